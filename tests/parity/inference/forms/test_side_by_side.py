"""One matrix for values side by side in one program, and a matrix for each of them in the other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from torch import nn

from support.inferred import WIDTH, derive, floats, rules

A, B, OUT = 5, 8, 6
SHAPES = {"e": (WIDTH, A), "f": (WIDTH, B), "c": (OUT,), "o": (OUT, 3)}


class Two(nn.Module):
    """Two values, and a layer for both or for each; `biases`: which of the two layers have one."""

    def __init__(self, joined: bool, biases: str = "a") -> None:
        super().__init__()
        self.e, self.f, self.o = (
            nn.Linear(WIDTH, A, bias=False),
            nn.Linear(WIDTH, B, bias=False),
            nn.Linear(OUT, 3, bias=False),
        )
        self.joined = joined
        if joined:
            self.both = nn.Linear(A + B, OUT)
        else:
            self.a, self.b = nn.Linear(A, OUT, bias="a" in biases), nn.Linear(B, OUT, bias="b" in biases)

    def forward(self, x: Any) -> Any:
        a, b = torch.tanh(self.e(x)), torch.sigmoid(self.f(x))
        return self.o(torch.relu(self.both(torch.cat([a, b], -1)) if self.joined else self.a(a) + self.b(b)))


def two(joined: bool) -> Any:
    def function(w: Mapping[str, Any], x: Any) -> Any:
        a, b = jnp.tanh(x @ w["e"]), jax.nn.sigmoid(x @ w["f"])
        y = jnp.concatenate([a, b], -1) @ w["l"] + w["c"] if joined else a @ w["a"] + b @ w["b"] + w["c"]
        return jax.nn.relu(y) @ w["o"]

    return function


@pytest.mark.parametrize("biases", [*(pytest.param(x, marks=pytest.mark.slow) for x in "ab"), "ab"])
def test_a_layer_for_each_value(biases: str):
    module = Two(False, biases)
    found = derive(two(True), module, {**SHAPES, "l": (A + B, OUT)})
    written = rules(found, module)
    assert '- einsum: "...(C + E),(C + E)F->...F"\n  from: l\n  linear: "{a,b}"' in written
    assert any(f"from: c\n  parameter: {biases[0]}.bias" in rule for rule in written)
    assert ("constant: b.bias" in written[-1]) == (biases == "ab")


def test_a_layer_for_both_values():
    module = Two(True)
    found = derive(two(False), module, {**SHAPES, "a": (A, OUT), "b": (B, OUT)})
    written = [rule for rule in rules(found, module) if "both.weight" in rule]
    assert [rule.split("\n  ", 1)[1] for rule in written] == [
        'axes: CF\n  parameter: {name: both.weight, axes: "F(C + E)", part: "1 of 2"}',
        'axes: EF\n  parameter: {name: both.weight, axes: "F(C + E)", part: "2 of 2"}',
    ]


class Bare(nn.Module):
    """A matrix that is no layer's: data multiplies it from the left, or `turned` from the right."""

    def __init__(self, turned: bool) -> None:
        super().__init__()
        self.e, self.f = nn.Linear(WIDTH, A, bias=False), nn.Linear(WIDTH, B, bias=False)
        self.o = nn.Linear(OUT, 3, bias=False)
        self.l = nn.Parameter(torch.zeros((OUT, A + B) if turned else (A + B, OUT)))

    def forward(self, x: Any) -> Any:
        both = torch.cat([torch.tanh(self.e(x)), torch.sigmoid(self.f(x))], -1)
        return self.o(torch.relu(both @ (self.l if self.l.shape[0] == A + B else self.l.T)))


