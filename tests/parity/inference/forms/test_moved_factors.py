"""A temperature that multiplies the scores of two towers in one program, and the vectors of one tower in the other."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

from convert.inference.derivation import Derivation, Grade
from convert.inference.infer import infer
from support.inferred import UNPROVEN, grades, rules

D = 8
OF_TOWER = {"w": (D, D), "b": (D,), "mean": (D,), "var": (D,), "scale": (D,), "bias": (D,), "v": (2 * D, D), "c": (D,)}
SHAPES = {**{f"{tower}/{name}": shape for tower in "ab" for name, shape in OF_TOWER.items()}, "t": ()}


def _tower(p: Any, tower: str, x: Any) -> Any:
    h = x @ p[f"{tower}/w"] + p[f"{tower}/b"]
    h = (h - p[f"{tower}/mean"]) * jax.lax.rsqrt(p[f"{tower}/var"] + 1e-5) * p[f"{tower}/scale"] + p[f"{tower}/bias"]
    return jnp.concatenate([x, jax.nn.relu(h)], -1) @ p[f"{tower}/v"] + p[f"{tower}/c"]


def _function(place: str) -> Any:
    def function(p: Any, given: Any) -> Any:
        a, b, t = _tower(p, "a", given["a"]), _tower(p, "b", given["b"]), jnp.exp(p["t"])
        return {"y": (a * t) @ b.T if place == "in front" else (a @ b.T) * t}

    return function


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(D, D), nn.BatchNorm1d(D), nn.Linear(2 * D, D)

    def forward(self, x: Any) -> Any:
        return self.last(torch.cat([x, torch.relu(self.norm(self.first(x)))], 1))


class Net(nn.Module):
    """Scores; ``place``: of the temperature, or a planted fault."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.one, self.two, self.t, self.place = Tower(), Tower(), nn.Parameter(torch.zeros(())), place

    def forward(self, a: Any, b: Any) -> Any:
        a, b, t = self.one(a), self.two(b), self.t.exp()
        return {
            "in front": lambda: (t * a) @ b.t(),
            "at the other": lambda: a @ (t * b).t(),
            "behind": lambda: (a @ b.t()) * t,
            "twice": lambda: (t * a) @ (t * b).t(),
            "divided": lambda: (a / t) @ b.t(),
            "of half": lambda: torch.cat([t * a[:, :4], a[:, 4:]], 1) @ b.t(),
        }[self.place]()


def _derive(source: str, target: str) -> tuple[Derivation, nn.Module]:
    def inputs(seed: int) -> dict[str, Any]:
        rng = np.random.default_rng(seed)
        return {name: rng.normal(size=(6, D)) for name in "ab"}

    module = Net(target).eval()
    return infer(_function(source), module, lambda net, given: {"y": net(**given)}, inputs, SHAPES), module


@pytest.mark.parametrize(
    ("source", "target"), [("behind", "in front"), ("behind", "at the other"), ("in front", "behind")]
)
def test_a_temperature_in_another_place(source: str, target: str) -> None:
    found, module = _derive(source, target)
    assert found.complete, found.differences
    assert grades(found) == {Grade.DERIVED}
    assert any(rule.endswith("parameter: t") for rule in rules(found, module))


@pytest.mark.slow
@pytest.mark.parametrize("planted", ["twice", "divided", "of half"])
def test_another_temperature_is_no_such_place(planted: str) -> None:
    found, _ = _derive("behind", planted)
    assert found.differences and found.proof is None
    assert grades(found) <= UNPROVEN
