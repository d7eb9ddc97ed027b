"""Take all rows apart that a program joins, learned ones, too: a norm of ``[class token, words]`` is that of the token, beside that of the words.

One program keeps the class token apart from the words in every layer; another joins them once. `batches_apart` leaves rows together of
which one is computed from the other, and `learned_rows` those that no parameter scales.
"""

from __future__ import annotations

from collections.abc import Sequence

from convert.inference.forms.batches_apart import Rewriting, axis_of_rows
from convert.programs.program import Operation, Program, Value

MOST_PARTS = 8  # that are joined at once


class _Joined(Rewriting):
    """A program of which all rows that are joined are apart, as long as operations act on each row alone."""

    def joined_axis(self, operation: Operation) -> int | None:
        """Return the axis along which an operation joins data, or learned rows to data; None if it joins none."""
        return _axis(operation)

    def are_steps(self, values: Sequence[Value]) -> bool:
        """Whether some values are steps of a loop: these are taken apart as well."""
        return False


def joins_rows(program: Program) -> bool:
    """Whether a program joins rows."""
    return any(_axis(operation) is not None for operation in program.operations)


def joined_rows_apart(program: Program, *, keep: bool) -> Program:
    """Return the program with all rows apart that it joins.

    Args:
        keep: whether what is computed of the whole stays in the program as well.
    """
    return _Joined(program, keep=keep).result()


def _axis(operation: Operation) -> int | None:
    if not operation.data or any(x.constant for x in operation.operands) or len(operation.operands) > MOST_PARTS:
        return None
    return axis_of_rows(operation)
