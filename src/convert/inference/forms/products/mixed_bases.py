"""Products with bases that the numbers of a looked-up row then mix, as products with matrices that are mixed first: ``sum_b c[r, b] (x V_b)``
is ``x W[r]`` with ``W = sum_b c[:, b] V_b``.

A relational graph convolution has a matrix for each relation, which is a sum of a few bases. One program makes these matrices, the other
multiplies each node by the bases and adds up what they give.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

import numpy as np

from convert.inference.derivation import Role
from convert.inference.forms.elements import (
    before_moves,
    elements_looked_up,
    in_turn,
    numbered,
    step,
    take,
    taken,
    without_idle,
)
from convert.inference.forms.products.commuted import equal
from convert.inference.meetings.sites import axes_of, parameter_operands, role_of
from convert.programs.program import Array, Operation, Program, Value

PLAIN = (((1,), (0,)), ((), ()))
ROW_BY_ROW = (((1,), (1,)), ((0,), (0,)))


@dataclass(frozen=True, eq=False)
class _Mixed:
    """A sum over bases of a number for each, times what a product with the basis gives.

    Attributes:
        sum: the product that adds them up.
        lookup: gives the numbers, of a table [matrix, basis].
        data: of the product with the bases.
        bases: of the product with the bases.
        rows: elements of the data, [row, summed].
        places: elements of the bases, [basis, summed, column].
    """

    sum: Operation
    lookup: Operation
    data: Value
    bases: Value
    rows: Array
    places: Array


def products_of_mixed_bases(program: Program) -> int:
    """Return how many sums a program takes of products with bases."""
    return sum(1 for _ in _all_mixed(program))


def bases_mixed_first(program: Program) -> Program:
    """Return the program with products with the mixed matrices in place of such sums."""
    found = {mixed.sum: mixed for mixed in _all_mixed(program)}
    if not found:
        return program
    steps = (_mixed_first(found[one]) if one in found else [one] for one in program.operations)
    return replace(program, operations=tuple(without_idle(list(chain.from_iterable(steps)), program)))


def _all_mixed(program: Program) -> Iterator[_Mixed]:
    made_by = program.made_by
    for operation in program.operations:
        if role_of(operation) is Role.PRODUCT and len(operation.operands) == len(operation.data) == 2:
            both = (_mixed(operation, side, made_by) for side in (0, 1))
            yield from [one for one in both if one is not None][:1]


def _mixed(operation: Operation, side: int, made_by: Mapping[Value, Operation]) -> _Mixed | None:
    """Return what a product adds up, if operand `side` has the numbers of the bases; None if it is something else."""
    axes = axes_of(operation, side)
    _, lookup, moves = before_moves(operation.operands[side], made_by)
    value, product, others = before_moves(operation.operands[1 - side], made_by)
    if axes is None or lookup is None or product is None or role_of(lookup) is not Role.LOOKUP:
        return None
    table, parameters = lookup.operands[0], parameter_operands(product)
    is_layer = role_of(product) is Role.PRODUCT and len(product.operands) == 2 and len(parameters) == 1
    if not is_layer or not table.of_parameters or table.array.ndim != 2 or len(lookup.data) != 1:
        return None
    places = elements_looked_up(lookup, moves)
    if places is None:
        return None
    chosen = _row_numbers(lookup, [x.array for x in lookup.operands])
    (batch, summed), (batch_of, summed_of) = axes
    at = _as_rows(places, batch_of, summed_of)
    rows = _as_rows(in_turn(others, numbered(value)), batch, summed)
    count = table.array.shape[1]
    if at.shape != (len(chosen), count, 1) or (at[:, :, 0] != chosen[:, None] * count + np.arange(count)).any():
        return None
    return _of_bases(operation, lookup, product, rows)


def _of_bases(operation: Operation, lookup: Operation, product: Operation, made: Array) -> _Mixed | None:
    """Return what a product adds up; None if a basis is not the same for all rows.

    Args:
        product: of the data with the bases.
        made: elements of its result, [row, basis, column].
    """
    (side,) = parameter_operands(product)
    axes = axes_of(product, side)
    data, bases = product.operands[1 - side], product.operands[side]
    if axes is None or any(
        x.array.shape[axis] > 1 for x, (of, _) in zip((data, bases), axes, strict=True) for axis in of
    ):
        return None
    # Elements of the data, [row, summed], and of the bases, [summed, column of all of them].
    (_, summed), (_, summed_of) = axes
    of_data = _as_rows(numbered(data), [], summed)[0].T
    of_bases = _as_rows(numbered(bases), [], summed_of)[0]
    order = (of_bases.shape[1], len(of_data)) if side == 0 else (len(of_data), of_bases.shape[1])
    one, other = np.unravel_index(made, order)
    row, column = (one, other) if side else (other, one)
    if (row != row[:, :1, :1]).any() or (column != column[0]).any() or made.shape[2] < 2:
        return None
    places = of_bases[:, column[0]].transpose(1, 0, 2)
    found = _Mixed(operation, lookup, data, bases, of_data[row[:, 0, 0]], places)
    (*_, again, _), (result,) = _mixed_first(found), operation.results
    return found if equal(again.results[0].array.reshape(result.array.shape), result.array) else None


def _mixed_first(mixed: _Mixed) -> list[Operation]:
    """Return the operations that mix the bases, take the matrix of each row, and multiply the row by it."""
    like, (table, *indices), (result,) = mixed.sum, mixed.lookup.operands, mixed.sum.results

    def mix(numbers: Array, bases: Array) -> Array:
        return np.asarray(np.tensordot(numbers, bases, 1))

    def look_up(matrices: Array, *at: Array) -> Array:
        return np.asarray(matrices[_row_numbers(mixed.lookup, [table.array, *at])])

    def multiply(rows: Array, matrices: Array) -> Array:
        return np.asarray(np.einsum("rs,rsc->rc", rows, matrices))

    leaves = table.leaves | mixed.bases.leaves
    bases = taken(mixed.bases, mixed.places)
    matrices = Value(mix(table.array, bases.array), leaves=leaves)
    chosen = Value(look_up(matrices.array, *(x.array for x in indices)), data=True, leaves=leaves)
    rows = taken(mixed.data, mixed.rows)
    made = Value(multiply(rows.array, chosen.array), data=True, leaves=result.leaves)
    mixing = step(like, "dot_general", (table, bases), matrices, mix)
    product = step(like, "dot_general", (rows, chosen), made, multiply)
    return [
        step(like, "slice", (mixed.bases,), bases, partial(take, places=mixed.places)),
        replace(mixing, settings={"dimension_numbers": PLAIN}),
        step(mixed.lookup, "index", (matrices, *indices), chosen, look_up),
        step(like, "slice", (mixed.data,), rows, partial(take, places=mixed.rows)),
        replace(product, settings={"dimension_numbers": ROW_BY_ROW}),
        step(like, "reshape", (made,), result, lambda x: x.reshape(result.array.shape)),
    ]


def _row_numbers(lookup: Operation, operands: list[Array]) -> Array:
    """Return the number of each row that a lookup takes of its table."""
    table, *indices = operands
    numbers = np.broadcast_to(np.arange(len(table), dtype=np.float64)[:, None], table.shape)
    return np.asarray(lookup.again([np.array(numbers), *indices])[0])[..., 0].astype(int).ravel()


def _as_rows(array: Array, batch: Sequence[int], summed: Sequence[int]) -> Array:
    """Return element numbers as [batch, summed, other axes]."""
    sizes = [math.prod(array.shape[axis] for axis in axes) for axes in (batch, summed)]
    rest = [axis for axis in range(array.ndim) if axis not in (*batch, *summed)]
    return array.transpose(*batch, *summed, *rest).reshape(*sizes, -1).astype(int)
