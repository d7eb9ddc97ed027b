"""Which values of one program are values of the other, as a whole or as one index of an axis."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from convert.programs.fingerprint import ValueTable
from convert.programs.program import Program, Value

Array = np.ndarray[Any, np.dtype[Any]]
FEW = 3  # arrays with fewer elements, or with one number throughout, are equal by chance
HIDDEN = 1e9  # scores of hidden positions are -inf, -1e30 or the smallest number of a dtype
STACKED = 16  # longest axis along which one side may keep apart what the other side stacks, such as experts


@dataclass(frozen=True)
class Part:
    """A value of a program, or one index of one of its axes.

    Attributes:
        axis: the axis; None for the whole value.
    """

    value: Value
    axis: int | None = None
    index: int = 0

    @property
    def array(self) -> Array:
        return self.value.array if self.axis is None else np.take(self.value.array, self.index, self.axis)


def tells(array: Array) -> bool:
    """Whether an equal array is evidence: floating, of several finite numbers that are not all the same."""
    if array.size < FEW or array.dtype.kind != "f":
        return False
    return bool(np.isfinite(array).all() and (array != array.flat[0]).any())


def is_rare(array: Array) -> bool:
    """Whether an array has few numbers, and none is a count or a half of one, so that it is hardly equal by chance."""
    if not 0 < array.size < FEW or array.dtype.kind != "f" or not np.isfinite(array).all():
        return False
    return bool((2 * array != np.round(2 * array)).all())


def confirms(array: Array) -> bool:
    """Whether an equal array shows that what it is computed with is right: signs, classes and counts are equal by chance."""
    if not array.size or array.dtype.kind != "f" or not (2 * array != np.round(2 * array)).any():
        return False
    return array.size < FEW or len(np.unique(np.abs(array))) >= FEW


def visible(array: Array) -> Array:
    """Return an array with zeros for what a mask hides, of which each library has another number."""
    if array.dtype.kind != "f" or not array.size or np.abs(array).max() < HIDDEN:
        return array
    return np.where(np.abs(array) < HIDDEN, array, 0.0)


def same_numbers(one: Array, two: Array) -> bool:
    """Whether two arrays hold the same numbers, in any order and each as often as it is, or repeated."""
    a, b = np.sort(one, axis=None), np.sort(two, axis=None)
    if min(a.size, b.size) == 0 or max(a.size, b.size) % min(a.size, b.size):
        return False
    a, b = (x[:: x.size // min(a.size, b.size)] for x in (a, b))
    return _are_near(a, b)


def near(one: Array, two: Array) -> bool:
    """Whether two arrays hold the same numbers in the same order, as near to each other as `same_numbers` takes them."""
    return one.shape == two.shape and _are_near(one, two)


def _are_near(one: Array, two: Array) -> bool:
    largest = float(np.abs(one).max(initial=0.0, where=np.isfinite(one)))  # a mask may be infinite
    return bool(np.allclose(one, two, rtol=1e-6, atol=1e-9 * largest))


def one_of(one: Array, two: Array) -> bool:
    """Whether two parameters hold the same numbers, or one those at an index of the other's first axis."""
    small, large = sorted((one, two), key=lambda x: x.size)
    if small.size == large.size:
        return same_numbers(small, large)
    return large.ndim > 1 and any(x.size == small.size and same_numbers(small, x) for x in large)


def contains(large: Array, small: Array) -> bool:
    """Whether a fused parameter holds all numbers of a smaller one, in any order."""
    if not small.size or small.size >= large.size:
        return False
    numbers, wanted = np.sort(large, axis=None), small.ravel()
    at = np.clip(np.searchsorted(numbers, wanted), 1, numbers.size - 1)
    nearest = np.minimum(np.abs(numbers[at] - wanted), np.abs(numbers[at - 1] - wanted))
    return bool((nearest <= 1e-9 * float(np.abs(numbers).max())).all())


def slices(array: Array) -> Iterator[tuple[int, Iterator[Array]]]:
    """Yield each short axis with the arrays at its indices."""
    if array.ndim < 2:
        return
    for axis, size in enumerate(array.shape):
        if 1 < size <= STACKED and array.size // size >= FEW:
            yield axis, (np.take(array, k, axis) for k in range(size))


class SharedValues:
    """Finds values among those of a program that an input is in.

    Args:
        numbers: whether single numbers count, such as the terms of a loss.
    """

    def __init__(self, program: Program, tolerance: float, *, numbers: bool = False) -> None:
        self.numbers = numbers
        self._whole: ValueTable[Part] = ValueTable(tolerance)
        self._parts: ValueTable[Part] | None = None
        self._tolerance = tolerance
        self._values = [value for operation in program.operations for value in operation.results if value.data]
        self._values = [*program.inputs.values(), *self._values]
        self._values = [value for value in self._values if self.tells(visible(value.array))]
        for value in self._values:
            self._whole.add(visible(value.array), Part(value))

    def tells(self, array: Array) -> bool:
        """Whether an equal array is evidence."""
        return tells(array) or (self.numbers and is_rare(array))

    def is_large(self, array: Array) -> bool:
        """Whether an array has as many numbers as a value that is put in."""
        return array.size >= (1 if self.numbers else FEW)

    def find(self, array: Array) -> tuple[Part, ...]:
        """Return the parts with these numbers; one for each index where they are stacked along an axis of `array`."""
        array = visible(array)
        if not self.tells(array):
            return ()
        found = tuple(self._whole.find(array, closest=True)) or tuple(self._stacked().find(array, closest=True))
        return found or next(self._taken_apart(array), ())

    def _stacked(self) -> ValueTable[Part]:
        """Return the table of what stands at one index of an axis."""
        if self._parts is None:
            self._parts = ValueTable(self._tolerance)
            for value in self._values:
                for axis, arrays in slices(visible(value.array)):
                    for index, array in enumerate(arrays):
                        self._parts.add(array, Part(value, axis, index))
        return self._parts

    def _taken_apart(self, array: Array) -> Iterator[tuple[Part, ...]]:
        """Yield what is found where each index of an axis is a value of its own."""
        for _, arrays in slices(array):
            found: list[Part] = []
            for one in arrays:
                parts = self._whole.find(one)  # at an index that was found it is worth while to ask whether it tells
                parts = parts if parts and tells(one) else ()
                if not parts:
                    break
                found.append(parts[0])
            else:
                yield tuple(found)
