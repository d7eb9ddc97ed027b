"""Proposals for a table that rows are taken from.

A table is a matrix whose rows the indices choose. So one may be some columns of the other, as a matrix may be: the programs then split
the rows that they have taken. The source may also multiply its table by rows of zeros and a one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import permutations, product
from typing import Any

import numpy as np

from convert.inference.candidates.candidate import Candidate, Piece
from convert.inference.candidates.context import Context
from convert.inference.derivation import Arithmetic, Role
from convert.inference.forms.hidden.always_zero import met_by_parameters
from convert.inference.meetings.sites import Meeting, Product
from convert.inference.proposals import products
from convert.inference.proposals.others import any_leaf
from convert.programs.program import Operation, Value

Array = np.ndarray[Any, np.dtype[Any]]
BY = "rows taken by the same indices"


def look_up(context: Context, operation: Operation, side: int) -> Iterator[Candidate]:
    """Yield the source's tables that rows are taken from by the same indices; either may have more rows."""
    weight = operation.operands[side]
    if not weight.elements:
        return
    elements = context.lacking(weight)
    data = context.replay.value(operation.data[0])
    same = context.source.same_data(Role.LOOKUP, data, context.tolerance)
    any_fits, row = False, weight.array.shape[1:]
    for meeting in context.near_first(same):
        source = meeting.weight
        for arranged, stored in product(_ways(source.array, row), source.elements):
            numbers, operand, places = map(
                arranged, (stored, source.array, np.arange(stored.size).reshape(stored.shape))
            )
            rows = min(len(numbers), len(weight.array))
            cut = np.s_[:rows]
            if not context.free(numbers[cut], elements[0][cut]):
                continue
            found = context.fitted(
                [t[cut] for t in elements],
                [numbers[cut]],
                operand[cut],
                lambda cut=cut: context.replay.value(weight)[cut],  # type: ignore[misc]
                meeting,
                places[cut],
            )
            if found is not None:
                any_fits = True
                yield Candidate(_with_more_rows(context, found, elements[0], rows), BY, ("rows", rows))
    for rows, candidate in _of_columns(context, operation, weight, elements):
        yield replace(candidate, pieces=_with_more_rows(context, candidate.pieces, elements[0], rows))
    if not any_fits:  # a product with rows of zeros and a one, or several indices, of which another table has the first
        yield from any_leaf(context, operation, side)


def _ways(table: Array, row: tuple[int, ...]) -> Iterator[Callable[[Array], Array]]:
    """Yield what gives the rows of a table a shape: an order of its further axes, the own one first; or each row is one number."""
    if table.size == len(table) and math.prod(row) == 1:
        yield lambda array: array.reshape(-1, *row)
        return
    for order in permutations(range(1, table.ndim)):
        if tuple(table.shape[axis] for axis in order) == row:
            yield partial(np.transpose, axes=(0, *order))


def _with_more_rows(context: Context, pieces: tuple[Piece, ...], table: Array, rows: int) -> tuple[Piece, ...]:
    """Return the pieces of a table with those of the rows that are not in them: the rest of the leaf, which the source has never read, or zeros.

    Args:
        pieces: of the first rows.
        table: the numbers of the target's elements.
        rows: how many the source's table has.
    """
    rest = table[rows:]
    if rest.size and len(pieces) == 1 and (numbers := _rest_of_leaf(context, pieces[0], table)) is not None:
        return context.pieces(table, numbers, context.source.theta[numbers], Arithmetic.SAME, pieces[0].meeting)
    return pieces + context.pieces(rest, np.full(rest.shape, -1), np.zeros(rest.shape), Arithmetic.CONSTANT, None, 0.0)


def _rest_of_leaf(context: Context, piece: Piece, table: Array) -> Array | None:
    """Return the numbers of the elements of a leaf in the order of its axes in which the first are those of a piece; None if there is none."""
    known, source = piece.numbers[np.argsort(piece.elements)], context.source
    if piece.arithmetic is not Arithmetic.SAME or piece.factor != 1 or (np.diff(table.ravel()) < 0).any():
        return None
    (numbers,) = source.program.parameters[source.leaf(int(known[0]))].elements
    for order in permutations(range(numbers.ndim)) if numbers.size == table.size else ():
        flat = numbers.transpose(order).ravel()
        if np.array_equal(flat[: len(known)], known):
            read = met_by_parameters(source.program, {}).at_all
            return None if read[flat[len(known) :]].any() else flat
    return None


def _of_columns(
    context: Context, operation: Operation, weight: Value, elements: Sequence[Array]
) -> Iterator[tuple[int, Candidate]]:
    """Yield proposals for a table whose columns several tables of the source fill, or which is some columns of one; and its rows that they have."""
    count, out = len(weight.array), weight.array[:1].size
    if weight.array.ndim < 2:
        return
    cuts = context.cuts(operation.results[0], -1) if context.level > 0 else ()
    of: dict[int, list[tuple[Product, Meeting, tuple[int, ...]]]] = {}
    for table, meeting in _tables(context, context.replay.value(operation.data[0])):
        rows = min(len(table.value), count)
        value, places, *numbers = (a[:rows] for a in (table.value, table.places, *table.numbers))
        if cuts or table.value.shape[1:] != weight.array.shape[1:]:  # those of one shape were tried as they are
            of.setdefault(rows, []).append((Product((), value, tuple(numbers), places), meeting, ()))
    for rows, tables in of.items():

        def read(part: Any, rows: int = rows) -> Array:
            taken: Array = context.replay.value(weight)[:rows].reshape(rows, out)[:, part]
            return taken

        numbers = [n[:rows].reshape(rows, out) for n in elements]
        for candidate in products.of_parts(context, tables, numbers, read, whole=True, cuts=cuts):
            yield rows, replace(candidate, by=f"columns of the {BY}")


def _tables(context: Context, indices: Array) -> Iterator[tuple[Product, Meeting]]:
    """Yield the source's tables, rows first, from which these indices take rows; nearest first."""
    for meeting in context.near_first(context.source.same_data(Role.LOOKUP, indices, context.tolerance)):
        table = meeting.weight
        if table.array.ndim > 1 and table.elements:
            yield (
                Product((), table.array, table.elements, np.arange(table.array.size).reshape(table.array.shape)),
                meeting,
            )
    if indices.dtype.kind not in "iu" or not indices.size or indices.min() < 0:
        return
    chosen = indices.ravel()
    for size in context.source.summed(at_least=int(chosen.max()) + 1):
        ones = np.eye(size)[chosen]
        for matrix, meeting in context.source.same_rows([ones], context.tolerance):
            if matrix.numbers and len(matrix.rows) == 1 and np.array_equal(matrix.rows[0], ones):
                yield matrix, meeting
