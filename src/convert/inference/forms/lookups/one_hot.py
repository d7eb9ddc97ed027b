"""Products of rows of zeros and one 1 with a parameter, as the lookups that they are: of constant rows, as a table of position biases by
buckets, and of rows that the target computes, as the codes of a VQ-VAE.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from convert.inference.derivation import Role
from convert.inference.forms.elements import LAYOUTS, moved_by, product_at, step
from convert.inference.forms.lookups.tables import MAX_TABLES
from convert.inference.meetings.sites import axes_of, role_of
from convert.programs.program import Array, Operation, Program, Value

LOOKUP = "index"
FIELDS = "sum_of_fields"
MAX_STEPS = 4  # operations between an index and its one-hot rows, such as a comparison and another dtype
Axes = tuple[tuple[Sequence[int], Sequence[int]], ...]  # (batch, summed) of the data, and of the parameter


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


@dataclass(frozen=True)
class _Fields:
    """Several fields whose one-hot rows meet a table of their own in one product.

    Attributes:
        of_hot, of_table: the axis of the fields, of the one-hot rows and of the parameter.
        rows: the axis of the parameter along which its rows lie.
        summed: whether the product adds up what the fields give; otherwise its first axis is theirs.
    """

    of_hot: int
    of_table: int
    rows: int
    summed: bool


def fields_apart(program: Program) -> Program:
    """Return the program with a product for each of several fields whose one-hot rows meet a table of their own, and the sum, or the stack, of these.

    One program contracts the one-hot rows of all fields at once, the other looks up a row for each.
    """
    made_by = program.made_by
    operations: list[Operation] = []
    for operation in program.operations:
        fields = _fields(operation, made_by)
        operations += [operation] if fields is None else _field_by_field(operation, fields)
    return replace(program, operations=tuple(operations)) if len(operations) > len(program.operations) else program


def _fields(operation: Operation, made_by: Mapping[Value, Operation]) -> _Fields | None:
    """Return the fields; None if it is another product."""
    axes = _axes_of_one_hot_rows(operation, made_by)
    if axes is None:
        return None
    (batch, summed), (of_batch, of_table) = axes
    shape = _hot_and_table(operation)[0].array.shape
    if len(summed) == 2 and not batch:
        k = summed.index(len(shape) - 1)
        return _Fields(summed[1 - k], of_table[1 - k], of_table[k], summed=True)
    if len(summed) == len(batch) == 1 and shape[batch[0]] <= MAX_TABLES:
        return _Fields(batch[0], of_batch[0], of_table[0], summed=False)
    return None


def _axes_of_one_hot_rows(operation: Operation, made_by: Mapping[Value, Operation]) -> Axes | None:
    """Return the axes of one-hot rows that are computed of data, and those of a parameter that they meet; None if it is another product."""
    if role_of(operation) is not Role.PRODUCT or len(operation.operands) != 2:
        return None
    hot, table = _hot_and_table(operation)
    axes = axes_of(operation, operation.operands.index(table))
    if not table.of_parameters or not table.elements or hot not in made_by or not hot.data or axes is None:
        return None
    return axes if hot.array.ndim - 1 in axes[0][1] and _are_one_hot(hot.array) else None


def _hot_and_table(product: Operation) -> tuple[Value, Value]:
    one, two = product.operands
    return (two, one) if one.of_parameters else (one, two)


def _as_product(product: Operation, array: Array, first: int, rank: int) -> Array:
    """Return a result with its axes in the product's order: where the table is the first operand, those of the one-hot rows are the last.

    Args:
        first, rank: the first axis of the one-hot rows in the array, and how many there are.
    """
    if not product.operands[0].of_parameters:
        return array
    return np.moveaxis(array, range(first, first + rank), range(-rank, 0))


def _field_by_field(product: Operation, fields: _Fields) -> list[Operation]:
    hot, table = _hot_and_table(product)
    rows = fields.rows - (fields.of_table < fields.rows)
    operations: list[Operation] = []
    found: list[Value] = []
    for k in range(hot.array.shape[fields.of_hot]):
        chosen = Value(np.take(hot.array, k, fields.of_hot), data=True, leaves=hot.leaves)
        taken = step(product, "select", (hot,), chosen, lambda x, k=k: np.take(x, k, fields.of_hot))
        turn = step(product, "select", (table,), table, lambda x, k=k: np.moveaxis(np.take(x, k, fields.of_table), rows, 0))  # fmt: skip
        one = moved_by(turn, table)
        times = product_at(product, chosen, one)
        found += times.results
        operations += [taken, replace(turn, results=(one,)), times]
    # One term of the sums that it stands in, however many fields there are.
    name, join = (FIELDS, np.sum) if fields.summed else ("stack", np.stack)
    first, rank = int(not fields.summed), hot.array.ndim - 2

    def joined(*rows: Array) -> Array:
        return _as_product(product, np.asarray(join(rows, 0)), first, rank)

    return [*operations, step(product, name, tuple(found), product.results[0], joined)]


def rows_chosen_by_products(program: Program) -> int:
    """Return how many products of one-hot rows that a program computes of data take rows of a parameter."""
    made_by = program.made_by
    return sum(_chosen(operation, made_by) is not None for operation in program.operations)


def chosen_rows_as_lookups(program: Program) -> Program:
    """Return the program with a lookup by the place of the 1 instead of each such product."""
    made_by = program.made_by
    operations: list[Operation] = []
    for operation in program.operations:
        axis = _chosen(operation, made_by)
        operations += [operation] if axis is None else _by_place(operation, axis, made_by)
    return replace(program, operations=tuple(operations))


def _chosen(operation: Operation, made_by: Mapping[Value, Operation]) -> int | None:
    """Return the axis of a parameter along which a product takes places by one-hot rows that are computed of data; None if it is another product."""
    axes = _axes_of_one_hot_rows(operation, made_by)
    return axes[1][1][0] if axes is not None and not axes[0][0] and len(axes[0][1]) == 1 else None


def _by_place(product: Operation, axis: int, made_by: Mapping[Value, Operation]) -> list[Operation]:
    hot, table = _hot_and_table(product)
    turn = step(product, "transpose", (table,), table, lambda x: np.moveaxis(x, axis, 0))
    rows = moved_by(turn, table)
    index = _index(hot, made_by)
    found: list[Operation] = []
    if index is None:
        index = Value(hot.array.argmax(-1), data=True, leaves=hot.leaves)
        found = [step(product, "argmax", (hot,), index, lambda x: x.argmax(-1))]

    def taken(table: Array, at: Array) -> Array:
        return _as_product(product, table[at.astype(np.int64)], 0, at.ndim)

    take = step(product, "embedding", (rows, index), product.results[0], taken)
    return [*found, replace(turn, results=(rows,)), take]


def _index(hot: Value, made_by: Mapping[Value, Operation]) -> Value | None:
    """Return the value of data that one-hot rows are made of; None if there is none."""
    at, value = hot.array.argmax(-1), hot
    for _ in range(MAX_STEPS):
        data = made_by[value].data if value in made_by else ()
        if len(data) != 1:
            return None
        (value,) = data
        if value.array.dtype.kind in "iu" and np.array_equal(value.array, at):
            return value
    return None


def _are_one_hot(rows: Array) -> bool:
    """Whether each row has one 1, and zeros besides."""
    return rows.size > 0 and bool(((rows == 0) | (rows == 1)).all() and (rows.sum(-1) == 1).all())
