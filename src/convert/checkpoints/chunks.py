"""Chunks of stored arrays, read piece by piece, so that the memory is that of a piece, not of the array."""

from __future__ import annotations

import itertools
import math
import operator
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from threading import local
from typing import Any

import numpy as np

from convert.checkpoints.memory_budget import Budget

# Bytes. A piece and its converted copy fit into the processor's caches; smaller pieces wait for the GIL more often.
PIECE = 1 << 22


@dataclass(frozen=True)
class Box:
    """A rectangular part of an array.

    Attributes:
        origin: its first element.
        shape: its extent along each axis.
    """

    origin: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def overlap(self, origin: Sequence[int], shape: Sequence[int]) -> Box | None:
        """Return the intersection with another box; None where it is empty."""
        starts, extents = [], []
        for a, n, b, m in zip(self.origin, self.shape, origin, shape, strict=True):
            start = max(a, b)
            extent = min(a + n, b + m) - start
            if extent <= 0:
                return None
            starts.append(start)
            extents.append(extent)
        return Box(tuple(starts), tuple(extents))

    def within(self, origin: Sequence[int]) -> tuple[Any, ...]:
        """Return the index of this box in an array whose first element is `origin`; it selects a view, even of a scalar."""
        slices = (slice(a - b, a - b + n) for a, b, n in zip(self.origin, origin, self.shape, strict=True))
        return (*slices, ...)


def full_box(shape: tuple[int, ...]) -> Box:
    """Return the box of all elements."""
    return Box((0,) * len(shape), shape)


