"""What `infer` finds in one layer it tries first in the next: further layers cost one candidate for each of their parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from convert.inference.derivation import Grade
from support.inferred import HEADS, UNPROVEN, WIDTH, derive, floats, grades

D, H = WIDTH, WIDTH // HEADS


def attention(leaves: Mapping[str, Any], x: Any) -> Any:
    for i in range(sum(name.endswith("/q") for name in leaves)):
        q, k, v = (jnp.einsum("btd,dnh->btnh", x, leaves[f"{i}/{part}"]) for part in "qkv")
        seen = jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", q, k) / np.sqrt(H), -1)
        x = x + jnp.einsum("bnts,bsnh,nhd->btd", seen, v, leaves[f"{i}/o"])
    return x


class Attention(torch.nn.Module):
    """One layer; its projections have numbers for names."""

    def __init__(self) -> None:
        super().__init__()
        self.m = torch.nn.ModuleList(torch.nn.Linear(D, D, bias=False) for _ in range(4))

    def forward(self, x: Any) -> Any:
        k, v, q = (part(x).unflatten(-1, (HEADS, H)).transpose(1, 2) for part in self.m[:3])
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        return x + self.m[3](y.transpose(1, 2).flatten(2))


class InTurns(torch.nn.Module):
    """The same with one matrix of queries, keys and values, head by head."""

    def __init__(self) -> None:
        super().__init__()
        self.m, self.o = torch.nn.Linear(D, 3 * D, bias=False), torch.nn.Linear(D, D, bias=False)

    def forward(self, x: Any) -> Any:
        q, k, v = self.m(x).unflatten(-1, (HEADS, 3 * H)).transpose(1, 2).chunk(3, -1)
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        return x + self.o(y.transpose(1, 2).flatten(2))


def tried(layer: type[torch.nn.Module], layers: int) -> int:
    shapes = {f"{i}/{part}": (D, HEADS, H) for i in range(layers) for part in "qkv"}
    shapes |= {f"{i}/o": (HEADS, H, D) for i in range(layers)}
    found = derive(attention, torch.nn.Sequential(*(layer() for _ in range(layers))), shapes, floats(2, 5, D))
    assert found.complete and grades(found) <= {Grade.DERIVED, Grade.INTERCHANGEABLE}
    return found.tried


@pytest.mark.parametrize(("layer", "parameters"), [(Attention, 4), (InTurns, 2)])
def test_a_further_layer_costs_one_candidate_for_each_parameter(layer, parameters):
    assert tried(layer, 4) - tried(layer, 3) == parameters


SPAN = 4  # relative positions are cut there
TABLE = 2 * SPAN
PARTS = ("q", "k", "v", "pk", "pq")


def disentangled(leaves: Mapping[str, Any], x: Any) -> Any:
    """DeBERTa's attention: the scores of contents, and of contents with the positions of a table that all layers share."""
    at = np.arange(TABLE)
    rows = np.clip(at[:, None] - at[None] + SPAN, 0, TABLE - 1)
    for i in range(sum(name.endswith("/q") for name in leaves)):
        of = {"pk": leaves["r"], "pq": leaves["r"]}
        made = {part: jnp.einsum("...d,dnh->...nh", of.get(part, x), leaves[f"{i}/{part}"]) for part in PARTS}
        q, v, positions = (made[part] + leaves[f"{i}/{part}b"] for part in ("q", "v", "pq"))
        scores = jnp.einsum("bqnh,bknh->bnqk", q, made["k"])
        scores = scores + jnp.einsum("bqnh,qknh->bnqk", q, made["pk"][rows])
        scores = scores + jnp.einsum("bknh,kqnh->bnqk", made["k"], positions[rows])
        seen = jax.nn.softmax(scores / np.sqrt(3 * H), -1)
        x = x + jnp.tanh(jnp.einsum("bnts,bsnh,nhd->btd", seen, v, leaves[f"{i}/o"]) + leaves[f"{i}/ob"])
    return x


class Disentangled(torch.nn.Module):
    """The same, head by head in one matrix; positions are looked up in the scores. Planted: `turned`, queries' positions as keys'."""

    def __init__(self, layers: int, turned: bool) -> None:
        super().__init__()
        self.r, self.turned = torch.nn.Embedding(TABLE, D), turned
        self.m = torch.nn.ModuleList(torch.nn.Linear(D, 3 * D, bias=False) for _ in range(layers))
        self.b = torch.nn.ParameterList(torch.nn.Parameter(torch.randn(D)) for _ in range(2 * layers))
        self.p = torch.nn.ModuleList(torch.nn.Linear(D, D, bias=k % 2 > 0) for k in range(2 * layers))
        self.o = torch.nn.ModuleList(torch.nn.Linear(D, D) for _ in range(layers))

    def forward(self, x: Any) -> Any:
        at = torch.arange(TABLE)
        rows = torch.clamp(at[:, None] - at[None] + SPAN, 0, TABLE - 1)

        def heads(y: Any) -> Any:
            return y.unflatten(-1, (HEADS, -1)).transpose(-3, -2)

        for i, (fused, out) in enumerate(zip(self.m, self.o, strict=True)):
            q, k, v = heads(fused(x)).chunk(3, -1)
            q, v = (part + heads(self.b[2 * i + j][None, None]) for j, part in enumerate((q, v)))
            key, query = (heads(self.p[2 * i + j](self.r.weight)) for j in range(2))
            index = rows.expand(len(x), HEADS, -1, -1)
            by_keys = torch.gather(k @ query.transpose(-1, -2), -1, index)
            scores = q @ k.transpose(-1, -2) + torch.gather(q @ key.transpose(-1, -2), -1, index)
            scores = scores + (by_keys if self.turned else by_keys.transpose(-1, -2))
            y = torch.softmax(scores / (3 * H) ** 0.5, -1) @ v
            x = x + torch.tanh(out(y.transpose(1, 2).flatten(2)))
        return x


def of_disentangled(layers: int, turned: bool = False) -> Any:
    shapes = {f"{i}/{part}": (D, HEADS, H) for i in range(layers) for part in PARTS}
    shapes |= {f"{i}/{part}b": (HEADS, H) for i in range(layers) for part in ("q", "v", "pq")}
    shapes |= {f"{i}/o": (HEADS, H, D) for i in range(layers)} | {f"{i}/ob": (D,) for i in range(layers)}
    return derive(disentangled, Disentangled(layers, turned), shapes | {"r": (TABLE, D)}, floats(2, TABLE, D))


@pytest.mark.slow
def test_a_level_that_refutes_many_candidates_leaves_the_next_one_its_own():
    """The heads of a fused matrix come at a further level; the levels before try all leaves of the table and of its projections."""
    found = of_disentangled(2)
    assert found.complete and grades(found) == {Grade.DERIVED}


@pytest.mark.slow
def test_positions_of_queries_as_keys_are_not_derived():
    assert grades(of_disentangled(2, turned=True)) & UNPROVEN
