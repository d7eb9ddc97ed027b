"""Learned rows that are joined to data, as the queries of a Q-Former, or the tokens of a class and of registers.

One program joins them to the words and normalises both at once; another normalises each, and joins them then: a norm of ``[queries, words]`` is
that of the queries, beside that of the words. One program has a parameter for each token; another has one for all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby

import numpy as np

from convert.inference.derivation import Role
from convert.inference.forms.batches_apart import LAYERS, Rewriting, axis_of_rows
from convert.inference.meetings.sites import parameter_operands, role_of
from convert.programs.program import Array, Operation, Program, Value


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


def learned_rows_together(program: Program) -> Program:
    """Return the program with learned rows that lie side by side in a join as one value, whether one parameter has them or several."""
    operations: list[Operation] = []
    for operation in program.operations:
        axis = axis_of_rows(operation) if operation.data else None
        joined = list[Value]()
        for learned, run in groupby(operation.operands, lambda x: x.of_parameters) if axis is not None else ():
            values = tuple(run)
            if learned and len(values) > 1:
                operations.append(_join(operation, values, axis or 0))
                values = operations[-1].results
            joined += values
        if axis is not None and len(joined) < len(operation.operands):
            run_again = partial(_joined, axis=axis)
            operation = replace(operation, operands=tuple(joined), again=run_again)
        operations.append(operation)
    return replace(program, operations=tuple(operations))


def _join(operation: Operation, values: tuple[Value, ...], axis: int) -> Operation:
    """Return the operation that joins some of the values that an operation joins."""
    array, leaves = np.concatenate([x.array for x in values], axis), frozenset[str]().union(*(x.leaves for x in values))
    factors = zip(*(x.elements for x in values), strict=True) if len({len(x.elements) for x in values}) == 1 else ()
    elements = tuple(np.concatenate(of, axis) for of in factors)
    result = Value(array, leaves=leaves, elements=elements)
    return replace(operation, operands=values, results=(result,), again=partial(_joined, axis=axis))


def _joined(arrays: Sequence[Array], axis: int) -> list[Array]:
    return [np.concatenate(arrays, axis)]


def scaled_with_learned(program: Program) -> Counter[int]:
    """Return the sizes of what learned rows are joined to where both are scaled at once, with how many there are of each."""
    return Counter(x.results[0].array.size for x in _Rows(program, keep=True).joins)


def learned_rows_apart(program: Program) -> Program:
    """Return the program with learned rows apart where they are scaled with the data that they are joined to; layers take both as before."""
    rewriting = _Rows(program, keep=False)
    return rewriting.result() if rewriting.joins else program