@dataclass(frozen=True)
class Grid:
    """The chunks of an array, in C order; those at the upper edges end there.

    Attributes:
        shape: of the array.
        chunk: of a chunk.
    """

    shape: tuple[int, ...]
    chunk: tuple[int, ...]

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """The number of chunks along each axis."""
        return tuple(-(-n // c) for n, c in zip(self.shape, self.chunk, strict=True))

    @cached_property
    def _length(self) -> int:
        return math.prod(self.counts)

    @property
    def in_order(self) -> bool:
        """Whether the chunks, joined one after the other, give the elements of the array in C order."""
        axis = next((k for k, c in enumerate(self.chunk) if c > 1), len(self.chunk) - 1)
        return all(c >= n for c, n in zip(self.chunk[axis + 1 :], self.shape[axis + 1 :], strict=True))

    def place(self, box: Box) -> tuple[int, ...]:
        """Return the index of a chunk in the grid, along each axis."""
        return tuple(a // c for a, c in zip(box.origin, self.chunk, strict=True))

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, k: int) -> Box:
        if not 0 <= k < self._length:
            raise IndexError(k)
        if self._length == 1:
            return full_box(self.shape)
        at = [int(i) for i in np.unravel_index(k, self.counts)] if self.counts else []
        origin = tuple(i * c for i, c in zip(at, self.chunk, strict=True))
        return Box(origin, tuple(min(c, n - o) for c, n, o in zip(self.chunk, self.shape, origin, strict=True)))

    def __iter__(self) -> Iterator[Box]:
        return (self[k] for k in range(len(self)))


def single_chunk(shape: tuple[int, ...]) -> Grid:
    """Return the grid of an array that is stored in one chunk."""
    return Grid(shape, tuple(max(n, 1) for n in shape))


class Meter:
    """Measures seconds by activity, summed over threads."""

    def __init__(self) -> None:
        self._here = local()
        self._all: list[dict[str, float]] = []  # one per thread; only this thread changes it

    def add(self, what: str, seconds: float) -> None:
        """Add seconds that this thread spent on `what`."""
        mine = self._mine()
        mine[what] = mine.get(what, 0.0) + seconds

    @contextmanager
    def rest(self, what: str) -> Iterator[None]:
        """Add the time of this block to `what`, without the time that the block itself adds to other activities."""
        mine = self._mine()
        started, before = time.perf_counter(), sum(mine.values())
        try:
            yield
        finally:
            self.add(what, time.perf_counter() - started - (sum(mine.values()) - before))

    def _mine(self) -> dict[str, float]:
        mine: dict[str, float] | None = getattr(self._here, "seconds", None)
        if mine is None:
            mine = self._here.seconds = {}
            self._all.append(mine)
        return mine

    @property
    def seconds(self) -> dict[str, float]:
        """Activity -> seconds so far."""
        words = dict.fromkeys(what for one in self._all for what in list(one))
        return {what: sum(one.get(what, 0.0) for one in self._all) for what in words}


Piece = tuple[tuple[int, ...], np.ndarray]  # index of its first element in the array, and the elements


def pieces(
    fill: Callable[[memoryview], None], stored: tuple[int, ...], box: Box, dtype: np.dtype, *, swapped: bool = False
) -> Iterator[Piece]:
    """Yield the pieces of a chunk that is stored in C order, from front to back, of at most `PIECE` bytes (or one element).

    A yielded array is valid until the next one is requested: they share memory.

    Args:
        fill: fills a buffer with the next bytes of the chunk; its errors pass through.
        stored: shape of the stored chunk; at an upper edge of the array it may exceed `box`.
        box: the part of the array in this chunk.
        dtype: of the elements.
        swapped: whether they have the other byte order than this machine.
    """
    memory = np.empty(0, np.uint8)
    for tile in tiles(stored, dtype.itemsize):
        nbytes = tile.size * dtype.itemsize
        if nbytes > memory.size:  # the first tile is the largest
            memory = np.empty(nbytes, np.uint8)
        raw = memory[:nbytes]
        fill(raw.data)
        inside = tile.overlap((0,) * len(stored), box.shape)
        if inside is not None:  # else it is beyond the edge of the array
            values = raw.view(dtype).reshape(tile.shape)
            if swapped:
                values.byteswap(inplace=True)
            yield _sum(box.origin, inside.origin), values[inside.within(tile.origin)]


def cut(origin: tuple[int, ...], values: np.ndarray) -> Iterator[Piece]:
    """Yield an array in memory as pieces, which are views of it, so that converted copies stay small."""
    for tile in tiles(values.shape, values.dtype.itemsize):
        yield _sum(origin, tile.origin), values[tile.within((0,) * values.ndim)]


def _sum(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(map(operator.add, a, b))


def tiles(shape: tuple[int, ...], itemsize: int, most: int | None = None) -> Iterator[Box]:
    """Yield parts of an array of at most `most` bytes (None: `PIECE`), in C order.

    A part is a range along one axis, full on the axes behind it, and one index on those before it.
    """
    if math.prod(shape) == 0:
        return
    most = most or PIECE
    axis = next((k for k in range(len(shape)) if itemsize * math.prod(shape[k + 1 :]) <= most), 0)
    behind = shape[axis + 1 :]
    along = shape[axis : axis + 1]  # nothing for an array without axes
    step = max(1, most // (itemsize * math.prod(behind)))
    for lead in itertools.product(*map(range, shape[:axis])):
        for start in range(0, math.prod(along), step):
            here = tuple(min(step, n - start) for n in along)
            yield Box((*lead, *(start for _ in along), *(0 for _ in behind)), (*(1 for _ in lead), *here, *behind))


AT_ONCE_BUDGET = Budget()  # of all arrays that `read_at_once` reads in this process


def read_at_once(
    origin: tuple[int, ...], read: Callable[[], np.ndarray], nbytes: int, meter: Meter | None
) -> Iterator[Piece]:
    """Yield the pieces of an array that can only be read at once. Waits while other threads use too much memory for such reads.

    Args:
        nbytes: size of the array. Reading takes twice as much: TensorStore keeps a chunk decompressed and as the requested
            array, other readers an array in the order of the file and in C order.
    """
    if nbytes <= PIECE:  # no larger than a piece
        yield from cut(origin, _metered(read, meter))
        return
    started = time.perf_counter()
    with AT_ONCE_BUDGET.reserve(2 * nbytes) as release:
        if meter is not None:
            meter.add("wait", time.perf_counter() - started)
        values = _metered(read, meter)
        release(nbytes)
        yield from cut(origin, values)


def _metered(read: Callable[[], np.ndarray], meter: Meter | None) -> np.ndarray:
    started = time.perf_counter()
    values = read()
    if meter is not None:
        meter.add("read", time.perf_counter() - started)
    return values


def timed(pieces: Iterator[Piece], meter: Meter | None, what: str) -> Iterator[Piece]:
    """Yield the same pieces, and add the time to get them to the meter."""
    if meter is None:
        yield from pieces
        return
    while True:
        started = time.perf_counter()
        piece = next(pieces, None)
        meter.add(what, time.perf_counter() - started)
        if piece is None:
            return
        yield piece
