"""Find a value of one program among those of another, in any order of its axes.

A fingerprint is a few sums over the elements of an array. It does not change when axes are permuted, split or joined, and padding
with zeros does not change it either. Two arrays of generic numbers with equal fingerprints hold the same numbers. Divided by the sum
of the sizes, it does not change when the whole array is repeated, as along a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
T = TypeVar("T")
EXACT = 1e-6  # relative; tables of angles that NumPy rounds to float32 leave about 1e-8, another GELU or epsilon 1e-5 and more
TINY = 1e-12
ROUNDING = 1e-11  # relative, of sums of the same numbers in two programs
FURTHER = 10  # times the distance of the nearest value: one of the same numbers, computed in another way
PROPORTIONS = [2, 1, 3, 4]  # of the sums; the first is never zero by cancellation


def _powers(x: Array) -> tuple[Array, Array]:
    """Return the addends of the sums, [5, ...], and the sizes of their errors, [5, ...], relative to those of `x`.

    None makes the error of a large number larger, as a sine would.
    """
    size = np.abs(x)
    square = x * x
    cube, bent = size * square, size / (1 + square)
    return np.stack([size, x, square, x * square, x / (1 + square)]), np.stack([size, size, square, cube, bent])


def fingerprint(array: Array) -> tuple[Array, Array]:
    """Return the sums over all elements, [5], and their scales, [5]."""
    x, total = np.asarray(array, np.float64).ravel(), np.add.reduce
    with np.errstate(all="ignore"):  # as `_powers`, whose array of ten rows would take most of the time
        size, square = np.abs(x), x * x
        above = 1 + square
        first, third = total(size), total(square)
        sums = [first, total(x), third, total(x * square), total(x / above)]
        scales = [first, first, third, total(size * square), total(size / above)]
        return np.array(sums), np.array(scales) + TINY


def size_of(array: Array) -> float:
    """Return the first of the sums of a fingerprint, which tells most arrays apart."""
    return float(np.add.reduce(np.abs(np.asarray(array, np.float64).ravel())))


def per_size(sums: Array, scales: Array) -> tuple[Array, Array]:
    """Return the sums and scales, [4], of an array in proportion to its size, the sum of all |x|: they are those of the array repeated."""
    size = sums[0] + TINY
    return sums[PROPORTIONS] / size, scales[PROPORTIONS] / size


def column_fingerprints(array: Array, columns: Array) -> tuple[Array, Array, Array]:
    """Return the distinct numbers in `columns`, [n], and the sums, [5, n], and scales, [5, n], of the elements under each.

    Args:
        columns: integers, broadcastable to the array's shape: to which column an element belongs.
    """
    x, columns = np.broadcast_arrays(np.asarray(array, np.float64), columns)
    numbers, group = np.unique(columns.ravel(), return_inverse=True)
    x = x.ravel()
    with np.errstate(all="ignore"):
        sums, scales = (np.stack([np.bincount(group, row, len(numbers)) for row in rows]) for rows in _powers(x))
        return numbers, sums, scales + TINY


class ValueTable(Generic[T]):
    """The values of a program, each with what it belongs to.

    Args:
        tolerance: relative error up to which two sums are equal.
        repeated: whether an array that is repeated is the same value.
    """

    def __init__(self, tolerance: float = EXACT, *, repeated: bool = False) -> None:
        self.tolerance = tolerance
        self._repeated = repeated
        self._rows: list[Array] = []
        self._items: list[T] = []
        self._matrix: Array | None = None
        self._order: Array = np.zeros(0, np.intp)  # of the rows, by their first sum
        self._first: Array = np.zeros(0)

    def add(self, array: Array, item: T) -> None:
        """Add a value."""
        self._rows.append(self.sums(array)[0])
        self._items.append(item)
        self._matrix = None

    def find(self, array: Array, *, closest: bool = False) -> Sequence[T]:
        """Return the items of the values that hold the same numbers, in the order in which they were added.

        Args:
            closest: leave out those that are further away than rounding moves the nearest: with a small number added or without it.
        """
        if not self._rows:
            return []
        if self._matrix is None:
            self._matrix = np.stack(self._rows)
            self._order = np.argsort(self._matrix[:, 0], kind="stable")
            self._first = self._matrix[self._order, 0]
        with np.errstate(all="ignore"):
            if not self._repeated and not len(self._near(size := size_of(array), size + TINY)):
                return []
            sums, scales = self.sums(array)
            near = np.sort(self._near(sums[0], scales[0]))
            away = (np.abs(self._matrix[near] - sums) / scales).max(1)
            same = away <= self.tolerance
            if closest and same.sum() > 1:
                same &= away <= max(ROUNDING, FURTHER * away[same].min())
        return [self._items[k] for k in near[same]]

    def _near(self, first: float, scale: float) -> Array:
        """Return the numbers of the values with this first sum, relative to a scale."""
        allowed = self.tolerance * scale
        low = np.searchsorted(self._first, first - allowed, "left")
        return self._order[low : np.searchsorted(self._first, first + allowed, "right")]

    def sums(self, array: Array) -> tuple[Array, Array]:
        """Return the sums of a value, and their scales."""
        with np.errstate(all="ignore"):
            return per_size(*fingerprint(array)) if self._repeated else fingerprint(array)
