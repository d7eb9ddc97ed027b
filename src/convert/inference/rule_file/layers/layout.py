"""Read a layout off a derivation: in which order the axes of a leaf lie in a tensor of the target."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from convert.inference.meetings.columns import factors

Array = np.ndarray[Any, np.dtype[Any]]
INTERLEAVED, HALF_SPLIT, REVERSED = "interleaved", "half-split", "reversed"
MAX_PARTS = 8  # of an axis whose parts lie in another order in the target
MAX_LONG_PARTS = 32  # if none is a single element: sines and cosines of 16 frequencies
MAX_JOINED = 4  # values that code joins in front of a layer
FEW = 4  # single elements that code puts side by side, such as position, time and mask


@dataclass(frozen=True)
class Axis:
    """An axis of a leaf, or one of the axes that it is made of.

    Attributes:
        of: number of the leaf's axis.
        place: of the axes that the leaf's axis is made of, the outermost is 0.
        size: number of elements that the block has along it.
        start: the first of them along the leaf's axis, where the block has only some; of an axis that is made of several, the outermost has it.
        order: how its elements lie in the target: empty (as stored), ``interleaved`` or ``half-split`` (how the source pairs the
            features of RoPE, where the target pairs them in the other way), or ``reversed``.
        parts: (start, length) of the runs of elements, in the target's order; none if `order` says it.
    """

    of: int
    place: int
    size: int
    start: int = 0
    order: str = ""
    parts: tuple[tuple[int, int], ...] = ()

    @property
    def in_parts(self) -> Axis:
        """The axis with each element as a part, where a few of them are reversed."""
        if self.order != REVERSED or self.size > FEW:
            return self
        return replace(self, order="", parts=tuple((k, 1) for k in reversed(range(self.size))))


@dataclass(frozen=True)
class Layout:
    """The elements of a leaf in a block of a tensor.

    Attributes:
        leaf_shape: of the leaf.
        fixed: (axis of the leaf, the one index that the block has), for axes longer than 1.
        axes: of the block, the slowest first; axes of size 1 are left out.
        shape: of the block, as the target's tensor has it; its product is that of the sizes of `axes`.
        joined: of each axis that is stored, how many of `leaf_shape` it is opened into; empty: one each.
    """

    leaf_shape: tuple[int, ...]
    fixed: tuple[tuple[int, int], ...]
    axes: tuple[Axis, ...]
    shape: tuple[int, ...]
    joined: tuple[int, ...] = ()

    @property
    def stored(self) -> tuple[tuple[int, ...], ...]:
        """The axes that each axis is opened into, as the leaf is stored."""
        counts = self.joined or (1,) * len(self.leaf_shape)
        ends = itertools.accumulate(counts)
        return tuple(tuple(range(end - count, end)) for end, count in zip(ends, counts, strict=True))

    def is_opened(self, axis: int) -> bool:
        """Whether an axis is no axis of the leaf as it is stored, but one that such an axis is opened into."""
        return (axis,) not in self.stored

    @property
    def groups(self) -> tuple[tuple[Axis, ...], ...] | None:
        """The axes of the leaf that each axis of the block is made of; None where one crosses their borders."""
        found, rest = [], list(self.axes)
        for size in self.shape:
            group: list[Axis] = []
            while math.prod(axis.size for axis in group) < size and rest:
                group.append(rest.pop(0))
            if math.prod(axis.size for axis in group) != size:
                return None
            found.append(tuple(group))
        return tuple(found) if not rest else None

    def made_of(self, axis: int) -> tuple[Axis, ...]:
        """Return the axes that an axis of the leaf is made of, the outermost first."""
        return tuple(sorted((a for a in self.axes if a.of == axis), key=lambda a: a.place))


def read_layout(
    leaf_shape: Sequence[int], positions: Array, shape: Sequence[int], rotary: bool = False
) -> Layout | None:
    """Return the layout of a block whose elements, in C order, have these positions in the leaf; None if it is no such layout.

    Args:
        positions: in C order of the leaf.
        shape: of the block.
        rotary: whether RoPE rotates the features, so that the two programs may pair them in different ways.
    """
    digits = np.unravel_index(np.asarray(positions, np.int64), tuple(leaf_shape)) if leaf_shape else ()
    fixed: list[tuple[int, int]] = []
    found: list[tuple[int, Axis]] = []  # step in the block, axis
    for k, column in enumerate(digits):
        varies = np.flatnonzero(column != column[0])
        if not len(varies):
            if leaf_shape[k] > 1:
                fixed.append((k, int(column[0])))
            continue
        inner = _axes_of(k, column, rotary)
        if inner is None:
            return None
        found += inner
    found.sort(key=lambda item: -item[0])
    axes = tuple(axis for _, axis in found)
    if math.prod(axis.size for axis in axes) != len(positions) or math.prod(shape) != len(positions):
        return None
    steps = [math.prod(axis.size for axis in axes[k + 1 :]) for k in range(len(axes))]
    if steps != [step for step, _ in found]:
        return None
    layout = Layout(tuple(leaf_shape), tuple(fixed), axes, tuple(shape))
    return layout if layout.groups is not None else _cut_at_borders(layout)


def cut_where_named(column: Array) -> tuple[int, ...]:
    """Return the lengths of the fewest parts of an axis of a block that each have a layout, as a flattened map has, and what is joined to it.

    >>> cut_where_named(np.array([2, 4, 3, 5, 0, 1]))
    (4, 2)

    Args:
        column: for each element its place along an axis of the leaf.
    """
    ways = (_cut(column, count) for count in range(2, MAX_JOINED + 1))
    return next((found for found in ways if found), ())


def _cut(column: Array, count: int) -> tuple[int, ...]:
    """Return the lengths of so many parts; none where there are no such parts."""
    if count == 1:
        return (len(column),) if _is_named(column) else ()
    runs = np.maximum.accumulate(column) - np.minimum.accumulate(column) == np.arange(len(column))
    # The longest first: a run with a place of the next part leaves no rest.
    for length in reversed(np.flatnonzero(runs[: 1 - count]) + 1):
        rest = _cut(column[length:], count - 1) if _is_named(column[:length]) else ()
        if rest:
            return int(length), *rest
    return ()


def _is_named(column: Array) -> bool:
    """Whether elements are a run of an axis, in an order that its letters say."""
    if np.ptp(column) != len(column) - 1:
        return False
    axes = _axes_of(0, column, False) if len(column) > 1 else []
    return axes is not None and not any(axis.parts or axis.order for _, axis in axes)


def _cut_at_borders(layout: Layout) -> Layout:
    """Return the layout with an axis that crosses borders of the block's axes as several: the rows and columns of a flattened patch."""
    axes: list[Axis] = []
    rest, sizes = list(layout.axes), list(layout.shape)
    while rest and sizes:
        axis, size = rest.pop(0), sizes.pop(0)
        if axis.size > size > 1 and axis.size % size == 0 and not (axis.order or axis.parts or axis.start):
            rest = [replace(other, place=other.place + _behind(other, axis)) for other in rest]
            axes = [replace(other, place=other.place + _behind(other, axis)) for other in axes]
            rest.insert(0, replace(axis, place=axis.place + 1, size=axis.size // size))
            axis = replace(axis, size=size)
        elif axis.size < size and size % axis.size == 0:
            sizes.insert(0, size // axis.size)
        elif size == 1:
            rest.insert(0, axis)
            continue
        elif axis.size != size:
            return layout
        axes.append(axis)
    return replace(layout, axes=(*axes, *rest))


def _behind(one: Axis, other: Axis) -> bool:
    """Whether an axis is further in than another one of the same axis of the leaf."""
    return one.of == other.of and one.place > other.place


def _axes_of(k: int, column: Array, rotary: bool) -> list[tuple[int, Axis]] | None:
    """Return the axes that one axis of the leaf is made of, with their steps; None if they cannot be told."""
    used = np.unique(column)
    start, size = int(used[0]), len(used)
    if int(used[-1]) - start + 1 != size:
        return None
    column = column - start
    turned = None
    for sizes in ((size,), *factors(size)):
        found = _decompose(k, column, sizes, start, rotary)
        if found is not None and (len(sizes) == 1 or all(axis.order != REVERSED for _, axis in found)):
            return found
        turned = turned or found
    return _in_parts(k, column, size, start) or turned


def _in_parts(k: int, column: Array, size: int, start: int) -> list[tuple[int, Axis]] | None:
    """Return an axis whose parts lie one after the other in another order."""
    step = int(np.flatnonzero(column != column[0])[0])
    order = column[: step * size : step]
    if len(order) != size or not np.array_equal(column, order[(np.arange(len(column)) // step) % size]):
        return None
    parts = runs_of(order)
    most = MAX_LONG_PARTS if min(length for _, length in parts) > 1 else MAX_PARTS
    return [(step, Axis(k, 0, size, start, parts=parts))] if len(parts) <= most else None


def runs_of(order: Array) -> tuple[tuple[int, int], ...]:
    """Return start and length of each run of numbers that follow one another.

    >>> runs_of(np.array([3, 4, 5, 0, 1, 2]))
    ((3, 3), (0, 3))
    """
    starts = np.flatnonzero(np.diff(order, prepend=order[0] - 2) != 1)
    lengths = np.diff(np.append(starts, len(order)))
    return tuple((int(order[at]), int(length)) for at, length in zip(starts, lengths, strict=True))


def _decompose(
    k: int, column: Array, sizes: tuple[int, ...], start: int, rotary: bool
) -> list[tuple[int, Axis]] | None:
    """Return the axes of these sizes with their steps, if each varies on its own, periodically, in one order."""
    rest, found = column, []
    for place in reversed(range(len(sizes))):
        size = sizes[place]
        digit, rest = rest % size, rest // size
        step = int(np.flatnonzero(digit != digit[0])[0])
        order = digit[: step * size : step]
        if len(order) != size or not np.array_equal(digit, order[(np.arange(len(digit)) // step) % size]):
            return None
        name = _order_name(order, rotary)
        if name is None:
            return None
        found.append((step, Axis(k, place, size, start if len(sizes) == 1 else 0, name)))
    if start and len(sizes) > 1:
        step, axis = found[-1]
        found[-1] = (step, replace(axis, start=start))
    return found


def _order_name(order: Array, rotary: bool) -> str | None:
    """Return the name of an order of the elements of an axis; None for one without."""
    size = len(order)
    stored = np.arange(size)
    if np.array_equal(order, stored):
        return ""
    if np.array_equal(order, stored[::-1]):
        return REVERSED
    if rotary and size % 2 == 0:
        if np.array_equal(order, stored.reshape(-1, 2).T.ravel()):
            return INTERLEAVED
        if np.array_equal(order, stored.reshape(2, -1).T.ravel()):
            return HALF_SPLIT
    return None
