"""Which part of a value a recording keeps when the whole would be too large, and how many bytes each value may take.

A sample is whole vectors along the last axis, at positions of the other axes. The positions follow from the shape, the
mask, their number and the seed, so that a recording need not list them. They are drawn by a hash of their own and not by
NumPy's generators, whose streams may change between versions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
METHOD = "splitmix64"  # how `positions` draws; a recording says so, and another method is another name
LEAST = 2  # positions of a value that is sampled at all, beside those at the edges of its mask


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
        """The sampled vectors of a whole value: [positions, last axis].

        Raises:
            ValueError: it is not of this shape.
        """
        if value.shape != self.shape:
            raise ValueError(f"shapes differ: {list(value.shape)} and {list(self.shape)}")
        return value.reshape(-1, self.shape[-1])[self.positions]

    def index(self, at: tuple[int, ...]) -> tuple[int, ...]:
        """Where an element of the sample lies in the whole value."""
        prefix = np.unravel_index(int(self.positions[at[0]]), self.shape[:-1])
        return (*(int(k) for k in prefix), *at[1:])


def positions(shape: tuple[int, ...], mask: Array | None, count: int, seed: int) -> Array:
    """The `count` positions at which a value of `shape` is kept, ascending: only such that count.

    Those at the edges of the mask come first, where padding would leak in; then the last one, which sees the longest
    context; the others are drawn.

    Args:
        mask: true where values count; its shape is a prefix of `shape`, with 1 for an axis along which all count alike.
    """
    counted, edges = _counted(shape, mask)
    drawn = _hash(counted.size, seed)
    first = np.zeros(counted.size, bool)
    for cell in np.unique(edges[edges >= 0]):  # one position for each edge, of all along which the mask is the same
        alike = np.flatnonzero(edges == cell)
        first[alike[np.argmin(drawn[alike])]] = True
    last = np.zeros(counted.size, bool)
    last[np.flatnonzero(counted)[-1:]] = True
    order = np.lexsort((drawn, ~last, ~first, ~counted))
    chosen: Array = np.sort(order[: min(count, int(counted.sum()))])
    return chosen


def least(shape: tuple[int, ...], mask: Array | None) -> tuple[int, int]:
    """The fewest positions that stand for a value of this shape, and how many positions count."""
    counted, edges = _counted(shape, mask)
    total = int(counted.sum())
    return min(total, LEAST + len(np.unique(edges[edges >= 0]))), total


def _counted(shape: tuple[int, ...], mask: Array | None) -> tuple[Array, Array]:
    """Of each position, whether it counts, and the number of its place in the mask if that is at an edge, else -1.

    An edge is a place that counts beside one that does not; along the first axis, the batch, nothing is beside anything.
    """
    grid = shape[:-1]
    if mask is None:
        return np.ones(math.prod(grid), bool), np.full(math.prod(grid), -1)
    keep: Array = np.asarray(mask, bool)
    if keep.ndim == len(shape):
        keep = np.asarray(keep.any(axis=-1))
    keep = keep.reshape(keep.shape + (1,) * (len(grid) - keep.ndim))
    sidecar = np.zeros(keep.shape, bool)
    for axis in range(1, keep.ndim):
        ahead, behind = _along(axis, slice(None, -1)), _along(axis, slice(1, None))
        sidecar[ahead] |= ~keep[behind]
        sidecar[behind] |= ~keep[ahead]
    edges = np.where(keep & sidecar, np.arange(keep.size).reshape(keep.shape), -1)
    return np.broadcast_to(keep, grid).reshape(-1), np.broadcast_to(edges, grid).reshape(-1)


def _along(axis: int, piece: slice) -> tuple[slice, ...]:
    return (slice(None),) * axis + (piece,)


def _hash(count: int, seed: int) -> Array:
    """SplitMix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", 2014) of 1, 2, ..., count."""
    start = np.array([seed % 2**64], np.uint64)
    z = start + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    out: Array = z ^ (z >> np.uint64(31))
    return out


@dataclass(frozen=True)
class Cost:
    """What a value takes in a recording.

    Attributes:
        vector: bytes of one position.
        least: the fewest positions that it may be sampled at.
        counted: positions that count: the most that a sample has.
        whole: positions in all; with these many it is stored as it is.
    """

    vector: int
    least: int
    counted: int
    whole: int

    def fit(self, limit: int) -> int:
        """The positions that `limit` bytes hold: `whole`, or as many as fit, and never fewer than `least`."""
        if self.vector * self.whole <= limit:
            return self.whole
        return max(self.least, min(self.counted, limit // max(self.vector, 1)))

    def bytes(self, limit: int) -> int:
        """The bytes that it takes under a limit of `limit`."""
        return self.vector * self.fit(limit)


def allot(costs: Mapping[str, Cost], budget: int) -> dict[str, int]:
    """Positions for each value: all values have the same limit in bytes, the largest with which the sum is in the budget.

    Raises:
        ValueError: even the fewest positions of each take more; the argument is how many bytes those take.
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
