"""Over which axes, and within which groups of an axis, a value is normalised by its own moments."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from convert.programs.divergence.layouts import same
from convert.programs.divergence.repair import Repair

Array = np.ndarray[Any, np.dtype[Any]]
MOST = 10**5  # elements of a value on which norms are tried
MOST_AXES = 4
LARGEST_EPSILON = 0.1
FEWEST = 2  # numbers that a norm is over


@dataclass(frozen=True)
class Norm:
    """How a value is normalised.

    Attributes:
        split: (axis, number of parts) of the axis that is taken apart, whose parts then are that axis; None for none.
        axes: that the moments are over, with the axis taken apart.
        centred: whether the mean is subtracted.
        epsilon: under the root.
        over: the axes and groups, in words.
    """

    split: tuple[int, int] | None
    axes: tuple[int, ...]
    centred: bool
    epsilon: float
    over: str

    def moments(self, given: Array) -> tuple[Array, Array]:
        """Return the value as it is divided, and what it is divided by the root of."""
        apart = given
        if self.split is not None:
            axis, parts = self.split
            apart = given.reshape(*given.shape[:axis], parts, -1, *given.shape[axis + 1 :])
        moved = apart - apart.mean(self.axes, keepdims=True) if self.centred else apart
        return moved, (moved * moved).mean(self.axes, keepdims=True)

    def of(self, given: Array) -> Array:
        """Return the normalised value."""
        moved, moment = self.moments(given)
        return np.asarray((moved / np.sqrt(moment + self.epsilon)).reshape(given.shape))

    def __str__(self) -> str:
        return f"divides by the {'standard deviation' if self.centred else 'root mean square'} {self.over}"


def two_norms(repair: Repair) -> str:
    """Say what the two sides of a repair normalise over; empty where one is no norm of the value, or both are the same."""
    if len(repair.given) != 1 or repair.got.size != repair.given[0].size:
        return ""
    one, two = (norm_of(x, repair.given[0]) for x in (repair.got, repair.want))
    if one is None or two is None or str(one) == str(two):
        return ""
    return f"the target {one}, and the JAX model {two}"


def norm_of(got: Array, given: Array) -> Norm | None:
    """Return how `given` is normalised where `got` is that; None if it is not."""
    if got.size != given.size or not is_small(given):
        return None
    for norm in ways(given.shape):
        moved, moment = norm.moments(given)
        epsilon = _epsilon(moved, moment, got)
        if epsilon is not None and same((found := replace(norm, epsilon=epsilon)).of(given), got):
            return found
    return None


def is_small(given: Array) -> bool:
    """Whether norms of a value are tried."""
    return given.size <= MOST and 0 < given.ndim <= MOST_AXES and given.dtype.kind == "f"


def _epsilon(moved: Array, moment: Array, got: Array) -> float | None:
    """Return the number that the largest element tells; None if there is none that could be an epsilon."""
    at = int(np.abs(moved).argmax())
    number, value = moved.ravel()[at], got.ravel()[at]
    if not value or not np.isfinite(value):
        return None
    left = float((number / value) ** 2 - np.broadcast_to(moment, moved.shape).ravel()[at])
    return max(left, 0.0) if -1e-9 * float(moment.max()) <= left <= LARGEST_EPSILON else None


def ways(shape: tuple[int, ...]) -> Iterator[Norm]:
    """Yield the norms of a value of a shape, without an epsilon."""
    every = range(len(shape))
    for size in range(1, len(shape) + 1):
        for axes in itertools.combinations(every, size):
            if int(np.prod([shape[axis] for axis in axes])) >= FEWEST:
                yield from _centred_or_not(None, axes, f"over {_axes(axes, len(shape))}")
    for axis in every:
        n = shape[axis]
        rest = [k for k in every if k != axis]
        others = [x for size in range(len(rest) + 1) for x in itertools.combinations(rest, size)]
        for parts in (k for k in range(2, n) if n % k == 0):
            for inner, width, word in (
                (axis + 1, n // parts, "neighbours"),
                (axis, parts, f"every {_nth(n // parts)}"),
            ):
                for more in others:
                    axes = (inner, *(k + (k > axis) for k in more))
                    also = f" and over {_axes(more, len(shape))}" if more else ""
                    said = f"within groups of {width} ({word}) of {_axes((axis,), len(shape))}{also}"
                    yield from _centred_or_not((axis, parts), axes, said)


def _centred_or_not(split: tuple[int, int] | None, axes: tuple[int, ...], over: str) -> Iterator[Norm]:
    yield Norm(split, axes, True, 0.0, over)
    yield Norm(split, axes, False, 0.0, over)


def _nth(n: int) -> str:
    return f"{n}{ {2: 'nd', 3: 'rd'}.get(n, 'th') }"


def _axes(axes: tuple[int, ...], rank: int) -> str:
    if axes == (rank - 1,):
        return "the last axis"
    return f"{'axis' if len(axes) == 1 else 'axes'} {' and '.join(map(str, axes))}"
