"""Attention within a window: one program unfolds the keys, the other masks a band of all scores (Longformer, Beltagy et al. 2020).

Between the input of a layer and its output both programs have no value in common, and the matrices of a layer stand in one segment.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from convert.inference.derivation import Grade
from support.inferred import derive, floats, grades, rules

D, HEADS, REACH, LAYERS, STEPS = 8, 2, 2, 2, 9
LEAVES = {
    "local": (LAYERS, D, 3, HEADS, D // HEADS),
    "merge": (LAYERS, D, D),
    "bias": (LAYERS, 3, HEADS, D // HEADS),
    "in": (5, D),
}


def banded(w: Mapping[str, Any], x: Any) -> Any:
    steps = np.arange(STEPS)
    band = jnp.asarray(abs(steps[:, None] - steps) <= REACH)

    def layer(x: Any, p: Any) -> Any:
        q, k, v = jnp.moveaxis(jnp.einsum("btd,dphe->btphe", x, p["local"]) + p["bias"], 2, 0)
        scores = jnp.einsum("bthe,bshe->bhts", q * (D // HEADS) ** -0.5, k)
        weights = jax.nn.softmax(jnp.where(band, scores, -jnp.inf), -1)
        y = jnp.einsum("bhts,bshe->bthe", weights, v).reshape(x.shape)
        return jnp.tanh(x + y @ p["merge"]), None

    return jax.lax.scan(layer, x @ w["in"], {name: w[name] for name in ("local", "merge", "bias")})[0]


class Window(torch.nn.Module):
    def __init__(self, reach: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (torch.nn.Linear(D, D) for _ in range(3))
        self.o, self.reach = torch.nn.Linear(D, D, bias=False), reach

    def forward(self, x: Any) -> Any:
        q, k, v = (m(x).view(*x.shape[:2], HEADS, -1).transpose(1, 2) for m in (self.q, self.k, self.v))
        around = (0, 0, self.reach, self.reach)
        keys, values = (torch.nn.functional.pad(y, around).unfold(2, 2 * self.reach + 1, 1) for y in (k, v))
        inside = torch.nn.functional.pad(x.new_ones(STEPS), around[2:]).unfold(0, 2 * self.reach + 1, 1)
        scores = torch.einsum("bhte,bhtew->bhtw", q / math.sqrt(D // HEADS), keys)
        weights = scores.masked_fill(inside == 0, -math.inf).softmax(-1)
        y = torch.einsum("bhtw,bhtew->bhte", weights, values)
        return torch.tanh(self.o(y.transpose(1, 2).reshape(x.shape)) + x)


class Windows(torch.nn.Module):
    def __init__(self, reach: int = REACH) -> None:
        super().__init__()
        self.first = torch.nn.Linear(5, D, bias=False)
        self.layers = torch.nn.ModuleList(Window(reach) for _ in range(LAYERS))

    def forward(self, x: Any) -> Any:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x


def test_every_layer_is_found_as_the_first_one() -> None:
    """The operations in front of the first layer of a scan are more than those between two."""
    found = derive(banded, Windows(), LEAVES, floats(3, STEPS, 5))
    assert found.complete and grades(found) == {Grade.DERIVED}
    assert found.tried < 800, "the second layer was searched as if there had been no first: 1,135 candidates"
    written = [rule for rule in rules(found, Windows()) if "layers.{i}" in rule]
    assert [rule.split("\n  ", 1)[1] for rule in written] == [
        "from: local\n  bias: bias\n  stacked: {i: 0}\n  linear: layers.{i}.{q,k,v}",
        "from: merge\n  stacked: {i: 0}\n  linear: layers.{i}.o",
    ], "the bias of a fused leaf is split as the kernel is"


@pytest.mark.slow
def test_a_narrower_window_is_not_derived() -> None:
    found = derive(banded, Windows(REACH - 1), LEAVES, floats(3, STEPS, 5))
    assert not found.complete and found.differences
