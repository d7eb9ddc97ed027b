"""Squared distances from a codebook, as the squares of all differences in one program, and as a product in the other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

from convert.inference.derivation import Derivation, Grade
from convert.inference.infer import infer
from support.inferred import UNPROVEN, grades

D = 8
SHAPES = {"w": (D, D), "e": (D, D), "v": (D, D)}


def _distance(way: str, z: Any, e: Any) -> Any:
    return {
        "differences": lambda: ((z[:, None] - e[None]) ** 2).sum(-1),
        "turned": lambda: ((e[None] - z[:, None]) ** 2).sum(-1),
        "product": lambda: (z**2).sum(1)[:, None] - 2 * z @ e.T + (e**2).sum(1),
        "other order": lambda: (e**2).sum(1)[None] + (z**2).sum(1)[:, None] - 2 * (z @ e.T),
        "another factor": lambda: (z**2).sum(1)[:, None] - 2 * z @ e.T + 1.1 * (e**2).sum(1),
        "of sizes": lambda: abs(z[:, None] - e[None]).sum(-1),
        "cdist": lambda: torch.cdist(z, e) ** 2,
    }[way]()


def _function(way: str, end: str) -> Any:
    def function(p: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
        z = given["x"] @ p["w"]
        distance = _distance(way, z, p["e"])
        if end == "softmax":
            return {"y": jax.nn.softmax(-distance, -1) @ p["v"]}
        index = jnp.argmin(distance, -1)
        chosen = p["e"][index]
        return {"y": jnp.tanh(chosen @ p["v"]), "index": index, "loss": ((z - chosen) ** 2).mean()}

    return function


class Net(nn.Module):
    def __init__(self, way: str, end: str) -> None:
        super().__init__()
        self.l, self.o = (nn.Linear(D, D, bias=False) for _ in range(2))
        self.book, self.way, self.end = nn.Embedding(D, D), way, end

    def forward(self, x: Any) -> dict[str, Any]:
        z = self.l(x)
        distance = _distance(self.way, z, self.book.weight)
        if self.end == "softmax":
            return {"y": self.o((-distance).softmax(-1))}
        index = distance.argmin(-1)
        chosen = self.book(index)
        return {"y": torch.tanh(self.o(chosen)), "index": index, "loss": (z - chosen).square().mean()}


def _derive(source: str, target: str, end: str) -> Derivation:
    def inputs(seed: int) -> dict[str, Any]:
        return {"x": np.random.default_rng(seed).normal(size=(16, D))}

    return infer(_function(source, end), Net(target, end).eval(), lambda net, given: net(**given), inputs, SHAPES)


@pytest.mark.parametrize("end", ["softmax", "choice"])
@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("differences", "product"),
        ("differences", "other order"),
        ("differences", "cdist"),
        ("product", "differences"),
        ("product", "turned"),
        ("other order", "differences"),
    ],
)
def test_a_distance_in_two_ways(source: str, target: str, end: str) -> None:
    found = _derive(source, target, end)
    assert found.complete, found.differences
    assert grades(found) == {Grade.DERIVED}


@pytest.mark.slow
@pytest.mark.parametrize("end", ["softmax", "choice"])
@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("differences", "another factor"),
        pytest.param("another factor", "differences", marks=pytest.mark.slow),
        pytest.param("product", "of sizes", marks=pytest.mark.slow),
    ],
)
def test_another_distance_is_a_difference(source: str, target: str, end: str) -> None:
    found = _derive(source, target, end)
    assert not found.complete and found.differences
    assert grades(found) <= UNPROVEN | {Grade.TIED}
