"""Whether other weights could make up for another function of a value: those of a layer in front of it, or behind it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from convert.inference.derivation import Role
from convert.inference.forms.elements import MOVES
from convert.inference.meetings.sites import role_of
from convert.programs.divergence.shared_values import visible
from convert.programs.program import Operation, Value

Array = np.ndarray[Any, np.dtype[Any]]
MOST = 300  # elements of a value of which functions are compared
FITS = 1e-4  # of the difference that may be left
STARTS = (1.0, -1.0, 0.5, 2.0, 1.7, 0.6)  # factors of a value from which the search for one begins
SMALLEST = 1e-7  # step of the search
TRIES = 100  # of steps from each start: a function that fits better and better, as tanh of smaller numbers does a line, has no end
MOVED = np.array([[1, 0], [-1, 0], [0, 1], [0, -1]])
DEPTH = 12  # operations behind a layer


def is_compensated(given: Array, got: Array, want: Array, function: Callable[[Array], Array] | None) -> bool:
    """Whether what one program computes is that of the other times a factor and plus a number: for all elements, or along an axis.

    Args:
        given: the value that both compute it of.
        got, want: what they compute, of the same shape.
        function: the target's, where a layer in front may multiply the value and add to it, too; None where there is none.
    """
    if not all(np.array_equal(visible(x), x) for x in (got, want)):
        return False  # a mask
    if any(_is_along(difference, want) for difference in (want - got, _ratio(want, got))):
        return True
    step = max(1, got.size // MOST)
    x, y, z = given.ravel()[::step], got.ravel()[::step], want.ravel()[::step]
    lacking = float(np.linalg.norm(z - y))
    if not lacking or _left(y, z) <= FITS * lacking:
        return True
    return function is not None and _fits(x, z, function, FITS * lacking)


def is_multiple(got: Array, want: Array) -> bool:
    """Whether what one program computes is that of the other times one number above zero."""
    ratio = _ratio(want, got)
    return (
        bool(np.isfinite(ratio).all())
        and bool(ratio.min() > 0)
        and float(np.ptp(ratio[got != 0])) <= 1e-9 * float(ratio.max())
    )


def _ratio(one: Array, two: Array) -> Array:
    """Return a quotient; 1 where it is 0 / 0."""
    with np.errstate(all="ignore"):
        return np.where((one == 0) & (two == 0), 1.0, one / two)


def _is_along(array: Array, like: Array) -> bool:
    """Whether an array has one number for each index of an axis."""
    if not np.isfinite(array).all():
        return False
    slack, axes = 1e-9 * float(np.abs(array).max(initial=0.0)), range(array.ndim)
    return any(
        (np.ptp(array, tuple(j for j in axes if j != k)) <= slack).all() for k in axes if array.shape[k] < like.size
    )


def _left(one: Array, two: Array) -> float:
    """Return what is left of an array without the best multiple of another one plus a number."""
    columns = np.stack([one, np.ones_like(one)], 1)
    return float(np.linalg.norm(two - columns @ np.linalg.lstsq(columns, two, rcond=None)[0]))


def _fits(x: Array, wanted: Array, function: Callable[[Array], Array], enough: float) -> bool:
    """Whether a function of a multiple of a value plus a number is what is wanted but for a factor and a number."""

    def left(numbers: Array) -> float:
        made = function(numbers[0] * x + numbers[1])
        return _left(made, wanted) if np.isfinite(made).all() else np.inf

    for start in STARTS:
        numbers, step = np.array([start, 0.0]), 0.25
        best = left(numbers)
        for _ in range(TRIES):
            if best <= enough or step < SMALLEST:
                break
            near = [numbers + step * move for move in MOVED]
            errors = [left(one) for one in near]
            if min(errors) < best:
                best, numbers, step = min(errors), near[int(np.argmin(errors))], 2 * step
            else:
                step /= 2
        if best <= enough:
            return True
    return False


def only_hides(got: Array, want: Array) -> bool:
    """Whether two values are equal but for what one of them sets to zero, or hides by a mask."""
    one, two = visible(got), visible(want)
    return bool(((one == two) | (one == 0) | (two == 0)).all())


def is_of_a_layer(value: Value, made_by: Mapping[Value, Operation]) -> bool:
    """Whether a value is what a layer gives, or a sum that has it: then other weights may give a multiple of it, or more."""
    waiting = [value]
    for _ in range(DEPTH):
        made = made_by.get(waiting.pop()) if waiting else None
        if made is None:
            continue
        if any(operand.of_parameters for operand in made.operands):
            return True
        if role_of(made) in (Role.SHIFT, Role.SCALE) or made.name in MOVES:
            waiting += made.data
    return False
