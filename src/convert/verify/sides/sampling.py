"""Choose the part of a value that a recording keeps when the whole value is too large, and the size of each part.

A sample consists of whole vectors along the last axis, at some positions of the other axes. The positions follow from the shape,
the mask, their number and the seed, so a recording does not list them. A hash draws them, not NumPy's generators, whose streams
may change between versions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
METHOD = "splitmix64"  # of `positions`; recordings name it, so another method needs another name
LEAST = 2  # positions of a sample, in addition to those at the edges of its mask


@dataclass(frozen=True)
class Sample:
    """Part of a value.

    Attributes:
        shape: of the whole value.
        positions: in the flattened axes before the last, ascending.
    """

    shape: tuple[int, ...]
    positions: Array

    def take(self, value: Array) -> Array:
        """Return the sampled vectors of a whole value: [positions, last axis].

        Raises:
            ValueError: the value has another shape.
        """
        if value.shape != self.shape:
            raise ValueError(f"expected shape {list(self.shape)}, got {list(value.shape)}")
        return value.reshape(-1, self.shape[-1])[self.positions]

    def index(self, at: tuple[int, ...]) -> tuple[int, ...]:
        """Return the index in the whole value of an element of the sample."""
        prefix = np.unravel_index(int(self.positions[at[0]]), self.shape[:-1])
        return (*(int(k) for k in prefix), *at[1:])


def positions(shape: tuple[int, ...], mask: Array | None, count: int, seed: int) -> Array:
    """Choose `count` positions of a value of `shape`, ascending, among those that count.

    Positions at the edges of the mask come first, because padding would leak in there; then the last one, which has the longest
    context. The others are drawn.

    Args:
        mask: true where values count; its shape is a prefix of `shape`, with 1 for an axis along which all elements count the same.
    """
    counted, edges = _counted(shape, mask)
    drawn = _hash(counted.size, seed)
    first = np.zeros(counted.size, bool)
    for cell in np.unique(edges[edges >= 0]):  # one position for each edge cell of the mask
        same_cell = np.flatnonzero(edges == cell)
        first[same_cell[np.argmin(drawn[same_cell])]] = True
    last = np.zeros(counted.size, bool)
    last[np.flatnonzero(counted)[-1:]] = True
    order = np.lexsort((drawn, ~last, ~first, ~counted))
    chosen: Array = np.sort(order[: min(count, int(counted.sum()))])
    return chosen


def least(shape: tuple[int, ...], mask: Array | None) -> tuple[int, int]:
    """Return the fewest positions of a sample of this shape, and the number of positions that count."""
    counted, edges = _counted(shape, mask)
    total = int(counted.sum())
    return min(total, LEAST + len(np.unique(edges[edges >= 0]))), total


def _counted(shape: tuple[int, ...], mask: Array | None) -> tuple[Array, Array]:
    """Return for each position whether it counts, and the index of its cell in the mask if that is an edge, else -1.

    An edge is a cell that counts next to one that does not. Rows of the batch, the first axis, are not next to each other.
    """
    grid = shape[:-1]
    if mask is None:
        return np.ones(math.prod(grid), bool), np.full(math.prod(grid), -1)
    keep: Array = np.asarray(mask, bool)
    if keep.ndim == len(shape):
        keep = np.asarray(keep.any(axis=-1))
    keep = keep.reshape(keep.shape + (1,) * (len(grid) - keep.ndim))
    next_to_masked = np.zeros(keep.shape, bool)
    for axis in range(1, keep.ndim):
        ahead, behind = _along(axis, slice(None, -1)), _along(axis, slice(1, None))
        next_to_masked[ahead] |= ~keep[behind]
        next_to_masked[behind] |= ~keep[ahead]
    edges = np.where(keep & next_to_masked, np.arange(keep.size).reshape(keep.shape), -1)
    return np.broadcast_to(keep, grid).reshape(-1), np.broadcast_to(edges, grid).reshape(-1)


def _along(axis: int, piece: slice) -> tuple[slice, ...]:
    return (slice(None),) * axis + (piece,)


def _hash(count: int, seed: int) -> Array:
    """Compute SplitMix64 of 1, 2, ..., count (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", 2014)."""
    start = np.array([seed % 2**64], np.uint64)
    z = start + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    out: Array = z ^ (z >> np.uint64(31))
    return out


@dataclass(frozen=True)
class Cost:
    """The size of a value in a recording.

    Attributes:
        vector: bytes of one position.
        least: fewest positions of a sample.
        counted: positions that count: the most that a sample has.
        whole: all positions; with these the value is stored as it is.
    """

    vector: int
    least: int
    counted: int
    whole: int

    def fit(self, limit: int) -> int:
        """Return the number of positions that `limit` bytes hold: `whole`, or as many as fit, but at least `least`."""
        if self.vector * self.whole <= limit:
            return self.whole
        return max(self.least, min(self.counted, limit // max(self.vector, 1)))

    def bytes(self, limit: int) -> int:
        """Return the size under a limit of `limit` bytes."""
        return self.vector * self.fit(limit)


def allot(costs: Mapping[str, Cost], budget: int) -> dict[str, int]:
    """Return the number of positions of each value, under the largest common limit in bytes whose sum is within the budget.

    Raises:
        ValueError: even the fewest positions exceed the budget; the argument is their size in bytes.
    """
    fewest = sum(cost.bytes(0) for cost in costs.values())
    if fewest > budget:
        raise ValueError(fewest)
    low, high = 0, max((cost.vector * cost.whole for cost in costs.values()), default=0)
    while low < high:
        middle = (low + high + 1) // 2
        if sum(cost.bytes(middle) for cost in costs.values()) <= budget:
            low = middle
        else:
            high = middle - 1
    return {name: cost.fit(low) for name, cost in costs.items()}
