"""A difference that is small, but larger than the rounding of float64, is named, and nothing is derived; numbers in float32 are a note."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

from convert.inference.derivation import Derivation, Grade
from convert.inference.rounding import ROUNDING
from convert.programs.fingerprint import EXACT
from support.inferred import WIDTH, derive, floats, grades

SHAPES = {"up": (WIDTH, WIDTH), "down": (WIDTH, WIDTH)}


class Between(torch.nn.Module):
    """A function between two layers."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function
        self.up, self.down = (torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))

    def forward(self, x: Any) -> Any:
        return self.down(self.function(self.up(x)))


def _derived(source: Callable[[Any], Any], target: Callable[[Any], Any]) -> Derivation:
    return derive(lambda w, x: source(x @ w["up"]) @ w["down"], Between(target), SHAPES)


def _unit_length(numpy: Any, epsilon: float) -> Callable[[Any], Any]:
    return lambda x: x / (numpy.sqrt((x * x).sum(-1)[..., None]) + epsilon)


def _gelu(numpy: Any, coefficient: float) -> Callable[[Any], Any]:
    return lambda x: 0.5 * x * (1 + numpy.tanh(math.sqrt(2 / math.pi) * (x + coefficient * x**3)))


@pytest.mark.parametrize(
    ("source", "target", "words"),
    [
        (_unit_length(jnp, 1e-6), _unit_length(torch, 1e-12), "the JAX model adds 1e-06"),
        (_gelu(jnp, 0.044715), _gelu(torch, 0.0447151), "the target multiplies by 0.0447151 .* by 0.044715 "),
    ],
    ids=["epsilon", "coefficient"],
)
def test_a_small_difference_is_named(source: Any, target: Any, words: str) -> None:
    found = _derived(source, target)
    assert not found.complete and found.proof is None and found.notes == ()
    assert grades(found) == {Grade.IN_FRONT, Grade.BEHIND}
    assert found.tensor("up.weight").grade is Grade.IN_FRONT
    assert found.tensor("down.weight").grade is Grade.BEHIND, "its outputs are the source's to 1e-6 alone"
    (difference,) = found.differences
    assert difference.error is not None and ROUNDING < difference.error < EXACT
    assert re.search(words, difference.problem), difference.problem


@pytest.mark.parametrize("rounds", [True, False])
def test_a_table_in_float32_is_a_note(rounds: bool) -> None:
    table = np.sin(np.arange(WIDTH)).astype(np.float32)
    found = _derived(
        lambda x: x * (table if rounds else jnp.sin(jnp.arange(float(WIDTH)))),
        lambda x: x * torch.arange(WIDTH, dtype=torch.float64).sin(),
    )
    assert found.complete and found.proof is not None
    assert found.proof.allowed == (EXACT if rounds else ROUNDING)
    assert bool(found.notes) == rounds
    assert all(re.match("numbers of the JAX function at test_small_differences.py:.* float32", x) for x in found.notes)


def test_inputs_in_float32_are_no_numbers_of_the_module():
    """What a batch norm takes first of them is an input minus zeros, with the digits of the input."""

    def function(w, x):
        return ((x - w["mean"]) / jnp.sqrt(w["variance"] + 1e-5) * w["scale"] + w["bias"]) @ w["up"]

    module = torch.nn.Sequential(torch.nn.BatchNorm1d(WIDTH), torch.nn.Linear(WIDTH, WIDTH, bias=False))
    inputs = lambda seed: {"x": np.random.default_rng(seed).normal(size=(6, WIDTH)).astype(np.float32)}  # noqa: E731
    shapes = {"up": SHAPES["up"], **dict.fromkeys(("mean", "variance", "scale", "bias"), (WIDTH,))}
    found = derive(function, module, shapes, inputs)
    assert found.complete and found.notes == () and found.proof is not None and found.proof.allowed == ROUNDING


class Slots(nn.Module):
    """Normalises what competes for each input, as slot attention does; the epsilon stands beside the sum."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x: Any) -> Any:
        weights = torch.softmax(0.02 * (self.q(x) @ self.k(x).mT), 1)
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-9)
        return self.last(torch.tanh(self.first(weights @ self.v(x))))


def test_the_place_of_a_difference_near_the_finest_is_found() -> None:
    """The outputs differ by 1e-9: values that are as near to each other are not taken as equal."""

    def slots(w: Any, x: Any) -> Any:
        weights = jax.nn.softmax(0.02 * ((x @ w["q"]) @ (x @ w["k"]).mT), 1) + 1e-9
        weights = weights / weights.sum(-1, keepdims=True)
        return jnp.tanh((weights @ (x @ w["v"])) @ w["f"] + w["fb"]) @ w["l"] + w["lb"]

    shapes = {**dict.fromkeys(("q", "k", "v", "f"), (WIDTH, WIDTH)), "fb": (WIDTH,), "l": (WIDTH, 3), "lb": (3,)}
    found = derive(slots, Slots(), shapes, floats(2, 6, WIDTH))
    (difference,) = found.differences
    assert difference.error is not None and difference.error < 1e-8
    assert "the target sums over the last axis, adds 1e-09, divides" in difference.problem, difference.problem
    assert "the JAX model adds 1e-09, sums over the last axis, divides" in difference.problem, difference.problem
