"""Lookups in a table of which code sets rows to zero, as lookups in the whole table whose results are multiplied by 0 or 1.

One program sets the row of the padding word to zero before it looks up, another masks what it looks up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from convert.inference.derivation import Role
from convert.inference.forms.elements import before_zeros, step
from convert.inference.meetings.sites import role_of
from convert.programs.program import Operation, Program, Value


def rows_zeroed_behind(program: Program) -> Program:
    """Return the program with these lookups in the whole tables."""
    whole = [x for x in program.parameters.values() if len(x.elements) == 1]
    operations: list[Operation] = []
    for operation in program.operations:
        operations += _behind(operation, whole) or [operation]
        whole += [x for x in operation.results if len(x.elements) == 1 and (x.elements[0] >= 0).all()]
    return replace(program, operations=tuple(operations))


def _behind(lookup: Operation, whole: Sequence[Value]) -> list[Operation]:
    """Return the lookup in the whole table, and what multiplies its result; none where a table has no rows of zeros."""
    table, *indices = lookup.operands or (Value(np.zeros(0)),)
    value = before_zeros(table, whole) if role_of(lookup) is Role.LOOKUP and lookup.data else None
    if value is None:
        return []
    mask = Value(np.where(table.elements[0] < 0, 0.0, 1.0))
    at = [x.array for x in indices]
    rows, hidden = (np.asarray(lookup.again([x.array, *at])[0]) for x in (value, mask))
    looked_up = replace(lookup.results[0], array=rows)
    masked = Value(hidden, data=True)
    return [
        replace(lookup, operands=(value, *indices), results=(looked_up,)),
        replace(lookup, operands=(mask, *indices), results=(masked,)),
        step(lookup, "mul", (looked_up, masked), lookup.results[0], np.multiply),
    ]
