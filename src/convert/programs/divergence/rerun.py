"""Run the record of a program again with other values in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from convert.programs.program import Operation, Program, Value

Array = np.ndarray[Any, np.dtype[Any]]
FAILS = (ValueError, RuntimeError, TypeError, IndexError, ZeroDivisionError, FloatingPointError)
Now = Callable[[Value], Array]  # what a value is now
Computed = Callable[[Now], Array]


@dataclass(frozen=True)
class Change:
    """Values to put into a record.

    Attributes:
        values: value -> its array, wherever it is used.
        operands: (number of an operation, of its operand) -> the array that it is given there alone.
        earlier: (number of an operation, of its operand) -> the earlier value that it is given there, as it is when the operation runs.
        computed: number of an operation -> what it gives instead of its first result, of the values as they are when it runs.
    """

    values: Mapping[Value, Array] = field(default_factory=dict)
    operands: Mapping[tuple[int, int], Array] = field(default_factory=dict)
    earlier: Mapping[tuple[int, int], Value] = field(default_factory=dict)
    computed: Mapping[int, Computed] = field(default_factory=dict)


class Rerun:
    """A record with values replaced.

    Attributes:
        changed: value -> its array now, for those that differ from the record.
        put_in: the values that were put in.
    """

    def __init__(self, program: Program, like: Rerun | None = None) -> None:
        self.program = program
        self.changed: dict[Value, Array] = dict(like.changed) if like else {}
        self.put_in: set[Value] = set(like.put_in) if like else set()
        self._given: dict[tuple[int, int], Array | Value] = dict(like._given) if like else {}

    def array(self, value: Value) -> Array:
        """Return what a value is now."""
        return self.changed.get(value, value.array)

    def put(self, change: Change) -> Iterator[tuple[int, Operation]]:
        """Put values in and run what depends on them; yield each operation that ran, with its number.

        Raises:
            ValueError: an operation does not take the new values.
        """
        self.changed |= change.values
        self.put_in |= set(change.values)
        self._given |= {**change.operands, **change.earlier}
        moved = set(change.values)
        given = {at for (at, k), x in self._given.items() if (at, k) in change.operands or isinstance(x, Value)}
        given |= set(change.computed)
        for index, operation in enumerate(self.program.operations):
            if index not in given and not any(operand in moved for operand in operation.operands):
                continue
            if all(result in self.put_in for result in operation.results):
                continue
            taken = [self._given.get((index, k), operand) for k, operand in enumerate(operation.operands)]
            operands = [_for_torch(self.array(x) if isinstance(x, Value) else x) for x in taken]
            try:
                results: Sequence[Array] = (
                    [change.computed[index](self.array)] if index in change.computed else operation.again(operands)
                )
            except FAILS as error:
                raise ValueError(f"{operation.name} does not take the new values") from error
            for value, array in zip(operation.results, results, strict=False):
                if value not in self.put_in:
                    self.changed[value] = np.asarray(array)
                    moved.add(value)
            yield index, operation


def _for_torch(array: Array) -> Array:
    """Torch takes no arrays of another order, or that it may not write."""
    return np.require(array, requirements=["C", "W"])


def again(operations: Sequence[Operation], given: Mapping[Value, Array], made: Value | None = None) -> Array | None:
    """Run a few operations of a record on other values; return what the last one gives, or None if one does not take them.

    Args:
        made: which value of the last one, where it gives several.
    """
    found = dict(given)
    for operation in operations:
        operands = [_for_torch(found.get(v, v.array)) for v in operation.operands]
        try:
            found |= dict(zip(operation.results, map(np.asarray, operation.again(operands)), strict=False))
        except FAILS:
            return None
    return found.get(made or operations[-1].results[0]) if operations else None
