"""Lay the elements of a source's value out as the target has a value of as many elements."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from convert.programs.divergence.shared_values import visible

Array = np.ndarray[Any, np.dtype[Any]]
MOST_AXES = 6
MOST_LAYOUTS = 24
SAME = 1e-9


def layouts(array: Array, like: Array, anchors: Sequence[tuple[Array, Array]] = ()) -> Iterator[Array]:
    """Yield `array` in the shape of `like`, the likeliest order of its axes first.

    Args:
        anchors: pairs of the same numbers on both sides, first the source's. Where such a pair has the shapes of `array` and
            `like`, it tells where each element goes.
    """
    if array.size != like.size:
        return
    kept = array.reshape([size for size in array.shape if size > 1])
    orders = [] if kept.ndim > MOST_AXES else _orders(kept.shape, like.shape)
    beside = [(one, two) for one, two in anchors if one.shape == array.shape and two.shape == like.shape]
    moved: list[Array] = []
    for one, two in beside:
        axes = one.reshape(kept.shape)
        right = [order for order in orders if same(axes.transpose(order).reshape(like.shape), two)]
        if right:
            orders, moved = right, []  # another anchor has its elements in another order: that may be the fault
            break
        if (order := places(one, two)) is not None:
            moved.append(array.ravel()[order].reshape(like.shape))
    yield from moved
    for one, two in anchors:
        if one.ndim == array.ndim and two.ndim == like.ndim and one.shape != array.shape:
            yield from _turned(array, like, one, two)
    found = [kept.transpose(order).reshape(like.shape) for order in orders]
    scores = [-_likeness(one, like) for one in found]
    for k in sorted(range(len(found)), key=lambda k: (round(scores[k], 3), k))[:MOST_LAYOUTS]:
        yield found[k]


def _turned(array: Array, like: Array, one: Array, two: Array) -> Iterator[Array]:
    """Yield an array with its axes in the order that makes one anchor of the other, where that gives the shape of `like`."""
    if one.ndim > MOST_AXES or sorted(one.shape) != sorted(two.shape):
        return
    for order in itertools.permutations(range(array.ndim)):
        made = array.transpose(order)
        if made.shape == like.shape and one.transpose(order).shape == two.shape and same(one.transpose(order), two):
            yield made


def same(one: Array, two: Array) -> bool:
    """Whether two arrays have the same numbers in the same order."""
    if one.size != two.size or not one.size:
        return False
    a, b = one.ravel(), two.ravel()
    if a.dtype == b.dtype == bool:  # NumPy does not subtract them
        return bool((a == b).all())
    scale = float(np.abs(b).max())
    return bool(np.isfinite(scale) and np.abs(a - b).max() <= SAME * scale)


def _orders(sizes: Sequence[int], shape: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the orders of axes of these sizes that give the shape, where either side may have joined neighbours."""
    axes = itertools.permutations(range(len(sizes)))
    return [order for order in axes if _fits([sizes[axis] for axis in order], shape)]


def _fits(sizes: Sequence[int], shape: Sequence[int]) -> bool:
    """Whether axes of these sizes are those of the shape, where either side may have joined neighbours."""
    one, two = set(np.cumprod(sizes).tolist()), set(np.cumprod([size for size in shape if size > 1]).tolist())
    return one <= two or two <= one


def _likeness(one: Array, two: Array) -> float:
    """Return the absolute correlation of two arrays of one shape, without what a mask hides."""
    one, two = visible(one), visible(two)
    finite = np.isfinite(one) & np.isfinite(two)
    a, b = one[finite].astype(np.float64), two[finite].astype(np.float64)
    if not a.size:
        return 0.0
    a, b = a - a.mean(), b - b.mean()
    score = abs(float(a @ b)) / (float(np.linalg.norm(a) * np.linalg.norm(b)) + 1e-300)
    return score if np.isfinite(score) else 0.0


def places(one: Array, two: Array) -> Array | None:
    """Return, for each place in `two`, the place of the same number in `one`; None where numbers repeat."""
    a, b = one.ravel(), two.ravel()
    first, second = np.argsort(a, kind="stable"), np.argsort(b, kind="stable")
    gaps = np.diff(a[first])
    scale = float(np.abs(a).max(initial=0.0))
    if not np.allclose(a[first], b[second], rtol=0, atol=1e-9 * scale) or (gaps <= 1e-8 * scale).any():
        return None
    order = np.empty(a.size, np.intp)
    order[second] = first
    return order
