"""Pair the columns of two arrays: which index along an axis of the target is which index along an axis of the source.

A column is known by a few sums over its elements, so that the order of the rows does not matter. Rows that are repeated
throughout count once: one program may repeat along a batch what the other computes for all of it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from convert.programs.fingerprint import EXACT, TINY, column_fingerprints

Array = np.ndarray[Any, np.dtype[Any]]
SAME = 1e-12  # relative: two rows that were computed in one way
NOTHING = 1e-8  # times the tolerance, relative to the largest column: so small a column is rounding, as of a channel far below zero behind a GELU
CANCELLED = 0.1  # the same, of what constants that one program rounded to float32 leave in a column whose terms cancel
FEW = 4  # equal columns that are tried in every order
MAX_FACTORS = 3  # of a composite axis, such as (N C H)


@dataclass(frozen=True, eq=False)
class Columns:
    """The columns of an array.

    Attributes:
        numbers: what each column is called, [n].
        sums: [m, n]; equal for equal columns.
        scales: [m, n]: what the error of a sum is relative to.
    """

    numbers: Array
    sums: Array
    scales: Array


@dataclass(frozen=True, eq=False)
class Pairing:
    """The source's column for each column of the target.

    Attributes:
        numbers: of the source, in the order of the target's columns.
        tied: positions of the target's columns that fit several of the source; they are paired as the others are, if those lie in
            an order of axes, such as channels before rows; otherwise in their order.
    """

    numbers: Array
    tied: Array


def columns_of(array: Array, numbers: Array) -> Columns:
    """Return the columns of an array whose elements belong to the columns `numbers`, broadcast to it."""
    numbers = numbers.reshape((1,) * (array.ndim - numbers.ndim) + numbers.shape)
    along = [k for k in range(array.ndim) if (numbers == np.take(numbers, [0], k)).all()] if numbers.size else []
    rest = [k for k in range(array.ndim) if k not in along]
    if along and array.size:
        own = numbers.transpose(*along, *rest)[(0,) * len(along)]
        rows = _distinct(array.transpose(*along, *rest).reshape(-1, math.prod(array.shape[k] for k in rest)))
        array, numbers = rows, np.broadcast_to(own, [array.shape[k] for k in rest]).reshape(1, -1)
    names, sums, scales = column_fingerprints(array, numbers)
    return Columns(names, sums, _with_rounding(scales))


def _with_rounding(scales: Array) -> Array:
    """Return what the error of sums is relative to, [m, n], where some columns are so small that they hold nothing but rounding."""
    largest = np.where(np.isfinite(scales), scales, 0).max(1, keepdims=True, initial=0)
    with_rounding: Array = scales + NOTHING * largest
    return with_rounding


def columns_along(array: Array, axis: int) -> Columns:
    """Return what stands at each place along an axis of an array, such as its channels."""
    return columns_of(array, np.arange(array.shape[axis]).reshape([-1 if k == axis else 1 for k in range(array.ndim)]))


def are_few(tied: Sequence[int] | Array) -> bool:
    """Whether so few columns are tied that they are tried in every order."""
    return 1 < len(tied) <= FEW


def in_other_orders(pairing: Pairing, target: Columns) -> list[Pairing]:
    """Return the pairings with a few columns of the target that are equal in every other order, as two that are zero in a first step.

    Where more than a few are equal, or others are, there are none.
    """
    tied = pairing.tied
    if not are_few(tied):
        return []
    one = Columns(target.numbers[tied], target.sums[:, tied], target.scales[:, tied])
    if len(matches(one, one)[0]) != len(tied) ** 2:
        return []
    found = []
    for order in itertools.islice(itertools.permutations(tied), 1, None):
        numbers = pairing.numbers.copy()
        numbers[tied] = pairing.numbers[list(order)]
        found.append(Pairing(numbers, tied))
    return found


def _distinct(rows: Array) -> Array:
    """Return each row of a matrix once, if each stands there as often as every other one; otherwise all rows.

    Rows that stand there several times by themselves, as those of a token, are counted: of a fused matrix they are not the same.
    """
    x = np.asarray(rows, np.float64)
    with np.errstate(all="ignore"):
        weights = np.random.default_rng(0).normal(size=x.shape[1])
        keys, slack = x @ weights, SAME * (np.abs(x) @ np.abs(weights))
        order = np.argsort(keys, kind="stable")
        near = np.flatnonzero(np.diff(keys[order]) <= slack[order[1:]])
        one, two = x[order[near]], x[order[near + 1]]
        again = np.abs(one - two).max(1, initial=0) <= SAME * np.abs(one).max(1, initial=0)
    first = np.ones(len(x), bool)
    first[near[again] + 1] = False
    starts = np.flatnonzero(first)
    counts = np.diff([*starts, len(x)])
    return x if len(set(counts.tolist())) != 1 else x[order[starts]]


def columns_of_rows(arrays: Sequence[Array]) -> Columns:
    """Return the columns of matrices [rows, columns] that stand below each other. Rows of zeros do not count: they show nothing.

    Sums that weigh each row by the sum of its elements are added: without them, columns of zeros and ones are only counts.
    """
    x = np.concatenate([np.asarray(a, np.float64) for a in arrays])
    x = _distinct(x[x.any(1)] if x.any() else x)
    ids = np.arange(x.shape[1])
    with np.errstate(all="ignore"):
        size = np.abs(x).sum(1)
        weight = np.stack([x.sum(1), np.log1p(size)])
        more, scales = weight @ x, np.stack([size, weight[1]]) @ np.abs(x) + TINY  # a sum may cancel
    base = columns_of(x, ids)
    if len(base.numbers) != x.shape[1]:  # no rows
        return base
    return Columns(ids, np.concatenate([base.sums, more]), np.concatenate([base.scales, _with_rounding(scales)]))


def matches(target: Columns, source: Columns, tolerance: float = EXACT) -> tuple[Array, Array]:
    """Return the positions (of the target, of the source) of all pairs of equal columns, by the target's."""
    order = np.argsort(source.sums[1], kind="stable")
    keys = source.sums[1][order]
    slack = tolerance * target.scales[1]
    with np.errstate(all="ignore"):
        low = np.searchsorted(keys, target.sums[1] - slack, "left")
        high = np.searchsorted(keys, target.sums[1] + slack, "right")
        count = np.maximum(high - low, 0)
        one = np.repeat(np.arange(len(target.numbers)), count)
        two = order[np.arange(len(one)) - np.repeat(np.cumsum(count) - count, count) + np.repeat(low, count)]
        near = (np.abs(target.sums[:, one] - source.sums[:, two]) <= tolerance * target.scales[:, one]).all(0)
    return one[near], two[near]


