"""Two small models, of JAX and of PyTorch, that differ in one mistake: what the comparison of their records says of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from convert.layers.activations import NUMPY_ACTIVATIONS
from convert.numerics.compare import difference
from convert.numerics.precision import jax_precision
from convert.programs.divergence.search import diverge
from convert.programs.divergence.wording import Named, named
from convert.programs.program import Program
from convert.programs.record_jax import record_jax
from convert.programs.record_torch import record_torch

Arrays = dict[str, Any]
RANDOM = np.random.default_rng(0)
WEIGHTS = {
    "w": RANDOM.standard_normal((8, 8)),
    "v": RANDOM.standard_normal((8, 8)),
    "g": 1 + 0.3 * RANDOM.standard_normal(8),
    "h": 1 + 0.3 * RANDOM.standard_normal(8),
    "rel": RANDOM.standard_normal(9),
    "conv": RANDOM.standard_normal((8, 8, 3)),
}
INPUTS = {"x": RANDOM.standard_normal((3, 10, 8)), "real": np.arange(10)[None] < np.array([10, 6, 8])[:, None]}


@dataclass(frozen=True)
class Fault:
    """What the JAX model computes, what the target computes instead, the name, and what the sentence says."""

    right: Callable[[Arrays, Any, Any], Any]
    wrong: Callable[[Arrays, Any, Any], Any]
    name: str
    says: tuple[str, ...]


def records(right: Callable[..., Any], wrong: Callable[..., Any]) -> tuple[Program, Program]:
    """Record the JAX model and the target."""
    with jax_precision("float64"):
        source = record_jax(lambda p, inputs: {"y": right(dict(p), **inputs)}, WEIGHTS, INPUTS)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, array in WEIGHTS.items():
                self.register_parameter(name, torch.nn.Parameter(torch.tensor(array)))

        def forward(self, x: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
            made: torch.Tensor = wrong(dict(self.named_parameters()), x, real)
            return made

    return source, record_torch(Model().double(), lambda module, inputs: {"y": module(**inputs)}, INPUTS)


def said(right: Callable[..., Any], wrong: Callable[..., Any]) -> Named | None:
    source, target = records(right, wrong)
    want = source.outputs["y"].array
    found = diverge(source, target, "y", lambda got: difference(got, want).relative, 1e-9, 1e-10)
    return None if found is None else named(found, source, target, NUMPY_ACTIVATIONS)


def check(fault: Fault) -> None:
    """Check that the mistake has its name, and the sentence its words."""
    found = said(fault.right, fault.wrong)
    assert found is not None and found.name == fault.name
    for words in fault.says:
        assert words in found.problem
    assert found.fix
