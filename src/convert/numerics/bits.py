"""Comparing arrays bit for bit, and up to a few roundings."""

from __future__ import annotations

from typing import Any

import numpy as np

from convert.core.tensor_spec import is_float
from convert.numerics.blocks import cut, everywhere, in_float64, largest
from convert.numerics.compare import epsilon

Array = np.ndarray[Any, np.dtype[Any]]
WORDS = (1, 2, 4, 8)  # bytes of an integer
ROUNDINGS = 4  # a mistake may have been made by other arithmetic, such as adding 1 and subtracting it again


def same_bits(a: Array, b: Array) -> bool:
    """Return whether two arrays have the same dtype, shape and bytes: NaN equals NaN, and 0 differs from -0."""
    return a.dtype == b.dtype and a.shape == b.shape and everywhere(np.array_equal, _words(a), _words(b))


def nearly(a: Array, b: Array) -> bool:
    """Return whether two float arrays differ by a few roundings only."""
    if a.dtype != b.dtype or a.shape != b.shape or not is_float(a.dtype.name):
        return False
    with np.errstate(invalid="ignore"):  # signalling NaNs, of swapped bytes
        slack = ROUNDINGS * epsilon(a.dtype.name) * largest(b)
        return all(bool(np.all(np.abs(x - y) <= slack)) for x, y in in_float64(a, b))


def unequal(got: Array, want: Array) -> Array:
    """Return a mask of the values that differ in any bit."""
    size = got.dtype.itemsize
    if size in WORDS:
        return np.asarray(_words(got) != _words(want))
    a, b = _bytes(got).reshape(-1, size), _bytes(want).reshape(-1, size)
    return np.asarray(np.any(a != b, axis=1)).reshape(got.shape)


def count_unequal(got: Array, want: Array) -> int:
    """Return how many values differ in any bit."""
    return sum(int(np.count_nonzero(unequal(*block))) for block in cut(got, want))


def _words(x: Array) -> Array:
    """Return the values as integers of their size, where there are such integers: this copies nothing, for any strides."""
    return x.view(f"u{x.itemsize}") if x.itemsize in WORDS else _bytes(x)


def _bytes(x: Array) -> Array:
    return np.ascontiguousarray(x).reshape(-1).view(np.uint8)
