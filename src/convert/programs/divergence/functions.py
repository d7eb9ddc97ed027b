"""Known functions of one value, to name what each side computes of it, in one operation or in several."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from convert.programs.divergence.kinds import LAYOUT, NO_FUNCTION, kind_of
from convert.programs.divergence.layouts import same
from convert.programs.program import Operation, Value

Array = np.ndarray[Any, np.dtype[Any]]
Function = Callable[[Array], Array]
MOST = 10**6  # elements of a value that functions are tried on
FEWER = 20_000  # the same, where each of several operations may begin or end a function


def computed(got: Array, given: Array, activations: Mapping[str, Function]) -> str:
    """Return the name of the function of `given` that is `got`, in any shape; empty if it is none."""
    if not given.size or max(got.size, given.size) > MOST or given.dtype == bool:  # NumPy does not negate a mask
        return ""
    for name, function in functions(activations):
        try:
            made = function(given)
        except (ValueError, IndexError):
            continue
        if same(made, got):
            return name
    if name := fitted(got, given):
        return name
    for axis in range(given.ndim):
        for name, function in over(axis):
            made = function(given)
            if same(made, got):
                last = axis == given.ndim - 1
                return f"{name} over {'the last axis' if last else f'axis {axis}'}"
    return ""


def functions(activations: Mapping[str, Function]) -> Iterator[tuple[str, Function]]:
    """Yield activations: those that a rule may name, and others."""
    yield from activations.items()
    hard: Function = lambda x: np.clip(x / 6 + 0.5, 0, 1)  # noqa: E731
    yield "hard sigmoid", hard
    yield "hard swish", lambda x: x * hard(x)
    yield "quick gelu", lambda x: x / (1 + np.exp(-1.702 * x))
    yield "softsign", lambda x: x / (1 + np.abs(x))
    yield "relu6", lambda x: np.clip(x, 0, 6)
    yield "squared relu", lambda x: np.square(np.maximum(x, 0))
    yield "mish", lambda x: x * np.tanh(np.logaddexp(x, 0))
    yield "selu", lambda x: 1.0507009873554805 * np.where(x > 0, x, 1.6732632423543772 * np.expm1(np.minimum(x, 0)))
    yield from (("log", np.log), ("log1p", np.log1p), ("exp", np.exp), ("exp2", np.exp2), ("expm1", np.expm1))
    yield "log sigmoid", lambda x: -np.logaddexp(-x, 0)


def steps_in_functions(
    operations: Sequence[Operation], activations: Mapping[str, Function]
) -> list[tuple[str, tuple[Operation, ...]]]:
    """Return the operations in order, those of a known function of one value together, with its name; for others it is empty."""
    found: list[tuple[str, tuple[Operation, ...]]] = []
    left = [one for one in operations if kind_of(one) != LAYOUT]
    while left:
        last = left[-1]
        name, taken = _function_at_the_end(left, activations)
        found.append((name, (*(one for one in left[:-1] if one in taken), last)))
        left = [one for one in left[:-1] if one not in taken]
    return found[::-1]


def _function_at_the_end(
    operations: Sequence[Operation], activations: Mapping[str, Function]
) -> tuple[str, set[Operation]]:
    """Return the function of the earliest value that the last operation gives, and its operations; empty if it is none."""
    made = operations[-1].results[0]
    behind: list[tuple[Value, set[Operation]]] = []
    producer = {value: one for one in operations for value in one.results}
    for given in dict.fromkeys(v for one in operations for v in one.data):
        if (between := _only_through(made, given, producer)) is not None:
            behind.append((given, between))
    for given, between in sorted(behind, key=lambda pair: -len(pair[1])):
        applied = {kind_of(one) for one in between}
        if applied <= NO_FUNCTION:
            continue
        if given.array.dtype.kind != "f" or made.array.dtype.kind != "f":
            continue  # a mask
        if given.array.size != made.array.size or made.array.size > FEWER or same(given.array, made.array):
            continue
        if name := _activation(made.array, given.array, activations):
            return name, between
    return "", set()


def _only_through(made: Value, given: Value, producer: Mapping[Value, Operation]) -> set[Operation] | None:
    """Return the operations that make one value of another and of constants alone; None if others are needed."""
    found: set[Operation] = set()
    waiting = [made]
    while waiting:
        value = waiting.pop()
        if value is given or value.constant:
            continue
        one = producer.get(value)
        if one is None:
            if value.data and value.array.shape == given.array.shape and same(value.array, given.array):
                continue  # x - 0, as JAX computes it within softplus
            return None
        if one not in found:
            found.add(one)
            waiting.extend(one.operands)
    return found


def _activation(got: Array, given: Array, activations: Mapping[str, Function]) -> str:
    for name, function in functions(activations):
        if same(function(given), got):
            return name
    return fitted(got, given)


def fitted(got: Array, given: Array) -> str:
    """Return the name of a function with a number in it, where the number makes `got` of `given`."""
    one, two = given.ravel(), got.ravel()
    low = one < 0
    if one.size != two.size or not low.any() or low.all():
        return ""
    least = int(np.argmin(one))
    slope = float(two[least] / one[least])
    if 0 < slope < 1 and same(np.where(low, slope * one, one), two):
        return f"leaky_relu with slope {slope:.4g}"
    return ""


def over(axis: int) -> Iterator[tuple[str, Function]]:
    """Yield functions along an axis."""
    yield "softmax", lambda x: _softmax(x, axis)
    yield "mean", lambda x: x.mean(axis)
    yield "sum", lambda x: x.sum(axis)
    yield "maximum", lambda x: x.max(axis)
    yield "last element", lambda x: np.take(x, -1, axis)
    yield "first element", lambda x: np.take(x, 0, axis)
    yield "reversed order", lambda x: np.flip(x, axis)


def _softmax(x: Array, axis: int) -> Array:
    made = np.exp(x - x.max(axis, keepdims=True))
    return np.asarray(made / made.sum(axis, keepdims=True))


def mask_offsets(visible: Array) -> tuple[int, int] | None:
    """Return the least and the largest distance from a row to a column that it sees; None where distances do not tell."""
    if visible.ndim < 2 or visible.shape[-1] != visible.shape[-2]:
        return None
    flat = visible.reshape(-1, *visible.shape[-2:])
    seen: Array = np.asarray(flat.any(0))
    n = len(seen)
    distance = np.arange(n)[:, None] - np.arange(n)
    if not seen.any() or not (flat == seen).all():
        return None
    low, high = int(distance[seen].min()), int(distance[seen].max())
    return (low, high) if (seen == ((distance >= low) & (distance <= high))).all() else None
