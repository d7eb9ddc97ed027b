"""Relations between two tensors of one shape: a common factor, rows of one in the other, the region in which they differ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from convert.verify.weights.corruption.permutations import first_few

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


def indices_that_differ(differ: Array, shape: tuple[int, ...]) -> Indices | None:
    """Return the smallest share of the indices of an axis that holds all differences; None: each axis differs everywhere.

    Args:
        differ: the indices of the values that differ, one in each row.
        shape: of the tensor.
    """
    found = []
    for axis, size in enumerate(shape):
        indices = np.unique(differ[:, axis])
        if len(indices) < size:
            found.append((len(indices) / size, axis, indices))
    if not found:
        return None
    _, axis, indices = min(found, key=lambda place: place[:2])
    return Indices(axis, [int(k) for k in indices])
