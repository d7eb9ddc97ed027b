"""Parts of a value that was joined, such as the half that a coupling layer of a flow passes on: they are what was joined, and depend on nothing else."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from convert.inference.forms.elements import JOINS, MOVES, elements_moved, joined
from convert.programs.program import Operation, Program, Value


def parts_of_joined(program: Program) -> Program:
    """Return the program with the values that it joins in place of the same parts of the whole."""
    made_by, same = program.made_by, dict[Value, Value]()
    operations: list[Operation] = []
    for operation in program.operations:
        join = made_by.get(operation.operands[0]) if operation.operands and operation.name in MOVES else None
        if join is not None and join.name in JOINS:
            same |= _same_parts(operation, join)
        if not same.keys().isdisjoint(operation.operands):
            operation = replace(operation, operands=tuple(same.get(x, x) for x in operation.operands))
        operations.append(operation)
    if not same:
        return program
    outputs = {name: same.get(value, value) for name, value in program.outputs.items()}
    return replace(program, operations=tuple(operations), outputs=outputs)


def _same_parts(operation: Operation, join: Operation) -> dict[Value, Value]:
    """Return the results of an operation that are one of the values that another one has joined -> this value."""
    places = elements_moved(operation)
    found = {}
    for value in dict.fromkeys(join.operands):
        of = joined(join, value)
        for result, at in zip(operation.results, places or (), strict=False):
            if of is None or result.array.shape != value.array.shape:
                continue
            if np.array_equal(of[0][at], np.arange(value.array.size)):
                found[result] = value
    return found
