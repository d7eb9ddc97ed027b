"""Parts of arrays as they are stored, and how one is read piece by piece: memory is that of a piece, not of the array."""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from threading import Lock

import numpy as np

PIECE = 1 << 20  # bytes: a piece, and what it becomes, stay in the processor's second-level cache


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

    def within(self, origin: Sequence[int]) -> tuple[slice, ...]:
        """Slices that cut this box out of an array whose first element is `origin`."""
        return tuple(slice(a - b, a - b + n) for a, b, n in zip(self.origin, origin, self.shape, strict=True))


def whole(shape: tuple[int, ...]) -> Box:
    """The box of all elements."""
    return Box((0,) * len(shape), shape)


@dataclass(frozen=True)
class Grid(Sequence[Box]):
    """The chunks of an array, in C order; those at the upper edges are cut off there.

    Attributes:
        shape: of the array.
        chunk: of a chunk.
    """

    shape: tuple[int, ...]
    chunk: tuple[int, ...]

    @property
    def counts(self) -> tuple[int, ...]:
        """How many there are along each axis."""
        return tuple(-(-n // c) for n, c in zip(self.shape, self.chunk, strict=True))

    def __len__(self) -> int:
        return math.prod(self.counts)

    def index(self, box: Box) -> tuple[int, ...]:  # type: ignore[override]
        """Where a chunk is in the grid, along each axis."""
        return tuple(a // c for a, c in zip(box.origin, self.chunk, strict=True))

    def __getitem__(self, k: int) -> Box:  # type: ignore[override]
        if not 0 <= k < len(self):
            raise IndexError(k)
        at = [int(i) for i in np.unravel_index(k, self.counts)] if self.counts else []
        origin = tuple(i * c for i, c in zip(at, self.chunk, strict=True))
        return Box(origin, tuple(min(c, n - o) for c, n, o in zip(self.chunk, self.shape, origin, strict=True)))


def undivided(shape: tuple[int, ...]) -> Grid:
    """The grid of an array that is stored in one."""
    return Grid(shape, tuple(max(n, 1) for n in shape))


class Meter:
    """Seconds by activity, summed over threads."""

    def __init__(self) -> None:
        self._seconds: Counter[str] = Counter()
        self._lock = Lock()

    def add(self, what: str, seconds: float) -> None:
        with self._lock:
            self._seconds[what] += seconds  # type: ignore[assignment]

    @property
    def seconds(self) -> dict[str, float]:
        """Activity -> seconds so far."""
        return dict(self._seconds)


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
        dtype: of the elements. swapped: whether their bytes are in the other order.
    """
    rank = len(stored)
    if math.prod(stored) == 0:
        return
    axis = _axis(stored, dtype.itemsize) or 0
    along, below = stored[axis] if rank else 1, dtype.itemsize * math.prod(stored[axis + 1 :])
    step = min(along, max(1, PIECE // below))
    memory = np.empty(step * below, np.uint8)
    for lead in itertools.product(*map(range, stored[:axis])):
        for start in range(0, along, step):
            count = min(step, along - start)
            raw = memory[: count * below]
            fill(raw.data)
            values = raw.view(dtype)
            if swapped:
                values.byteswap(inplace=True)
            if rank == 0:
                yield (), values.reshape(())
                continue
            inside = all(i < n for i, n in zip(lead, box.shape, strict=False)) and start < box.shape[axis]
            if not inside:
                continue  # beyond the array's edge
            shaped = values.reshape((1,) * axis + (count, *stored[axis + 1 :]))
            cut = (slice(None),) * axis + tuple(slice(0, n) for n in (box.shape[axis] - start, *box.shape[axis + 1 :]))
            local = (*lead, start, *(0,) * (rank - axis - 1))
            yield tuple(a + b for a, b in zip(box.origin, local, strict=True)), shaped[cut]


def cut(origin: tuple[int, ...], values: np.ndarray) -> Iterator[Piece]:
    """An array in memory as pieces, which are views of it; so that what is made of them stays small."""
    axis = _axis(values.shape, values.dtype.itemsize)
    if axis is None:
        yield origin, values
        return
    below = values.dtype.itemsize * math.prod(values.shape[axis + 1 :])
    step = max(1, PIECE // below)
    for lead in itertools.product(*map(range, values.shape[:axis])):
        for start in range(0, values.shape[axis], step):
            at = (*lead, start, *(0,) * (values.ndim - axis - 1))
            slices = (*(slice(i, i + 1) for i in lead), slice(start, start + step))
            yield tuple(a + b for a, b in zip(origin, at, strict=True)), values[slices]


def _axis(shape: tuple[int, ...], itemsize: int) -> int | None:
    """The first axis such that all behind it is no more than a piece; None for an array that has none, or no elements.

    Pieces are ranges along it, whole on the axes behind it and single elements on those before it.
    """
    if math.prod(shape) == 0:
        return None
    return next((k for k in range(len(shape)) if itemsize * math.prod(shape[k + 1 :]) <= PIECE), None)


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
