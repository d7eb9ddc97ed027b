"""Sums and products of several terms, constants among them, that the two programs take in another order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from convert.inference.derivation import Derivation, Grade
from support.inferred import WIDTH, derive, floats, sources

D, T = WIDTH, 7
SHAPES = {"w": (D, D), "b": (D,), "c": (T, D), "out": (D, D)}
TABLE = np.random.default_rng(1).normal(size=(T, D)).astype(np.float32)
SEEN = TABLE > -0.5


class Model(torch.nn.Module):
    """A linear layer, two parameters, a table and a mask."""

    def __init__(self, way: Callable[[Any, Any], Any], saved: bool) -> None:
        super().__init__()
        self.way = way
        self.w, self.out = (torch.nn.Linear(D, D, bias=False) for _ in range(2))
        self.b, self.c = torch.nn.Parameter(torch.zeros(D)), torch.nn.Parameter(torch.zeros(T, D))
        self.register_buffer("table", torch.tensor(TABLE), persistent=saved)
        self.register_buffer("mask", torch.zeros(T, D).masked_fill(~torch.tensor(SEEN), float("-inf")), False)

    def forward(self, x: Any) -> Any:
        return self.out(torch.tanh(self.way(self, self.w(x)) + 1))


def derived(
    source: Callable[[Mapping[str, Any], Any], Any], way: Callable[[Any, Any], Any], saved: bool = False
) -> Derivation:
    """Derive a module from a function of (leaves, x @ w)."""
    module = Model(way, saved)
    return derive(lambda w, x: jnp.tanh(source(w, x @ w["w"]) + 1) @ w["out"], module, SHAPES, floats(3, T, D))


ADDED: Any = lambda w, x: ((x + w["b"]) + TABLE) + w["c"]  # noqa: E731
MULTIPLIED: Any = lambda w, x: ((x * TABLE) * w["b"]) * w["c"]  # noqa: E731
EQUAL: dict[str, tuple[Any, Any]] = {
    "within brackets": (ADDED, lambda m, x: x + ((m.b + m.table) + m.c)),
    "the constant first": (ADDED, lambda m, x: ((x + m.table) + m.c) + m.b),
    "taken away": (lambda w, x: ((x - TABLE) + w["b"]) + w["c"], lambda m, x: (x + m.c) + (m.b - m.table)),
    "moved before it is added": (ADDED, lambda m, x: x + (m.b.expand(T, D) + m.c + m.table)[None].expand(3, T, D)),
    "in the source": (lambda w, x: x + ((w["b"] + TABLE) + w["c"]), lambda m, x: (x + m.c) + m.b + m.table),
    "masked": (
        lambda w, x: jnp.where(SEEN, (x + w["b"]) + w["c"], -1e30),
        lambda m, x: (x + (m.b + m.mask)[None]) + m.c,
    ),
    "factors": (MULTIPLIED, lambda m, x: x * ((m.c * m.table) * m.b)),
}


@pytest.mark.parametrize("case", EQUAL)
def test_terms_in_another_order_are_the_same(case: str) -> None:
    found = derived(*EQUAL[case], saved=case == "within brackets")
    assert found.proof is not None, found.differences
    assert {tensor.name: tensor.grade for tensor in found.tensors if tensor.grade is not Grade.DERIVED} == {}
    given = sources(found)
    assert {name: given[name] for name in ("b", "c")} == {"b": "b", "c": "c"}


FAULTS: dict[str, tuple[Any, Any]] = {
    "another mask": (EQUAL["masked"][0], lambda m, x: (x + (m.b + m.mask.roll(1, 0))[None]) + m.c),
    "a term twice": (ADDED, lambda m, x: x + ((m.b + m.table) + (m.c + m.c))),
    "another bracket": (MULTIPLIED, lambda m, x: x * ((m.c + m.table) * m.b)),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", FAULTS)
def test_other_terms_are_a_difference(case: str) -> None:
    found = derived(*FAULTS[case])
    (difference,) = found.differences
    assert not found.complete and "test_sums.py" in difference.site.where, difference


class Scaled(torch.nn.Module):
    """A parameter that multiplies a sum of two branches, or each of them."""

    def __init__(self, apart: bool, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.apart, self.t = apart, torch.nn.Parameter(torch.ones(shape))
        self.a, self.b, self.out = (torch.nn.Linear(D, D, bias=False) for _ in range(3))

    def forward(self, x: Any) -> Any:
        a, b = torch.tanh(self.a(x)), torch.sigmoid(self.b(x))
        return self.out(x + self.t * a - self.t * b if self.apart else x + self.t * (a - b))


def scaled(apart: bool, wrong: bool = False) -> Any:
    def function(w: Mapping[str, Any], x: Any) -> Any:
        a, b, t = jnp.tanh(x @ w["a"]), 1 / (1 + jnp.exp(-(x @ w["b"]))), w["t"]
        return (x + t * a - (b if wrong else t * b) if apart else x + t * (a - b)) @ w["out"]

    return function


@pytest.mark.parametrize("shape", [(D,), (1,)])
@pytest.mark.parametrize("apart", [False, True])
def test_a_parameter_that_multiplies_a_sum_or_each_of_its_terms(apart: bool, shape: tuple[int, ...]):
    shapes = {"a": (D, D), "b": (D, D), "t": shape, "out": (D, D)}
    found = derive(scaled(not apart), Scaled(apart, shape), shapes)
    assert found.complete, found.differences
    assert sources(found) == {"t": "t", "a.weight": "a", "b.weight": "b", "out.weight": "out"}


@pytest.mark.slow
def test_a_parameter_that_multiplies_one_term_alone_is_a_difference():
    found = derive(scaled(True, wrong=True), Scaled(False, (D,)), {"a": (D, D), "b": (D, D), "t": (D,), "out": (D, D)})
    assert not found.complete and found.differences


@pytest.mark.slow  # half a minute
def test_a_sum_that_a_long_loop_adds_up() -> None:
    """Its terms nest once for each step, deeper than Python lets calls nest."""

    def function(w: Any, x: Any) -> Any:
        total = jnp.zeros_like(x)
        for _ in range(1100):
            x = jnp.tanh(x @ w["a"])
            total = total + x
        return total @ w["b"]

    class Loop(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = (torch.nn.Linear(5, 5, bias=False) for _ in range(2))

        def forward(self, x: Any) -> Any:
            total = torch.zeros_like(x)
            for _ in range(1100):
                x = torch.tanh(self.a(x))
                total = x + total
            return self.b(total)

    found = derive(function, Loop(), {"a": (5, 5), "b": (5, 5)}, floats(3, 5))
    assert found.complete and sources(found) == {"a.weight": "a", "b.weight": "b"}
