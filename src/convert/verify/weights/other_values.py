"""Tell values near those of the source, as of another training step, from unrelated ones; and one file of several from all."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from convert.numerics.bits import count_unequal
from convert.numerics.real_numbers import as_real
from convert.verify.weights.corruption.relations import indices_that_differ

Array = np.ndarray[Any, np.dtype[Any]]
BLOCK = 1 << 22  # values that are compared at once, in float64
NEAR, UNRELATED = "values near the source's", "values unrelated to the source's"
NEARLY_ALL = 0.9  # of the values differ: a change of the whole tensor
NEAR_DISTANCE = 0.3  # relative; training goes on from there, or other arithmetic made the values
RELATED = 0.9  # correlation of near values
FEW = 64  # values whose correlation tells nothing


@dataclass(frozen=True)
class Distance:
    """Sums over the values of tensors that differ; they add up.

    Attributes:
        size: number of values.
        differ: number of values that differ.
        sums: of got, want, got squared, want squared, got times want, and the squared difference.
    """

    size: int
    differ: int
    sums: tuple[float, ...]

    def __add__(self, other: Distance) -> Distance:
        sums = tuple(a + b for a, b in zip(self.sums, other.sums, strict=True))
        return Distance(self.size + other.size, self.differ + other.differ, sums)

    @property
    def relative(self) -> float:
        """The norm of the difference, relative to that of the right values."""
        return math.sqrt(self.sums[5] / self.sums[3]) if self.sums[3] > 0 else math.inf

    @property
    def correlation(self) -> float:
        """Of the values of the file with the right ones; 0 where one of them is constant."""
        x, y, xx, yy, xy, _ = (total / max(1, self.size) for total in self.sums)
        spread = (xx - x * x) * (yy - y * y)
        return (xy - x * y) / math.sqrt(spread) if spread > 0 else 0.0

    @property
    def is_whole(self) -> bool:
        """Whether nearly all values differ, and all are numbers."""
        return self.differ >= NEARLY_ALL * self.size and all(map(math.isfinite, self.sums))

    @property
    def name(self) -> str:
        """`NEAR`, `UNRELATED`, or empty if it is neither."""
        if not self.is_whole:
            return ""
        if self.relative < NEAR_DISTANCE and (self.correlation > RELATED or self.size < FEW):
            return NEAR
        if self.size >= FEW and abs(self.correlation) < max(0.05, 4 / math.sqrt(self.size)):
            return UNRELATED
        return ""

    @property
    def text(self) -> str:
        """How near the values are, and what that may mean."""
        if self.name == NEAR:
            return (
                f"values near those of the source (relative distance {self.relative:.1e}), and nearly all different: of another "
                "training step or checkpoint, or made by other arithmetic"
            )
        if self.name == UNRELATED:
            return f"values unrelated to those of the source (correlation {self.correlation:.2f}): of another tensor or model"
        return ""


def measure_distance(got: Array, want: Array) -> Distance:
    """Measure how far a tensor is from the right one."""
    sums = np.zeros(6)
    got, want = as_real(got), as_real(want)
    x, y = got.reshape(-1), want.reshape(-1)
    for k in range(0, x.size, BLOCK):
        a, b = x[k : k + BLOCK].astype(np.float64), y[k : k + BLOCK].astype(np.float64)
        with np.errstate(all="ignore"):
            sums += [a.sum(), b.sum(), a @ a, b @ b, a @ b, (a - b) @ (a - b)]
    return Distance(got.size, count_unequal(got, want), tuple(map(float, sums)))


def measure_part(got: Array, want: Array) -> tuple[str, Distance] | None:
    """Measure the few indices of an axis that hold all differences, and say which; None: each axis differs everywhere."""
    got, want = as_real(got), as_real(want)
    place = indices_that_differ(got, want)
    if place is None:
        return None
    distance = measure_distance(*map(place.take, (got, want)))
    return f"{place.where}: {distance.text}", distance


def total(distances: Iterable[Distance]) -> Distance:
    """Add distances up."""
    found = Distance(0, 0, (0.0,) * 6)
    for distance in distances:
        found += distance
    return found
