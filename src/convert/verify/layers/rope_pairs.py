"""The pairs of features that RoPE turns, listed one by one: what the layers level goes by, beside the plan's permutations."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


def pairs(width: int, convention: str) -> list[tuple[int, int]]:
    """The pairs of a head's features, the fastest turning first.

    >>> pairs(6, "interleaved"), pairs(6, "half-split")
    ([(0, 1), (2, 3), (4, 5)], [(0, 3), (1, 4), (2, 5)])
    """
    half = width // 2
    return [(2 * k, 2 * k + 1) if convention == "interleaved" else (k, k + half) for k in range(half)]


def paired(y: Array, axis: int, source: str, target: str) -> Array:
    """`y` with each pair of the source's convention where the target's has it."""
    order = [0] * y.shape[axis]
    for ours, theirs in zip(pairs(len(order), source), pairs(len(order), target), strict=True):
        for one, other in zip(ours, theirs, strict=True):
            order[other] = one
    return np.take(y, order, axis)
