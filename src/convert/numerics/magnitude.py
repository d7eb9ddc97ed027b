"""How large values are, for errors that are relative to them."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
SAME = 1e-5  # relative; a mask that is added to scores of about 10 is a number of at least 1e6
FAR = 1e4  # times the largest of the other values
ALONE = 1e15  # the same, for one value: next to it nothing of the others is left in float64


def magnitudes(values: Array) -> Array:
    """Return for each value what its error is relative to: the largest finite magnitude.

    A number that stands for a masked value, such as -1e30 for a logit, or -1e9 that was added to one, is so much larger that no error
    of the others would show beside it. So they are relative to the largest of the others.

    >>> magnitudes(np.array([3.0, -2.0, -1e30, -1e30]))
    array([3.e+00, 3.e+00, 1.e+30, 1.e+30])
    """
    size = np.abs(values)
    left = np.isfinite(size)
    largest = float(size.max(initial=0.0, where=left))
    found = np.full(size.shape, largest)
    while largest > 0:
        masked = left & (size >= largest * (1 - SAME))
        left &= ~masked
        next_largest = float(size.max(initial=0.0, where=left))
        far = FAR if np.count_nonzero(masked) > 1 else ALONE
        if not 0 < next_largest <= largest / far:
            break
        found[left] = next_largest
        largest = next_largest
    return found


def relative_error(got: Array, want: Array) -> float:
    """Return the largest error, relative to `magnitudes`; infinite for other shapes, and for an infinity or NaN on one side."""
    if got.shape != want.shape:
        return float("inf")
    with np.errstate(all="ignore"):
        sizes = magnitudes(want)
        errors = np.where((got == want) | (np.isnan(got) & np.isnan(want)), 0.0, np.abs(got - want)) / np.where(
            sizes == 0, 1.0, sizes
        )
    worst = float(errors.max(initial=0.0))
    return worst if np.isfinite(worst) else float("inf")
