"""What the live tests of layers share: random weights for a library's layer, the conversion, and torch's module loaded with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from flax.traverse_util import flatten_dict, unflatten_dict

from convert.planning.planner import make_plan
from support.memory_source import MemorySource, rule_file, run

Tree = dict[str, np.ndarray]
rng = np.random.default_rng(0)


def draw(*shape: int) -> np.ndarray:
    return rng.standard_normal(shape)


def drawn(tree: Any) -> Any:
    """The same tree with random values; what is called a variance is positive."""
    flat = flatten_dict(dict(tree), sep="|")
    made = {
        path: np.abs(draw(*np.shape(x))) + 0.3 if path.rpartition("|")[2] in ("var", "sigma") else draw(*np.shape(x))
        for path, x in flat.items()
    }
    return unflatten_dict({path: jnp.asarray(x) for path, x in made.items()}, sep="|")


def names(tree: Any) -> Tree:
    return {path: np.asarray(x) for path, x in flatten_dict(dict(tree), sep="/").items()}


def converted(rules: str, tree: Tree, head: str | None = None) -> dict[str, torch.Tensor]:
    file = rule_file(rules, head) if head else rule_file(rules)
    return {name: torch.tensor(x.copy()) for name, x in run(make_plan(file, MemorySource(tree))).items()}


def loaded(module: torch.nn.Module, state: Mapping[str, torch.Tensor]) -> torch.nn.Module:
    module = module.double().eval()
    module.load_state_dict({name.removeprefix("m."): x for name, x in state.items()}, strict=True)
    return module.requires_grad_(False)


def first(x: np.ndarray) -> torch.Tensor:
    """Channels first."""
    return torch.tensor(np.moveaxis(np.asarray(x), -1, 1).copy())


def last(y: torch.Tensor) -> np.ndarray:
    return np.moveaxis(y.numpy(), 1, -1)


def same(got: np.ndarray, want: Any) -> None:
    want = np.asarray(want)
    assert got.shape == want.shape
    assert np.abs(got - want).max() <= 1e-12 * np.abs(want).max()
