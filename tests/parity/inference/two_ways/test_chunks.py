"""Operations that one program applies to each chunk of a value, and the other to the whole."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from torch import nn

from support.inferred import WIDTH, derive, floats, sources

D = WIDTH
SHAPES = {"a": (D, D), "mean": (D,), "var": (D,), "scale": (D,), "bias": (D,), "up": (D, 2 * D), "upb": (2 * D,), "down": (2 * D, D)}  # fmt: skip
FOUND = {
    "a.weight": "a",
    **{f"norm.{name}": leaf for name, leaf in zip(("weight", "bias", "running_mean", "running_var"), ("scale", "bias", "mean", "var"), strict=True)},
    "up.weight": "up", "up.bias": "upb", "down.weight": "down",
}  # fmt: skip


class Chunked(nn.Module):
    """A ghost batch norm over chunks of the batch, and a feed-forward over chunks of the sequence; ``fault``: what differs."""

    def __init__(self, fault: str = "") -> None:
        super().__init__()
        self.a, self.up, self.down = nn.Linear(D, D, bias=False), nn.Linear(D, 2 * D), nn.Linear(2 * D, D, bias=False)
        self.norm = nn.BatchNorm1d(D, eps=1e-3 if fault == "epsilon" else 1e-5)
        self.fault = fault

    def forward(self, x: Any) -> Any:
        y = self.a(x)
        y = torch.cat([self.norm(part.flatten(0, 1)).view_as(part) for part in y.chunk(3)])
        parts = y.split(3, dim=1)
        if self.fault == "order":
            parts = parts[::-1]
        if self.fault == "mean":
            parts = tuple(part - part.mean(1, keepdim=True) for part in parts)
        return y + torch.cat([self.down(self.up(part).tanh()) for part in parts], dim=1)


def _whole(w: Any, x: Any) -> Any:
    y = (x @ w["a"] - w["mean"]) * jax.lax.rsqrt(w["var"] + 1e-5) * w["scale"] + w["bias"]
    return y + jnp.tanh(y @ w["up"] + w["upb"]) @ w["down"]


def test_chunks_of_the_batch_and_of_the_sequence() -> None:
    found = derive(_whole, Chunked(), SHAPES, floats(6, 7, D))
    assert found.complete and found.proof is not None, found.differences
    assert {name: leaf for name, leaf in sources(found).items() if name in FOUND} == FOUND


class Chooses(nn.Module):
    """A ghost batch norm in front of a choice, the numbers of which no output shows."""

    def __init__(self, *, faulty: bool) -> None:
        super().__init__()
        self.a, self.norm, self.table = nn.Linear(D, D, bias=False), nn.BatchNorm1d(D), nn.Embedding(D, D)
        self.faulty = faulty

    def forward(self, x: Any) -> Any:
        parts = [self.norm(part) for part in self.a(x).split(5)]
        if self.faulty:
            parts = [part - part.mean(0) for part in parts]
        y = torch.cat(parts)
        return y + (self.table(y.argmax(-1)) - y).detach()


@pytest.mark.slow
@pytest.mark.parametrize("faulty", [False, True])
def test_a_choice_behind_chunks(faulty: bool) -> None:
    def function(w: Any, x: Any) -> Any:
        y = (x @ w["a"] - w["mean"]) * jax.lax.rsqrt(w["var"] + 1e-5) * w["scale"] + w["bias"]
        return y + jax.lax.stop_gradient(w["table"][jnp.argmax(y, -1)] - y)

    shapes = {**{name: SHAPES[name] for name in ("a", "mean", "var", "scale", "bias")}, "table": (D, D)}
    found = derive(function, Chooses(faulty=faulty), shapes, floats(15, D))
    assert (found.proof is not None) is not faulty, found.differences


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["epsilon", "order", "mean"])
def test_a_fault_in_chunks(fault: str) -> None:
    """Chunks in another order are no whole; a mean of each is not that of all."""
    found = derive(_whole, Chunked(fault), SHAPES, floats(6, 7, D))
    assert found.differences and found.proof is None
    if fault == "epsilon":
        assert "0.001" in found.differences[0].problem
