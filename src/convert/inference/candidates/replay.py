"""The target's run, operation by operation, with parameters that become known one after another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from convert.programs.divergence.kinds import LAYOUT, kind_of
from convert.programs.program import REFUSALS, Operation, Program, Value

Array = np.ndarray[Any, np.dtype[Any]]
MOVES = (LAYOUT, "part")


class OtherPathError(ValueError):
    """An operation gives another number of results than in the record, as where no row is sent to an expert."""


class Replay:
    """A run of a program with its own parameters.

    Attributes:
        program: the record.
        parameters: the parameters, flat; NaN where an element is not known.
        values: of data, as far as the run has come.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.parameters = {
            name: np.full(value.array.size, np.nan) if value.array.dtype.kind == "f" else value.array.ravel()
            for name, value in program.parameters.items()
        }
        self.values: dict[Value, Array] = {}
        self._versions = dict.fromkeys(self.parameters, 0)
        self._clock = 0
        self._weights: dict[Value, tuple[tuple[int, ...], Array]] = {}
        self._names = {value: name for name, value in program.parameters.items()}
        self._made_by = {
            result: (operation, k)
            for operation in program.operations
            for k, result in enumerate(operation.results)
            if result.of_parameters
        }

    def value(self, value: Value) -> Array:
        """Return a value as this run has it."""
        if value.data:
            return self.values.get(value, value.array)  # an input stays as it is
        return self._weight(value) if value.leaves else value.array

    def _weight(self, value: Value) -> Array:
        if value in self._names:
            return self.parameters[self._names[value]].reshape(value.array.shape)
        if value not in self._made_by:
            return value.array
        version = tuple(self._versions[name] for name in sorted(value.leaves))
        known = self._weights.get(value)
        if known is None or known[0] != version:
            self._weights[value] = known = version, self._made(*self._made_by[value])
        return known[1]

    def _made(self, operation: Operation, k: int) -> Array:
        """Return a result of parameters; NaN where the operation, such as an SVD, does not run as not all that it is given is known."""
        operands = [self.value(operand) for operand in operation.operands]
        try:
            with np.errstate(all="ignore"):
                return np.asarray(operation.again(operands)[k])
        except REFUSALS:
            if all(self.known(operand) for operand in operation.operands):
                raise
            return np.full(operation.results[k].array.shape, np.nan)

    def known_parameters(self) -> dict[str, Array]:
        """Return the real parameters of which something is known, by name; elements that are not known have the record's numbers."""
        found = {}
        for name, value in self.program.parameters.items():
            flat = self.parameters[name]
            lacks = np.isnan(flat) if flat.dtype.kind == "f" else np.zeros(flat.shape, bool)
            if not (lacks.all() or value.complex):
                found[name] = np.where(lacks, value.array.ravel(), flat).reshape(value.array.shape)
        return found

    def stands_for(self, name: str, places: Array) -> Value:
        """Return a value that has elements of a parameter as they are stored."""
        of = self.program.parameters[name]
        numbers = self.program.first_element[name] + places
        made = Value(of.array.ravel()[places], leaves=frozenset((name,)), elements=(numbers,))
        take = Operation("take", (of,), (made,), {}, lambda arrays: [arrays[0].ravel()[places]])
        self._made_by[made] = take, 0
        return made

    def is_stored(self, value: Value) -> bool:
        """Whether a value of parameters has their elements as they are stored, in any layout."""
        while value in self._made_by:
            operation, _ = self._made_by[value]
            if kind_of(operation) not in MOVES or len(operation.operands) != 1:
                return False
            value = operation.operands[0]
        return value in self._names

    def known(self, value: Value) -> bool:
        """Whether the parameters in a value of parameters are known, as far as it uses them."""
        array = self.value(value)
        return array.dtype.kind != "f" or not np.isnan(array).any()

    def run(self, operation: Operation, replaced: dict[int, Array] | None = None) -> list[Array]:
        """Return what the operation gives; `replaced` has other operands by position.

        Raises:
            OtherPathError: it gives another number of results.
            TypeError, ValueError, IndexError, RuntimeError: it does not run.
        """
        operands = [self.value(operand) for operand in operation.operands]
        for k, array in (replaced or {}).items():
            operands[k] = array
        with np.errstate(all="ignore"):
            results = [np.asarray(out) for out in operation.again(operands)]
        if len(results) != len(operation.results):
            raise OtherPathError(f"it gives {len(results)} results in place of {len(operation.results)}")
        return results

    def keep(self, operation: Operation, results: Sequence[Array]) -> None:
        """Take arrays as the results of an operation."""
        self.values.update(zip(operation.results, results, strict=True))

    def assign(self, changes: Sequence[tuple[str, Array, Array]]) -> list[tuple[str, Array, Array]]:
        """Set elements of parameters, (name, elements, values); return what undoes it."""
        undo = []
        for name, elements, values in changes:
            flat = self.parameters[name]
            undo.append((name, elements, flat[elements].copy()))
            flat[elements] = values
            self._clock += 1
            self._versions[name] = self._clock
        return undo[::-1]

    @contextmanager
    def assigned(self, changes: Sequence[tuple[str, Array, Array]]) -> Iterator[None]:
        """Set elements of parameters within this context."""
        undo = self.assign(changes)
        try:
            yield
        finally:
            self.assign(undo)
