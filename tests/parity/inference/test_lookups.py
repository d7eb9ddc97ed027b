"""A table whose rows the source takes with ones and zeros, or in another order of its axes, as in a CRF."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from convert.inference.derivation import Derivation
from convert.inference.infer import infer
from support.inferred import WIDTH, derive, rules, sources, tokens

pytestmark = pytest.mark.slow
D = WIDTH
SHAPES = {"x": (D, D), "h": (D, D), "out": (D, D), "start": (D,), "end": (D,), "steps": (D, D), "book": (D, D)}


def inputs(seed: int) -> dict[str, Any]:
    generator = np.random.default_rng(seed)
    return {"x": generator.normal(size=(5, 4, D)), "tags": generator.integers(0, D, (5, 4))}


def tagger(w: Any, given: Any) -> dict[str, Any]:
    """The score of some tags, as JAX code has it: products with ones and zeros."""

    def step(h: Any, x: Any) -> tuple[Any, Any]:
        h = jnp.tanh(x @ w["x"] + h @ w["h"])
        return h, h

    _, h = jax.lax.scan(step, jnp.zeros((5, D)), given["x"].swapaxes(0, 1))
    ones = jax.nn.one_hot(given["tags"], D)
    score = (
        jnp.einsum("btd,btd->b", h.swapaxes(0, 1) @ w["out"], ones)
        + ones[:, 0] @ w["start"]
        + w["end"][given["tags"][:, -1]]
    )
    score += jnp.einsum("bti,btj,ij->b", ones[:, :-1], ones[:, 1:], w["steps"])
    return {"score": score, "codes": w["book"].T[given["tags"]]}


class Tagger(torch.nn.Module):
    """The same by indices, with a matrix of (to, from)."""

    def __init__(self, last: int = -1) -> None:
        super().__init__()
        self.last = last
        self.first, self.again, self.out = (torch.nn.Linear(D, D, bias=False) for _ in range(3))
        self.codes = torch.nn.Embedding(D, D)
        self.eos, self.bos = (torch.nn.Parameter(torch.zeros(D)) for _ in range(2))
        self.trans = torch.nn.Parameter(torch.zeros(D, D))

    def forward(self, x: Any, tags: Any) -> dict[str, Any]:
        states = [torch.zeros(len(x), D)]
        for t in range(x.shape[1]):
            states.append(torch.tanh(self.first(x[:, t]) + self.again(states[-1])))
        out, rows = self.out(torch.stack(states[1:], 1)), torch.arange(len(x))
        score = self.bos[tags[:, 0]] + out[rows, 0, tags[:, 0]] + self.eos[tags[:, self.last]]
        for t in range(1, x.shape[1]):
            score = score + out[rows, t, tags[:, t]] + self.trans[tags[:, t], tags[:, t - 1]]
        return {"score": score, "codes": self.codes(tags)}


def test_tables_by_ones_and_zeros_are_found() -> None:
    module = Tagger().eval()
    found = infer(tagger, module, lambda module, given: module(**given), inputs, SHAPES)
    written = rules(found, module)
    for rule in (
        'from: "{end,start}"\n  parameter: "{eos,bos}"',
        "from: steps\n  axes: CD\n  parameter: {name: trans, axes: DC}",
        "from: book\n  axes: CD\n  parameter: {name: codes.weight, axes: DC}",
    ):
        assert f"- {rule}" in written, written


def test_another_row_of_a_table_is_a_difference() -> None:
    found = infer(tagger, Tagger(last=-2).eval(), lambda module, given: module(**given), inputs, SHAPES)
    assert not found.complete and found.differences


FIELDS = 4
STACKED = {"tables": (FIELDS, D, D), "w": (FIELDS * D, D)}
APART = {**{f"table{k}": (D, D) for k in range(FIELDS)}, "w": (FIELDS * D, D)}


def records(seed: int) -> dict[str, Any]:
    return {"x": np.random.default_rng(seed).integers(0, D, (5, FIELDS))}


SOURCES: dict[str, Any] = {
    "vmap": lambda w, x: jax.vmap(lambda table, ids: table[ids], in_axes=(0, 1), out_axes=1)(w["tables"], x),
    "second index": lambda w, x: w["tables"][jnp.arange(FIELDS), x],
    "take_along_axis": lambda w, x: jnp.take_along_axis(w["tables"], x.T[..., None], 1).swapaxes(0, 1),
    "number": lambda w, x: jnp.stack([w["tables"][k, x[:, k]] for k in range(FIELDS)], 1),
    "apart": lambda w, x: jnp.stack([w[f"table{k}"][x[:, k]] for k in range(FIELDS)], 1),
}


class Fields(torch.nn.Module):
    """A table for each field of a record, in a list or stacked."""

    def __init__(self, stacked: bool = False, fields: tuple[int, ...] = (0, 1, 2, 3)) -> None:
        super().__init__()
        self.fields = fields
        if stacked:
            self.tables = torch.nn.Parameter(torch.zeros(FIELDS, D, D))
        else:
            self.e = torch.nn.ModuleList(torch.nn.Embedding(D, D) for _ in range(FIELDS))
        self.out = torch.nn.Linear(FIELDS * D, D, bias=False)

    def forward(self, x: Any) -> Any:
        if hasattr(self, "tables"):
            rows = self.tables[torch.arange(FIELDS), x[:, list(self.fields)]]
        else:
            rows = torch.stack([table(x[:, k]) for table, k in zip(self.e, self.fields, strict=True)], 1)
        return torch.relu(self.out(rows.flatten(1)))


def table_for_each_field(way: str, module: Fields) -> Derivation:
    def function(w: Any, x: Any) -> Any:
        return jax.nn.relu(SOURCES[way](w, x).reshape(len(x), -1) @ w["w"])

    return derive(function, module, APART if way == "apart" else STACKED, records)


@pytest.mark.parametrize("way", ["vmap", "second index", "take_along_axis", "number"])
def test_stacked_tables_are_a_list_of_embeddings(way: str) -> None:
    module = Fields()
    assert "- from: tables\n  stacked: {i: 0}\n  axes: VD\n  embedding: e.{i}" in rules(
        table_for_each_field(way, module), module
    )


def test_a_list_of_tables_is_found_in_one_parameter() -> None:
    found = table_for_each_field("apart", Fields(stacked=True))
    assert sources(found)["tables"] == tuple(f"table{k}" for k in range(FIELDS))
    assert found.complete


@pytest.mark.parametrize(("way", "stacked"), [("vmap", False), ("vmap", True), ("number", False)])
def test_a_table_that_is_given_another_field_is_a_difference(way: str, stacked: bool) -> None:
    found = table_for_each_field(way, Fields(stacked, fields=(0, 1, 2, 2)))
    (difference,) = found.differences
    assert not found.complete and "test_lookups.py" in difference.site.where


@pytest.mark.parametrize("transposed", [False, True])
def test_two_tables_with_the_same_first_index(transposed):
    """As the scores of a CRF: a table of first states, and one of moves from each state to the next."""

    class Scores(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.start, self.end = (torch.nn.Parameter(torch.zeros(6)) for _ in range(2))
            self.moves = torch.nn.Parameter(torch.zeros(6, 6))

        def forward(self, x: Any) -> Any:
            return self.start[x[:, 0]] + self.moves[x[:, 0], x[:, 1]] + self.moves[x[:, 1], x[:, 2]] + self.end[x[:, 2]]

    def function(w, x):
        def one(x):
            pairs = [(x[1], x[0]), (x[2], x[1])] if transposed else [(x[0], x[1]), (x[1], x[2])]
            return w["start"][x[0]] + w["moves"][pairs[0]] + w["moves"][pairs[1]] + w["end"][x[2]]

        return jax.vmap(one)(x)

    shapes = {"moves": (6, 6), "start": (6,), "end": (6,)}
    found = derive(function, Scores(), shapes, tokens(6, 60, 3))
    assert found.complete and sources(found) == {name: name for name in ("start", "end", "moves")}
    assert np.array_equal(found.tensor("moves").parts[0].positions, np.arange(36).reshape(6, 6).T.ravel()) == transposed
