"""Find rows of data among the rows that a product of the source is applied to.

A layer acts on each row by itself. One program takes rows before it, the other takes them behind it, or none: tokens of an expert,
nodes at the ends of edges, the last position.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

import numpy as np

from convert.inference.meetings.columns import Columns, matches
from convert.inference.meetings.sites import Meeting, Product, axes_of
from convert.programs.fingerprint import column_fingerprints
from convert.programs.program import Operation, Program

Array = np.ndarray[Any, np.dtype[Any]]
T = TypeVar("T")
MAX_EXPERTS = 64  # a product that sums over so many experts is taken apart
SAME = 1e-9  # relative: a factor that is the same for all features


class RowTable(Generic[T]):
    """Arrays of rows, each with what it belongs to. A row is known by a few sums, in any order of its columns."""

    def __init__(self, items: Sequence[tuple[Array, T]]) -> None:
        self._rows = [rows for rows, _ in items]
        self._items = [item for _, item in items]
        self._sums = [_by_row(rows) for rows in self._rows]
        sizes = [sums.sums[0] for sums in self._sums]
        keys = np.concatenate([np.zeros(0), *sizes])
        order = np.argsort(keys, kind="stable")
        self._keys = keys[order]
        self._owners = np.repeat(np.arange(len(items)), [len(x) for x in sizes])[order]

    def find(self, wanted: Array, tolerance: float) -> list[tuple[T, Array]]:
        """Return the items whose arrays have each of these rows, with these rows alone, in their order.

        Rows of zeros beside others are those of any: no output depends on them, or a state begins from them.
        """
        rows, here = wanted, wanted.any(1) | ~wanted.any()
        wanted = rows[here]
        if not wanted.size:
            return []
        first = _by_row(wanted[:1])
        slack = tolerance * first.scales[0, 0]
        low, high = np.searchsorted(self._keys, (first.sums[0, 0] - slack, first.sums[0, 0] + slack))
        owners = np.unique(self._owners[low : high + 1])
        sums = _by_row(wanted) if len(owners) else first
        found = []
        for k in owners:
            if self._rows[k].shape[1] != wanted.shape[1]:
                continue
            one, two = matches(sums, self._sums[k], tolerance)
            # Two coordinates in turns have the same sums, and so nearly have the rows of a softmax that hardly chooses.
            apart = np.abs(wanted[one] - self._rows[k][two]).max(1)
            order = np.lexsort((apart, one))
            one, two = one[order], two[order]
            known, at = np.unique(one, return_index=True)
            if len(known) == len(wanted):
                same = np.zeros(rows.shape)
                same[here] = self._rows[k][two[at]]
                found.append((self._items[k], same))
        return found


class Rows:
    """The rows of products."""

    def __init__(self, products: Sequence[tuple[Product, Meeting]]) -> None:
        self._table = RowTable([(_joined(product.rows), (product, meeting)) for product, meeting in products])

    def find(self, rows: Sequence[Array], tolerance: float) -> list[tuple[Product, Meeting]]:
        """Return the products that are applied to each of these rows, with these rows alone, in their order."""
        found = self._table.find(_joined(rows), tolerance)
        return [(replace(product, rows=(at,), _columns=[]), meeting) for (product, meeting), at in found]


def _joined(rows: Sequence[Array]) -> Array:
    return np.concatenate([np.asarray(x, np.float64).reshape(-1, x.shape[-1]) for x in rows])


def _by_row(rows: Array) -> Columns:
    return Columns(*column_fingerprints(rows, np.arange(len(rows))[:, None]))


def of_each_expert(program: Program, found: Sequence[Meeting]) -> Iterator[tuple[Product, Meeting]]:
    """Yield the products of which the source computes only the sum, each times a factor of its rows: experts and their gates."""
    made_by = program.made_by
    for meeting in found:
        operation, side = meeting.operation, meeting.side
        axes = axes_of(operation, side)
        if operation.name != "dot_general" or len(meeting.operations) > 1 or axes is None:
            continue
        (x_batch, x_sum), (w_batch, w_sum) = axes
        weight, data = operation.operands[side], operation.operands[1 - side]
        if w_batch or x_batch or len(w_sum) < 2 or not weight.elements or not data.data:
            continue
        k = int(np.argmin(w_sum))
        count = weight.array.shape[w_sum[k]]
        if not 1 < count <= MAX_EXPERTS:
            continue
        x = _without_factor(made_by.get(data), data.array, [axis for j, axis in enumerate(x_sum) if j != k])
        rest = [axis for axis in range(x.ndim) if axis not in x_sum]
        free = [axis for axis in range(weight.array.ndim) if axis not in w_sum]
        places = np.arange(weight.array.size).reshape(weight.array.shape)
        summed = [axis for j, axis in enumerate(w_sum) if j != k]
        size = math.prod(weight.array.shape[axis] for axis in summed)
        stack = [
            a.transpose(w_sum[k], *summed, *free).reshape(count, size, *[a.shape[axis] for axis in free])
            for a in (weight.array, places, *weight.elements)
        ]
        rows = x.transpose(x_sum[k], *rest, *(axis for j, axis in enumerate(x_sum) if j != k)).reshape(count, -1, size)
        for expert in range(count):
            value, at, *numbers = (a[expert] for a in stack)
            yield Product((rows[expert],), value, tuple(numbers), at), meeting


def of_each_vector(found: Sequence[Meeting]) -> Iterator[tuple[Product, Meeting]]:
    """Yield what is added to rows or multiplies them: for each vector of a parameter the rows that meet it."""
    for meeting in found:
        weight, data = meeting.weight, meeting.data[0]
        if len(weight.elements) != 1 or len(meeting.operations) > 1:
            continue
        shape = np.broadcast_shapes(data.shape, weight.array.shape)
        if not shape or shape[-1] < 2:
            continue
        places = np.arange(weight.array.size).reshape(weight.array.shape)
        x, value, numbers, at = (
            np.broadcast_to(a, shape).reshape(-1, shape[-1]) for a in (data, weight.array, weight.elements[0], places)
        )
        vectors, first, owner = np.unique(numbers[:, 0], return_index=True, return_inverse=True)
        if len(vectors) <= MAX_EXPERTS and (numbers == numbers[first][owner]).all():
            for k, row in enumerate(first):
                yield Product((x[owner == k],), value[row], (numbers[row],), at[row]), meeting


def _without_factor(operation: Operation | None, array: Array, features: Sequence[int]) -> Array:
    """Return what an operation multiplies by a number for all features of a row; the array itself if it does not."""
    for operand in operation.data if operation is not None else ():
        if operand.array.shape != array.shape or operand.array is array:
            continue
        with np.errstate(all="ignore"):
            factor = array / operand.array
        known = np.isfinite(factor)
        low, high = (
            bound(factor, axis=tuple(features), keepdims=True, where=known, initial=start)
            for bound, start in ((np.min, np.inf), (np.max, -np.inf))
        )
        if known.any() and ((high - low) <= SAME * np.maximum(np.abs(low), np.abs(high)))[np.isfinite(low)].all():
            return operand.array
    return array
