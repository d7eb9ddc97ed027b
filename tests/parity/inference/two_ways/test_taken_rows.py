"""Relative positions as Shaw's: rows of a table for each distance, in keys and values, in the scores, or behind the products with the table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from convert.inference.derivation import Derivation, Grade
from support.inferred import HEADS, UNPROVEN, WIDTH, derive, floats, grades, sources

D, N, H, T = WIDTH, HEADS, WIDTH // HEADS, 6
DISTANCES = np.arange(T) - np.arange(T)[:, None] + T - 1
ROWS = 2 * T - 1
SHAPES = {**dict.fromkeys("qkvo", (D, D)), "rk": (ROWS, H), "rv": (ROWS, H)}


def _skewed(scores: Any) -> Any:
    """Music Transformer's: the products with all rows are shifted."""
    padded = jnp.pad(scores, ((0, 0), (0, 0), (0, 0), (1, 0))).reshape(*scores.shape[:2], ROWS + 1, T)[:, :, 1:]
    return padded.reshape(*scores.shape)[..., :T]


def _source(scores: str, values: str) -> Callable[[Any, Any], Any]:
    def function(w: Any, x: Any) -> Any:
        q, k, v = ((x @ w[c]).reshape(-1, T, N, H).transpose(0, 2, 1, 3) for c in "qkv")
        keys, of_values = w["rk"][DISTANCES], w["rv"][DISTANCES]
        made = {
            "in keys": lambda: jnp.einsum("bntd,bntsd->bnts", q, k[:, :, None] + keys),
            "apart": lambda: q @ k.swapaxes(2, 3) + jnp.einsum("bntd,tsd->bnts", q, keys),
            "skewed": lambda: q @ k.swapaxes(2, 3) + _skewed(jnp.einsum("bntd,rd->bntr", q, w["rk"])),
        }[scores]()
        weights = jax.nn.softmax(made / 2, -1)
        by_distance = jnp.einsum("bnts,tsr->bntr", weights, jax.nn.one_hot(DISTANCES, ROWS))
        y = {
            "in values": lambda: jnp.einsum("bnts,bntsd->bntd", weights, v[:, :, None] + of_values),
            "apart": lambda: weights @ v + jnp.einsum("bnts,tsd->bntd", weights, of_values),
            "by distance": lambda: weights @ v + by_distance @ w["rv"],
        }[values]()
        return y.transpose(0, 2, 1, 3).reshape(-1, T, D) @ w["o"]

    return function


class Shaw(torch.nn.Module):
    """Attention; ``scores`` and ``values``: how the tables meet them; ``fault``: what differs."""

    def __init__(self, scores: str, values: str, fault: str = "") -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (torch.nn.Linear(D, D, bias=False) for _ in range(4))
        self.rk, self.rv = torch.nn.Embedding(ROWS, H), torch.nn.Embedding(ROWS, H)
        self.scores, self.values, self.fault = scores, values, fault

    def forward(self, x: Any) -> Any:
        q, k, v = (m(x).view(len(x), -1, N, H).transpose(1, 2) for m in (self.q, self.k, self.v))
        of_scores = of_values = torch.as_tensor(DISTANCES)
        of_scores = of_scores.t() if self.fault == "keys turned" else of_scores
        of_values = of_values.clamp(1) if self.fault == "a value twice" else of_values
        table = self.rv if self.fault == "one table" else self.rk
        if self.scores == "in keys":
            made = torch.einsum("bntd,bntsd->bnts", q, k[:, :, None] + table(of_scores))
        elif self.scores == "apart":
            made = q @ k.transpose(-1, -2) + torch.einsum("bntd,tsd->bnts", q, table(of_scores))
        else:
            made = q @ k.transpose(-1, -2) + (q @ table.weight.t()).gather(-1, of_scores.expand(len(x), N, T, T))
        weights = (made / 2).softmax(-1)
        if self.values == "in values":
            y = torch.einsum("bnts,bntsd->bntd", weights, v[:, :, None] + self.rv(of_values))
        else:
            y = weights @ v + torch.einsum("bnts,tsd->bntd", weights, self.rv(of_values))
        return self.o(y.transpose(1, 2).flatten(-2))


def _derive(source: tuple[str, str], module: torch.nn.Module) -> Derivation:
    return derive(_source(*source), module, SHAPES, floats(2, T, D))


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (("in keys", "apart"), ("gathered", "in values")),
        (("skewed", "by distance"), ("apart", "in values")),
        (("apart", "in values"), ("in keys", "apart")),
        pytest.param(("skewed", "by distance"), ("gathered", "apart"), marks=pytest.mark.slow),
        pytest.param(("in keys", "in values"), ("apart", "apart"), marks=pytest.mark.slow),
        pytest.param(("apart", "apart"), ("in keys", "in values"), marks=pytest.mark.slow),
        pytest.param(("in keys", "in values"), ("in keys", "in values"), marks=pytest.mark.slow),
        pytest.param(("apart", "apart"), ("apart", "apart"), marks=pytest.mark.slow),
    ],
)
def test_rows_for_each_distance(source: tuple[str, str], target: tuple[str, str]) -> None:
    found = _derive(source, Shaw(*target))
    assert found.complete, found.differences
    assert grades(found) == {Grade.DERIVED} and found.tried < 100
    assert {name: sources(found.tensor(f"{name}.weight")) for name in SHAPES} == {name: name for name in SHAPES}


@pytest.mark.slow
@pytest.mark.parametrize("source", [("in keys", "apart"), ("skewed", "by distance"), ("apart", "in values")])
@pytest.mark.parametrize("fault", ["keys turned", "a value twice", "one table"])
def test_other_rows_are_found(source: tuple[str, str], fault: str) -> None:
    found = _derive(source, Shaw("gathered", "in values", fault))
    assert found.differences and found.proof is None
    assert grades(found) <= UNPROVEN
