"""Take learned rows apart from the data that they are joined to, up to the first layer: a norm of ``[queries, words]`` is that of the queries,
beside that of the words.

One program joins learned queries to the words and normalises both at once; another normalises each, and joins them then.
"""

from __future__ import annotations

from collections import Counter

from convert.inference.derivation import Role
from convert.inference.forms.batches_apart import LAYERS, Rewriting, axis_of_rows
from convert.inference.meetings.sites import parameter_operands, role_of
from convert.programs.program import Operation, Program


class _Rows(Rewriting):
    """A program whose learned rows are apart; of what is joined, that is counted which a parameter scales."""

    def goes_on(self, operation: Operation) -> bool:
        """Whether an operation is tried on the parts: it has no other data, and is no layer."""
        others = [x for x in operation.data if x not in self._parts]
        return not others and role_of(operation) not in LAYERS

    def joined_axis(self, operation: Operation) -> int | None:
        """Return the axis along which an operation joins learned rows to data; None if it joins none."""
        learned = [x for x in operation.operands if x.of_parameters]
        both = learned and operation.data and not any(x.constant for x in operation.operands)
        return axis_of_rows(operation) if both else None

    def is_layer(self, operation: Operation) -> bool:
        """Whether a parameter scales the rows."""
        return bool(parameter_operands(operation)) and role_of(operation) is Role.SCALE


def scaled_with_learned(program: Program) -> Counter[int]:
    """Return the sizes of what learned rows are joined to where both are scaled at once, with how many there are of each."""
    return Counter(x.results[0].array.size for x in _Rows(program, keep=True).joins)


def learned_rows_apart(program: Program) -> Program:
    """Return the program with learned rows apart where they are scaled with the data that they are joined to; layers take both as before."""
    rewriting = _Rows(program, keep=False)
    return rewriting.result() if rewriting.joins else program
