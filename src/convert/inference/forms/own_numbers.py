"""Numbers that a module has itself, as constants: tables and masks that are saved with its weights, as buffers or as parameters that do not learn.

The source has them as constants, too, and may use them in another way, such as two tables as one.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from convert.programs.program import Array, Program, Value


def own_numbers(program: Program) -> frozenset[str]:
    """Return the names of the buffers that operations use with data, and whose numbers say something."""
    used = {x for operation in program.operations if operation.data for x in operation.operands if x.of_parameters}
    names = {name for x in used if x.leaves <= program.buffers for name in x.leaves}
    return frozenset(name for name in names if not says_nothing(program.parameters[name].array))


def says_nothing(array: Array) -> bool:
    """Whether zeros or ones fill a buffer, as they fill the statistics of a BatchNorm and the mask of a pruned weight before these are loaded."""
    return bool(array.size) and np.ptp(array) == 0 and array.flat[0] in (0, 1)


def own_numbers_as_constants(program: Program) -> Program:
    """Return the program with what is computed of such buffers alone as constants."""
    names = own_numbers(program)
    new: dict[Value, Value] = {}
    values = [*program.parameters.values(), *(x for operation in program.operations for x in operation.results)]
    for value in values:
        if value.of_parameters and value.leaves <= names:
            new[value] = Value(value.array)
    operations = tuple(
        replace(operation, operands=tuple(new.get(x, x) for x in operation.operands))
        for operation in program.operations
        if not all(x in new for x in operation.results) or not operation.results
    )
    return replace(program, operations=operations) if new else program