def pair(target: Columns, source: Columns, tolerance: float = EXACT) -> Pairing | None:
    """Pair every column of the target with another column of the source; None if that is not possible."""
    size = len(target.numbers)
    if size != len(source.numbers):
        return None
    one, two = matches(target, source, tolerance)
    count = np.bincount(one, minlength=size)
    if (count == 0).any():
        largest = np.where(np.isfinite(target.scales), target.scales, 0).max(1, keepdims=True, initial=0)
        one, two = matches(replace(target, scales=target.scales + CANCELLED * largest), source, tolerance)
        count = np.bincount(one, minlength=size)
    if (count == 0).any():
        return None
    chosen = np.full(size, -1)
    alone = count[one] == 1
    chosen[one[alone]] = two[alone]
    tied = np.flatnonzero(count > 1)
    taken = np.zeros(size, bool)
    if len(np.unique(two[alone])) != alone.sum():
        return None
    regular = _regular(chosen, one, two) if len(tied) else None
    if regular is not None:
        return Pairing(source.numbers[regular], tied)
    taken[two[alone]] = True
    starts = np.searchsorted(one, tied)
    for k, start in zip(tied, starts, strict=True):
        free = [s for s in np.sort(two[start : start + count[k]]) if not taken[s]]
        if not free:
            return None
        chosen[k] = free[0]
        taken[free[0]] = True
    return Pairing(source.numbers[chosen], tied)


def _regular(chosen: Array, one: Array, two: Array) -> Array | None:
    """Return an order of the axes that the columns may be made of, with which the known ones agree; None if there is none.

    Args:
        chosen: the source's column for each of the target's; -1 where several fit.
        one, two: pairs of columns that are equal.
    """
    size, known = len(chosen), np.flatnonzero(chosen >= 0)
    equal = np.unique(one * size + two)
    for sizes in ((size,), *factors(size)) if len(known) else ():
        places = np.arange(size).reshape(sizes)
        for axes in itertools.permutations(range(len(sizes))):
            order = places.transpose(axes).ravel()
            if np.array_equal(order[known], chosen[known]) and np.isin(np.arange(size) * size + order, equal).all():
                return order
    return None


def factors(size: int) -> Iterator[tuple[int, ...]]:
    """Yield the ways to write a size as a product of several factors, those of few factors first."""
    divisors = [d for d in range(2, size) if size % d == 0]
    for count in range(2, MAX_FACTORS + 1):
        for head in itertools.product(divisors, repeat=count - 1):
            rest, whole = divmod(size, math.prod(head))
            if not whole and rest > 1:
                yield (*head, rest)
