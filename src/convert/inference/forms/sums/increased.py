"""Multiply by one more where a program adds a multiple of a value to it: ``x + s x`` is ``(1 + s) x``, as the epsilon of a graph isomorphism network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from convert.inference.forms.elements import step
from convert.programs.program import Operation, Program, Value

ADDS = ("add", "add_any")


def increased_values(program: Program) -> int:
    """Return how often a program adds a multiple of a value to it, by a parameter."""
    made_by = program.made_by
    return sum(_factor(operation, made_by) is not None for operation in program.operations)


def by_one_more(program: Program, *, keep: bool) -> Program:
    """Return the program with a product in place of each such sum.

    Args:
        program: the record.
        keep: whether the sums stay in the program as well.
    """
    made_by = program.made_by
    operations: list[Operation] = []
    for operation in program.operations:
        found = _factor(operation, made_by)
        operations += [operation] if found is None or keep else []
        if found is not None:
            value, factor = found
            one_more = replace(factor, array=factor.array + 1)
            operations.append(step(operation, "add", (Value(np.array(1.0)), factor), one_more, np.add))
            operations.append(step(operation, "mul", (one_more, value), operation.results[0], np.multiply))
    return replace(program, operations=tuple(operations))


def _factor(total: Operation, made_by: Mapping[Value, Operation]) -> tuple[Value, Value] | None:
    """Return the value and the parameter of a sum of the value and its multiple; None if it is another operation."""
    if (
        total.name not in ADDS
        or len(total.data) != 2
        or len(total.operands) != 2
        or total.settings.get("alpha", 1) != 1
    ):
        return None
    for value, multiple in (total.operands, total.operands[::-1]):
        made = made_by.get(multiple)
        if made is not None and made.name == "mul" and len(made.operands) == 2 and value in made.operands:
            factor = made.operands[1 - made.operands.index(value)]
            if factor.of_parameters and factor.elements and multiple.array.shape == value.array.shape:
                return value, factor
    return None
