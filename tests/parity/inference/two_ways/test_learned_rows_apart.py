"""Learned queries that are joined to the words before one norm normalises both, or normalised by themselves and joined then."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from torch import nn

from convert.inference.derivation import Grade
from convert.inference.forms.learned_rows import learned_rows_apart, scaled_with_learned
from convert.programs.record_torch import record_torch
from support.inferred import UNPROVEN, derive, grades, layer_norm, rms_norm, sources, tokens

WIDTH, QUERIES, WORDS, LAYERS = 16, 5, 7, 2
HEADS = 4
SHAPES = {
    "queries": (QUERIES, WIDTH),
    "table": (11, WIDTH),
    "places": (WORDS, WIDTH),
    "g": (WIDTH,),
    "b": (WIDTH,),
    **{f"{name}{k}": (WIDTH, WIDTH) for k in range(LAYERS) for name in ("o", "u", "v")},
    **{f"w{k}": (3, WIDTH, HEADS, WIDTH // HEADS) for k in range(LAYERS)},
    **{f"r{k}": (3, HEADS, WIDTH // HEADS) for k in range(LAYERS)},
    **{f"{name}{k}": (WIDTH,) for k in range(LAYERS) for name in ("s", "t", "c", "p")},
}


def _source(*, joined: bool, norm: str) -> Any:
    """Return a function that normalises queries and words at once where they are `joined`, and each by itself otherwise."""

    def first_norm(w: Any, x: Any) -> Any:
        return layer_norm(x, w["g"], w["b"], 1e-5) if norm == "layer" else rms_norm(x, w["g"], 1e-5) + w["b"]

    def function(w: Any, x: Any) -> Any:
        words = w["table"][x] + w["places"]
        queries = jnp.tile(w["queries"], (len(x), 1, 1))
        if joined:
            y = first_norm(w, jnp.concatenate([queries, words], 1))
        else:
            y = jnp.concatenate([first_norm(w, queries), first_norm(w, words)], 1)
        for k in range(LAYERS):
            q, k_, v = jnp.einsum("btd,cdnh->cbtnh", y, w[f"w{k}"]) + w[f"r{k}"][:, None, None]
            scores = jax.nn.softmax(jnp.einsum("bqnh,bknh->bnqk", q, k_) / 2)
            heads = jnp.einsum("bnqk,bknh->bqnh", scores, v).reshape(y.shape)
            y = layer_norm(y + heads @ w[f"o{k}"] + w[f"p{k}"], w[f"s{k}"], w[f"t{k}"], 1e-5)
            queries, words = y[:, :QUERIES], y[:, QUERIES:]
            parts = [jnp.tanh(queries @ w[f"u{k}"] + w[f"c{k}"]), jnp.sin(words @ w[f"v{k}"])]
            y = jnp.concatenate(parts, 1)
        return y

    return function


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.of_words = nn.Linear(WIDTH, WIDTH, bias=False)
        self.of_queries, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, y: Any) -> Any:
        q, k, v = (of(y).unflatten(-1, (HEADS, -1)).transpose(1, 2) for of in (self.query, self.key, self.value))
        heads = torch.softmax(q @ k.mT / 2, -1) @ v
        y = self.norm(y + self.out(heads.transpose(1, 2).flatten(2)))
        return torch.cat([self.of_queries(y[:, :QUERIES]).tanh(), self.of_words(y[:, QUERIES:]).sin()], 1)


class Reader(nn.Module):
    """Queries beside words; ``fault``: what differs."""

    def __init__(self, *, joined: bool, norm: str, fault: str = "") -> None:
        super().__init__()
        self.learned = nn.Parameter(torch.randn(QUERIES, WIDTH))
        self.words, self.places = nn.Embedding(11, WIDTH), nn.Embedding(WORDS, WIDTH)
        self.norm = nn.LayerNorm(WIDTH) if norm == "layer" else nn.RMSNorm(WIDTH, 1e-5)
        self.bias = nn.Parameter(torch.randn(WIDTH)) if norm != "layer" else None
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.joined, self.fault = joined, fault

    def first_norm(self, x: Any, *, of_queries: bool) -> Any:
        if of_queries and self.fault == "epsilon":
            x = x + 0.01 * x.sin()
        x = self.norm(x)
        return x if self.bias is None else x + self.bias

    def forward(self, x: Any) -> Any:
        words = self.words(x) + self.places.weight
        queries = self.learned.expand(len(x), -1, -1)
        if self.joined:
            y = self.first_norm(torch.cat([queries, words], 1), of_queries=False)
        else:
            y = torch.cat([self.first_norm(queries, of_queries=True), self.first_norm(words, of_queries=False)], 1)
        for block in self.blocks:
            y = block(y)
        return y


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize(("of_source", "of_target"), [(False, True), (True, False)])
def test_norm_of_joined_rows_is_that_of_each(of_source: bool, of_target: bool, norm: str) -> None:
    made = derive(
        _source(joined=of_source, norm=norm), Reader(joined=of_target, norm=norm), SHAPES, tokens(11, 3, WORDS)
    )
    assert made.complete, [(tensor.name, tensor.grade) for tensor in made.tensors]
    assert grades(made) == {Grade.DERIVED} and made.proof is not None
    assert sources(made)["learned"] == "queries" and sources(made)["norm.weight"] == "g"


@pytest.mark.slow
def test_other_norm_of_the_learned_rows_is_no_norm_of_both() -> None:
    module = Reader(joined=False, norm="layer", fault="epsilon")
    made = derive(_source(joined=True, norm="layer"), module, SHAPES, tokens(11, 3, WORDS))
    assert not made.complete and made.differences
    assert UNPROVEN & grades(made)


def test_programs_that_join_behind_the_norm_stay_as_they_are() -> None:
    given = tokens(11, 3, WORDS)(0)
    record = {
        joined: record_torch(Reader(joined=joined, norm="layer").double(), lambda net, x: {"y": net(x["x"])}, given)
        for joined in (True, False)
    }
    assert sum(scaled_with_learned(record[True]).values()) == 1 and not scaled_with_learned(record[False])
    assert learned_rows_apart(record[False]) is record[False]
