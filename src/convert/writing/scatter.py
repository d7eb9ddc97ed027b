"""Where the elements of a leaf go in an output tensor: the tensor's memory, seen through the leaf's own axes.

Operations that move elements are views, so their inverses are views of the result: a piece of the leaf can be put into
its place, or compared with what lies there, as soon as it is read, whatever comes before and after it. Where an operation
regroups axes, or exchanges the halves of an axis with its pairs, an axis of the leaf becomes several of the view: its
*digits*, which number its elements as the digits of a clock number seconds.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, NamedTuple

import numpy as np

from convert.checkpoints.chunks import Box
from convert.core.ops import (
    Add,
    Cast,
    Deinterleave,
    Flip,
    Interleave,
    Multiply,
    Op,
    Permute,
    Reshape,
    Slice,
    Take,
    apply,
    out_spec,
    overwrite,
    widens,
)
from convert.core.tensor_spec import TensorSpec, numpy_dtype

Array = np.ndarray[Any, np.dtype[Any]]
ELEMENTWISE = (Cast, Add, Multiply)
MOVING = (Permute, Reshape, Flip, Take, Slice, Deinterleave, Interleave)


@dataclass(frozen=True)
class Place:
    """A region of memory as the leaf has it.

    Attributes:
        view: the region, with the digits of the leaf's axes as its axes.
        origin: the digits of the leaf's element that its first element is.
        digits: for each axis of the leaf, the sizes of its digits, the slowest first.
        ops: what is done to each value on its way there.
    """

    view: Array
    origin: tuple[int, ...]
    digits: tuple[tuple[int, ...], ...]
    ops: tuple[Op, ...]

    def parts(self, origin: Sequence[int], values: Array) -> Iterator[tuple[Array, Array]]:
        """What goes there of a piece of the leaf: parts of the region, each with the values for it, of the same shape."""
        here = Box(self.origin, self.view.shape)
        if len(self.origin) == len(self.digits):  # one for each axis: the common case, and there may be many leaves
            if (common := here.overlap(origin, values.shape)) is not None:
                yield self.view[common.within(self.origin)], values[common.within(origin)]
            return
        runs = (list(_runs(sizes, a, a + n)) for sizes, a, n in zip(self.digits, origin, values.shape, strict=True))
        for boxes in itertools.product(*runs):
            box = Box(sum((b.origin for b in boxes), ()), sum((b.shape for b in boxes), ()))
            common = here.overlap(box.origin, box.shape)
            if common is None:
                continue
            starts = [_number(sizes, b.origin) - a for sizes, b, a in zip(self.digits, boxes, origin, strict=True)]
            cut: tuple[Any, ...] = (
                *(slice(start, start + b.size) for start, b in zip(starts, boxes, strict=True)),
                ...,
            )
            given = values[cut].reshape(box.shape)  # axes are split, none are joined: a view
            yield self.view[common.within(self.origin)], given[common.within(box.origin)]


def _number(sizes: Sequence[int], digits: Sequence[int]) -> int:
    number = 0
    for size, digit in zip(sizes, digits, strict=True):
        number = number * size + digit
    return number


def _runs(sizes: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """The elements ``start <= k < stop`` of an axis as boxes of its digits, in order; each is a range of elements."""
    if len(sizes) == 1:
        yield Box((start,), (stop - start,))
        return
    rest = sizes[1:]
    below = math.prod(rest)
    while start < stop:
        first = start // below
        many = (stop - start) // below if start % below == 0 else 0
        if many:
            yield Box((first, *(0 for _ in rest)), (many, *rest))
            start += many * below
        else:
            end = min(stop, (first + 1) * below)
            for run in _runs(rest, start - first * below, end - first * below):
                yield Box((first, *run.origin), (1, *run.shape))
            start = end


class _Digit(NamedTuple):
    """Its size, and where the view's first element is on it."""

    size: int
    origin: int


class _UnlikeError(Exception):
    """The region is no box of digits."""


