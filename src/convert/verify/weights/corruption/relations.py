"""Relations between two tensors of one shape: a common factor, rows of one in the other, the region in which they differ."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from convert.numerics.bits import unequal
from convert.numerics.blocks import BLOCK, blocks, in_float64, longest_axis
from convert.verify.weights.corruption.permutations import first_few

Array = np.ndarray[Any, np.dtype[Any]]
MOST_WHOLE = 1 << 22  # values of a tensor that is looked at without a sample
MAX_ROWS = 1 << 17  # rows whose order is looked up


def common_factor(got: Array, want: Array, of: Callable[[Array], Array] | None = None) -> float | None:
    """Return the number by which all values of `want`, or of a function of them, are multiplied, up to a few roundings; None if there is none."""
    if got.dtype.kind in "iub" or got.size < 2:
        return None
    few = spread(got, want)
    if few[0] is not got and common_factor(few[0], few[1], of) is None:
        return None
    with np.errstate(all="ignore"):
        sums = np.zeros(2)
        most = np.zeros(2)  # of a right value, and of a difference
        for x, y in _pairs(got, want, of):
            sums += np.vdot(y, y), np.vdot(y, x)
            most = np.maximum(most, (np.abs(y).max(initial=0), np.abs(x - y).max(initial=0)))
        factor = float(sums[1] / sums[0]) if sums[0] else 0.0
        if not np.isfinite(factor) or factor in (0.0, 1.0):
            return None
        bound = 4 * float(np.finfo(np.float32).eps if got.dtype.itemsize >= 4 else 2.0**-8) * most[0]
        bound = min(bound, most[1] / 8)  # of another change, a factor near 1 explains little
        right = all(bool(np.abs(x / factor - y).max(initial=0) <= bound) for x, y in _pairs(got, want, of))
        return factor if right else None


def _pairs(got: Array, want: Array, of: Callable[[Array], Array] | None) -> Iterator[tuple[Array, Array]]:
    return ((x, of(y) if of else y) for x, y in in_float64(got, want))


def spread(*arrays: Array) -> tuple[Array, ...]:
    """Return some values of large arrays of one shape, spread evenly along the longest axis; of others, all."""
    shape = arrays[0].shape
    return _taken(arrays, np.arange(shape[longest_axis(shape)])) if arrays[0].size > MOST_WHOLE else arrays


def sample(got: Array, want: Array, *more: Array) -> tuple[Array, ...]:
    """Return some values of large arrays of one shape, at indices of the longest axis at which the first two differ; of others, all.

    What is true of all values, of each index or of each pair of values, is true of these: they tell at little cost what is not.
    """
    indices = differing(got, want)[longest_axis(got.shape)] if got.size > MOST_WHOLE else ()
    return _taken((got, want, *more), np.asarray(indices)) if len(indices) else (got, want, *more)


def first_found(
    finders: Sequence[Callable[..., Iterator[tuple[str, str]]]],
    of_the_whole: Collection[Callable[..., Iterator[tuple[str, str]]]],
    got: Array,
    want: Array,
    *more: Array,
) -> tuple[str, str] | None:
    """Return the first change that a finder sees; None if none sees one.

    Args:
        finders: arrays -> name and description of each change.
        of_the_whole: those that some values tell nothing; of large arrays the others look at a `sample` first.
    """
    few = sample(got, want, *more)
    for find in finders:
        if few[0] is not got and find not in of_the_whole and next(find(*few), None) is None:
            continue
        if (change := next(find(got, want, *more), None)) is not None:
            return change
    return None


def _taken(arrays: tuple[Array, ...], indices: Array) -> tuple[Array, ...]:
    axis = longest_axis(arrays[0].shape)
    most = max(2, BLOCK * arrays[0].shape[axis] // arrays[0].size)
    return tuple(x.take(indices[:: -(-len(indices) // most) or 1], axis) for x in arrays)


def places_of_rows(got: Array, want: Array, axis: int) -> list[int] | None:
    """Return where in `want` each row of `got` along an axis is; -1: it is no row of `want`. None if rows of `want` repeat, or are too many."""
    size = got.shape[axis]
    if not 1 < size <= MAX_ROWS:
        return None
    across = [n for k, n in enumerate(got.shape) if k != axis]
    if got.size > MOST_WHOLE and across:  # where no row is one of `want` in some places, none is
        turned = [np.moveaxis(x, axis, 0) for x in (got, want)]
        few = [slice(None, None, -(-got.size // BLOCK) if n == max(across) else None) for n in across]
        if not set(_rows(turned[0][(slice(None), *few)])) & set(_rows(turned[1][(slice(None), *few)])):
            return None
    places = {row: k for k, row in enumerate(_rows(np.moveaxis(want, axis, 0)))}
    return [places.get(row, -1) for row in _rows(np.moveaxis(got, axis, 0))] if len(places) == size else None


def _rows(x: Array) -> Iterator[int]:
    """Yield 64 bits of each row: the rows may be larger than memory."""
    step = max(1, BLOCK * len(x) // max(1, x.size))
    for k in range(0, len(x), step):
        yield from (hash(row.tobytes()) for row in np.ascontiguousarray(x[k : k + step]))


@dataclass(frozen=True)
class Indices:
    """A few indices of an axis, outside of which two tensors are equal."""

    axis: int
    indices: list[int]

    @property
    def where(self) -> str:
        which = f"index {self.indices[0]}" if len(self.indices) == 1 else f"the indices {first_few(self.indices)}"
        return f"in {which} of axis {self.axis}"

    def take(self, x: Array) -> Array:
        """Return the values there; of one index, without the axis."""
        return np.take(x, self.indices[0] if len(self.indices) == 1 else self.indices, self.axis)


def sums_along(got: Array, want: Array, axis: int) -> Array:
    """Return for each index of an axis the sums of `want` squared and of its products with `got`, and the means of both."""
    sums = np.zeros((4, got.shape[axis]))
    across = tuple(k for k in range(got.ndim) if k != axis)
    for place in blocks(got.shape):
        x, y = got[place].astype(np.float64), want[place].astype(np.float64)
        some = place[axis] if axis < len(place) else slice(None)
        sums[:, some] += [v.sum(axis=across) for v in (y * y, x * y, x, y)]
    sums[2:] *= got.shape[axis] / got.size
    return sums


def along(values: Array, axis: int, shape: tuple[int, ...]) -> Array:
    """Return one value for each index of an axis in the shape of a tensor; takes no memory."""
    return np.broadcast_to(values.reshape([-1 if k == axis else 1 for k in range(len(shape))]), shape)


def differing(got: Array, want: Array) -> list[Array]:
    """Return the indices of each axis at which two tensors differ."""
    found = [np.zeros(size, bool) for size in got.shape]
    for place in blocks(got.shape) if got.ndim else ():
        differ = unequal(got[place], want[place])
        for axis, indices in enumerate(found):
            part = indices[place[-1]] if axis == len(place) - 1 else indices
            part |= differ.any(axis=tuple(k for k in range(got.ndim) if k != axis))
    return [np.flatnonzero(indices) for indices in found]


def indices_that_differ(got: Array, want: Array) -> Indices | None:
    """Return the smallest share of the indices of an axis that holds all differences; None: each axis differs everywhere."""
    found = []
    for axis, indices in enumerate(differing(got, want)):
        size = got.shape[axis]
        if len(indices) < size:
            found.append((len(indices) / size, axis, indices))
    if not found:
        return None
    _, axis, indices = min(found, key=lambda place: place[:2])
    return Indices(axis, [int(k) for k in indices])
