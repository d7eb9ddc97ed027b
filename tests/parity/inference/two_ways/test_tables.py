"""Tables of position biases that one program looks up, and the other multiplies by rows of zeros and one 1."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from convert.inference.derivation import Grade
from convert.inference.infer import infer
from support.inferred import HEADS, WIDTH, derive, floats, grades, rules, sources, tokens

D, N, T, BUCKETS = WIDTH, HEADS, 6, 7
ROWS = np.clip(np.arange(T) - np.arange(T)[:, None] + 3, 0, BUCKETS - 1)
HOT = np.eye(BUCKETS)[ROWS]


def _source(*, hot: bool) -> Any:
    def function(w: Any, x: Any) -> Any:
        q, k, v = ((x @ w[c]).reshape(-1, T, N, D // N) for c in "qkv")
        table = jnp.einsum("tsb,bn->nts", HOT, w["t"]) if hot else w["t"][:, ROWS]
        scores = jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", q, k) / 2 + table, -1)
        return jnp.einsum("bnts,bsnh->btnh", scores, v).reshape(x.shape) @ w["o"]

    return function


class Attention(torch.nn.Module):
    def __init__(self, hot: Any = None) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (torch.nn.Linear(D, D, bias=False) for _ in range(4))
        self.hot = None if hot is None else torch.as_tensor(hot)
        self.t = torch.nn.Embedding(BUCKETS, N) if hot is None else torch.nn.Linear(BUCKETS, N, bias=False)

    def forward(self, x: Any) -> Any:
        q, k, v = (m(x).view(len(x), T, N, D // N).transpose(1, 2) for m in (self.q, self.k, self.v))
        table = self.t(torch.as_tensor(ROWS) if self.hot is None else self.hot.to(x.dtype)).permute(2, 0, 1)
        y = (q @ k.mT / 2 + table).softmax(-1) @ v
        return self.o(y.transpose(1, 2).reshape(x.shape))


@pytest.mark.parametrize("to_hot", [False, True], ids=["to lookups", "to products"])
def test_a_table_that_is_multiplied_is_the_one_that_is_looked_up(to_hot: bool) -> None:
    module = Attention(HOT if to_hot else None)
    shapes = {**dict.fromkeys("qkvo", (D, D)), "t": (N, BUCKETS) if to_hot else (BUCKETS, N)}
    found = derive(_source(hot=not to_hot), module, shapes, floats(2, T, D))
    assert found.complete and grades(found) == {Grade.DERIVED}
    assert sources(found.tensor("t.weight")) == "t" and rules(found, module)


@pytest.mark.slow
def test_other_rows_of_the_table_are_never_derived() -> None:
    module = Attention(HOT[:, ::-1].copy())
    found = derive(_source(hot=False), module, {**dict.fromkeys("qkvo", (D, D)), "t": (N, BUCKETS)}, floats(2, T, D))
    assert not found.complete and found.differences and found.proof is None


COORDINATES = np.stack(np.meshgrid(np.arange(2), np.arange(3), indexing="ij"), -1).reshape(T, 2)
PAIRS = COORDINATES[:, None] - COORDINATES
EVERY = np.stack(np.meshgrid(np.arange(-1, 2), np.arange(-2, 3), indexing="ij"), -1).reshape(-1, 2)
SWIN = {**dict.fromkeys("qkvo", (D, D)), "t": (N, 1, 1), "a": (2, 8), "b": (8,), "c": (8, N)}


def _far(pairs: Any) -> Any:
    return np.sign(pairs) * np.log2(1 + 4.0 * np.abs(pairs)) / 3


def _swin(w: Any, x: Any) -> Any:
    """Applies the layers to each pair of places."""
    q, k, v = ((x @ w[c]).reshape(-1, T, N, D // N) for c in "qkv")
    q, k = (y / jnp.linalg.norm(y, axis=-1, keepdims=True) for y in (q, k))
    table = jax.nn.relu(_far(PAIRS) @ w["a"] + w["b"]) @ w["c"]
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) * jnp.exp(w["t"]) + 16 * jax.nn.sigmoid(table.transpose(2, 0, 1))
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores, -1), v).reshape(x.shape) @ w["o"]


class Swin(torch.nn.Module):
    """Applies the layers to each distance, and takes those of the pairs, as Swin v2."""

    def __init__(self, most: float = 16.0) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (torch.nn.Linear(D, D, bias=False) for _ in range(4))
        self.t = torch.nn.Parameter(torch.randn(N, 1, 1))
        self.a, self.c, self.most = torch.nn.Linear(2, 8), torch.nn.Linear(8, N, bias=False), most

    def forward(self, x: Any) -> Any:
        q, k, v = (m(x).view(len(x), T, N, D // N).transpose(1, 2) for m in (self.q, self.k, self.v))
        q, k = (torch.nn.functional.normalize(y, dim=-1) for y in (q, k))
        table = self.c(self.a(torch.as_tensor(_far(EVERY), dtype=x.dtype)).relu())
        at = torch.as_tensor((PAIRS[..., 0] + 1) * 5 + PAIRS[..., 1] + 2)
        bias = self.most * table[at.view(-1)].view(T, T, N).permute(2, 0, 1).sigmoid()
        y = (q @ k.mT * self.t.exp() + bias).softmax(-1) @ v
        return self.o(y.transpose(1, 2).reshape(x.shape))


@pytest.mark.slow
def test_layers_of_each_distance_or_of_each_pair() -> None:
    module = Swin()
    found = derive(_swin, module, SWIN, floats(2, T, D))
    assert found.complete and grades(found) == {Grade.DERIVED} and rules(found, module)
    assert [sources(found.tensor(name)) for name in ("a.weight", "a.bias", "c.weight", "t")] == ["a", "b", "c", "t"]


@pytest.mark.slow
def test_another_largest_bias_is_never_derived() -> None:
    found = derive(_swin, Swin(8.0), SWIN, floats(2, T, D))
    assert not found.complete and found.proof is None
    assert found.differences[0].brief.startswith("behind q: the target adds parameters, the JAX model adds;")


class Words(torch.nn.Module):
    """Adds up the words of a sentence; those of one number have no embedding, if it `hides` it."""

    def __init__(self, hides: int | None, *, in_table: bool) -> None:
        super().__init__()
        self.t, self.o = torch.nn.Embedding(BUCKETS, D), torch.nn.Linear(D, D)
        self.hides, self.in_table = hides, in_table

    def forward(self, x: Any) -> Any:
        if self.in_table:
            kept = torch.arange(BUCKETS)[:, None] != self.hides
            return self.o(torch.tanh(torch.nn.functional.embedding(x, self.t.weight * kept).sum(1)))
        rows = self.t(x) if self.hides is None else self.t(x) * (x != self.hides).unsqueeze(-1)
        return self.o(torch.tanh(rows.sum(1)))


def _words(*, in_table: bool) -> Any:
    def function(w: Any, x: Any) -> Any:
        table = jnp.asarray(w["t"])
        rows = table.at[0].set(0.0)[x] if in_table else jnp.where((x > 0)[..., None], table[x], 0)
        return jnp.tanh(rows.sum(1)) @ w["o"] + w["b"]

    return function


OF_WORDS = {"t": (BUCKETS, D), "o": (D, D), "b": (D,)}


@pytest.mark.parametrize(
    ("source", "target"), [(True, False), *(pytest.param(x, True, marks=pytest.mark.slow) for x in (False, True))]
)
def test_a_row_of_zeros_is_a_row_that_is_hidden(source: bool, target: bool) -> None:
    """As in MemN2N: the word of the padding has no embedding."""
    module = Words(0, in_table=target)
    found = derive(_words(in_table=source), module, OF_WORDS, tokens(BUCKETS, 9, T))
    assert found.complete and sources(found.tensor("t.weight")) == "t", found.differences
    assert rules(found, module)


@pytest.mark.parametrize("hides", [None, pytest.param(1, marks=pytest.mark.slow)])
def test_another_hidden_row_is_never_derived(hides: int | None) -> None:
    found = derive(_words(in_table=True), Words(hides, in_table=False), OF_WORDS, tokens(BUCKETS, 9, T))
    assert not found.complete and found.proof is None and found.differences


FIELDS, ENTRIES, OUT = 5, 8, 4
FIELD_SHAPES = {"t": (FIELDS, ENTRIES, OUT), "c": (OUT,), "d": (3, OUT), "b": (OUT,)}


class FieldTable(torch.nn.Module):
    """The table of all fields, with the rows of each behind those before it; `shift`: a fault in where the last one begins."""

    def __init__(self, shift: int = 0) -> None:
        super().__init__()
        self.table, self.deep = torch.nn.Embedding(FIELDS * ENTRIES, OUT), torch.nn.Linear(3, OUT)
        starts = ENTRIES * torch.arange(FIELDS) - shift * (torch.arange(FIELDS) == FIELDS - 1)
        self.register_buffer("starts", starts, persistent=False)

    def forward(self, ids: Any, x: Any) -> Any:
        return self.deep(x) + self.table(ids + self.starts).sum(1)


def _at_once(ids: Any, table: Any) -> Any:
    return jnp.einsum("bfv,fvt->bt", jax.nn.one_hot(ids, ENTRIES), table)


def _then_summed(ids: Any, table: Any) -> Any:
    return jnp.einsum("bfv,fvt->bft", jax.nn.one_hot(ids, ENTRIES), table).sum(1)


def _of_one_table(ids: Any, table: Any) -> Any:
    hot = jax.nn.one_hot(ids + ENTRIES * jnp.arange(FIELDS), FIELDS * ENTRIES)
    return (hot @ table.reshape(-1, OUT)).sum(1)


def _fields(look_up: Any = _at_once, shift: int = 0) -> Any:
    def function(w: Any, given: Any) -> Any:
        return {"y": look_up(given["ids"], w["t"]) + w["c"] + (given["x"] @ w["d"] + w["b"])}

    def inputs(seed: int) -> dict[str, Any]:
        rng = np.random.default_rng(seed)
        return {"ids": rng.integers(0, ENTRIES, size=(16, FIELDS)), "x": rng.normal(size=(16, 3))}

    return infer(function, FieldTable(shift).eval(), lambda net, given: {"y": net(**given)}, inputs, FIELD_SHAPES)


@pytest.mark.parametrize("look_up", [_at_once, _then_summed, _of_one_table])
def test_one_hot_rows_of_several_fields_are_lookups_in_tables_of_their_own(look_up: Any) -> None:
    """Beside two biases, of which the other program has the sum."""
    found = _fields(look_up)
    assert found.complete and grades(found) == {Grade.DERIVED}, found.differences


@pytest.mark.slow
@pytest.mark.parametrize("look_up", [_at_once, _then_summed, _of_one_table])
def test_a_field_that_begins_in_another_row_is_a_difference(look_up: Any) -> None:
    found = _fields(look_up, shift=1)
    assert not found.complete and found.proof is None