@pytest.mark.parametrize(
    ("turned", "axes"), [(False, ""), pytest.param(True, ' axes: "D(C + E)",', marks=pytest.mark.slow)]
)
def test_a_matrix_without_a_layer_for_both_values(turned: bool, axes: str):
    module = Bare(turned)

    def function(w: Mapping[str, Any], x: Any) -> Any:
        return jax.nn.relu(jnp.tanh(x @ w["e"]) @ w["a"] + jax.nn.sigmoid(x @ w["f"]) @ w["b"]) @ w["o"]

    shapes = {name: SHAPES[name] for name in "efo"} | {"a": (A, OUT), "b": (B, OUT)}
    written = "\n".join(rules(derive(function, module, shapes), module))
    assert f'  parameter: {{name: l,{axes} part: "1 of 2"}}' in written
    assert f'  parameter: {{name: l,{axes} part: "2 of 2"}}' in written


@pytest.mark.slow
def test_the_halves_of_a_vector_of_an_attention_over_a_graph():
    """As in pyGAT: ``[a; b]``, whose halves score both ends of an edge, for each head."""

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.ParameterList(torch.zeros(2 * WIDTH, 1) for _ in range(3))
            self.o = nn.Linear(3 * 7, OUT, bias=False)

        def forward(self, x: Any) -> Any:
            edges = [x @ a[:WIDTH] + (x @ a[WIDTH:]).mT for a in self.a]
            return self.o(torch.cat([torch.tanh(edge) for edge in edges], -1))

    def function(w: Mapping[str, Any], x: Any) -> Any:
        edges = jnp.einsum("bnd,hd->bnh", x, w["to"])[:, :, None] + jnp.einsum("bnd,hd->bnh", x, w["of"])[:, None]
        return jnp.tanh(edges).swapaxes(2, 3).reshape(*x.shape[:2], -1) @ w["o"]

    module = Heads()
    shapes = {"to": (3, WIDTH), "of": (3, WIDTH), "o": (21, OUT)}
    written = "\n".join(rules(derive(function, module, shapes), module))
    assert '- from: "{to,of}"' in written
    assert '  stacked: {i: 0}\n  axes: D\n  parameter: {name: "a.{i}", axes: "(D + D)."}' in written


class Pairs(nn.Module):
    """Additive attention: a layer for the pair, or one for each of the two."""

    def __init__(self, joined: bool) -> None:
        super().__init__()
        self.joined, self.v, self.o = joined, nn.Linear(OUT, 1, bias=False), nn.Linear(B, 3)
        if joined:
            self.w = nn.Linear(2 * B, OUT)
        else:
            self.q, self.k = nn.Linear(B, OUT, bias=False), nn.Linear(B, OUT)

    def forward(self, x: Any) -> Any:
        count = x.shape[1]
        if self.joined:
            pair = [x[:, :, None].expand(-1, -1, count, -1), x[:, None].expand(-1, count, -1, -1)]
            h = self.w(torch.cat(pair, -1))
        else:
            h = self.q(x)[:, :, None] + self.k(x)[:, None]
        return self.o(self.v(torch.tanh(h))[..., 0].softmax(-1) @ x)


def pairs(joined: bool) -> Any:
    def function(w: Mapping[str, Any], x: Any) -> Any:
        count = x.shape[1]
        if joined:
            pair = [jnp.repeat(x[:, :, None], count, 2), jnp.repeat(x[:, None], count, 1)]
            h = jnp.concatenate(pair, -1) @ w["w"] + w["b"]
        else:
            h = (x @ w["q"])[:, :, None] + (x @ w["k"] + w["b"])[:, None]
        return jax.nn.softmax((jnp.tanh(h) @ w["v"])[..., 0], -1) @ x @ w["o"] + w["c"]

    return function


@pytest.mark.parametrize("joined", [False, True])
def test_pairs_of_rows(joined: bool):
    """The rows that stand side by side are repeated, and the layer for each has them once."""
    module = Pairs(not joined)
    own = {"w": (2 * B, OUT)} if joined else {"q": (B, OUT), "k": (B, OUT)}
    shapes = {"v": (OUT, 1), "o": (B, 3), "c": (3,), "b": (OUT,), **own}
    assert rules(derive(pairs(joined), module, shapes, floats(3, 5, B)), module)