class _Backwards:
    """A region of the result, taken back through one operation after the other.

    Attributes:
        view: the region; its axes are the digits in order.
        axes: the digits of each axis that the array has there.
    """

    def __init__(self, region: Array) -> None:
        self.view = region
        self.axes = [[_Digit(n, 0)] for n in region.shape]

    @property
    def origin(self) -> tuple[int, ...]:
        return tuple(digit.origin for axis in self.axes for digit in axis)

    def through(self, op: Op, before: tuple[int, ...]) -> None:
        """To the array before `op`, which has the shape `before`."""
        if isinstance(op, Permute):
            self._reorder([op.axes.index(axis) for axis in range(len(op.axes))])
        elif isinstance(op, Reshape):
            self._regroup(before)
        elif isinstance(op, Take):
            self.view = np.expand_dims(self.view, self._at(op.axis))
            self.axes.insert(op.axis, [_Digit(before[op.axis], op.index)])
        elif isinstance(op, Slice):
            first, *rest = self.axes[op.axis]
            below = math.prod(digit.size for digit in rest)
            if op.start % below or before[op.axis] % below:
                raise _UnlikeError
            self.axes[op.axis][0] = _Digit(before[op.axis] // below, first.origin + op.start // below)
        elif isinstance(op, Flip):
            for axis in op.axes:  # the last number has the last of every digit
                for k, digit in enumerate(self.axes[axis]):
                    at = self._at(axis) + k
                    self.axes[axis][k] = _Digit(digit.size, digit.size - digit.origin - self.view.shape[at])
                    self.view = np.flip(self.view, at)
        elif isinstance(op, Deinterleave):
            self._exchange(op.axis, 2)
        elif isinstance(op, Interleave):
            self._exchange(op.axis, before[op.axis] // 2)
        else:
            raise _UnlikeError

    def _at(self, axis: int) -> int:
        """The first digit of an axis, among all."""
        return sum(map(len, self.axes[:axis]))

    def _reorder(self, order: Sequence[int]) -> None:
        starts = [self._at(axis) for axis in range(len(self.axes))]
        self.view = self.view.transpose([starts[axis] + k for axis in order for k in range(len(self.axes[axis]))])
        self.axes = [self.axes[axis] for axis in order]

    def _exchange(self, axis: int, first: int) -> None:
        """An axis is taken as two, the first of this size; they change places."""
        shape = [math.prod(digit.size for digit in digits) for digits in self.axes]
        self._regroup((*shape[:axis], first, shape[axis] // first, *shape[axis + 1 :]))
        count = len(self.axes)
        self._reorder([*range(axis), axis + 1, axis, *range(axis + 2, count)])
        self.axes[axis : axis + 2] = [self.axes[axis] + self.axes[axis + 1]]

    def _regroup(self, shape: Sequence[int]) -> None:
        """The digits are those of axes of other sizes; one that belongs to two of them is split."""
        digits = [digit for axis in self.axes for digit in axis]
        self.view = self.view.squeeze(tuple(k for k, digit in enumerate(digits) if digit.size == 1))
        digits = [digit for digit in digits if digit.size > 1]
        self.axes, at = [], 0
        for size in shape:
            axis: list[_Digit] = []
            if size == 1:
                self.view = np.expand_dims(self.view, at)
                digits.insert(at, _Digit(1, 0))
                axis, at = [digits[at]], at + 1
            while size > 1:
                digit = digits[at]
                if size % digit.size:
                    below, extent = digit.size // size, self.view.shape[at]
                    if digit.size % size or digit.origin % below or extent % below:
                        raise _UnlikeError
                    old = self.view.shape
                    split = (*old[:at], extent // below, below, *old[at + 1 :])
                    self.view = np.reshape(self.view, split, copy=False)
                    digits[at : at + 1] = [_Digit(size, digit.origin // below), _Digit(below, 0)]
                    digit = digits[at]
                axis.append(digit)
                size, at = size // digit.size, at + 1
            self.axes.append(axis)


def nowhere(spec: TensorSpec) -> Place:
    """Of a leaf of which nothing is needed."""
    rank = len(spec.shape)
    return Place(np.empty((0,) * rank), (0,) * rank, tuple((n,) for n in spec.shape), ())


def place(ops: Sequence[Op], spec: TensorSpec, region: Array) -> Place | None:
    """The region that `ops` fill from a leaf of `spec`, in the leaf's axes; None where they do more than move elements.

    >>> region = np.zeros((3, 2))
    >>> found = place((Take(0, 5), Permute((1, 0))), TensorSpec((7, 2, 3), "float64"), region)
    >>> found.view.shape, found.origin
    ((1, 2, 3), (5, 0, 0))
    """
    specs = [spec]
    try:
        for op in ops:
            specs.append(op.out_spec(specs[-1]))
    except ValueError:  # as the plan would never have it; applying them says why
        return None
    if not region.size:
        return nowhere(spec)
    back, values = _Backwards(region), list[Op]()
    try:
        for k in range(len(ops) - 1, -1, -1):
            if isinstance(ops[k], ELEMENTWISE):
                values.insert(0, ops[k])
            else:
                back.through(ops[k], specs[k].shape)
    except _UnlikeError:
        return None
    return Place(back.view, back.origin, tuple(tuple(d.size for d in axis) for axis in back.axes), tuple(values))


class Gathered:
    """A part of a leaf whose operations need all of it at once: it is collected first, in the dtype that they are computed in.

    Attributes:
        place: the memory that it is collected in.
    """

    def __init__(self, ops: Sequence[Op], spec: TensorSpec) -> None:
        first = tuple(takewhile(lambda op: isinstance(op, Take | Slice), ops))
        kept = at = out_spec(first, spec)
        early, moves, rest = list[Op](), list[Op](), list(ops[len(first) :])
        # What changes values one by one is done as they come; that they are moved first would make no difference.
        while rest and isinstance(rest[0], (*ELEMENTWISE, *MOVING)):
            if isinstance(rest[0], Cast) and not widens(at.dtype, rest[0].dtype):
                break  # which may fail: that is for who asks for the result
            at = rest[0].out_spec(at)
            (early if isinstance(rest[0], ELEMENTWISE) else moves).append(rest.pop(0))
        count = len(list(takewhile(lambda op: isinstance(op, ELEMENTWISE), reversed(rest))))
        self._whole, self._late = (*moves, *rest[: len(rest) - count]), tuple(rest[len(rest) - count :])
        self._memory = np.empty(kept.shape, numpy_dtype(at.dtype))
        self._made: Array | None = None
        self._error: OverflowError | None = None
        found = place(first, spec, self._memory)
        assert found is not None
        self.place = replace(found, ops=tuple(early))

    def made(self, cut: tuple[Any, ...]) -> Array:
        """A part of what the operations make of it, once it is complete; in its own memory as far as they can.

        Raises:
            OverflowError: a value does not fit its new dtype.
        """
        if self._error is not None:
            raise self._error
        if self._made is None:
            try:
                self._made = overwrite(self._whole, self._memory)
            except OverflowError as error:  # the memory has been given up
                self._error = error
                raise
        return apply(self._late, self._made[cut])
