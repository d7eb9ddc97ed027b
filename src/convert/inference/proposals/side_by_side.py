"""Proposals for a matrix that the target applies to several values side by side; the source applies one to each, and adds the results."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from convert.inference.candidates.candidate import Candidate, Piece
from convert.inference.candidates.context import Context
from convert.inference.derivation import Role
from convert.inference.meetings.columns import columns_of_rows, pair
from convert.inference.meetings.sites import Meeting, Product, role_of
from convert.inference.proposals.low_rank import is_value
from convert.programs.program import Operation, Value

Array = np.ndarray[Any, np.dtype[Any]]
MAX_WAYS = 200
_Way = tuple[Product, Meeting, Array]  # with its rows in the order of the target's columns


def values_of(context: Context, operation: Operation, data: Value) -> list[slice]:
    """Return where each of the values is that stand side by side along the axis that a product or a convolution sums over; none if it is one value."""
    ends = np.cumsum(context.widths(data, 1 if role_of(operation) is Role.CONVOLUTION else -1))
    return [slice(start, end) for start, end in itertools.pairwise([0, *map(int, ends)])]


def propose(
    context: Context, operation: Operation, data: Value, target: Product, read: Callable[[slice], Array]
) -> Iterator[Candidate]:
    """Yield a matrix of the source for each value, such that the sum of the products is a value of the source.

    Args:
        operation: of the target.
        data: what it is applied to.
        read: returns rows of the target's matrix, [I, O].
    """
    if len(target.numbers) != 1:
        return
    numbers = target.numbers[0].reshape(len(target.numbers[0]), -1)
    places = values_of(context, operation, data)
    if not places or places[-1].stop != len(numbers):
        return
    rows = np.concatenate(target.rows)
    ways = [list(_ways(context, rows[:, place], numbers.shape[1])) for place in places]
    for chosen in itertools.islice(itertools.product(*ways), MAX_WAYS):
        values = [_matrix(product.value)[order] for product, _, order in chosen]
        made = np.sum([rows[:, place] @ value for place, value in zip(places, values, strict=True)], 0)
        if len({product.numbers[0].min() for product, _, _ in chosen}) < len(chosen):
            continue
        if context.level == 0 and not is_value(context, made):  # the source may add a bias to one of them
            continue
        pieces = [
            context.fitted(
                [numbers[place]],
                [_matrix(product.numbers[0])[order]],
                value,
                lambda place=place: read(place),  # type: ignore[misc]
                meeting,
                _matrix(product.places)[order],
            )
            for place, (product, meeting, order), value in zip(places, chosen, values, strict=True)
        ]
        found: list[Piece] = [piece for of in pieces if of is not None for piece in of]
        if None not in pieces:
            kind = ("side by side", tuple(meeting.operation.where for _, meeting, _ in chosen))
            yield Candidate(tuple(found), "columns of values that stand side by side", kind)


def _ways(context: Context, rows: Array, out: int) -> Iterator[_Way]:
    columns = columns_of_rows([rows])
    for product, meeting in _near(context, context.source.with_rows([rows], context.tolerance)):
        if len(product.numbers) == 1 and product.value.size == rows.shape[1] * out:
            pairing = pair(columns, product.columns, context.tolerance)
            if pairing is not None and context.free(product.numbers[0]):
                yield product, meeting, pairing.numbers


def _near(context: Context, found: Sequence[tuple[Product, Meeting]]) -> list[tuple[Product, Meeting]]:
    return sorted(found, key=lambda item: abs(item[1].index - context.near))


def _matrix(array: Array) -> Array:
    return array.reshape(len(array), -1)
