"""Differences that the outputs hardly show are named all the same: of one column, of a small part of an output, and behind large inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.nn import functional

from support.inferred import WIDTH, derive, floats, sources

D, PRICE = WIDTH, 1e7
SHAPES = {"a": (D, 3), "w": (D, D), "v": (D, 3)}


class Scored(torch.nn.Module):
    """Prices beside scores, or scores alone."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.a, self.w, self.v = (torch.nn.Linear(D, n, bias=False) for n in (3, D, 3))
        self.function = function

    def forward(self, x: Any) -> Any:
        return torch.cat([self.a(x) * PRICE, self.v(self.function(self.w(x)))], -1)


def scored(function: Callable[[Any], Any]) -> Any:
    return lambda w, x: jnp.concatenate([x @ w["a"] * PRICE, function(x @ w["w"]) @ w["v"]], -1)


def gelu(x: Any) -> Any:
    return jax.nn.gelu(x, approximate=True)


def test_another_function_of_a_small_column_is_named() -> None:
    found = derive(scored(gelu), Scored(functional.gelu), SHAPES)
    (difference,) = found.differences
    assert not found.complete and difference.shown
    assert difference.brief == "behind w: the target computes gelu_erf, the JAX model gelu_tanh"


def test_columns_of_several_sizes_that_are_equal_are_derived() -> None:
    found = derive(scored(gelu), Scored(lambda x: functional.gelu(x, approximate="tanh")), SHAPES)
    assert found.complete and not found.notes, (found.differences, found.notes)


class Normed(torch.nn.Module):
    def __init__(self, epsilon: float) -> None:
        super().__init__()
        self.n, self.o = torch.nn.LayerNorm(D, eps=epsilon), torch.nn.Linear(D, 5, bias=False)

    def forward(self, x: Any) -> Any:
        return self.o(self.n(x))


def normed(w: Any, x: Any) -> Any:
    x = x - x.mean(-1, keepdims=True)
    return (x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5) * w["s"] + w["b"]) @ w["o"]


def large(size: float) -> Callable[[int], dict[str, Any]]:
    return lambda seed: {"x": size * floats(3, 7, D)(seed)["x"]}


@pytest.mark.parametrize("epsilon", [1e-6, 1e-5])
def test_another_epsilon_behind_large_inputs_is_named(epsilon: float) -> None:
    found = derive(normed, Normed(epsilon), {"s": (D,), "b": (D,), "o": (D, 5)}, large(1000))
    assert found.complete is (epsilon == 1e-5)
    assert [x.brief for x in found.differences] == ["in n: the target adds 1e-06, the JAX model adds 1e-05"][
        found.complete :
    ]


class Curved(torch.nn.Module):
    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.w, self.v, self.function = *(torch.nn.Linear(D, n, bias=False) for n in (D, 3)), function

    def forward(self, x: Any) -> Any:
        return self.v(self.function(self.w(x.to(self.w.weight.dtype))))


CURVED = {"w": (D, D), "v": (D, 3)}


def test_another_function_far_from_zero_is_named() -> None:
    """A GELU of 1e5 is a ReLU of it to the last digit."""
    found = derive(lambda w, x: jax.nn.relu(x @ w["w"]) @ w["v"], Curved(functional.gelu), CURVED, large(1e5))
    (difference,) = found.differences
    assert not found.complete and difference.shown and "gelu_erf, the JAX model relu" in difference.brief


def test_a_constant_with_fewer_digits_has_a_note() -> None:
    def short(x: Any) -> Any:
        return 0.5 * x * (1 + torch.tanh(0.797884561 * (x + 0.044715 * x**3)))

    found = derive(lambda w, x: gelu(x @ w["w"]) @ w["v"], Curved(short), CURVED)
    (note,) = found.notes
    assert found.complete and "times what rounding makes; a constant with fewer digits does that" in note
    assert sources(found) == {"w.weight": "w", "v.weight": "v"}


def test_values_on_the_straight_part_of_a_curve_have_a_note() -> None:
    """The inputs are whole numbers, which are not made smaller."""

    def inputs(seed: int) -> dict[str, Any]:
        return {"x": np.random.default_rng(seed).integers(10**5, 10**6, (3, 7, D)) * 2 + 1}

    found = derive(lambda w, x: jnp.abs(x @ w["w"] * 1.0) @ w["v"], Curved(lambda x: x * torch.erf(x)), CURVED, inputs)
    assert any("every value is beyond 6 on either side" in note for note in found.notes), found.notes
