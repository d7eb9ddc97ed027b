"""Comparing arrays bit for bit, and up to a few roundings."""

from __future__ import annotations

from typing import Any

import numpy as np

from convert.core.tensor_spec import is_float
from convert.numerics.compare import epsilon

Array = np.ndarray[Any, np.dtype[Any]]
ROUNDINGS = 4  # a mistake may have been made by other arithmetic, such as adding 1 and subtracting it again


def same_bits(a: Array, b: Array) -> bool:
    """Return whether two arrays have the same dtype, shape and bytes: NaN equals NaN, and 0 differs from -0."""
    return a.dtype == b.dtype and a.shape == b.shape and bool(np.array_equal(_words(a), _words(b)))


def nearly(a: Array, b: Array) -> bool:
    """Return whether two float arrays differ by a few roundings only."""
    if a.dtype != b.dtype or a.shape != b.shape or not is_float(a.dtype.name):
        return False
    eps = epsilon(a.dtype.name)
    with np.errstate(invalid="ignore"):  # signalling NaNs, of swapped bytes
        x, y = a.astype(np.float64), b.astype(np.float64)
    return bool(np.all(np.abs(x - y) <= ROUNDINGS * eps * np.maximum(np.abs(y), np.max(np.abs(y), initial=0.0))))


def unequal(got: Array, want: Array) -> Array:
    """Return a mask of the values that differ in any bit."""
    size = got.dtype.itemsize
    a, b = _bytes(got).reshape(-1, size), _bytes(want).reshape(-1, size)
    return np.asarray(np.any(a != b, axis=1)).reshape(got.shape)


def count_unequal(got: Array, want: Array) -> int:
    """Return how many values differ in any bit."""
    return int(np.count_nonzero(unequal(got, want)))


def _words(x: Array) -> Array:
    """Return the values as integers of their size, where there are such integers: this copies nothing, for any strides."""
    return x.view(f"u{x.itemsize}") if x.itemsize in (1, 2, 4, 8) else _bytes(x)


def _bytes(x: Array) -> Array:
    return np.ascontiguousarray(x).reshape(-1).view(np.uint8)
