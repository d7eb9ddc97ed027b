"""Towers in one einsum over what an edge joins; a list of modules, with a matrix for each of the joined values, in the other: PNA."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

from convert.inference.derivation import Derivation, Grade
from convert.inference.infer import infer
from support.inferred import grades

D, TOWERS, NODES, EDGES, PARTS = 8, 4, 8, 24, 12
SHAPES = {
    "pre/w": (TOWERS, 3 * D, D),
    "pre/b": (TOWERS, D),
    "post/w": (TOWERS, D + PARTS * D, D),
    "post/b": (TOWERS, D),
    "mix/w": (TOWERS, D, D),
    "mix/b": (D,),
    **dict.fromkeys(("node/w", "edge/w", "out/w"), (D, D)),
    **dict.fromkeys(("node/b", "edge/b", "out/b"), (D,)),
}


class Tower(nn.Module):
    def __init__(self, joins: bool, turned: bool) -> None:
        super().__init__()
        self.joins, self.turned = joins, turned
        if joins:
            self.pre = nn.Linear(3 * D, D)
        else:
            self.into, self.from_, self.edge = nn.Linear(D, D, bias=False), nn.Linear(D, D, bias=False), nn.Linear(D, D)
        self.own, self.met = nn.Linear(D, D, bias=False), nn.Linear(PARTS * D, D)

    def forward(self, x: Any, e: Any, of: Any, to: Any) -> Any:
        m = (
            self.pre(torch.cat([x[of], x[to], e], -1))
            if self.joins
            else self.from_(x)[of] + self.into(x)[to] + self.edge(e)
        )
        where, empty = to[:, None].expand_as(m), m.new_zeros(NODES, D)
        mean, low, high = (empty.scatter_reduce(0, where, m, k, include_self=False) for k in ("mean", "amin", "amax"))
        square = empty.scatter_reduce(0, where, m**2, "mean", include_self=False)
        spread = torch.sqrt(torch.relu(square - mean**2) + 1e-5)
        many = torch.log(torch.zeros(NODES, dtype=m.dtype).index_add(0, to, torch.ones_like(m[:, 0])) + 1)[:, None]
        parts = [y for x in (mean, low, high, spread) for y in (x, x * many, x / many)]
        return self.own(x) + self.met(torch.cat([y.flip(0) if self.turned else y for y in parts], -1))


class Stacked(nn.Module):
    """All towers in one matrix product for each step, with scales for single rows left out."""

    def __init__(self, turned: bool) -> None:
        super().__init__()
        self.turned = turned
        self.pre, self.post = nn.Parameter(torch.zeros(TOWERS, 3 * D, D)), nn.Parameter(torch.zeros(TOWERS, 2 * D, D))
        self.pre_b, self.post_b = nn.Parameter(torch.zeros(TOWERS, D)), nn.Parameter(torch.zeros(TOWERS, D))
        self.node, self.edge, self.out = (nn.Linear(D, D) for _ in range(3))
        self.mix = nn.Linear(TOWERS * D, D)

    def forward(self, x: Any, e: Any, ends: Any) -> Any:
        x, e, (of, to) = self.node(x), self.edge(e), ends.T
        m = torch.einsum("ed,tdf->etf", torch.cat([x[of], x[to], e], -1), self.pre) + self.pre_b
        where = to[:, None, None].expand_as(m)
        mean = m.new_zeros(NODES, TOWERS, D).scatter_reduce(0, where, m, "mean", include_self=False)
        y = torch.cat([x[:, None].expand_as(mean), mean.flip(0) if self.turned else mean], -1)
        y = torch.einsum("ntd,tdf->ntf", y, self.post) + self.post_b
        return self.out(x + torch.relu(self.mix(y.flatten(1))))


class Model(nn.Module):
    def __init__(self, *, joins: bool, turned: bool = False) -> None:
        super().__init__()
        self.node, self.edge, self.out = (nn.Linear(D, D) for _ in range(3))
        self.towers = nn.ModuleList(Tower(joins, turned) for _ in range(TOWERS))
        self.mix = nn.Linear(TOWERS * D, D)

    def forward(self, x: Any, e: Any, ends: Any) -> Any:
        x, e = self.node(x), self.edge(e)
        y = torch.cat([tower(x, e, *ends.T) for tower in self.towers], -1)
        return self.out(x + torch.relu(self.mix(y)))


def function(p: Mapping[str, Any], given: Mapping[str, Any]) -> Mapping[str, Any]:
    of, to = given["ends"].T

    def at_nodes(m: Any) -> Any:
        return jax.ops.segment_sum(m, to, NODES)

    x, e = given["x"] @ p["node/w"] + p["node/b"], given["e"] @ p["edge/w"] + p["edge/b"]
    m = jnp.einsum("ed,tdf->etf", jnp.concatenate([x[of], x[to], e], -1), p["pre/w"]) + p["pre/b"]
    count = at_nodes(jnp.ones(EDGES))[:, None, None]
    mean = at_nodes(m) / count
    spread = jnp.sqrt(jax.nn.relu(at_nodes(m * m) / count - mean * mean) + 1e-5)
    high, low = jax.ops.segment_max(m, to, NODES), jax.ops.segment_min(m, to, NODES)
    parts, many = jnp.concatenate([mean, high, low, spread], -1), jnp.log(count + 1)
    own = jnp.broadcast_to(x[:, None], (NODES, TOWERS, D))
    y = jnp.concatenate([own, parts, parts * many, parts / many], -1)
    y = jnp.einsum("ntd,tdf->ntf", y, p["post/w"]) + p["post/b"]
    y = jnp.einsum("ntf,tfd->nd", y, p["mix/w"]) + p["mix/b"]
    return {"y": (x + jax.nn.relu(y)) @ p["out/w"] + p["out/b"]}


EACH = {
    **{
        f"{k}/{name}": shape[1:]
        for k in range(TOWERS)
        for name, shape in SHAPES.items()
        if len(shape) > 1 and name[0] in "pm"
    },
    **{f"{k}/post/w": (2 * D, D) for k in range(TOWERS)},
    "mix/b": (D,),
    **{name: shape for name, shape in SHAPES.items() if name[0] in "neo"},
}


def one_after_the_other(p: Mapping[str, Any], given: Mapping[str, Any]) -> Mapping[str, Any]:
    of, to = given["ends"].T
    x, e = given["x"] @ p["node/w"] + p["node/b"], given["e"] @ p["edge/w"] + p["edge/b"]
    count, y = jax.ops.segment_sum(jnp.ones(EDGES), to, NODES)[:, None], p["mix/b"]
    for k in range(TOWERS):
        m = jnp.concatenate([x[of], x[to], e], -1) @ p[f"{k}/pre/w"] + p[f"{k}/pre/b"]
        mean = jax.ops.segment_sum(m, to, NODES) / count
        y = y + (jnp.concatenate([x, mean], -1) @ p[f"{k}/post/w"] + p[f"{k}/post/b"]) @ p[f"{k}/mix/w"]
    return {"y": (x + jax.nn.relu(y)) @ p["out/w"] + p["out/b"]}


def inputs(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    to = rng.permutation(np.concatenate([np.arange(NODES), rng.integers(0, NODES, EDGES - NODES)]))  # each node has one
    ends = np.stack([rng.integers(0, NODES, EDGES), to], 1)
    return {"x": rng.normal(size=(NODES, D)), "e": rng.normal(size=(EDGES, D)), "ends": ends}


def derived(**options: bool) -> Derivation:
    return infer(function, Model(**options).eval(), lambda net, given: {"y": net(**given)}, inputs, SHAPES)


@pytest.mark.slow
@pytest.mark.parametrize("joins", [False, True])
def test_towers_of_one_leaf_are_told_apart_by_the_sums_of_their_products(joins: bool) -> None:
    found = derived(joins=joins)
    assert found.complete and grades(found) == {Grade.DERIVED, Grade.INTERCHANGEABLE}, found.differences
    # Each tower, in any order, with its columns of the mixing matrix.
    of = {"pre"} if joins else {"from_", "into", "edge"}
    for name in sorted(of):
        parts = [found.tensor(f"towers.{k}.{name}.weight").parts[0].leaf for k in range(TOWERS)]
        assert set(parts) == {"pre/w"}


@pytest.mark.slow
def test_another_node_s_messages_are_a_difference() -> None:
    found = derived(joins=False, turned=True)
    assert found.differences and not found.complete


def _stacked(*, turned: bool = False) -> Derivation:
    def run(net: nn.Module, given: Mapping[str, Any]) -> Mapping[str, Any]:
        return {"y": net(**given)}

    return infer(one_after_the_other, Stacked(turned).eval(), run, inputs, EACH)


def test_towers_in_one_parameter_have_the_order_in_which_they_are_mixed() -> None:
    found = _stacked()
    assert found.complete and grades(found) == {Grade.DERIVED}, found.differences
    assert {part.leaf for part in found.tensor("pre").parts} == {f"{k}/pre/w" for k in range(TOWERS)}


@pytest.mark.slow
def test_another_node_s_mean_is_a_difference() -> None:
    found = _stacked(turned=True)
    assert found.differences and not found.complete
