"""Products of constant rows of zeros and one 1 with a parameter, as the lookups that they are: a table of position biases by buckets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from convert.inference.derivation import Role
from convert.inference.forms.elements import LAYOUTS, moved_by
from convert.inference.meetings.sites import axes_of, role_of
from convert.programs.program import Array, Operation, Program, Value

LOOKUP = "index"


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
    if not (((rows == 0) | (rows == 1)).all() and (rows.sum(-1) == 1).all()):
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
