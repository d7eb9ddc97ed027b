"""Map the elements of a leaf to their destination in an output tensor: the tensor's memory, viewed in the leaf's axes.

Ops that move elements are views, so their inverses are views of the result. A piece of the leaf can therefore be written
to its destination, or compared with it, as soon as it is read, in any order. Where an op regroups axes, or interleaves
the halves of an axis, one axis of the leaf becomes several axes of the view: its *digits*. They number the elements in a
mixed radix, as hours, minutes and seconds number the seconds of a day.
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
    Deinterleave,
    Flip,
    Interleave,
    Op,
    Permute,
    Reorder,
    Reshape,
    Slice,
    Take,
    apply,
    out_spec,
    overwrite,
)
from convert.core.tensor_spec import TensorSpec, numpy_dtype, widens
from convert.core.value_ops import Add, Cast, Multiply

Array = np.ndarray[Any, np.dtype[Any]]
ELEMENTWISE = (Cast, Add, Multiply)
MOVING = (Permute, Reshape, Flip, Take, Slice, Deinterleave, Interleave, Reorder)


@dataclass(frozen=True)
class DestinationView:
    """A region of memory, viewed in the axes of the leaf.

    Attributes:
        region: the memory; its axes are the digits of the leaf's axes.
        origin: digits of the leaf's element that is the first of `region`.
        digits: for each axis of the leaf, the sizes of its digits, the slowest first.
        ops: elementwise ops that are applied to each value.
        others: views of further regions, where parts of an axis have another order in the leaf.
    """

    region: Array
    origin: tuple[int, ...]
    digits: tuple[tuple[int, ...], ...]
    ops: tuple[Op, ...]
    others: tuple[DestinationView, ...] = ()

    @property
    def size(self) -> int:
        """The number of elements of all regions."""
        return self.region.size + sum(other.size for other in self.others)

    def parts(self, origin: Sequence[int], values: Array) -> Iterator[tuple[Array, Array]]:
        """Yield the parts of the regions that a piece of the leaf fills, each with its values, of the same shape."""
        yield from self._own_parts(origin, values)
        for other in self.others:
            yield from other.parts(origin, values)

    def _own_parts(self, origin: Sequence[int], values: Array) -> Iterator[tuple[Array, Array]]:
        here = Box(self.origin, self.region.shape)
        if len(self.origin) == len(self.digits):  # one digit for each axis: the common case, and the fast one
            if (common := here.overlap(origin, values.shape)) is not None:
                yield self.region[common.within(self.origin)], values[common.within(origin)]
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
            yield self.region[common.within(self.origin)], given[common.within(box.origin)]


def _number(sizes: Sequence[int], digits: Sequence[int]) -> int:
    number = 0
    for size, digit in zip(sizes, digits, strict=True):
        number = number * size + digit
    return number


def _runs(sizes: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Split the elements ``start <= k < stop`` of an axis into boxes of its digits, in order."""
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
    """Size of a digit, and its value at the view's first element."""

    size: int
    origin: int


class _NotABoxError(Exception):
    """The region is not a box of digits."""


