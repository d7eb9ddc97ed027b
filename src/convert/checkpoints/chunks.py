"""Parts of arrays as they are stored, and how one is read piece by piece: memory is that of a piece, not of the array."""

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

PIECE = (
    1 << 22
)  # bytes: a piece, and what it becomes, stay in the processor's caches; smaller ones wait for the GIL more often


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
        """What it has in common with another box; None when that is nothing."""
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
        """What cuts this box out of an array whose first element is `origin`; a view, even of an array without axes."""
        slices = (slice(a - b, a - b + n) for a, b, n in zip(self.origin, origin, self.shape, strict=True))
        return (*slices, ...)


def whole(shape: tuple[int, ...]) -> Box:
    """The box of all elements."""
    return Box((0,) * len(shape), shape)


@dataclass(frozen=True)
class Grid:
    """The chunks of an array, in C order; those at the upper edges are cut off there.

    Attributes:
        shape: of the array.
        chunk: of a chunk.
    """

    shape: tuple[int, ...]
    chunk: tuple[int, ...]

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """How many there are along each axis."""
        return tuple(-(-n // c) for n, c in zip(self.shape, self.chunk, strict=True))

    @cached_property
    def _length(self) -> int:
        return math.prod(self.counts)

    @property
    def in_order(self) -> bool:
        """Whether the chunks, one after the other, have the array's elements in C order."""
        axis = next((k for k, c in enumerate(self.chunk) if c > 1), len(self.chunk) - 1)
        return all(c >= n for c, n in zip(self.chunk[axis + 1 :], self.shape[axis + 1 :], strict=True))

    def place(self, box: Box) -> tuple[int, ...]:
        """Where a chunk is in the grid, along each axis."""
        return tuple(a // c for a, c in zip(box.origin, self.chunk, strict=True))

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, k: int) -> Box:
        if not 0 <= k < self._length:
            raise IndexError(k)
        if self._length == 1:
            return whole(self.shape)
        at = [int(i) for i in np.unravel_index(k, self.counts)] if self.counts else []
        origin = tuple(i * c for i, c in zip(at, self.chunk, strict=True))
        return Box(origin, tuple(min(c, n - o) for c, n, o in zip(self.chunk, self.shape, origin, strict=True)))

    def __iter__(self) -> Iterator[Box]:
        return (self[k] for k in range(len(self)))


def undivided(shape: tuple[int, ...]) -> Grid:
    """The grid of an array that is stored in one."""
    return Grid(shape, tuple(max(n, 1) for n in shape))


class Meter:
    """Seconds by activity, summed over threads."""

    def __init__(self) -> None:
        self._here = local()
        self._all: list[dict[str, float]] = []  # one of each thread, which alone changes it

    def add(self, what: str, seconds: float) -> None:
        """Says that this thread spent so long."""
        mine = self._mine()
        mine[what] = mine.get(what, 0.0) + seconds

    @contextmanager
    def rest(self, what: str) -> Iterator[None]:
        """What this thread spends here, and nobody adds, counts as `what`."""
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


Piece = tuple[tuple[int, ...], np.ndarray]  # where its first element is in the array, and the elements


def pieces(
    fill: Callable[[memoryview], None], stored: tuple[int, ...], box: Box, dtype: np.dtype, *, swapped: bool = False
) -> Iterator[Piece]:
    """The pieces of a chunk that is stored in C order, from front to back, of at most `PIECE` bytes where an element is no larger.

    An array that is yielded is valid until the next one is asked for: they share memory.

    Args:
        fill: fills a buffer with the chunk's next bytes; raises what the reader raises.
        stored: shape of the chunk as stored; at an upper edge of the array it may reach beyond `box`.
        box: the part of the array that it holds.
        dtype: of the elements.
        swapped: whether their bytes are in the order that is not this machine's.
    """
    memory = np.empty(0, np.uint8)
    for tile in tiles(stored, dtype.itemsize):
        nbytes = tile.size * dtype.itemsize
        if nbytes > memory.size:  # the first is the largest
            memory = np.empty(nbytes, np.uint8)
        raw = memory[:nbytes]
        fill(raw.data)
        inside = tile.overlap((0,) * len(stored), box.shape)
        if inside is not None:  # else it is beyond the array's edge
            values = raw.view(dtype).reshape(tile.shape)
            if swapped:
                values.byteswap(inplace=True)
            yield _sum(box.origin, inside.origin), values[inside.within(tile.origin)]


def cut(origin: tuple[int, ...], values: np.ndarray) -> Iterator[Piece]:
    """An array in memory as pieces, which are views of it; so that what is made of them stays small."""
    for tile in tiles(values.shape, values.dtype.itemsize):
        yield _sum(origin, tile.origin), values[tile.within((0,) * values.ndim)]


def _sum(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(map(operator.add, a, b))


def tiles(shape: tuple[int, ...], itemsize: int) -> Iterator[Box]:
    """Parts of an array of at most `PIECE` bytes, in C order; ranges along one axis, whole on the axes behind it, single on those before."""
    if math.prod(shape) == 0:
        return
    axis = next((k for k in range(len(shape)) if itemsize * math.prod(shape[k + 1 :]) <= PIECE), 0)
    behind = shape[axis + 1 :]
    along = shape[axis : axis + 1]  # nothing for an array without axes
    step = max(1, PIECE // (itemsize * math.prod(behind)))
    for lead in itertools.product(*map(range, shape[:axis])):
        for start in range(0, math.prod(along), step):
            here = tuple(min(step, n - start) for n in along)
            yield Box((*lead, *(start for _ in along), *(0 for _ in behind)), (*(1 for _ in lead), *here, *behind))


WHOLE = Budget()  # of all that `in_one` reads in this process


def in_one(
    origin: tuple[int, ...], read: Callable[[], np.ndarray], nbytes: int, meter: Meter | None
) -> Iterator[Piece]:
    """The pieces of what can only be read at once; a large one waits while other threads hold too much of the like.

    Args:
        nbytes: of what is read. To make it of what is stored takes as much again: TensorStore holds a chunk as it was decompressed
            and as it was asked for, others an array in the order of the file and in C order.
    """
    if nbytes <= PIECE:  # no more than what is read in pieces
        yield from cut(origin, _metered(read, meter))
        return
    started = time.perf_counter()
    with WHOLE.holding(2 * nbytes) as give_back:
        if meter is not None:
            meter.add("wait", time.perf_counter() - started)
        values = _metered(read, meter)
        give_back(nbytes)
        yield from cut(origin, values)


def _metered(read: Callable[[], np.ndarray], meter: Meter | None) -> np.ndarray:
    started = time.perf_counter()
    values = read()
    if meter is not None:
        meter.add("read", time.perf_counter() - started)
    return values


def timed(pieces: Iterator[Piece], meter: Meter | None, what: str) -> Iterator[Piece]:
    """The same pieces; the time that it takes to get them is added to the meter."""
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
