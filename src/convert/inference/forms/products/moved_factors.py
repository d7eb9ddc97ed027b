"""A number that multiplies a result, as it multiplies what the result is made of: ``(u v) t`` is ``(t u) v`` and ``u (t v)``; and the reverse.

One program multiplies the scores by a temperature, the other the queries. The source's record has one of the two places; the others
are computed here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from convert.inference.derivation import Role
from convert.inference.forms.products.commuted import LINEAR, LINEAR_LAYOUTS, MAX_DEPTH, equal, run_with
from convert.inference.meetings.sites import role_of
from convert.programs.program import REFUSALS, Array, Operation, Program, Value

FACTOR = 3.0  # by which a value is multiplied to see whether it multiplies a result


@dataclass(frozen=True, eq=False)
class MovedFactor:
    """A factor of parameters that multiplies other data.

    Attributes:
        index: of the source's operation.
        operation: it, with other data.
        side: position of the factor.
    """

    index: int
    operation: Operation
    side: int


def moved_factors(program: Program) -> Iterator[MovedFactor]:
    """Yield the multiplications by one number of parameters, in front of the linear operations that give what it multiplies, and behind."""
    made_by, users = program.made_by, program.users
    for index, operation in enumerate(program.operations):
        if role_of(operation) is not Role.SCALE or len(operation.operands) != 2 or len(operation.data) != 1:
            continue
        side = 0 if operation.operands[1].data else 1
        weight = _as_number(operation.operands[side])
        if weight is None or (operation.name == "div" and side == 0):
            continue
        for array in (*_in_front(operation.data[0], made_by, MAX_DEPTH), *_behind(operation, users)):
            yield MovedFactor(index, _with(operation, side, weight, array), side)


def _as_number(weight: Value) -> Value | None:
    """Return a value of parameters that is one number, also one that is repeated, without axes; None if it is several."""
    elements = [numbers.ravel() for numbers in weight.elements]
    if not elements or not weight.array.size or any((x != x[0]).any() for x in (weight.array.ravel(), *elements)):
        return None
    return replace(weight, array=weight.array.ravel()[0], elements=tuple(np.asarray(x[0]) for x in elements))


def _in_front(value: Value, made_by: Mapping[Value, Operation], depth: int) -> Iterator[Array]:
    """Yield the data of which a value is a linear function."""
    made = made_by.get(value)
    if made is None or made.name not in LINEAR or not depth:
        return
    for x in dict.fromkeys(made.data):
        if _multiplies(made, x, value):
            if made.name not in LINEAR_LAYOUTS:
                yield x.array
            yield from _in_front(x, made_by, depth - 1)


def _behind(operation: Operation, users: Mapping[Value, Sequence[Operation]]) -> Iterator[Array]:
    """Yield what linear operations that are applied to the result would make of what is multiplied."""
    value, array = operation.results[0], operation.data[0].array
    for _ in range(MAX_DEPTH):
        using = users.get(value, [])
        if len(using) != 1 or using[0].name not in LINEAR or array.shape != value.array.shape:
            return
        (used,) = using
        if not _multiplies(used, value, used.results[0]):
            return
        array = run_with(used, value, array)
        value = used.results[0]
        if used.name not in LINEAR_LAYOUTS:
            yield array


def _multiplies(operation: Operation, x: Value, result: Value) -> bool:
    """Whether a factor of an operand is one of the result."""
    try:
        made = run_with(operation, x, FACTOR * x.array)
    except REFUSALS:
        return False
    return equal(made, FACTOR * result.array)


def _with(operation: Operation, side: int, weight: Value, array: Array) -> Operation:
    """Return the multiplication by a number with other data."""
    data = Value(array, data=True)
    made = array / weight.array if operation.name == "div" else array * weight.array
    operands = (data, weight) if side else (weight, data)
    result = Value(made, data=True, leaves=operation.results[0].leaves)
    return replace(operation, operands=operands, results=(result,))
