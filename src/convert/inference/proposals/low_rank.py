"""Proposals for a matrix that the source keeps as a product of two, alone or added to a third: low rank, LoRA."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from convert.inference.candidates.candidate import Candidate, Piece, ratio
from convert.inference.candidates.context import Context
from convert.inference.derivation import Arithmetic, LowRank, Role
from convert.inference.meetings.columns import pair
from convert.inference.meetings.sites import Meeting, Product

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, eq=False)
class _Factor:
    """A matrix [in, out] of the source that multiplies data."""

    product: Product
    meeting: Meeting
    order: Array

    @property
    def numbers(self) -> Array:
        """The numbers of its elements, with the inputs in the target's order."""
        return self.product.numbers[0].reshape(len(self.product.value), -1)[self.order]

    @property
    def value(self) -> Array:
        """Its elements."""
        return self.product.value.reshape(len(self.product.value), -1)[self.order]


def propose(context: Context, target: Product) -> Iterator[Candidate]:
    """Yield the products of two matrices that give a value of the source, and the sums of one with a third matrix."""
    numbers = target.numbers[0]
    if len(target.numbers) != 1 or numbers.ndim != 2 or (numbers < 0).any():
        return
    first = [factor for factor in _of_data(context, target) if factor.numbers.shape[1] < numbers.shape[1]]
    whole = [factor for factor in _of_data(context, target) if factor.numbers.shape[1] == numbers.shape[1]]
    for left in first:
        rows = np.concatenate([r.reshape(-1, r.shape[-1]) for r in target.rows]) @ left.value
        for right, before in _behind(context, rows, numbers.shape[1]):
            delta = before * left.value @ right.value
            made = np.concatenate([r.reshape(-1, r.shape[-1]) for r in target.rows])
            for base in (None, *whole):
                for scale in _scales(context, made @ delta) if base is not None else (1.0,):
                    value = scale * delta + (0 if base is None else base.value)
                    if is_value(context, made @ value):
                        yield _candidate(context, numbers, value, left, right, before * scale, base)


def _of_data(context: Context, target: Product) -> Iterator[_Factor]:
    for product, meeting in context.source.same_rows(target.rows, context.tolerance):
        if len(product.numbers) == 1 and len(product.value) == len(target.numbers[0]):
            pairing = pair(target.columns, product.columns, context.tolerance)
            if pairing is not None and context.free(product.numbers[0]):
                yield _Factor(product, meeting, pairing.numbers)


def _behind(context: Context, rows: Array, out: int) -> Iterator[tuple[_Factor, float]]:
    """Yield the matrices that the source multiplies these rows by, and what it multiplies the rows by before."""
    for product, meeting in context.source.products:
        if (
            len(product.numbers) != 1
            or product.value.size != rows.shape[1] * out
            or len(product.value) != rows.shape[1]
        ):
            continue
        given = np.concatenate([r.reshape(-1, r.shape[-1]) for r in product.rows])
        if given.shape != rows.shape:
            continue
        before = 1.0 if np.allclose(given, rows, rtol=1e-9, atol=1e-12) else ratio(rows, given)
        if before is not None and context.free(product.numbers[0]):
            yield _Factor(product, meeting, np.arange(len(product.value))), before


def _scales(context: Context, result: Array) -> Iterator[float]:
    """Yield what the source may multiply a value of data by: nothing, or a number."""
    yield 1.0
    for operation in context.source.program.operations:
        if (
            operation.name in ("mul", "div")
            and len(operation.data) == 1
            and operation.data[0].array.size == result.size
        ):
            numbers = [np.unique(x.array) for x in operation.operands if x.constant]
            if numbers and len(numbers[0]) == 1 and np.allclose(np.ravel(operation.data[0].array), np.ravel(result)):
                yield float(1 / numbers[0][0] if operation.name == "div" else numbers[0][0])


def is_value(context: Context, array: Array) -> bool:
    """Whether an array is a value of the source, or what a bias is added to."""
    source = context.source
    return source.has(array, context.tolerance) or bool(source.same_data(Role.SHIFT, array, context.tolerance))


def _candidate(
    context: Context, numbers: Array, value: Array, left: _Factor, right: _Factor, scale: float, base: _Factor | None
) -> Candidate:
    low_rank = LowRank(
        context.source.located(left.numbers),
        context.source.located(right.numbers),
        scale,
        None if base is None else context.source.located(base.numbers),
    )
    at = base or left
    ids = np.full(numbers.shape, -1) if base is None else base.numbers
    places = np.arange(numbers.size).reshape(numbers.shape)
    pieces = context.pieces(numbers, ids, value, Arithmetic.COMPUTED, at.meeting, 1.0, places)
    pieces = tuple(Piece(**{**vars(piece), "low_rank": low_rank}) for piece in pieces)
    kind = ("low rank", left.meeting.operation.where, right.meeting.operation.where)
    return Candidate(pieces, "columns of the data; two products of the source are one", kind)
