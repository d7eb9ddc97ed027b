"""Factorisation machines: a number for each category, in a vector that rows are picked from, against ``nn.Embedding(V, 1)``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

from convert.inference.derivation import Derivation
from support.inferred import derive, rules, sources

FIELDS, ENTRIES, WIDTH = 4, 16, 5
ROWS = FIELDS * ENTRIES
STARTS = np.arange(FIELDS) * ENTRIES


def records(seed: int) -> dict[str, Any]:
    return {"x": np.random.default_rng(seed).integers(0, ENTRIES, (64, FIELDS))}


def joined(w: Any, x: Any) -> Any:
    return w["t"][x + jnp.asarray(STARTS)].sum(1)


def stacked(w: Any, x: Any) -> Any:
    return w["t"][jnp.arange(FIELDS), x].sum(1)


def mapped(w: Any, x: Any) -> Any:
    return jax.vmap(lambda table, at: table[at], in_axes=(0, 1), out_axes=1)(w["t"], x).sum(1)


def apart(w: Any, x: Any) -> Any:
    return sum(w[f"t{k}"][x[:, k]] for k in range(FIELDS))


SHAPES = {
    joined: {"t": (ROWS,)},
    stacked: {"t": (FIELDS, ENTRIES)},
    mapped: {"t": (FIELDS, ENTRIES)},
    apart: {f"t{k}": (ENTRIES,) for k in range(FIELDS)},
}


class Joined(nn.Module):
    """One table for all fields; `starts`: where the rows of each begin; `pool`: over the fields."""

    def __init__(self, starts: Any = STARTS, pool: Callable[..., Any] = torch.sum) -> None:
        super().__init__()
        self.e, self.bias = nn.Embedding(ROWS, 1), nn.Parameter(torch.zeros(1))
        self.starts, self.pool = torch.tensor(starts), pool

    def forward(self, x: Any) -> Any:
        return self.pool(self.e(x + self.starts), dim=1)[:, 0] + self.bias


class Apart(nn.Module):
    """A table for each field; `tables`: which of them each field reads."""

    def __init__(self, tables: tuple[int, ...] = (0, 1, 2, 3)) -> None:
        super().__init__()
        self.e = nn.ModuleList(nn.Embedding(ENTRIES, 1) for _ in range(FIELDS))
        self.bias, self.tables = nn.Parameter(torch.zeros(1)), tables

    def forward(self, x: Any) -> Any:
        rows = [self.e[table](x[:, k : k + 1]) for k, table in enumerate(self.tables)]
        return torch.cat(rows, -1).sum(-1)[:, 0] + self.bias


class Bag(nn.Module):
    def __init__(self, mode: str = "sum") -> None:
        super().__init__()
        self.e, self.bias = nn.EmbeddingBag(ROWS, 1, mode=mode), nn.Parameter(torch.zeros(1))

    def forward(self, x: Any) -> Any:
        return self.e(x + torch.tensor(STARTS))[:, 0] + self.bias


def first_order(function: Any, module: nn.Module) -> Derivation:
    shapes = {**SHAPES[function], "bias": ()}
    return derive(lambda w, x: function(w, x) + w["bias"], module, shapes, records)


VECTOR = "parameter: {name: e.weight, axes: D.}"
LIST = 'parameter: {name: "e.{0,1,2,3}.weight", axes: D.}'


@pytest.mark.parametrize(
    ("function", "module", "rule"),
    [
        (joined, Joined(), f"- from: t\n  axes: D\n  {VECTOR}"),
        (joined, Apart(), f"- from: t\n  axes: (D + D + D + D)\n  {LIST}"),
        (joined, Bag(), f"- from: t\n  axes: D\n  {VECTOR}"),
        (apart, Apart(), '- from: t{i}\n  axes: D\n  parameter: {name: "e.{i}.weight", axes: D.}'),
        (
            apart,
            Joined(),
            '- from: "{t0,t1,t2,t3}"\n  axes: D\n  parameter: {name: e.weight, axes: "(D + D + D + D)."}',
        ),
        (stacked, Joined(), '- from: t\n  axes: DC\n  parameter: {name: e.weight, axes: "(D C)."}'),
        (
            mapped,
            Apart(),
            '- from: t\n  stacked: {i: 0}\n  axes: D\n  parameter: {name: "e.{i}.weight", axes: D.}',
        ),
    ],
)
def test_a_number_for_each_category_is_a_table_of_width_one(function: Any, module: nn.Module, rule: str) -> None:
    assert rule in rules(first_order(function, module), module)


@pytest.mark.parametrize("function", [joined, apart, mapped])
@pytest.mark.parametrize(
    "module",
    [
        Joined(STARTS - (STARTS > 0)),  # the last row of a field is the first of the next
        Joined(pool=torch.mean),
        Bag("mean"),
        Apart((0, 0, 2, 3)),
    ],
    ids=["rows begin one earlier", "mean", "mean of a bag", "one table for two fields"],
)
def test_other_rows_or_means_are_a_difference(function: Any, module: nn.Module) -> None:
    assert not first_order(function, module).complete


def test_the_mean_of_a_bag_for_a_sum_is_named() -> None:
    class Bags(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.e = nn.EmbeddingBag(ROWS, WIDTH, mode="mean")

        def forward(self, x: Any) -> Any:
            return self.e(x)

    (difference,) = derive(lambda w, x: w["t"][x].sum(1), Bags(), {"t": (ROWS, WIDTH)}, records).differences
    assert "mean over axis 1 for sum over axis 1" in difference.problem
    assert derive(lambda w, x: w["t"][x].mean(1), Bags(), {"t": (ROWS, WIDTH)}, records).complete


class Machine(nn.Module):
    """A factorisation machine; `fields`: which of them its second-order term reads."""

    def __init__(self, factor: float = 0.5, fields: tuple[int, ...] = (0, 1, 2, 3)) -> None:
        super().__init__()
        self.first, self.v, self.out = Joined(), nn.Embedding(ROWS, WIDTH), nn.Linear(FIELDS * WIDTH, 1)
        self.factor, self.fields = factor, list(fields)

    def forward(self, x: Any) -> Any:
        v = self.v(x + torch.tensor(STARTS))
        u = v[:, self.fields]
        pairs = self.factor * (u.sum(1) ** 2 - (u**2).sum(1)).sum(1)
        return self.first(x) + pairs + self.out(torch.tanh(v.flatten(1)))[:, 0]


def by_pairs(v: Any) -> Any:
    one, other = np.triu_indices(FIELDS, 1)
    return (v[:, one] * v[:, other]).sum((1, 2))


def by_squares(v: Any) -> Any:
    return 0.5 * (v.sum(1) ** 2 - (v**2).sum(1)).sum(-1)


def machine(second: Any, module: Machine) -> Derivation:
    def function(w: Any, x: Any) -> Any:
        v = w["v"][x + jnp.asarray(STARTS)]
        deep = jnp.tanh(v.reshape(len(x), -1)) @ w["out"] + w["shift"]
        return joined(w, x) + w["bias"] + second(v) + deep[:, 0]

    shapes = {"t": (ROWS,), "v": (ROWS, WIDTH), "out": (FIELDS * WIDTH, 1), "bias": (), "shift": ()}
    return derive(function, module, shapes, records)


@pytest.mark.parametrize("second", [by_pairs, by_squares])
def test_both_forms_of_the_second_order_term(second: Any) -> None:
    module = Machine()
    found = machine(second, module)
    assert {sources(found)[name] for name in ("first.bias", "out.bias")} == {"bias", "shift"}
    written = rules(found, module)
    assert any(rule.startswith("- einsum") and rule.endswith("from: out\n  linear: out") for rule in written), written


@pytest.mark.slow
@pytest.mark.parametrize("second", [by_pairs, by_squares])
@pytest.mark.parametrize("module", [Machine(1.0), Machine(fields=(0, 0, 2, 3))], ids=["no 0.5", "a field twice"])
def test_another_second_order_term_is_a_difference(second: Any, module: Machine) -> None:
    assert not machine(second, module).complete
