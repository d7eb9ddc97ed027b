"""The products of two values of data, such as the scores of attention. They refute a wrong layer before what follows is run."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np

from convert.inference.derivation import Role
from convert.inference.meetings.columns import Columns, matches
from convert.inference.meetings.sites import axes_of, role_of
from convert.programs.fingerprint import column_fingerprints, fingerprint
from convert.programs.program import Operation, Program, Value

Array = np.ndarray[Any, np.dtype[Any]]
SUMS = ("add", "add_any")
MOVES = ("transpose", "reshape", "convert_element_type")


class DataProducts:
    """The products of two values of data in a program, up to a factor of each: whole, or vector by vector.

    One program may take the product of each head by itself, and the other that of all heads at once. One may add up the products of two
    parts of queries and keys, as those with positions and those without, and the other join the parts first.

    Attributes:
        arrays: what the products give.
    """

    def __init__(self, program: Program) -> None:
        known: set[Value] = set()
        self.arrays: list[Array] = []
        for operation in program.operations:
            product = role_of(operation) is Role.PRODUCT and len(operation.data) == len(operation.operands)
            made_of_products = bool(operation.operands) and all(x in known for x in operation.operands)
            if product or (made_of_products and operation.name in (*SUMS, *MOVES)):
                known.update(operation.results)
                self.arrays += [operation.results[0].array] if operation.name not in MOVES else []
        if self.arrays:  # the sum over experts, which the other program takes of their results and the gates
            self.arrays += [op.results[0].array for op in program.operations if _sums_over_experts(op)]
        self._sums = np.array([fingerprint(_of_size_one(array))[0] for array in self.arrays])

    def has(self, array: Array, tolerance: float) -> bool:
        """Whether an array is one of the products, or each vector along its last axis is part of one; true if there are none."""
        if not self.arrays:
            return True
        sums, scales = fingerprint(_of_size_one(array))
        with np.errstate(all="ignore"):
            whole = (np.abs(self._sums - sums) <= tolerance * scales).all(1).any()
        return bool(whole) or self._has_vectors(array, tolerance)

    def _has_vectors(self, array: Array, tolerance: float) -> bool:
        if array.ndim < 2 or not np.isfinite(array).all():
            return False
        vectors = _of_vectors(array, array.ndim - 1)
        known, _ = matches(vectors, self._vectors, tolerance)
        return len(np.unique(known)) == len(vectors.numbers)

    @cached_property
    def _vectors(self) -> Columns:
        found = [_of_vectors(array, axis) for array in self.arrays for axis in range(array.ndim)]
        sums, scales = (
            np.concatenate([np.zeros((5, 0)), *parts], 1)
            for parts in zip(*[(x.sums, x.scales) for x in found], strict=True)
        )
        return _once(sums, scales)


def _sums_over_experts(operation: Operation) -> bool:
    """Whether a product of data and parameters sums over several axes."""
    if role_of(operation) is not Role.PRODUCT or len(operation.operands) != 2 or len(operation.data) != 1:
        return False
    axes = axes_of(operation, 0 if operation.operands[1].data else 1)
    return axes is not None and len(axes[1][1]) > 1


def _of_vectors(array: Array, axis: int) -> Columns:
    """Return the vectors along an axis, each divided by its size."""
    rows = np.moveaxis(np.asarray(array, np.float64), axis, -1).reshape(-1, array.shape[axis])
    size = np.sqrt(np.mean(np.square(rows), 1, keepdims=True))
    rows = np.divide(rows, size, out=np.zeros_like(rows), where=size > 0)
    found = Columns(*column_fingerprints(rows, np.arange(len(rows))[:, None]))
    return _once(found.sums, found.scales)


def _once(sums: Array, scales: Array) -> Columns:
    """Return columns without those that are equal: what masks leave of many vectors is the same."""
    _, first = np.unique(sums, axis=1, return_index=True)
    return Columns(np.arange(len(first)), sums[:, first], scales[:, first])


def _of_size_one(array: Array) -> Array:
    """Return an array divided by the mean size of its elements."""
    size = np.sqrt(np.mean(np.square(array))) if array.size else 0.0
    return array / size if size > 0 and np.isfinite(size) else array
