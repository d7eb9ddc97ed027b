"""The primitive operations on arrays, and those that move elements. Layer kinds compile to them, and plans consist of them.

Each has the spec of its result (`out_spec`), the computation (`apply`) and an `inverse`. Two laws hold, which the tests
check for random specs: ``apply(x)`` has the spec of `out_spec`, and ``apply(inverse(y))`` equals ``y``, bit for bit if the
operation only moves elements.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar

import numpy as np

from convert.core.tensor_spec import TensorSpec

Array = np.ndarray[Any, np.dtype[Any]]


class Op(ABC):
    """One operation on one array. A wrong shape raises ValueError without the rule and tensor; the planner adds them.

    Attributes:
        partial: whether some elements are not in the result, or some of the result are no elements, for reasons that only the
            operation knows.
    """

    partial: ClassVar[bool] = False

    @property
    def rounds(self) -> bool:
        """Whether several values of an element give the same result."""
        return False

    @abstractmethod
    def out_spec(self, spec: TensorSpec) -> TensorSpec:
        """Return the spec of the result.

        Raises:
            ValueError: the operation does not fit `spec`.
        """

    @abstractmethod
    def apply(self, x: Array) -> Array:
        """Return the result, as a view if possible."""

    def overwrite(self, x: Array) -> Array:
        """Do the same as `apply`, and reuse the memory of `x`."""
        return self.apply(x)

    @abstractmethod
    def inverse(self, spec: TensorSpec) -> Op:
        """Return the operation that maps the result back to an array of `spec`; removed elements become zeros."""

    @abstractmethod
    def __str__(self) -> str:
        """Describe the operation for people, as in a printed plan."""


@dataclass(frozen=True)
class Permute(Op):
    """Axis `k` of the result is axis ``axes[k]`` of the input."""

    axes: tuple[int, ...]

    def out_spec(self, spec: TensorSpec) -> TensorSpec:
        if sorted(self.axes) != list(range(len(spec.shape))):
            raise ValueError(f"{self.axes} does not permute the axes of {spec}")
        return TensorSpec(tuple(spec.shape[axis] for axis in self.axes), spec.dtype)

    def apply(self, x: Array) -> Array:
        return x.transpose(self.axes)

    def inverse(self, spec: TensorSpec) -> Op:
        return Permute(tuple(self.axes.index(k) for k in range(len(self.axes))))

    def __str__(self) -> str:
        return f"permute {self.axes}"


@dataclass(frozen=True)
class Reshape(Op):
    """Give the same elements, in C order, another shape."""

    shape: tuple[int, ...]

    def out_spec(self, spec: TensorSpec) -> TensorSpec:
        if math.prod(self.shape) != spec.size:
            raise ValueError(f"{spec} has {spec.size} elements, the shape {self.shape} {math.prod(self.shape)}")
        return TensorSpec(self.shape, spec.dtype)

    def apply(self, x: Array) -> Array:
        return x.reshape(self.shape)

    def inverse(self, spec: TensorSpec) -> Op:
        return Reshape(spec.shape)

    def __str__(self) -> str:
        return f"reshape {self.shape}"


@dataclass(frozen=True)
class Slice(Op):
    """Take the elements ``start <= k < stop`` of one axis."""

    axis: int
    start: int
    stop: int

    def out_spec(self, spec: TensorSpec) -> TensorSpec:
        if not (0 <= self.axis < len(spec.shape) and 0 <= self.start <= self.stop <= spec.shape[self.axis]):
            raise ValueError(f"elements {self.start} to {self.stop} of axis {self.axis} are not in {spec}")
        shape = list(spec.shape)
        shape[self.axis] = self.stop - self.start
        return TensorSpec(tuple(shape), spec.dtype)

    def apply(self, x: Array) -> Array:
        return x[(slice(None),) * self.axis + (slice(self.start, self.stop),)]

    def inverse(self, spec: TensorSpec) -> Op:
        return Pad(self.axis, self.start, spec.shape[self.axis] - self.stop)

    def __str__(self) -> str:
        return f"axis {self.axis} [{self.start}:{self.stop}]"


@dataclass(frozen=True)
class Pad(Op):
    """Add zeros before and after the elements of one axis."""

    axis: int
    before: int
    after: int

    def out_spec(self, spec: TensorSpec) -> TensorSpec:
        if not (0 <= self.axis < len(spec.shape) and self.before >= 0 and self.after >= 0):
            raise ValueError(f"{self.before} and {self.after} zeros do not fit around axis {self.axis} of {spec}")
        shape = list(spec.shape)
        shape[self.axis] += self.before + self.after
        return TensorSpec(tuple(shape), spec.dtype)

    def apply(self, x: Array) -> Array:
        shape = list(x.shape)
        shape[self.axis] += self.before + self.after
        out = np.zeros(shape, x.dtype)
        out[(slice(None),) * self.axis + (slice(self.before, self.before + x.shape[self.axis]),)] = x
        return out

    def inverse(self, spec: TensorSpec) -> Op:
        return Slice(self.axis, self.before, self.before + spec.shape[self.axis])

    def __str__(self) -> str:
        return f"axis {self.axis} padded with {self.before} and {self.after} zeros"


@dataclass(frozen=True)
class Take(Op):
    """Take element `index` of one axis and remove the axis: one layer of a stack, or one part of a fused weight."""

    axis: int
    index: int

    def out_spec(self, spec: TensorSpec) -> TensorSpec:
        if not (0 <= self.axis < len(spec.shape) and 0 <= self.index < spec.shape[self.axis]):
            raise ValueError(f"element {self.index} of axis {self.axis} is not in {spec}")
        return TensorSpec(spec.shape[: self.axis] + spec.shape[self.axis + 1 :], spec.dtype)

    def apply(self, x: Array) -> Array:
        return x[(slice(None),) * self.axis + (self.index, ...)]  # the ellipsis keeps a 0-d result an array

    def inverse(self, spec: TensorSpec) -> Op:
        return Place(self.axis, self.index, spec.shape[self.axis])

    def __str__(self) -> str:
        return f"axis {self.axis} [{self.index}]"


@dataclass(frozen=True)
class Place(Op):
    """Add an axis of `size` with the array at `index` and zeros elsewhere."""

    axis: int
    index: int
    size: int

    def out_spec(self, spec: TensorSpec) -> TensorSpec:
        if not (0 <= self.axis <= len(spec.shape) and 0 <= self.index < self.size):
            raise ValueError(f"{spec} cannot be element {self.index} of {self.size} on axis {self.axis}")
        return TensorSpec((*spec.shape[: self.axis], self.size, *spec.shape[self.axis :]), spec.dtype)

    def apply(self, x: Array) -> Array:
        out = np.zeros((*x.shape[: self.axis], self.size, *x.shape[self.axis :]), x.dtype)
        out[(slice(None),) * self.axis + (self.index,)] = x
        return out

    def inverse(self, spec: TensorSpec) -> Op:
        return Take(self.axis, self.index)

    def __str__(self) -> str:
        return f"element {self.index} of {self.size} on a new axis {self.axis}"


@dataclass(frozen=True)
class Flip(Op):
    """Reverse the order of the elements of some axes."""

    axes: tuple[int, ...]

    def out_spec(self, spec: TensorSpec) -> TensorSpec:
        if any(not 0 <= axis < len(spec.shape) for axis in self.axes):
            raise ValueError(f"axes {self.axes} are not in {spec}")
        return spec

    def apply(self, x: Array) -> Array:
        return np.asarray(np.flip(x, self.axes))  # NumPy makes a scalar of a 0-d array

    def inverse(self, spec: TensorSpec) -> Op:
        return self

    def __str__(self) -> str:
        return f"flip {self.axes}"


@dataclass(frozen=True)
class _Pairs(Op):
    """Reorder the pairs of one axis.

    Attributes:
        axis: the axis.
        width: reorder each run of `width` elements, such as one of several heads; None: all elements are one run.
        within: (period, start, stop): of each `period` elements only those from `start` to `stop`, such as the queries of a fused
            axis; None: all elements of the axis.
    """

    axis: int
    width: int | None = None
    within: tuple[int, int, int] | None = None

    def out_spec(self, spec: TensorSpec) -> TensorSpec:
        if not 0 <= self.axis < len(spec.shape):
            raise ValueError(f"axis {self.axis} of {spec} has no pairs")
        size = spec.shape[self.axis]
        period, start, stop = self.within or (size, 0, size)
        if self.within is not None and (not 0 <= start < stop <= period or size % period):
            raise ValueError(f"elements {start} to {stop} of each {period} are not in axis {self.axis} of {spec}")
        if (stop - start) % 2:
            raise ValueError(f"axis {self.axis} of {spec} has no pairs")
        if self.width is not None and (self.width < 1 or self.width % 2 or (stop - start) % self.width):
            raise ValueError(f"axis {self.axis} of {spec} is not made of runs of {self.width} elements that have pairs")
        return spec

    def apply(self, x: Array) -> Array:
        if self.within is None:
            return self._reordered(x, self.axis)
        period, start, stop = self.within
        out = x.copy()
        periods = out.reshape(*x.shape[: self.axis], x.shape[self.axis] // period, period, *x.shape[self.axis + 1 :])
        rows = (slice(None),) * (self.axis + 1) + (slice(start, stop),)
        periods[rows] = self._reordered(periods[rows], self.axis + 1)
        return out

    def _reordered(self, x: Array, axis: int) -> Array:
        width = self.width or x.shape[axis]
        runs = x.shape[axis] // width if width else 1
        apart = x.reshape(*x.shape[:axis], runs, *self._split(width), *x.shape[axis + 1 :])
        return apart.swapaxes(axis + 1, axis + 2).reshape(x.shape)

    @abstractmethod
    def _split(self, width: int) -> tuple[int, int]:
        """Return the sizes of the two axes of a run, which are exchanged."""

    @property
    def _shown(self) -> str:
        runs = "" if self.width is None else f" in runs of {self.width}"
        return runs if self.within is None else "{} from {} to {} of each {}".format(runs, *self.within[1:], self.within[0])  # fmt: skip


@dataclass(frozen=True)
class Deinterleave(_Pairs):
    """Reorder elements to 0, 2, 4, ..., 1, 3, 5, ...: adjacent pairs become pairs at a distance of half the run."""

    def inverse(self, spec: TensorSpec) -> Op:
        return Interleave(self.axis, self.width, self.within)

    def _split(self, width: int) -> tuple[int, int]:
        return width // 2, 2

    def __str__(self) -> str:
        return f"axis {self.axis} de-interleaved{self._shown}"


@dataclass(frozen=True)
class Interleave(_Pairs):
    """Reorder elements to 0, n/2, 1, n/2 + 1, ...: pairs at a distance of half the run become adjacent pairs."""

    def inverse(self, spec: TensorSpec) -> Op:
        return Deinterleave(self.axis, self.width, self.within)

    def _split(self, width: int) -> tuple[int, int]:
        return 2, width // 2

    def __str__(self) -> str:
        return f"axis {self.axis} interleaved{self._shown}"


@dataclass(frozen=True)
class Reorder(Op):
    """Give the parts that stand one after the other along an axis another order.

    Attributes:
        axis: the axis.
        lengths: of the parts, in the order of the input.
        order: which part of the input is at each place of the result.
    """

    axis: int
    lengths: tuple[int, ...]
    order: tuple[int, ...]

    @property
    def moves(self) -> Iterator[tuple[int, int, int]]:
        """Where each part starts in the input and in the result, and its length, in the order of the result."""
        starts = list(accumulate(self.lengths, initial=0))
        at = 0
        for k in self.order:
            yield starts[k], at, self.lengths[k]
            at += self.lengths[k]

    def out_spec(self, spec: TensorSpec) -> TensorSpec:
        if not 0 <= self.axis < len(spec.shape) or sum(self.lengths) != spec.shape[self.axis] or min(self.lengths) < 0:
            raise ValueError(f"axis {self.axis} of {spec} is not made of parts of {', '.join(map(str, self.lengths))}")
        if sorted(self.order) != list(range(len(self.lengths))):
            raise ValueError(f"{self.order} is no order of {len(self.lengths)} parts")
        return spec

    def apply(self, x: Array) -> Array:
        out = np.empty_like(x)
        before = (slice(None),) * self.axis
        for start, at, length in self.moves:
            out[(*before, slice(at, at + length))] = x[(*before, slice(start, start + length))]
        return out

    def inverse(self, spec: TensorSpec) -> Op:
        lengths = tuple(self.lengths[k] for k in self.order)
        return Reorder(self.axis, lengths, tuple(self.order.index(k) for k in range(len(self.order))))

    def __str__(self) -> str:
        parts = ", ".join(f"[{start}:{start + length}]" for start, _, length in self.moves)
        return f"axis {self.axis} in the order {parts}"


def out_spec(ops: tuple[Op, ...], spec: TensorSpec) -> TensorSpec:
    """Return the spec after all `ops`, in order."""
    for op in ops:
        spec = op.out_spec(spec)
    return spec


def apply(ops: tuple[Op, ...], x: Array) -> Array:
    """Apply all `ops`, in order."""
    for op in ops:
        x = op.apply(x)
    return x


def overwrite(ops: tuple[Op, ...], x: Array) -> Array:
    """Do the same as `apply`, and reuse the memory of `x`, which must not be used elsewhere."""
    for op in ops:
        x = op.overwrite(x)
    return x


def inverse(ops: tuple[Op, ...], spec: TensorSpec) -> tuple[Op, ...]:
    """Return the operations that map the result back to an array of `spec`."""
    back: list[Op] = []
    for op in ops:
        back.insert(0, op.inverse(spec))
        spec = op.out_spec(spec)
    return tuple(back)
