"""Tables of several fields: one for each, or all below each other in one, where a number is added to what each field has."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

from convert.inference.derivation import Derivation
from convert.inference.infer import infer
from support.inferred import rules, sources

FIELDS, WIDTH, OUT = (10, 6, 8), 16, 4
STARTS = np.cumsum([0, *FIELDS[:-1]])


class Joined(nn.Module):
    """One table for all fields; `starts`: where the rows of each begin."""

    def __init__(self, starts: Any = STARTS) -> None:
        super().__init__()
        self.table, self.weights = nn.Embedding(sum(FIELDS), WIDTH), nn.Embedding(sum(FIELDS), 1)
        self.out, self.starts = nn.Linear(3 * WIDTH, OUT), torch.tensor(starts)

    def forward(self, x: Any) -> Any:
        x = x + self.starts
        return torch.tanh(self.out(self.table(x).flatten(1))) + self.weights(x).sum(1)


class Apart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, WIDTH) for rows in FIELDS)
        self.weights = nn.ModuleList(nn.Embedding(rows, 1) for rows in FIELDS)
        self.out = nn.Linear(3 * WIDTH, OUT)

    def forward(self, x: Any) -> Any:
        y = torch.cat([table(x[:, k]) for k, table in enumerate(self.tables)], 1)
        return torch.tanh(self.out(y)) + sum(table(x[:, k]) for k, table in enumerate(self.weights))


def apart(w: Any, x: Any) -> Any:
    y = jnp.concatenate([w[f"table_{k}"][x[:, k]] for k in range(3)], 1)
    return jnp.tanh(y @ w["out"] + w["bias"]) + sum(w[f"weights_{k}"][x[:, k]] for k in range(3))


def joined(w: Any, x: Any) -> Any:
    x = x + jnp.asarray(STARTS)
    y = w["table"][x].reshape(len(x), -1)
    return jnp.tanh(y @ w["out"] + w["bias"]) + w["weights"][x].sum(1)


def row_by_row(w: Any, x: Any) -> Any:
    """As Equinox's layers are called, for one number of one row at a time."""

    def looked_up(table: Any, numbers: Any) -> Any:
        return jax.vmap(lambda number: table[number])(numbers)

    def of_row(numbers: Any) -> Any:
        numbers = numbers + STARTS
        y = looked_up(w["table"], numbers).ravel()
        return jnp.tanh(y @ w["out"] + w["bias"]) + looked_up(w["weights"], numbers).sum(0)

    return jax.vmap(of_row)(x)


HEAD = {"out": (3 * WIDTH, OUT), "bias": (OUT,)}
TABLES = {f"table_{k}": (rows, WIDTH) for k, rows in enumerate(FIELDS)}
WEIGHTS = {f"weights_{k}": (rows, 1) for k, rows in enumerate(FIELDS)}


def inputs(seed: int) -> dict[str, Any]:
    generator = np.random.default_rng(seed)
    return {"x": np.stack([generator.integers(0, rows, 40) for rows in FIELDS], 1)}


def derived(function: Any, module: nn.Module, shapes: Any) -> Derivation:
    return infer(
        lambda w, given: {"y": function(w, given["x"])},
        module.eval(),
        lambda module, given: {"y": module(given["x"])},
        inputs,
        shapes,
    )


def test_a_leaf_for_each_field_is_rows_of_one_table() -> None:
    found = derived(apart, Joined(), {**TABLES, **WEIGHTS, **HEAD})
    assert found.complete, found.differences
    assert sources(found)["table.weight"] == ("table_0", "table_1", "table_2")
    written = rules(found, Joined())
    assert '- from: table_1\n  axes: AD\n  embedding: {module: table, part: "2 of 3"}' in written, written


@pytest.mark.slow
def test_rows_of_one_leaf_are_a_table_for_each_field() -> None:
    shapes = {"table": (sum(FIELDS), WIDTH), "weights": (sum(FIELDS), 1), **HEAD}
    found = derived(joined, Apart(), shapes)
    assert found.complete, found.differences
    assert sources(found)["tables.2.weight"] == "table"


def test_one_table_on_both_sides_is_one_leaf() -> None:
    shapes = {"table": (sum(FIELDS), WIDTH), "weights": (sum(FIELDS), 1), **HEAD}
    found = derived(joined, Joined(), shapes)
    assert found.complete, found.differences
    assert any(rule.endswith("embedding: table") for rule in rules(found, Joined()))


@pytest.mark.slow
def test_rows_that_begin_elsewhere_are_a_difference() -> None:
    found = derived(joined, Joined(STARTS + np.array([0, 0, -1])), {"table": (24, WIDTH), "weights": (24, 1), **HEAD})
    assert not found.complete and found.differences


@pytest.mark.slow
def test_rows_that_are_taken_one_by_one() -> None:
    shapes = {"table": (sum(FIELDS), WIDTH), "weights": (sum(FIELDS), 1), **HEAD}
    found = derived(row_by_row, Joined(), shapes)
    assert found.complete, found.differences
    assert sources(found)["table.weight"] == "table"


@pytest.mark.slow
def test_other_starts_of_rows_that_are_taken_one_by_one() -> None:
    """The planted fault: the rows of two fields overlap."""
    shapes = {"table": (sum(FIELDS), WIDTH), "weights": (sum(FIELDS), 1), **HEAD}
    found = derived(row_by_row, Joined(STARTS - [0, 1, 0]), shapes)
    assert not found.complete and found.proof is None
