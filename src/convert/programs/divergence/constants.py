"""Constants that the two programs use with the same parameters, such as the epsilon that a BatchNorm adds to its variance.

What is computed from parameters alone is no value of the data, so the search knows none of it. One side may also multiply a scale
into it before any data comes, and the other one behind it: no operation on data then differs in a constant alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from convert.programs.divergence.kinds import LAYOUT, kind_of
from convert.programs.divergence.knowledge import Knowledge
from convert.programs.divergence.repair import Repair
from convert.programs.divergence.rerun import Change
from convert.programs.divergence.shared_values import same_numbers
from convert.programs.program import Operation, Value

WITH_A_CONSTANT = ("add", "subtract", "multiply", "divide", "limit")


def other_constants(known: Knowledge) -> tuple[Repair, ...]:
    """Return the repairs that give operations of the target on parameters alone the constants that the source has for the same.

    They are one hypothesis; the caller runs it.
    """
    theirs: dict[tuple[str, int], list[tuple[Operation, Value, float]]] = defaultdict(list)
    for one in known.source.operations:
        if (found := constant_of_parameters(one)) is not None:
            at, number = found
            theirs[kind_of(one), one.operands[1 - at].array.size].append((one, one.operands[1 - at], number))
    return tuple(_repairs(known, theirs))


def _repairs(known: Knowledge, theirs: dict[tuple[str, int], list[tuple[Operation, Value, float]]]) -> Iterator[Repair]:
    for index, one in enumerate(known.target.operations if theirs else ()):
        if (found := constant_of_parameters(one)) is None:
            continue
        at, number = found
        given = one.operands[1 - at]
        beside = [x for x in theirs.get((kind_of(one), given.array.size), ()) if same_numbers(x[1].array, given.array)]
        if not beside or any(meant == number for _, _, meant in beside):
            continue
        other, value, meant = beside[0]
        constant = one.operands[at].array
        change = Change(operands={(index, at): np.full(constant.shape, meant, np.result_type(constant, np.float64))})
        got, want = one.results[0].array, other.results[0].array
        named = _parameter(given, known)
        yield Repair((one,), (other,), (named,), (named.array,), (value,), got, want, index, change)


def _parameter(value: Value, known: Knowledge) -> Value:
    """Return the parameter whose elements a value of the target has, which has a name; the value where it is computed."""
    index = known.producer.get(value)
    while index is not None and kind_of(made := known.target.operations[index]) == LAYOUT and len(made.operands) == 1:
        value = made.operands[0]
        index = known.producer.get(value)
    return value


def constant_of_parameters(operation: Operation) -> tuple[int, float] | None:
    """Return which of two operands is a number, where the other one is computed from parameters alone; and the number."""
    if kind_of(operation) not in WITH_A_CONSTANT or len(operation.operands) != 2:
        return None
    for at, value in enumerate(operation.operands):
        array = value.array
        is_number = value.constant and array.size and array.dtype.kind in "fi" and (array == array.flat[0]).all()
        if is_number and operation.operands[1 - at].of_parameters:
            return at, float(array.flat[0])
    return None
