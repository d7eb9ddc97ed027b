"""Attention over the edges of a graph: a vector for both ends side by side in one program, one for each end of all nodes in the other."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

from support.inferred import derive, rules
from support.marks import slow_but

D, HEADS, RELATIONS, NODES = 8, 4, 2, 8
SIZE = D // HEADS
OF_ITSELF = np.broadcast_to(np.arange(NODES), (RELATIONS, 2, NODES))
EDGES = np.concatenate([np.random.default_rng(0).integers(0, NODES, (RELATIONS, 2, 12)), OF_ITSELF], 2)
SHAPES = {"w": (D, D), "attend": (RELATIONS, HEADS, 2 * SIZE)}


class Attention(nn.Module):
    """Graph attention with a vector of each relation: `joined`, both ends stand side by side."""

    def __init__(self, joined: bool, swapped: bool = False) -> None:
        super().__init__()
        self.layer, self.joined, self.swapped = nn.Linear(D, D, bias=False), joined, swapped
        ends = ("both",) if joined else ("target", "source")
        size = 2 * SIZE if joined else SIZE
        for end in ends:
            setattr(self, end, nn.ParameterList([nn.Parameter(torch.zeros(HEADS, size)) for _ in range(RELATIONS)]))

    def forward(self, x: Any) -> Any:
        h, found = self.layer(x).view(NODES, HEADS, SIZE), []
        for k, (source, target) in enumerate(torch.as_tensor(EDGES)):
            source, target = (target, source) if self.swapped else (source, target)
            if self.joined:
                score = (torch.cat([h[target], h[source]], -1) * self.both[k]).sum(-1)
            else:
                score = (h * self.target[k]).sum(-1)[target] + (h * self.source[k]).sum(-1)[source]
            score = torch.exp(nn.functional.leaky_relu(score, 0.2)).unsqueeze(-1)
            zeros = torch.zeros(NODES, HEADS, 1, dtype=x.dtype)
            total = zeros.index_add(0, torch.as_tensor(EDGES[k, 1]), score)
            found.append(
                zeros.expand(-1, -1, SIZE).index_add(0, torch.as_tensor(EDGES[k, 1]), score * h[source]) / total
            )
        return torch.stack(found)


def attention(joined: bool) -> Any:
    def function(w: Any, x: Any) -> Any:
        h = (x @ w["w"]).reshape(NODES, HEADS, SIZE)

        def relation(attend: Any, edges: Any) -> Any:
            source, target = edges
            if joined:
                score = jnp.einsum("enk,nk->en", jnp.concatenate([h[target], h[source]], -1), attend)
            else:
                ends = jnp.einsum("vnk,nk->vn", h, attend[:, :SIZE]), jnp.einsum("vnk,nk->vn", h, attend[:, SIZE:])
                score = ends[0][target] + ends[1][source]
            score = jnp.exp(jax.nn.leaky_relu(score, 0.2))[..., None]
            total = jax.ops.segment_sum(score, target, NODES)
            return jax.ops.segment_sum(score * h[source], target, NODES) / total

        return jax.vmap(relation)(w["attend"], EDGES)

    return function


def inputs(seed: int) -> dict[str, Any]:
    return {"x": np.random.default_rng(seed).normal(size=(NODES, D))}


@pytest.mark.parametrize("joined", slow_but([False], [True, False]))
def test_both_ends_side_by_side_or_apart(joined: bool) -> None:
    found = derive(attention(joined), Attention(not joined), SHAPES, inputs)
    assert found.complete, found.differences
    assert rules(found, Attention(not joined))


@pytest.mark.slow
def test_the_wrong_end_is_a_difference() -> None:
    found = derive(attention(True), Attention(False, swapped=True), SHAPES, inputs)
    assert not found.complete