@pytest.mark.slow
def test_pairs_of_columns_are_a_difference():
    """Scores that are given to the softmax along the other node."""
    shapes = {"v": (OUT, 1), "o": (B, 3), "c": (3,), "b": (OUT,), "w": (2 * B, OUT)}

    def function(w: Mapping[str, Any], x: Any) -> Any:
        count = x.shape[1]
        pair = [jnp.repeat(x[:, :, None], count, 2), jnp.repeat(x[:, None], count, 1)]
        scores = (jnp.tanh(jnp.concatenate(pair, -1) @ w["w"] + w["b"]) @ w["v"])[..., 0]
        return jax.nn.softmax(scores, -2) @ x @ w["o"] + w["c"]

    found = derive(function, Pairs(False), shapes, floats(3, 5, B))
    assert not found.complete and found.differences


class Heads(nn.Module):
    """Attention of two heads, whose results are projected as one."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Any) -> Any:
        q, k, v = (f(x).unflatten(-1, (2, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return self.o(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


@pytest.mark.slow
@pytest.mark.parametrize("stacked", [True, False])
def test_heads_that_are_projected_and_added_up(stacked: bool):
    size = WIDTH // 2

    def function(w: Mapping[str, Any], x: Any) -> Any:
        y = 0
        for h in range(2):
            q, k, v, o = ((w[name][h] if stacked else w[f"{name}{h}"]) for name in "qkvo")
            scores = (x @ q) @ (x @ k).transpose(0, 2, 1) / size**0.5
            y = y + (jax.nn.softmax(scores, -1) @ (x @ v)) @ o
        return y

    module = Heads()
    one = {"q": (WIDTH, size), "k": (WIDTH, size), "v": (WIDTH, size), "o": (size, WIDTH)}
    shapes = {name: (2, *shape) for name, shape in one.items()} if stacked else {}
    shapes = shapes or {f"{name}{h}": shape for name, shape in one.items() for h in range(2)}
    written = rules(derive(function, module, shapes, floats(3, 7, WIDTH)), module)
    assert len(written) == (2 if stacked else 4), written


class Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Conv1d(A, A, 3, padding=1)

    def forward(self, x: Any) -> Any:
        return self.c(x)


def test_a_bias_that_the_source_of_a_convolution_lacks():
    def function(w: Mapping[str, Any], x: Any) -> Any:
        return jax.lax.conv_general_dilated(x, w["k"], (1,), "SAME", dimension_numbers=("NCW", "WIO", "NCW"))

    module = Convolved()
    written = rules(derive(function, module, {"k": (3, A, A)}, floats(3, A, 7)), module)
    assert written[-1].startswith("- value: 0") and written[-1].endswith("constant: c.bias")


def test_a_vector_and_a_matrix_of_one_column_in_one_layer():
    """As NeuMF, whose JAX code has a vector for the product of both embeddings and a layer for the others."""

    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.e, self.o = nn.Linear(WIDTH, A, bias=False), nn.Linear(2 * A, 1, bias=False)

        def forward(self, x: Any) -> Any:
            a = torch.tanh(self.e(x))
            return self.o(torch.cat([a * x[..., :A], a], -1))[..., 0]

    def function(w: Mapping[str, Any], x: Any) -> Any:
        a = jnp.tanh(x @ w["e"])
        return (a * x[..., :A]) @ w["h"] + (a @ w["k"])[..., 0]

    module = One()
    written = rules(derive(function, module, {"e": SHAPES["e"], "h": (A,), "k": (A, 1)}), module)
    assert [rule.split("\n  ", 1)[1] for rule in written if "o.weight" in rule] == [
        'axes: C\n  parameter: {name: o.weight, axes: ".(C + C)", part: "1 of 2"}',
        'axes: C.\n  parameter: {name: o.weight, axes: ".(C + C)", part: "2 of 2"}',
    ]
