"""Products with rows that are taken of a table, as products with the table: ``q r[i]`` is ``(q r)[i]``, and what is summed over rows is added up first.

Attention with relative positions takes the row of each distance and multiplies the queries by it, as Shaw's; or it multiplies them by all
rows, and takes or shifts what belongs to each distance, as Transformer-XL. Its weights multiply the rows of the distances, or they are
added up by distance and multiply the table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from convert.inference.derivation import Role
from convert.inference.forms.elements import before_moves, elements_looked_up, step
from convert.inference.forms.products.commuted import equal
from convert.inference.meetings.sites import axes_of, role_of
from convert.programs.program import Array, Operation, Program, Value


@dataclass(frozen=True, eq=False)
class Taken:
    """A product with rows that are taken of a table, of parameters or of data. Its axes have numbers.

    Attributes:
        product: the product.
        side: position of the rows.
        shape: of the rows: batch, free axes, summed.
        data: the axes of what they multiply.
        batch, summed: axes of both.
        table: the table.
        axes: those of the table: of the product where it is one of these, a further one where rows are taken.
        rows: for each of the further ones, at which place of it each row is: [batch, free axes of the rows, summed].
        free: of the rows.
    """

    product: Operation
    side: int
    shape: tuple[int, ...]
    data: tuple[int, ...]
    batch: tuple[int, ...]
    summed: int
    table: Value
    axes: tuple[int, ...]
    rows: dict[int, Array]
    free: tuple[int, ...]

    @property
    def result(self) -> tuple[int, ...]:
        """The axes of the result."""
        of_data = tuple(k for k in self.data if k not in (*self.batch, self.summed))
        return self.batch + (of_data + self.free if self.side else self.free + of_data)


def rows_taken_behind(program: Program, *, keep: bool) -> Program:
    """Return the program with products with the table in place of those with rows of it that differ along the batch.

    Args:
        keep: whether the products with the rows stay in the program as well.
    """
    made_by = program.made_by
    operations: list[Operation] = []
    for operation in program.operations:
        steps = _with_table(operation, made_by)
        operations += [*steps, operation] if keep or not steps else steps
    return replace(program, operations=tuple(operations))


def _with_table(product: Operation, made_by: Mapping[Value, Operation]) -> list[Operation]:
    """Return the operations that take the place of a product with rows of a table; none if it is another."""
    if role_of(product) is not Role.PRODUCT or len(product.operands) != 2:
        return []
    for side, value in enumerate(product.operands):
        axes = axes_of(product, side)
        if axes is None or not axes[1][0] or len(axes[1][1]) != 1 or not product.operands[1 - side].data:
            continue
        located = _located(value, made_by)
        taken = None if located is None else rows_of(product, side, *located)
        if taken is None or not taken.rows or set(taken.batch) <= set(taken.axes):
            continue
        steps = taken_behind(taken) if taken.summed in taken.axes else _added_before(taken)
        if steps and equal(steps[-1].again([steps[-1].operands[0].array])[0], product.results[0].array):
            return steps
    return []


def _located(value: Value, made_by: Mapping[Value, Operation]) -> tuple[Value, Array] | None:
    """Return a table of which constant indices take a value, and where each element of the value is in it; None if there is none."""
    _, made, moves = before_moves(value, made_by)
    if made is None or role_of(made) is not Role.LOOKUP:
        return None
    table, *indices = made.operands
    if table.constant or not all(x.constant for x in indices):
        return None
    at = elements_looked_up(made, moves)
    return None if at is None or at.shape != value.array.shape else (table, at)


def rows_of(product: Operation, side: int, table: Value, at: Array) -> Taken | None:
    """Return what is taken, if whole rows are.

    Args:
        product: of the rows.
        side: position of the rows.
        table: the table.
        at: which element of the table each element of the rows is.
    """
    axes = axes_of(product, side)
    assert axes is not None, "those of a product with a batch"
    (of_data, (data_sum,)), (batch, (summed,)) = axes
    free = [k for k in range(at.ndim) if k not in (*batch, summed)]
    at = at.transpose(*batch, *free, summed)
    named: dict[int, int] = {}
    rows: dict[int, Array] = {}
    for k, where in enumerate(np.unravel_index(at, table.array.shape)):
        whole = [j for j, size in enumerate(at.shape) if size == table.array.shape[k] and j not in named.values()]
        along = next((j for j in whole if (where == _along(j, at.shape)).all()), None)
        named[k] = at.ndim + product.operands[1 - side].array.ndim + k if along is None else along
        rows |= {named[k]: where} if along is None else {}
    count, last = len(batch), at.ndim - 1
    fixed = [last] if last in named.values() else range(count, last)  # along which the rows are whole
    if not {*fixed} <= set(named.values()):
        return None
    if any((where != where.take([0], j)).any() for where in rows.values() for j in fixed):
        return None
    others = iter(range(at.ndim, at.ndim + product.operands[1 - side].array.ndim))
    data = tuple(
        list(of_data).index(k) if k in of_data else last if k == data_sum else next(others)
        for k in range(product.operands[1 - side].array.ndim)
    )
    axes_of_table = tuple(named[k] for k in range(table.array.ndim))
    batch, free = tuple(range(count)), list(range(count, last))
    return Taken(product, side, at.shape, data, batch, last, table, axes_of_table, rows, tuple(free))


def _along(axis: int, shape: Sequence[int]) -> Array:
    """Return the places along an axis of an array."""
    return np.arange(shape[axis]).reshape([-1 if k == axis else 1 for k in range(len(shape))])


def _product(taken: Taken, data: Value, axes: Sequence[int]) -> tuple[Operation, list[int]]:
    """Return the product of data that has these axes with the table, and the axes of its result."""
    both = [k for k in axes if k in taken.axes]
    batch = [k for k in both if k in taken.batch]
    summed = [k for k in both if k not in batch]
    given = [*batch, *(k for k in axes if k not in both), *(k for k in taken.axes if k not in both)]

    def run(x: Array, table: Array) -> Array:
        return np.asarray(np.einsum(x, list(axes), table, list(taken.axes), given, optimize=True))

    leaves = data.leaves | taken.table.leaves
    whole = Value(run(data.array, taken.table.array), data=True, leaves=leaves)
    of_data, of_table = (tuple(tuple(of.index(k) for k in ks) for ks in (summed, batch)) for of in (axes, taken.axes))
    numbers = tuple(zip(of_data, of_table, strict=True))
    made = step(taken.product, "dot_general", (data, taken.table), whole, run)
    return replace(made, settings={"dimension_numbers": numbers}), given


def taken_behind(taken: Taken) -> list[Operation]:
    """Return the product of the data with all rows, and the operation that takes its elements."""
    times, given = _product(taken, taken.product.operands[1 - taken.side], taken.data)
    whole, (result,) = times.results[0].array, taken.product.results
    sizes = dict(zip(taken.data, taken.product.operands[1 - taken.side].array.shape, strict=True))
    sizes |= dict(zip((*taken.batch, *taken.free), taken.shape, strict=False))
    shape = [sizes[k] for k in taken.result]
    rows = {k: _placed(where[..., 0], (*taken.batch, *taken.free), taken.result) for k, where in taken.rows.items()}
    at = [rows[k] if k in rows else _along(taken.result.index(k), shape) for k in given]
    places = np.ravel_multi_index([np.broadcast_to(k, shape) for k in at], whole.shape).reshape(result.array.shape)
    return [times, step(taken.product, "index", times.results, result, lambda x: x.ravel()[places])]


def _placed(array: Array, axes: Sequence[int], among: Sequence[int]) -> Array:
    """Return an array with its axes at their places among others, in the order of these."""
    order = [axes.index(k) for k in among if k in axes]
    sizes = dict(zip(axes, array.shape, strict=True))
    return array.transpose(order).reshape([sizes.get(k, 1) for k in among])


def _added_before(taken: Taken) -> list[Operation]:
    """Return the sums of the data that meets each row of the table, their product with the table, and what gives the axes of the result."""
    data, (result,) = taken.product.operands[1 - taken.side], taken.product.results
    rest = [k for k in taken.data if k not in (*taken.batch, taken.summed)]
    order = [taken.data.index(k) for k in (*taken.batch, taken.summed, *rest)]
    whole = (slice(None),) * len(taken.batch) + (0,) * len(taken.free)
    where = [of[whole] for of in taken.rows.values()]
    grid = tuple(_along(j, where[0].shape) for j in range(len(taken.batch)))
    sizes = [taken.table.array.shape[taken.axes.index(k)] for k in taken.rows]

    def add(array: Array) -> Array:
        x = array.transpose(order)
        sums = np.zeros((*x.shape[: len(taken.batch)], *sizes, *x.shape[len(taken.batch) + 1 :]))
        np.add.at(sums, (*grid, *where), x)
        return sums

    added = Value(add(data.array), data=True, leaves=data.leaves)
    times, given = _product(taken, added, (*taken.batch, *taken.rows, *rest))
    turn = [given.index(k) for k in taken.result]
    return [
        step(taken.product, "scatter-add", (data,), added, add),
        times,
        step(
            taken.product, "transpose", times.results, result, lambda x: x.transpose(turn).reshape(result.array.shape)
        ),
    ]
