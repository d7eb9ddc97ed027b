"""An MLP of each edge of a graph, as EGNN's: one program computes all pairs of nodes and masks some, the other takes the edges by index."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from convert.inference.infer import infer
from support.inferred import rules

NODES, D, C = 6, 8, 3


class Edges(nn.Module):
    """`order` of the columns: nodes i and j, and the distance."""

    def __init__(self, order: str) -> None:
        super().__init__()
        self.e, self.o, self.order = nn.Linear(2 * D + order.count("r"), D), nn.Linear(D, 3), order

    def forward(self, h: Any, x: Any) -> Any:
        i, j = torch.where(~torch.eye(len(h), dtype=torch.bool))
        of = {"i": h[i], "j": h[j], "r": ((x[i] - x[j]) ** 2).sum(-1, keepdim=True)}
        made = functional.silu(self.e(torch.cat([of[name] for name in self.order], -1)))
        return self.o(torch.zeros_like(h).index_add(0, i, made))


def pairs(w: Mapping[str, Any], h: Any, x: Any, order: str) -> Any:
    distances = ((x[:, None] - x[None]) ** 2).sum(-1, keepdims=True)
    shape = (NODES, NODES, D)
    of = {"i": jnp.broadcast_to(h[:, None], shape), "j": jnp.broadcast_to(h[None], shape), "r": distances}
    made = jax.nn.silu(jnp.concatenate([of[name] for name in order], -1) @ w["e"] + w["eb"])
    return (made * (1 - jnp.eye(NODES)[..., None])).sum(1) @ w["o"] + w["ob"]


def inputs(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {"h": rng.normal(size=(NODES, D)), "x": rng.normal(size=(NODES, C))}


@pytest.mark.parametrize("order", ["ijr", *(pytest.param(x, marks=pytest.mark.slow) for x in ("rij", "ij", "irj"))])
def test_the_kernel_of_the_edges_is_one_rule(order: str):
    module = Edges(order).eval()
    found = infer(
        lambda leaves, given: {"y": pairs(leaves, given["h"], given["x"], order)},
        module,
        lambda module, given: {"y": module(given["h"], given["x"])},
        inputs,
        {"e": (2 * D + order.count("r"), D), "eb": (D,), "o": (D, 3), "ob": (3,)},
    )
    assert [rule for rule in rules(found, module) if "from: e\n" in rule] == [
        "- einsum: ...D,DC->...C\n  from: e\n  bias: eb\n  linear: e"
    ]