class _InverseView:
    """A region of the result, taken backwards through one op after the other.

    Attributes:
        view: the region; its axes are the digits in order.
        axes: the digits of each axis of the array before the op.
    """

    def __init__(self, region: Array) -> None:
        self.view = region
        self.axes = [[_Digit(n, 0)] for n in region.shape]

    @property
    def origin(self) -> tuple[int, ...]:
        return tuple(digit.origin for axis in self.axes for digit in axis)

    def through(self, op: Op, before: tuple[int, ...]) -> None:
        """Go back to the array before `op`, of the shape `before`."""
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
                raise _NotABoxError
            self.axes[op.axis][0] = _Digit(before[op.axis] // below, first.origin + op.start // below)
        elif isinstance(op, Flip):
            for axis in op.axes:  # the last element has the last value of every digit
                for k, digit in enumerate(self.axes[axis]):
                    at = self._at(axis) + k
                    self.axes[axis][k] = _Digit(digit.size, digit.size - digit.origin - self.view.shape[at])
                    self.view = np.flip(self.view, at)
        elif isinstance(op, Deinterleave | Interleave) and op.within is not None:
            raise _NotABoxError
        elif isinstance(op, Deinterleave):
            self._exchange(op.axis, 2, op.width)
        elif isinstance(op, Interleave):
            self._exchange(op.axis, (op.width or before[op.axis]) // 2, op.width)
        else:
            raise _NotABoxError

    def through_parts(self, op: Reorder) -> Iterator[_InverseView]:
        """Go back to the array before `op`: yield a region for each part of the axis."""
        if len(self.axes[op.axis]) != 1:
            raise _NotABoxError
        ((size, origin),), at = self.axes[op.axis], self._at(op.axis)
        end = origin + self.view.shape[at]
        for start, place, length in op.moves:
            first, last = max(origin, place), min(end, place + length)
            if first < last:
                own = _InverseView(self.view[(slice(None),) * at + (slice(first - origin, last - origin),)])
                own.axes = [list(axis) for axis in self.axes]
                own.axes[op.axis] = [_Digit(size, start + first - place)]
                yield own

    def _at(self, axis: int) -> int:
        """Return the position of the first digit of an axis."""
        return sum(map(len, self.axes[:axis]))

    def _reorder(self, order: Sequence[int]) -> None:
        starts = [self._at(axis) for axis in range(len(self.axes))]
        self.view = self.view.transpose([starts[axis] + k for axis in order for k in range(len(self.axes[axis]))])
        self.axes = [self.axes[axis] for axis in order]

    def _exchange(self, axis: int, first: int, width: int | None) -> None:
        """Split each run of `width` elements of an axis in two, the first of size `first`, and exchange the two."""
        shape = [math.prod(digit.size for digit in digits) for digits in self.axes]
        width = width or shape[axis]
        self._regroup((*shape[:axis], shape[axis] // width, first, width // first, *shape[axis + 1 :]))
        count = len(self.axes)
        self._reorder([*range(axis + 1), axis + 2, axis + 1, *range(axis + 3, count)])
        self.axes[axis : axis + 3] = [self.axes[axis] + self.axes[axis + 1] + self.axes[axis + 2]]

    def _regroup(self, shape: Sequence[int]) -> None:
        """Assign the digits to axes of other sizes; a digit that belongs to two axes is split."""
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
                        raise _NotABoxError
                    old = self.view.shape
                    split = (*old[:at], extent // below, below, *old[at + 1 :])
                    self.view = np.reshape(self.view, split, copy=False)
                    digits[at : at + 1] = [_Digit(size, digit.origin // below), _Digit(below, 0)]
                    digit = digits[at]
                axis.append(digit)
                size, at = size // digit.size, at + 1
            self.axes.append(axis)


def empty_view(spec: TensorSpec) -> DestinationView:
    """Return the view of a leaf from which no element is needed."""
    rank = len(spec.shape)
    return DestinationView(np.empty((0,) * rank), (0,) * rank, tuple((n,) for n in spec.shape), ())


def destination_view(ops: Sequence[Op], spec: TensorSpec, region: Array) -> DestinationView | None:
    """View the region that `ops` fill from a leaf of `spec` in the leaf's axes.

    Returns None where the ops do more than move elements and change them one by one.

    >>> region = np.zeros((3, 2))
    >>> found = destination_view((Take(0, 5), Permute((1, 0))), TensorSpec((7, 2, 3), "float64"), region)
    >>> found.region.shape, found.origin
    ((1, 2, 3), (5, 0, 0))
    """
    specs = [spec]
    try:
        for op in ops:
            specs.append(op.out_spec(specs[-1]))
    except ValueError:  # a plan never has such ops; applying them raises with the reason
        return None
    if not region.size:
        return empty_view(spec)
    regions, values = [_InverseView(region)], list[Op]()
    try:
        for op, before in zip(reversed(ops), reversed(specs[:-1]), strict=True):
            if isinstance(op, ELEMENTWISE):
                values.insert(0, op)
            elif isinstance(op, Reorder):
                regions = [part for back in regions for part in back.through_parts(op)]
            else:
                for back in regions:
                    back.through(op, before.shape)
    except _NotABoxError:
        return None
    first, *others = (
        DestinationView(x.view, x.origin, tuple(tuple(d.size for d in axis) for axis in x.axes), tuple(values))
        for x in regions
    )
    return replace(first, others=tuple(others))


def needed_box(ops: tuple[Op, ...], spec: TensorSpec) -> tuple[Box, tuple[Op, ...]]:
    """Return the elements of a leaf that its first operations select, and the operations that remain for them.

    >>> needed_box((Take(0, 5), Slice(0, 2, 3)), TensorSpec((7, 4), "float32"))
    (Box(origin=(5, 2), shape=(1, 1)), (Reshape(shape=(1,)),))
    """
    start, size, axes = [0] * len(spec.shape), list(spec.shape), list(range(len(spec.shape)))
    count = 0
    for op in ops:
        if isinstance(op, Take):
            axis = axes.pop(op.axis)
            start[axis], size[axis] = start[axis] + op.index, 1
        elif isinstance(op, Slice):
            axis = axes[op.axis]
            start[axis], size[axis] = start[axis] + op.start, op.stop - op.start
        else:
            break
        count += 1
    first = (Reshape(tuple(size[axis] for axis in axes)),) if len(axes) < len(size) else ()
    return Box(tuple(start), tuple(size)), (*first, *ops[count:])


class BufferedLeaf:
    """A part of a leaf whose ops need all its elements: they are buffered in the dtype of the computation.

    Attributes:
        view: the buffer, in the axes of the leaf.
    """

    def __init__(self, ops: Sequence[Op], spec: TensorSpec) -> None:
        first = tuple(takewhile(lambda op: isinstance(op, Take | Slice), ops))
        kept = at = out_spec(first, spec)
        early, moves, rest = list[Op](), list[Op](), list(ops[len(first) :])
        # Elementwise ops are applied as values arrive. They commute with the ops that move elements.
        while rest and isinstance(rest[0], (*ELEMENTWISE, *MOVING)):
            if isinstance(rest[0], Cast) and not widens(at.dtype, rest[0].dtype):
                break  # it may overflow, which `result` reports
            at = rest[0].out_spec(at)
            (early if isinstance(rest[0], ELEMENTWISE) else moves).append(rest.pop(0))
        count = len(list(takewhile(lambda op: isinstance(op, ELEMENTWISE), reversed(rest))))
        self._buffered_ops, self._late_ops = (*moves, *rest[: len(rest) - count]), tuple(rest[len(rest) - count :])
        self._memory = np.empty(kept.shape, numpy_dtype(at.dtype))
        self._result: Array | None = None
        self._error: OverflowError | None = None
        view = destination_view(first, spec, self._memory)
        assert view is not None
        self.view = replace(view, ops=tuple(early))

    def result(self, cut: tuple[Any, ...]) -> Array:
        """Return a part of the result of the ops; call it when the buffer is complete. The ops work in place where they can.

        Raises:
            OverflowError: a value does not fit its new dtype.
        """
        if self._error is not None:
            raise self._error
        if self._result is None:
            try:
                self._result = overwrite(self._buffered_ops, self._memory)
            except OverflowError as error:  # the buffer is overwritten already
                self._error = error
                raise
        return apply(self._late_ops, self._result[cut])
