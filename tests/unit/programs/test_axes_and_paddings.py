"""Rewrites of the target's record: axes, paddings, values computed once, and functions with a number in them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from convert.programs.divergence.naming.functions import computed
from convert.programs.program import Operation, Program, Value, parameter_values
from convert.programs.rewrites.places.axes import SPLIT, axes
from convert.programs.rewrites.places.shared import AGAIN, shared
from convert.programs.rewrites.rewrite import Goal

Array = np.ndarray[Any, np.dtype[Any]]
RNG = np.random.default_rng(0)


def operation(name: str, function: Callable[..., Array], *operands: Value, where: str = "model.py:1") -> Operation:
    made = np.asarray(function(*(v.array for v in operands)))
    leaves = frozenset().union(*(v.leaves for v in operands))
    result = Value(made, any(v.data for v in operands), leaves)
    again: Callable[[Sequence[Array]], Sequence[Array]] = lambda given: (np.asarray(function(*given)),)  # noqa: E731
    return Operation(name, operands, (result,), {}, again, where)


def program(operations: Sequence[Operation], x: Value, parameters: dict[str, Value]) -> Program:
    return Program(parameters, {"x": x}, tuple(operations), {"y": operations[-1].results[0]})


def goal(want: Array) -> Goal:
    return Goal("y", lambda got: float(np.abs(got - want).max()) if got.shape == want.shape else np.inf, 1e-12)


def split_by(parts: tuple[int, int], order: tuple[int, int, int]) -> Program:
    """A program that splits an axis, lays out heads in front of features, and applies weights to them."""
    x, weights = Value(RNG_X, data=True), parameter_values({"w": WEIGHTS})
    view = operation("view", lambda a: a.reshape(5, *parts), x)
    moved = operation("permute", lambda a: a.transpose(order), view.results[0], where="model.py:2")
    out = operation("mul", lambda a, w: a * w, moved.results[0], weights["w"], where="model.py:3")
    return program([view, moved, out], x, weights)


RNG_X, WEIGHTS = RNG.normal(size=(5, 6)), RNG.normal(size=(2, 5, 3))


def test_a_split_in_another_order_is_named_with_its_line() -> None:
    target, source = split_by((3, 2), (2, 0, 1)), split_by((2, 3), (1, 0, 2))
    found = axes(source, target, goal(source.outputs["y"].array))
    assert found is not None
    assert found.name == SPLIT
    assert "model.py:1" in found.problem
    assert "into 2 x 3 and not into 3 x 2" in found.problem


def test_no_order_of_axes_explains_other_numbers() -> None:
    target = split_by((2, 3), (1, 0, 2))
    assert axes(target, target, goal(target.outputs["y"].array + 1)) is None


def applied(times: int) -> Program:
    """A program that computes keys once, or anew of what it has computed."""
    x, weights = Value(RNG_X, data=True), parameter_values({"k": KEYS})
    operations: list[Operation] = []
    for k in range(2):
        given = operations[-1].results[0] if operations else x
        if k < times:
            operations.append(operation("mm", lambda a, w: a @ w, given, weights["k"]))
            keys = operations[-1].results[0]
        operations.append(operation("add", lambda a, b: np.tanh(a) + b, given, keys, where="model.py:2"))
    return program(operations, x, weights)


KEYS = RNG.normal(size=(6, 6))


def test_a_layer_that_the_source_applies_once_is_named() -> None:
    source = applied(1)
    found = shared(source, applied(2), goal(source.outputs["y"].array))
    assert found is not None
    assert found.name == AGAIN
    assert shared(source, source, goal(source.outputs["y"].array + 1)) is None


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("softplus with beta 2", lambda x: np.logaddexp(0, 2 * x) / 2),
        ("elu with alpha 0.5", lambda x: np.where(x > 0, x, 0.5 * np.expm1(x))),
        ("swish with beta 1.3", lambda x: x / (1 + np.exp(-1.3 * x))),
        ("tanh up to 30", lambda x: 30 * np.tanh(x / 30)),
        ("leaky_relu with slope 0.2", lambda x: np.where(x > 0, x, 0.2 * x)),
        ("log_softmax over the last axis", lambda x: x - np.log(np.exp(x).sum(-1, keepdims=True))),
        ("division by the L1 norm over axis 0", lambda x: x / np.abs(x).sum(0, keepdims=True)),
        ("", lambda x: x + 0.3 * np.sin(7 * x)),
    ],
)
def test_a_number_in_a_function_is_found(name: str, function: Callable[[Array], Array]) -> None:
    x = RNG.normal(size=(4, 5))
    with np.errstate(all="ignore"):
        assert computed(function(x), x, {}) == name
