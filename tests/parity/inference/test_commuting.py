"""Parameters that may exchange places along one path are interchangeable; those between which something bends are derived."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from torch import nn
from torch.nn import functional

from convert.inference.derivation import Grade
from support.inferred import derive, floats, sources

D, STEPS = 8, 7


class Path(nn.Module):
    def __init__(self, function: Callable[..., Any], *shape: int) -> None:
        super().__init__()
        self.one, self.two = nn.Parameter(torch.zeros(shape)), nn.Parameter(torch.zeros(shape))
        self.first, self.last, self.function = nn.Linear(D, D), nn.Linear(D, 3), function

    def forward(self, x: Any) -> Any:
        return self.last(self.function(torch.tanh(self.first(x)), self.one, self.two))


def of_jax(function: Callable[..., Any]) -> Any:
    def whole(w: Mapping[str, Any], x: Any) -> Any:
        return function(jnp.tanh(x @ w["f"] + w["fb"]), w["a"], w["b"]) @ w["l"] + w["lb"]

    return whole


def filtered(x: Any, kernel: Any) -> Any:
    padded = jnp.pad(x, ((0, 0), (2, 0), (0, 0)))
    return sum(padded[:, k : k + STEPS] * kernel[:, 0, k] for k in range(3))


def convolved(x: Any, kernel: Any) -> Any:
    return functional.conv1d(functional.pad(x.mT, (2, 0)), kernel, groups=D).mT


PATHS = {
    "around a mean": (lambda x, a, b: (x * a).mean(1) * b, lambda x, a, b: (x * a).mean(1) * b, (D,)),
    "around a running sum": (lambda x, a, b: jnp.cumsum(x * a, 1) * b, lambda x, a, b: (x * a).cumsum(1) * b, (D,)),
    "of exponentials, around relu": (
        lambda x, a, b: jax.nn.relu(x * jnp.exp(a)) * jnp.exp(b),
        lambda x, a, b: torch.relu(x * a.exp()) * b.exp(),
        (D,),
    ),
    "depthwise kernels": (
        lambda x, a, b: filtered(filtered(x, a), b),
        lambda x, a, b: convolved(convolved(x, a), b),
        (D, 1, 3),
    ),
}
APART = {
    "around tanh": (lambda x, a, b: jnp.tanh(x * a) * b, lambda x, a, b: torch.tanh(x * a) * b, (D,)),
    "of a softplus, around a mean": (
        lambda x, a, b: (x * a).mean(1) * jax.nn.softplus(b),
        lambda x, a, b: (x * a).mean(1) * functional.softplus(b),
        (D,),
    ),
    "with the first one used twice": (
        lambda x, a, b: (x * a + 1) * b + x * a,
        lambda x, a, b: (y := x * a, (y + 1) * b + y)[1],
        (D,),
    ),
}


def _found(paths: Any, name: str) -> tuple[Any, nn.Module]:
    source, target, shape = paths[name]
    module = Path(target, *shape)
    shapes = {"f": (D, D), "fb": (D,), "a": shape, "b": shape, "l": (D, 3), "lb": (3,)}
    return derive(of_jax(source), module, shapes, floats(3, STEPS, D)), module


SLOW = [name if k == 0 else pytest.param(name, marks=pytest.mark.slow) for k, name in enumerate(PATHS)]


@pytest.mark.parametrize("name", SLOW)
def test_parameters_that_may_exchange_places_are_interchangeable(name: str):
    found, _ = _found(PATHS, name)
    assert {tensor.name: tensor.grade for tensor in found.tensors if tensor.name in ("one", "two")} == {
        "one": Grade.INTERCHANGEABLE,
        "two": Grade.INTERCHANGEABLE,
    }
    named = sources(found)
    assert (named["one"], named["two"]) == ("a", "b")  # the order in which both programs meet them


@pytest.mark.parametrize("name", APART)
def test_parameters_between_which_something_stands_are_derived(name: str):
    found, _ = _found(APART, name)
    assert found.complete, found.differences
    assert {tensor.grade for tensor in found.tensors} == {Grade.DERIVED}
