"""Constants that meet parameters as data does: the state that a recurrent layer starts from, a table of sines before a layer."""

from __future__ import annotations

from dataclasses import replace

from convert.inference.derivation import Role
from convert.inference.sites import role_of
from convert.programs.program import Operation, Program, Value


def constants_as_data(program: Program) -> Program:
    """Return the program with the constants that a product multiplies by parameters as data, and what is computed from them."""
    new: dict[Value, Value] = {}
    operations = []
    for operation in program.operations:
        operands = tuple(new.get(operand, operand) for operand in operation.operands)
        if role_of(operation) in (Role.PRODUCT, Role.CONVOLUTION) and any(x.of_parameters for x in operands):
            operands = tuple(Value(x.array, data=True) if _is_like_data(x) else x for x in operands)
        operations.append(_with(operation, operands, new))
    outputs = {name: new.get(value, value) for name, value in program.outputs.items()}
    return replace(program, operations=tuple(operations), outputs=outputs)


def _is_like_data(value: Value) -> bool:
    return value.constant and value.array.dtype.kind == "f" and value.array.ndim > 1


def _with(operation: Operation, operands: tuple[Value, ...], new: dict[Value, Value]) -> Operation:
    if operands == operation.operands:
        return operation
    results = tuple(Value(value.array, data=True, leaves=value.leaves) for value in operation.results)
    new.update(zip(operation.results, results, strict=True))
    return replace(operation, operands=operands, results=results)
