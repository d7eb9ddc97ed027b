"""Take rows of the table of one field at a time, where a program has the tables of all fields below each other in one.

It adds to the number that a field has where the rows of that field begin: the categories of a record, the items of several shops.
Other code has a table for each field.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from convert.inference.forms.elements import JOINS, step
from convert.inference.forms.lookups.tables import each_lookup
from convert.programs.program import Array, Operation, Program, Value

SUMS = ("add", "add_")
MAX_STEPS = 12  # operations between the sum and the lookup: what treats numbers below zero, and layouts


@dataclass(frozen=True)
class _Fields:
    """The fields of a lookup.

    Attributes:
        numbers: what is looked up in the table of each field, before the sum.
        axis: of the numbers, along which the fields lie.
        starts, ends: of the rows of each field.
    """

    numbers: Value
    axis: int
    starts: tuple[int, ...]
    ends: tuple[int, ...]


def field_by_field(program: Program) -> Program:
    """Return the program with a lookup for each field."""
    return each_lookup(program, _fields, _apart)


def _fields(operation: Operation, made_by: Mapping[Value, Operation]) -> _Fields | None:
    """Return the fields of a lookup; None if there is one, or if a number is a row of another field."""
    weight, data, result = operation.operands[0], operation.data, operation.results[0]
    if not weight.of_parameters or len(weight.elements) != 1 or weight.array.ndim > 2 or len(data) != 1:
        return None
    found = _sum(data[0], made_by)
    if found is None:
        return None
    numbers, offsets = found
    shape = numbers.array.shape
    along = [axis for axis in range(len(shape)) if (offsets != offsets.take([0], axis)).any()]
    if len(along) != 1 or not np.array_equal(
        weight.array[(numbers.array + offsets).ravel()].ravel(), result.array.ravel()
    ):
        return None
    starts = np.moveaxis(offsets, along[0], 0).reshape(shape[along[0]], -1)[:, 0]
    order = np.argsort(starts)
    ends = np.empty_like(starts)
    ends[order] = [*starts[order][1:], len(weight.array)]
    columns = np.moveaxis(numbers.array, along[0], 0).reshape(len(starts), -1)
    if len(np.unique(starts)) < len(starts) or (columns < 0).any() or (columns.max(1) >= ends - starts).any():
        return None
    return _Fields(numbers, along[0], tuple(starts.tolist()), tuple(ends.tolist()))


def _sum(index: Value, made_by: Mapping[Value, Operation]) -> tuple[Value, Array] | None:
    """Return the numbers and the constants, of their shape, that add up to an index; None if it is no such sum."""
    value = index
    for _ in range(MAX_STEPS):
        made = made_by.get(value)
        if made is None:
            return None
        if (
            made.name in JOINS
            and len(made.data) == 1
            and all(x in made.data or not x.array.any() for x in made.operands)
        ):
            index = value = made.data[0]  # beside zeros, as `vmap` says where each row begins
            continue
        given = [x for x in made.data if np.array_equal(x.array.ravel(), index.array.ravel())]
        if given:
            value = given[0]
            continue
        if made.name not in SUMS or len(made.data) != 1 or made.settings.get("alpha", 1) != 1:
            return None
        others = [x for x in made.operands if x.constant]
        if len(others) != 1 or made.data[0].array.shape != made.results[0].array.shape:
            return None
        return made.data[0], np.broadcast_to(others[0].array, made.data[0].array.shape)
    return None


def _apart(operation: Operation, fields: _Fields) -> Iterator[Operation]:
    """Yield the lookups of single fields, and the operation that joins their results."""
    weight, result, axis = operation.operands[0], operation.results[0], fields.axis
    made = []
    for k, (start, end) in enumerate(zip(fields.starts, fields.ends, strict=True)):
        rows = slice(start, end)
        one = Value(weight.array[rows], leaves=weight.leaves, elements=(weight.elements[0][rows],))
        chosen = Value(fields.numbers.array.take(k, axis), data=True, leaves=fields.numbers.leaves)
        made.append(Value(one.array[chosen.array], data=True, leaves=result.leaves))
        yield step(operation, "slice", (weight,), one, lambda x, rows=rows: x[rows])
        yield step(operation, "slice", (fields.numbers,), chosen, lambda x, k=k: x.take(k, axis))
        yield step(operation, operation.name, (one, chosen), made[-1], lambda one, at: one[at])
    shape = result.array.shape
    yield step(operation, "stack", tuple(made), result, lambda *x: np.stack(x, axis).reshape(shape))
