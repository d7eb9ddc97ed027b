"""Nets that one program stacks along an axis, and the other has by names with numbers: the twin critics of a reinforcement learner."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch import nn

from support.inferred import WIDTH, derive, layer_norm, rules

D = WIDTH
SHAPES = {"w": (2, D, D), "b": (2, D), "s": (2, D), "o": (2, D), "v": (2, D, 1), "c": (2, 1)}


class Twins(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q1, self.q2 = (
            nn.Sequential(nn.Linear(D, D), nn.LayerNorm(D), nn.ReLU(), nn.Linear(D, 1)) for _ in range(2)
        )

    def forward(self, x: Any) -> Any:
        return torch.min(self.q1(x), self.q2(x))


def twins(w: Any, x: Any) -> Any:
    def one(w: Any) -> Any:
        y = layer_norm(x @ w["w"] + w["b"], w["s"], w["o"], epsilon=1e-5)
        return jax.nn.relu(y) @ w["v"] + w["c"]

    return jnp.min(jax.vmap(one)(dict(w)), 0)


def test_modules_that_are_counted_in_their_names_are_elements_of_an_axis() -> None:
    written = rules(derive(twins, Twins(), SHAPES), Twins())
    assert any("stacked: {i: 0}" in rule and 'layer_norm: "q{i+1}.1"' in rule for rule in written), written
