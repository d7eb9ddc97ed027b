"""Known functions of one value, to name what each side computes of it, in one operation or in several."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from convert.programs.divergence.kinds import LAYOUT, NO_FUNCTION, kind_of
from convert.programs.divergence.layouts import same
from convert.programs.program import Operation, Value, producers_of

Array = np.ndarray[Any, np.dtype[Any]]
Function = Callable[[Array], Array]
MOST = 10**6  # elements of a value that functions are tried on
FEWEST = 4  # numbers that tell a function with a number in it
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
    with np.errstate(all="ignore"):
        name = fitted(got, given)
    if name:
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
    yield "hardtanh (-1 to 1)", lambda x: np.clip(x, -1, 1)
    yield "tanhshrink", lambda x: x - np.tanh(x)
    yield "the absolute value", np.abs
    yield "squared relu", lambda x: np.square(np.maximum(x, 0))
    yield "mish", lambda x: x * np.tanh(np.logaddexp(x, 0))
    yield "selu", lambda x: 1.0507009873554805 * np.where(x > 0, x, 1.6732632423543772 * np.expm1(np.minimum(x, 0)))
    yield from (
        ("log", np.log),
        ("log2", np.log2),
        ("log10", np.log10),
        ("log1p", np.log1p),
        ("exp", np.exp),
        ("exp2", np.exp2),
        ("expm1", np.expm1),
    )
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
    producer = producers_of(operations)
    of_data = any(one.data for one in operations)
    for given in dict.fromkeys(v for one in operations for v in (one.data if of_data else one.operands)):
        if (between := only_through(made, given, producer)) is not None:
            behind.append((given, between))
    for given, between in sorted(behind, key=lambda pair: -len(pair[1])):
        applied = {kind_of(one) for one in between}
        if applied <= NO_FUNCTION:
            continue
        if given.array.dtype.kind != "f" or made.array.dtype.kind != "f":
            continue  # a mask
        if given.array.size != made.array.size or made.array.size > FEWER or same(given.array, made.array):
            continue
        if name := elementwise(made.array, given.array, activations):
            return name, between
    return "", set()


def only_through(made: Value, given: Value, producer: Mapping[Value, Operation]) -> set[Operation] | None:
    """Return the operations that make one value of another and of constants alone; None if others are needed."""
    found: set[Operation] = set()
    waiting = [made]
    while waiting:
        value = waiting.pop()
        if value is given or value.constant:
            continue
        one = producer.get(value)
        if one is None:
            if not value.constant and value.array.shape == given.array.shape and same(value.array, given.array):
                continue  # x - 0, as JAX computes it within softplus
            return None
        if one not in found:
            found.add(one)
            waiting.extend(one.operands)
    return found


def elementwise(got: Array, given: Array, activations: Mapping[str, Function]) -> str:
    """Return the name of the function of each element of `given` that is `got`; empty if it is none."""
    for name, function in functions(activations):
        if same(function(given), got):
            return name
    return fitted(got, given)


def fitted(got: Array, given: Array) -> str:
    """Return the name of a function with a number in it, where the number makes `got` of `given`."""
    one, two = given.ravel(), got.ravel()
    if one.size != two.size or got.dtype.kind != "f" or not np.isfinite(one).all() or len(np.unique(one)) < FEWEST:
        return ""
    if (two == two[0]).all():
        return ""  # zeros are what a mask leaves
    for name, function, number in _with_a_number(one.astype(np.float64), two):
        if np.isfinite(number) and number > 0 and same(function(one, number), two):
            return f"{name} {number:.4g}"
    return ""


def _with_a_number(x: Array, y: Array) -> Iterator[tuple[str, Callable[[Array, float], Array], float]]:
    """Yield functions with a number in them, and the number that one element tells."""
    least, largest = int(np.argmin(x)), int(np.argmax(x))
    near = int(np.argmin(np.abs(np.abs(x) - 1)))  # a size at which a function bends
    low, high, middle = float(x[least]), float(x[largest]), float(x[near])
    if low < 0 < high:
        yield "leaky_relu with slope", lambda x, a: np.where(x > 0, x, a * x), float(y[least]) / low
        yield "elu with alpha", lambda x, a: np.where(x > 0, x, a * np.expm1(x)), float(y[least] / np.expm1(low))
        yield (
            "celu with alpha",
            lambda x, a: np.where(x > 0, x, a * np.expm1(x / a)),
            _root(lambda a: float(a * np.expm1(low / a)), float(y[least]), falls=True),
        )
        yield "softshrink by", lambda x, a: np.sign(x) * np.maximum(np.abs(x) - a, 0), high - float(y[largest])
    if middle:
        share = float(y[near]) / middle
        if 0 < share < 1:
            yield "swish with beta", lambda x, b: x / (1 + np.exp(-b * x)), float(np.log(share / (1 - share)) / middle)
    yield (
        "softplus with beta",
        lambda x, b: np.logaddexp(0, b * x) / b,
        _root(lambda b: float(np.logaddexp(0, b * middle)) / b, float(y[near]), falls=True),
    )
    most = int(np.argmax(np.abs(x)))
    bend = abs(float(x[most]))
    yield (
        "tanh up to",
        lambda x, c: c * np.tanh(x / c),
        _root(lambda c: c * float(np.tanh(bend / c)), abs(float(y[most])), falls=False),
    )


def _root(function: Callable[[float], float], wanted: float, *, falls: bool) -> float:
    """Return the positive number at which a monotone function has a value; NaN where it has not."""
    low, high = 1e-3, 1e3
    ends = sorted((function(low), function(high)))
    if not ends[0] < wanted < ends[1]:
        return float("nan")
    middle = low
    for _ in range(200):
        middle = (low * high) ** 0.5
        if (function(middle) > wanted) == falls:
            low = middle
        else:
            high = middle
    return middle


def over(axis: int) -> Iterator[tuple[str, Function]]:
    """Yield functions along an axis."""
    yield "softmax", lambda x: _softmax(x, axis)
    yield "log_softmax", lambda x: _log_softmax(x, axis)
    yield "L2 norm", lambda x: np.sqrt(np.square(x).sum(axis))
    yield "L1 norm", lambda x: np.abs(x).sum(axis)
    yield "division by the L2 norm", lambda x: x / np.sqrt(np.square(x).sum(axis, keepdims=True))
    yield "division by the L1 norm", lambda x: x / np.abs(x).sum(axis, keepdims=True)
    yield "variance", lambda x: x.var(axis)
    yield "variance of n-1", lambda x: x.var(axis, ddof=1) if x.shape[axis] > 1 else x.var(axis)
    yield "running sum", lambda x: np.cumsum(x, axis)
    yield "running sum from the end", lambda x: np.flip(np.cumsum(np.flip(x, axis), axis), axis)
    yield "mean", lambda x: x.mean(axis)
    yield "sum", lambda x: x.sum(axis)
    yield "maximum", lambda x: x.max(axis)
    yield "last element", lambda x: np.take(x, -1, axis)
    yield "first element", lambda x: np.take(x, 0, axis)
    yield "reversed order", lambda x: np.flip(x, axis)


def _softmax(x: Array, axis: int) -> Array:
    made = np.exp(x - x.max(axis, keepdims=True))
    return np.asarray(made / made.sum(axis, keepdims=True))


def _log_softmax(x: Array, axis: int) -> Array:
    """Return the logarithm of the softmax, also where that is too small for a number."""
    below = x - x.max(axis, keepdims=True)
    return np.asarray(below - np.log(np.exp(below).sum(axis, keepdims=True)))


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
