"""One layer makes the filters of all blocks, as in PaiNN; the JAX model has one for each, and splits what it makes in another order."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

from convert.inference.derivation import Derivation
from convert.inference.infer import infer
from support.inferred import UNPROVEN, grades

ROWS, D, N, BLOCKS = 7, 6, 3, 2
SHAPES = {"o": (D, 1)} | {
    f"{name}{k}": shape
    for k in range(BLOCKS)
    for name, shape in {"p": (D, 3 * D), "f": (N, 3 * D), "u": (D, D)}.items()
}


def _function(w: Any, x: Any) -> Any:
    r, s = x["r"], x["s"]
    v = jnp.zeros((ROWS, 3, D))
    for k in range(BLOCKS):
        a, b, c = jnp.split((s @ w[f"p{k}"]) * (r @ w[f"f{k}"]), 3, -1)
        s, v = s + jnp.cumsum(b, 0), v + jnp.cumsum(v * a[:, None] + r[:, :, None] * c[:, None], 0)
        s, v = s + jnp.tanh(s @ w[f"u{k}"]) * jnp.sum(v * v, 1), v * jnp.sin(s)[:, None]
    return {"y": s @ w["o"]}


class _Block(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.p, self.u = nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D, bias=False)
        self._function = function

    def forward(self, s: Any, v: Any, f: Any, r: Any) -> Any:
        b, c, a = (self.p(s) * f)[:, None].split(D, -1)
        s, v = s + b[:, 0].cumsum(0), v + (c * r[..., None] + a * v).cumsum(0)
        return s + self._function(self.u(s)) * (v * v).sum(1), v * s.sin()[:, None]


class _Net(nn.Module):
    def __init__(self, function: Any = torch.tanh) -> None:
        super().__init__()
        self.f = nn.Linear(N, BLOCKS * 3 * D, bias=False)
        self.blocks = nn.ModuleList(_Block(function) for _ in range(BLOCKS))
        self.o = nn.Linear(D, 1, bias=False)

    def forward(self, x: Any) -> Any:
        r, s = x["r"], x["s"]
        v = s.new_zeros(ROWS, 3, D)
        for f, block in zip(self.f(r).split(3 * D, -1), self.blocks, strict=True):
            s, v = block(s, v, f, r)
        return {"y": self.o(s)}


def _inputs(seed: int) -> dict[str, Any]:
    generator = np.random.default_rng(seed)
    return {"r": generator.normal(size=(ROWS, N)), "s": generator.normal(size=(ROWS, D))}


def _found(module: nn.Module) -> Derivation:
    return infer(_function, module, lambda m, x: m(x), _inputs, SHAPES)


@pytest.mark.slow
def test_a_layer_that_only_zeros_multiply_is_not_shown() -> None:
    """What is put in for two parts of the first block leaves a third one, which a state of zeros multiplies."""
    assert not any(difference.shown for difference in _found(_Net()).differences)


@pytest.mark.slow
def test_another_function_is_never_derived() -> None:
    found = _found(_Net(torch.sigmoid))
    assert not found.complete and found.proof is None and grades(found) <= UNPROVEN
