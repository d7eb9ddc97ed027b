"""Run an operation with other numbers in some elements of its operands, and see which elements of its results change."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from convert.programs.program import REFUSALS, Array, Operation

HUGE = 1e3  # what is added to hide a score is larger, with any weights
CHANGED = 1e-12  # relative


def others(array: Array, where: Array, seed: int, mask: Array | bool = False) -> Iterator[Array]:
    """Yield an array with other numbers in some elements: of the same sign, as a logarithm needs them, and far on either side.

    Args:
        array: as it is.
        where: these elements.
        seed: of the numbers.
        mask: which elements hide what they are added to; they still do with the others.
    """
    if not where.any():
        yield from [array] * 3
        return
    random = np.random.default_rng(seed)
    factor = random.uniform(1.1, 1.9, array.shape)
    with np.errstate(over="ignore"):  # a mask may be the largest number
        scaled = np.where(array == 0, factor, array * factor)
    yield np.where(where & ~np.asarray(mask), scaled, array)
    noise = random.uniform(1.0, 3.0, array.shape) * random.choice((-1.0, 1.0), array.shape)
    size = np.where(mask, np.minimum(np.abs(array), HUGE / 10), np.abs(array))
    for step in (noise, -noise):
        with np.errstate(over="ignore", invalid="ignore"):
            yield np.where(where, array + step * (1 + size), array)


def run(operation: Operation, operands: Sequence[Array]) -> list[Array] | None:
    """Return what an operation makes of operands; None if it does not take them."""
    with np.errstate(all="ignore"):
        try:
            return [np.asarray(out) for out in operation.again(operands)]
        except REFUSALS:
            return None


def changes(before: Array, after: Array) -> Array:
    """Return which elements are others; the same rounding in another order is none."""
    with np.errstate(all="ignore"):
        if before.dtype.kind not in "fc":
            return np.asarray(before != after)
        same = (before == after) | (np.isnan(before) & np.isnan(after))
        largest = np.maximum(np.abs(before), np.abs(after))
        return np.asarray(~same & ~(np.isfinite(largest) & (np.abs(after - before) <= CHANGED * largest)))
