"""Relations between two tensors of one shape: a common factor, rows of one in the other, the region in which they differ."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
MAX_ROWS = 1 << 17  # rows whose order is looked up


def common_factor(got: Array, want: Array) -> float | None:
    """Return the number by which all values of `want` are multiplied, up to a few roundings; None if there is none."""
    if got.dtype.kind in "iub" or got.size < 2:
        return None
    x, y = got.astype(np.float64), want.astype(np.float64)
    norm = float(np.vdot(y, y))
    with np.errstate(all="ignore"):
        factor = float(np.vdot(y, x)) / norm if norm else 0.0
        if not np.isfinite(factor) or factor in (0.0, 1.0):
            return None
        bound = 4 * float(np.finfo(np.float32).eps if got.dtype.itemsize >= 4 else 2.0**-8) * float(np.abs(y).max())
        left = float(np.abs(x / factor - y).max())  # of another change, a factor near 1 explains little
        return factor if left <= min(bound, float(np.abs(x - y).max()) / 8) else None


def places_of_rows(got: Array, want: Array, axis: int) -> list[int] | None:
    """Return where in `want` each row of `got` along an axis is; -1: it is no row of `want`. None if rows of `want` repeat, or are too many."""
    size = got.shape[axis]
    if not 1 < size <= MAX_ROWS:
        return None
    ours, theirs = (np.ascontiguousarray(np.moveaxis(x, axis, 0)).reshape(size, -1) for x in (got, want))
    places = {row.tobytes(): k for k, row in enumerate(theirs)}
    return [places.get(row.tobytes(), -1) for row in ours] if len(places) == size else None


def differing_block(differ: Array, shape: tuple[int, ...]) -> tuple[int, int, int] | None:
    """Return axis, start and stop of the narrowest range of several rows that holds all differences; None: it is the whole.

    Args:
        differ: the indices of the values that differ, one in each row.
        shape: of the tensor.
    """
    low, high = differ.min(axis=0), differ.max(axis=0) + 1
    found = [
        (int(b - a) / size, axis, int(a), int(b))
        for axis, (a, b, size) in enumerate(zip(low, high, shape, strict=True))
        if 1 < b - a < size
    ]
    return min(found)[1:] if found else None
