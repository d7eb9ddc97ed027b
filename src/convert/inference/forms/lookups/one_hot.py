"""Products of rows of zeros and one 1 with a parameter, as the lookups that they are: of constant rows, as a table of position biases by
buckets, and of rows that the target computes, as the codes of a VQ-VAE.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from convert.inference.derivation import Role
from convert.inference.forms.elements import LAYOUTS, moved_by, product_at, step
from convert.inference.meetings.sites import axes_of, role_of
from convert.programs.program import Array, Operation, Program, Value, producers_of

LOOKUP = "index"
FIELDS = "sum_of_fields"


def one_hot_as_lookups(program: Program) -> Program:
    """Return the program with a lookup in place of each such product."""
    new: dict[Value, Value] = {}
    operations: list[Operation] = []
    for operation in program.operations:
        moved = any(operand in new for operand in operation.operands)
        now = operation
        if moved:
            now = replace(operation, operands=tuple(new.get(operand, operand) for operand in operation.operands))
        found = _lookup(now) or now
        if found is now and moved and operation.name in LAYOUTS and len(now.operands) == 1:
            found = replace(now, results=(moved_by(operation, now.operands[0]),))
        if found is not operation:
            new.update((a, b) for a, b in zip(operation.results, found.results, strict=True) if a is not b)
        operations.append(found)
    if not new:
        return program
    outputs = {name: new.get(value, value) for name, value in program.outputs.items()}
    return replace(program, operations=tuple(operations), outputs=outputs)


def _lookup(operation: Operation) -> Operation | None:
    """Return the lookup that a product of a constant with a parameter is; None if it is none."""
    if role_of(operation) is not Role.PRODUCT or len(operation.operands) != 2:
        return None
    side = next((k for k, x in enumerate(operation.operands) if x.of_parameters and x.elements), None)
    axes = None if side is None or not operation.operands[1 - side].constant else axes_of(operation, side)
    if side is None or axes is None:
        return None
    (hot_batch, hot_sum), (batch, summed) = axes
    hot, table = operation.operands[1 - side], operation.operands[side]
    if hot_batch or batch or len(hot_sum) != 1 or len(summed) != 1 or hot.array.ndim < 2:
        return None
    rows = np.moveaxis(hot.array, hot_sum[0], -1)
    if not _are_one_hot(rows):
        return None
    at, last = rows.argmax(-1), side == 1

    def take(array: Array) -> Array:
        taken = np.take(array, at, summed[0])  # its axes stand in the place of the one that was summed over
        behind = tuple(range(summed[0], summed[0] + at.ndim))
        ends = tuple(range(at.ndim)) if last else tuple(range(taken.ndim - at.ndim, taken.ndim))
        return np.ascontiguousarray(np.moveaxis(taken, behind, ends))

    def again(arrays: Sequence[Array]) -> list[Array]:
        return [take(arrays[0])]

    elements = tuple(take(numbers) for numbers in table.elements)
    made = Value(take(table.array), leaves=table.leaves, elements=elements)
    if made.array.shape != operation.results[0].array.shape:
        return None
    return replace(operation, name=LOOKUP, operands=(table,), results=(made,), settings={}, again=again)


def fields_apart(program: Program) -> Program:
    """Return the program with a product for each of several fields whose one-hot rows meet a table of their own, and the sum of these.

    One program contracts the one-hot rows of all fields at once, the other looks up a row for each.
    """
    made_by = producers_of(program.operations)
    operations: list[Operation] = []
    for operation in program.operations:
        axes = _fields(operation, made_by)
        operations += [operation] if axes is None else _field_by_field(operation, axes)
    return replace(program, operations=tuple(operations)) if len(operations) > len(program.operations) else program


def _fields(operation: Operation, made_by: dict[Value, Operation]) -> tuple[int, int, int] | None:
    """Return the axis of the fields of one-hot rows, and the axes of a parameter that fields and rows meet; None if it is another product."""
    summed, of_table = _summed_with_one_hot_rows(operation, made_by, 2)
    if not summed:
        return None
    k = summed.index(operation.operands[0].array.ndim - 1)
    return summed[1 - k], of_table[1 - k], of_table[k]


def _summed_with_one_hot_rows(
    operation: Operation, made_by: dict[Value, Operation], count: int
) -> tuple[list[int], list[int]]:
    """Return the axes of one-hot rows that are computed of data, and those of a parameter, over which their product sums; none if these are not so many."""
    if role_of(operation) is not Role.PRODUCT or len(operation.operands) != 2:
        return [], []
    hot, table = operation.operands
    axes = axes_of(operation, 1)
    if not table.of_parameters or not table.elements or hot not in made_by or not hot.data or axes is None:
        return [], []
    (batch, summed), (_, of_table) = axes
    last = not batch and len(summed) == count and hot.array.ndim - 1 in summed
    return (list(summed), list(of_table)) if last and _are_one_hot(hot.array) else ([], [])


def _field_by_field(product: Operation, axes: tuple[int, int, int]) -> list[Operation]:
    (field, of_field, of_rows), (hot, table) = axes, product.operands
    operations: list[Operation] = []
    found: list[Value] = []
    for k in range(hot.array.shape[field]):
        rows = Value(np.take(hot.array, k, field), data=True, leaves=hot.leaves)
        taken = step(product, "select", (hot,), rows, lambda x, k=k: np.take(x, k, field))
        turn = step(product, "select", (table,), table, lambda x, k=k: np.moveaxis(np.take(x, k, of_field), of_rows - (of_field < of_rows), 0))  # fmt: skip
        one = moved_by(turn, table)
        times = product_at(product, rows, one)
        found += times.results
        operations += [taken, replace(turn, results=(one,)), times]
    # One term of the sums that it stands in, however many fields there are.
    return [*operations, step(product, FIELDS, tuple(found), product.results[0], lambda *x: np.sum(x, 0))]


def rows_chosen_by_products(program: Program) -> int:
    """Return how many products of one-hot rows that a program computes of data take rows of a parameter."""
    made_by = producers_of(program.operations)
    return sum(_chosen(operation, made_by) is not None for operation in program.operations)


def chosen_rows_as_lookups(program: Program) -> Program:
    """Return the program with a lookup by the place of the 1 instead of each such product."""
    made_by = producers_of(program.operations)
    operations: list[Operation] = []
    for operation in program.operations:
        axis = _chosen(operation, made_by)
        operations += [operation] if axis is None else _by_place(operation, axis)
    return replace(program, operations=tuple(operations))


def _chosen(operation: Operation, made_by: dict[Value, Operation]) -> int | None:
    """Return the axis of a parameter along which a product takes places by one-hot rows that are computed of data; None if it is another product."""
    _, of_table = _summed_with_one_hot_rows(operation, made_by, 1)
    return of_table[0] if of_table else None


def _by_place(product: Operation, axis: int) -> list[Operation]:
    hot, table = product.operands
    index = Value(hot.array.argmax(-1), data=True, leaves=hot.leaves)
    turn = step(product, "transpose", (table,), table, lambda x: np.moveaxis(x, axis, 0))
    rows = moved_by(turn, table)
    return [
        step(product, "argmax", (hot,), index, lambda x: x.argmax(-1)),
        replace(turn, results=(rows,)),
        step(product, "embedding", (rows, index), product.results[0], lambda x, at: x[at]),
    ]


def _are_one_hot(rows: Array) -> bool:
    """Whether each row has one 1, and zeros besides."""
    return rows.size > 0 and bool(((rows == 0) | (rows == 1)).all() and (rows.sum(-1) == 1).all())
