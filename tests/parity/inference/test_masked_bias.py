"""Attention with a table of biases: wherever a mask stands in front of the softmax, and whatever number it has, the two are equal."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from convert.inference.derivation import Derivation, Grade
from convert.inference.infer import infer
from support.inferred import WIDTH, grades, sources

D, HEADS, T = WIDTH, 4, 6
ROWS = np.clip(np.arange(T)[:, None] - np.arange(T), 0, None)
SHAPES = {**dict.fromkeys("qkv", (D, D)), "table": (16, HEADS)}
LARGE, INFINITE, LEAST = -1e9, -np.inf, float(np.finfo(np.float32).min)
PLACES = {
    "choose, scores": lambda xp, scores, bias, seen, number: xp.where(seen, scores, number) + bias,
    "choose, bias": lambda xp, scores, bias, seen, number: scores + xp.where(seen, bias, number),
    "choose, sum": lambda xp, scores, bias, seen, number: xp.where(seen, scores + bias, number),
    "add, scores": lambda xp, scores, bias, seen, number: (scores + xp.where(seen, 0.0, number)) + bias,
    "add, bias": lambda xp, scores, bias, seen, number: scores + (bias + xp.where(seen, 0.0, number)),
    "add, sum": lambda xp, scores, bias, seen, number: (scores + bias) + xp.where(seen, 0.0, number),
}
How = tuple[str, float]


def causal(xp: Any, padding: Any) -> Any:
    return xp.asarray(np.tril(np.ones((T, T), bool)))[None, None]


def both(xp: Any, padding: Any) -> Any:
    return causal(xp, padding) & ~padding[:, None, None, :]


def function(how: How, seen: Any = causal, instead: Any = None) -> Any:
    def run(w: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
        q, k, v = ((given["x"] @ w[name]).reshape(-1, T, HEADS, D // HEADS) for name in "qkv")
        bias, scores = w["table"][ROWS].transpose(2, 0, 1)[None], jnp.einsum("bqhd,bkhd->bhqk", q, k)
        mask = seen(jnp, given["padding"])
        if instead is None:
            weights = jax.nn.softmax(PLACES[how[0]](jnp, scores, bias, mask, how[1]), -1)
        else:
            weights = instead(jax.nn.softmax(scores + bias, -1), mask)
        return {"y": jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(-1, T, D)}

    return run


class Model(torch.nn.Module):
    def __init__(self, how: How, seen: Any = causal, fused: str = "") -> None:
        super().__init__()
        self.m = torch.nn.ModuleList(torch.nn.Linear(D, D, bias=False) for _ in range(3))
        self.e = torch.nn.Embedding(16, HEADS)
        self.how, self.seen, self.fused = how, seen, fused

    def forward(self, x: Any, padding: Any) -> Any:
        bias = self.e(torch.as_tensor(ROWS)).permute(2, 0, 1)[None]
        q, k, v = (m(x).view(-1, T, HEADS, D // HEADS).transpose(1, 2) for m in self.m)
        seen, (place, number) = self.seen(torch, padding), self.how
        if self.fused:
            mask = PLACES[place](torch, torch.zeros(()), bias, seen, number)
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=1.0)
        else:
            out = PLACES[place](torch, q @ k.mT, bias, seen, number).softmax(-1) @ v
        return out.transpose(1, 2).reshape(-1, T, D)


def inputs(seed: int) -> dict[str, Any]:
    padding = np.zeros((3, T), bool)
    padding[1, 4:] = padding[2, 3:] = True
    return {"x": np.random.default_rng(seed).normal(size=(3, T, D)), "padding": padding}


def derived(function: Any, model: Model) -> Derivation:
    def run(module: Any, given: Mapping[str, Any]) -> dict[str, Any]:
        return {"y": module(given["x"], given["padding"])}

    return infer(function, model.eval(), run, inputs, SHAPES)


def assert_derived(found: Derivation) -> None:
    assert found.complete, found.differences
    assert grades(found) == {Grade.DERIVED}
    assert list(sources(found).values()) == ["q", "k", "v", "table"]


@pytest.mark.slow
@pytest.mark.parametrize(("one", "two"), list(pairwise([*PLACES, *PLACES][:7])))
@pytest.mark.parametrize("turned", [False, True])
def test_a_causal_mask_in_two_places(one: str, two: str, turned: bool) -> None:
    one, two = (two, one) if turned else (one, two)
    assert_derived(derived(function((one, LARGE)), Model((two, INFINITE if turned else LEAST))))


@pytest.mark.parametrize(("one", "two"), [("choose, sum", "add, bias"), ("add, scores", "choose, bias")])
@pytest.mark.parametrize("turned", [False, True])
def test_a_mask_of_the_inputs_in_two_places(one: str, two: str, turned: bool) -> None:
    one, two = (two, one) if turned else (one, two)
    assert_derived(derived(function((one, INFINITE), both), Model((two, LARGE), both)))


@pytest.mark.parametrize("place", ["choose, bias", "add, bias"])
@pytest.mark.parametrize("seen", [causal, both])
def test_a_fused_attention_takes_the_bias_with_its_mask(place: str, seen: Any) -> None:
    """The mask meets the bias before the scores are there."""
    assert_derived(derived(function(("choose, sum", LEAST), seen), Model((place, LARGE), seen, fused=place)))


class Buffer(Model):
    """Adds a mask that is one of its buffers, as Swin does."""

    def __init__(self, number: float, seen: Any = causal) -> None:
        super().__init__(("add, sum", number))
        self.register_buffer("mask", torch.where(seen(torch, None), 0.0, number))

    def forward(self, x: Any, padding: Any) -> Any:
        bias = self.e(torch.as_tensor(ROWS)).permute(2, 0, 1)[None]
        q, k, v = (m(x).view(-1, T, HEADS, D // HEADS).transpose(1, 2) for m in self.m)
        return (((q @ k.mT + bias) + self.mask).softmax(-1) @ v).transpose(1, 2).reshape(-1, T, D)


@pytest.mark.slow
def test_a_mask_by_a_smaller_number_that_no_sum_shows_has_a_note() -> None:
    found = derived(function(("choose, sum", LARGE)), Buffer(-100.0))
    assert found.complete and list(sources(found).values()) == ["", "q", "k", "v", "table"]
    assert found.notes and "its mask leaves weights of" in found.notes[-1]
    assert not derived(function(("add, sum", -100.0)), Buffer(-100.0)).notes


def window(xp: Any, padding: Any) -> Any:
    near = np.tril(np.ones((T, T), bool)) & ~np.tril(np.ones((T, T), bool), -4)
    return xp.asarray(near)[None, None]


@pytest.mark.slow
@pytest.mark.parametrize(("number", "seen"), [(-10.0, causal), pytest.param(-100.0, window, marks=pytest.mark.slow)])
def test_a_mask_by_a_number_that_shows_or_of_other_positions_is_a_difference(number: float, seen: Any) -> None:
    found = derived(function(("choose, sum", LARGE)), Buffer(number, seen))
    assert not found.complete and found.proof is None


def shifted(xp: Any, padding: Any) -> Any:
    return xp.asarray(np.tril(np.ones((T, T), bool), 1))[None, None]


@pytest.mark.slow
@pytest.mark.parametrize("seen", [window, shifted])
def test_another_mask_is_a_difference_with_its_name(seen: Any) -> None:
    found = derived(function(("choose, sum", LARGE)), Model(("choose, sum", LARGE), seen))
    assert not found.complete and found.proof is None
    assert re.search("the JAX model hides|a position sees itself", found.differences[0].problem)


@pytest.mark.slow
@pytest.mark.parametrize("seen", [window, shifted])
@pytest.mark.parametrize(("one", "two"), [("choose, bias", "add, sum"), ("add, sum", "add, sum")])
def test_another_mask_that_is_added_is_a_difference(seen: Any, one: str, two: str) -> None:
    found = derived(function((one, LARGE)), Model((two, INFINITE if one != two else LARGE), seen))
    assert not found.complete and found.proof is None
    (difference,) = found.differences
    if one == two:  # a sum of another order is no value of the source where the masks differ
        assert re.search("shows .* positions that the JAX model hides, and hides", difference.problem)


@pytest.mark.slow
def test_a_mask_behind_the_softmax_is_a_difference() -> None:
    def masked(weights: Any, seen: Any) -> Any:
        return weights * seen

    found = derived(function(("", 0.0), instead=masked), Model(("choose, bias", LARGE)))
    assert not found.complete and found.differences
