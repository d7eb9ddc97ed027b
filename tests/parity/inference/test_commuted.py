"""A layer in front of a linear operation in one program, and behind it in the other: a graph's sums, a number."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from support.inferred import UNPROVEN, WIDTH, derive, grades, rules, sources

D, WIDE, NODES = WIDTH, 24, 7
EDGES = np.random.default_rng(0).uniform(size=(NODES, NODES))
SHAPES = {"w": (D, WIDE), "b": (WIDE,), "v": (WIDE, D), "c": (D,)}


class Graph(nn.Module):
    """Two layers of a graph network; `first`: the layer is applied to the sums over the neighbours, not to the nodes."""

    def __init__(self, first: bool, edges: Any = EDGES) -> None:
        super().__init__()
        self.up, self.down, self.first = nn.Linear(D, WIDE), nn.Linear(WIDE, D), first
        self.register_buffer("edges", torch.tensor(edges, dtype=torch.float32), persistent=False)

    def forward(self, x: Any) -> Any:
        y = torch.tanh(self._through(self.up, x))
        return torch.tanh(self._through(self.down, y))

    def _through(self, layer: Any, x: Any) -> Any:
        edges = self.edges.to(x.dtype)
        return layer(edges @ x) if self.first else edges @ functional.linear(x, layer.weight) + layer.bias


def graph(first: bool) -> Any:
    def function(w: Any, x: Any) -> Any:
        for name, bias in ("wb", "vc"):
            sums = jnp.einsum("ij,bjd->bid", EDGES, x if first else x @ w[name])
            x = jnp.tanh((sums @ w[name] if first else sums) + w[bias])
        return x

    return function


@pytest.mark.parametrize("first", [True, False])
def test_a_layer_of_nodes_or_of_their_sums(first: bool) -> None:
    found = derive(graph(first), Graph(not first), SHAPES)
    assert found.complete, found.differences
    assert sources(found) == {"up.weight": "w", "up.bias": "b", "down.weight": "v", "down.bias": "c"}
    assert rules(found, Graph(not first))


@pytest.mark.slow
def test_other_edges_are_a_difference() -> None:
    found = derive(graph(True), Graph(False, EDGES.T), SHAPES)
    assert not found.complete and found.differences


class Scaled(nn.Module):
    """A number multiplies what the first layer gives; the third layer is applied to every position before a weighted sum of them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(D, D, bias=False), nn.Linear(D, 1), nn.Linear(D, D, bias=False)

    def forward(self, x: Any) -> Any:
        y = torch.tanh(0.3 * self.a(x))
        return (self.b(y).softmax(1) * self.c(y)).sum(1)


def test_a_number_and_a_weighted_sum() -> None:
    def function(w: Any, x: Any) -> Any:
        y = jnp.tanh((x * 0.3) @ w["a"])
        scores = jnp.exp(y @ w["b"] + w["d"])
        return jnp.einsum("btd,bts->bd", y, scores / scores.sum(1, keepdims=True)) @ w["c"]

    found = derive(function, Scaled(), {"a": (D, D), "b": (D, 1), "d": (1,), "c": (D, D)})
    assert found.complete, found.differences
    assert sources(found)["c.weight"] == "c"


MASK = (np.arange(7) < np.array([[7], [4], [2]])).astype(float)[..., None]


def _summed(x: Any) -> Any:
    return x.sum(1)


def _mean(x: Any) -> Any:
    return x.mean(1)


def _masked_mean(x: Any) -> Any:
    mask = torch.as_tensor(MASK, dtype=x.dtype) if isinstance(x, torch.Tensor) else MASK
    return (x * mask).sum(1) / mask.sum(1)


def _turned_and_added(x: Any) -> Any:
    return x + (x.flip(1) if isinstance(x, torch.Tensor) else jnp.flip(x, 1))


class Pooled(nn.Module):
    """A layer in front of what mixes rows or behind it; then its bias is added `times` times."""

    def __init__(self, pool: Any, *, first: bool, times: float = 1) -> None:
        super().__init__()
        self.layer, self.output = nn.Linear(D, D), nn.Linear(D, D)
        self.pool, self.first, self.times = pool, first, times

    def forward(self, x: Any) -> Any:
        if self.first:
            return self.output(torch.tanh(self.pool(self.layer(x))))
        return self.output(torch.tanh(self.layer(self.pool(x)) + (self.times - 1) * self.layer.bias))


def _pooled(pool: Any, *, first: bool, times: float = 1) -> Any:
    def function(w: Any, x: Any) -> Any:
        y = pool(x @ w["w"] + w["b"]) if first else pool(x) @ w["w"] + times * w["b"]
        return jnp.tanh(y) @ w["v"] + w["c"]

    return function


POOLED = {"w": (D, D), "b": (D,), "v": (D, D), "c": (D,)}
POOLS = [(_mean, 1), (_masked_mean, 1), (_summed, 7), (_turned_and_added, 2)]


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(("pool", "times"), POOLS)
def test_a_layer_with_a_bias_in_front_of_a_mean_or_a_sum_or_behind_it(pool: Any, times: int, first: bool) -> None:
    module = Pooled(pool, first=not first, times=times)
    found = derive(_pooled(pool, first=first, times=times), module, POOLED)
    assert found.complete, found.differences
    assert sources(found) == {"layer.weight": "w", "layer.bias": "b", "output.weight": "v", "output.bias": "c"}
    assert rules(found, module)


@pytest.mark.slow
@pytest.mark.parametrize(("pool", "times"), [(_mean, 2), (_summed, 1), (_turned_and_added, 1), (_masked_mean, 7)])
def test_a_bias_that_is_added_another_number_of_times_is_a_difference(pool: Any, times: int) -> None:
    found = derive(_pooled(pool, first=True), Pooled(pool, first=False, times=times), POOLED)
    assert not found.complete and found.proof is None
    assert grades(found) <= UNPROVEN
