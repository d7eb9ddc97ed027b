"""A class token that is a row of the matrix that multiplies the features, as in FT-Transformer, or a parameter of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from torch import nn

from support.inferred import derive, floats, layer_norm, rules, sources

FEATURES, D = 5, 8


class Tokens(nn.Module):
    def __init__(self, joined: bool) -> None:
        super().__init__()
        self.joined, self.bias = joined, nn.Parameter(torch.zeros(FEATURES, D))
        self.weight = nn.Parameter(torch.zeros(FEATURES + joined, D))
        if not joined:
            self.cls = nn.Parameter(torch.zeros(1, 1, D))
        self.mix, self.norm, self.out = nn.Linear(D, D), nn.LayerNorm(D), nn.Linear(D, 3)

    def forward(self, x: Any) -> Any:
        if self.joined:
            t = torch.cat([torch.ones(len(x), 1), x], 1)[:, :, None] * self.weight[None]
            t = t + torch.cat([torch.zeros(1, D), self.bias])[None]
        else:
            t = torch.cat([self.cls.expand(len(x), 1, D), x[:, :, None] * self.weight + self.bias], 1)
        t = t + torch.softmax(self.mix(t) @ t.transpose(1, 2), -1) @ t
        return self.out(self.norm(t)[:, 0])


def tokens(joined: bool, last: bool = False) -> Any:
    """`last`: with the class token behind the features."""

    def function(w: Mapping[str, Any], x: Any) -> Any:
        if joined:
            t = jnp.concatenate([jnp.ones((len(x), 1)), x], 1)[:, :, None] * w["weight"]
            t = t + jnp.concatenate([jnp.zeros((1, D)), w["bias"]])
        else:
            parts = [jnp.broadcast_to(w["cls"], (len(x), 1, D)), x[:, :, None] * w["weight"] + w["bias"]]
            t = jnp.concatenate(parts[::-1] if last else parts, 1)
        t = t + jax.nn.softmax((t @ w["mix"] + w["mb"]) @ t.transpose(0, 2, 1), -1) @ t
        return layer_norm(t, w["ns"], w["nb"], 1e-5)[:, 0] @ w["out"] + w["ob"]

    return function


def shapes(joined: bool) -> dict[str, tuple[int, ...]]:
    found = {"weight": (FEATURES + joined, D), "bias": (FEATURES, D), "mix": (D, D), "mb": (D,), "ns": (D,), "nb": (D,)}
    return {**found, "out": (D, 3), "ob": (3,), **({} if joined else {"cls": (D,)})}


@pytest.mark.parametrize(
    ("source", "target"),
    [(False, True), (True, False), *(pytest.param(x, x, marks=pytest.mark.slow) for x in (False, True))],
)
def test_a_class_token_in_a_matrix_or_by_itself(source: bool, target: bool):
    module = Tokens(target)
    found = derive(tokens(source), module, shapes(source), floats(6, FEATURES))
    assert found.complete, found.differences
    if source:
        assert {sources(found)[name] for name in ("weight", *(() if target else ("cls",)))} == {"weight"}
    else:
        written = [rule for rule in rules(found, module) if "name: weight" in rule]
        if target:
            assert [rule.split("{", 1)[1] for rule in written] == [
                'name: weight, axes: .D, part: "1 of 2"}',
                'name: weight, part: "2 of 2"}',
            ]


@pytest.mark.slow
def test_a_class_token_behind_the_features_is_a_difference():
    found = derive(tokens(False, last=True), Tokens(True), shapes(False), floats(6, FEATURES))
    assert not found.complete and found.differences
