"""Blocks of large arrays: what is compared block by block takes the memory of one, and ends at the first that differs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from types import EllipsisType
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
Place = tuple[slice | EllipsisType, ...]
BLOCK = 1 << 20  # values


def longest_axis(shape: tuple[int, ...]) -> int:
    """Return the axis along which an array is cut."""
    return max(range(len(shape)), key=lambda axis: shape[axis], default=0)


def blocks(shape: tuple[int, ...]) -> Iterator[Place]:
    """Yield the places of the blocks of an array, which is cut along its longest axis."""
    if not shape:
        yield (...,)
        return
    axis = longest_axis(shape)
    step = max(1, BLOCK * shape[axis] // max(1, math.prod(shape)))
    for first in range(0, shape[axis], step):
        yield (*(slice(None),) * axis, slice(first, first + step))


def cut(*arrays: Array) -> Iterator[tuple[Array, ...]]:
    """Yield the blocks of arrays of one shape."""
    for place in blocks(arrays[0].shape):
        yield tuple(x[place] for x in arrays)


def in_float64(*arrays: Array) -> Iterator[tuple[Array, ...]]:
    """Yield the blocks of arrays of one shape in float64."""
    for block in cut(*arrays):
        yield tuple(x.astype(np.float64) for x in block)


def everywhere(holds: Callable[..., Any], *arrays: Array) -> bool:
    """Whether something holds in each block of arrays of one shape."""
    return all(bool(holds(*block)) for block in cut(*arrays))


def largest(x: Array) -> float:
    """Return the largest size of a value, in float64; NaN where a value is one."""
    return float(np.max([np.abs(y).max(initial=0.0) for (y,) in in_float64(x)], initial=0.0))
