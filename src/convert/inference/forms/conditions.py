"""Conditions that a module computes of its buffers alone, as constants: GPT's ``bias[:, :, :T, :T] == 0``, a mask that is saved as floats."""

from __future__ import annotations

from dataclasses import replace

from convert.programs.program import Operation, Program, Value


def constant_conditions(program: Program) -> Program:
    """Return the program with truth values of buffers as constants; the buffers are then the module's own numbers."""
    new: dict[Value, Value] = {}
    operations: list[Operation] = []
    for operation in program.operations:
        results = operation.results
        if any(x.array.dtype.kind != "b" or not x.of_parameters or not x.leaves <= program.buffers for x in results):
            known = tuple(new.get(x, x) for x in operation.operands)
            operations.append(operation if known == operation.operands else replace(operation, operands=known))
        else:
            new.update({x: Value(x.array) for x in results})
    return replace(program, operations=tuple(operations)) if new else program
