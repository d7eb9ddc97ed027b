"""Run one expert after the other, where a program runs the first layer of all experts, then the second of all.

Code that sorts tokens by expert multiplies them group by group, and applies what lies between two products to all of them at once. As
each row is computed by itself, the rows of one expert can go through all of it first. What an expert gives is then known before the
next one is looked at.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from convert.inference.meetings.sites import parameter_operands
from convert.programs.program import REFUSALS, Array, Operation, Program, Value, producers_of

SAME = 1e-9  # relative: rows that were computed alone, and among others


@dataclass(frozen=True, eq=False)
class _Group:
    """The rows of one expert.

    Attributes:
        rows: their numbers; data.
        value: what they are.
        put: what put them beside those of other experts.
    """

    rows: Value
    value: Value
    put: Operation


class _Rewriting:
    """A program whose experts are taken apart, as far as it was read.

    Attributes:
        operations: what takes the place of those that were read.
    """

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self._new: dict[Value, Value] = {}
        self._sums: dict[Value, list[_Group]] = {}  # of which not all rows are there yet
        self._groups: dict[Value, list[_Group]] = {}

    def read(self, operation: Operation) -> None:
        """Take the next operation of the program."""
        now = operation
        if any(x in self._new for x in operation.operands):
            now = replace(operation, operands=tuple(self._new.get(x, x) for x in operation.operands))
        if self._adds_rows(now) or self._takes_rows(now) or self._by_group(now):
            return
        for operand in now.operands:
            self.put_together(operand)
        self.operations.append(now)

    def put_together(self, value: Value) -> None:
        """Let operations give a value whose groups are apart; one after the other, each with all that leads to it."""
        groups = self._groups.pop(value, None) or self._sums.pop(value, None)
        if groups is None:
            return
        array = value.array
        total = Value(np.zeros_like(array))
        chain = []
        for k, group in enumerate(groups):
            made = value if k == len(groups) - 1 else Value(_added(total.array, group), data=True, leaves=value.leaves)
            chain.append(_index_add(total, group, made))
            total = made
        self.operations = list(_late(self.operations, chain))

    def _adds_rows(self, operation: Operation) -> bool:
        """Whether an operation puts the rows of a group beside those of others; they are kept apart."""
        if operation.name != "index_add" or operation.settings.get("dim") != 0 or len(operation.operands) != 3:
            return False
        total, rows, value = operation.operands
        if not (total in self._sums or (total.constant and not total.array.any())) or not (rows.data and value.data):
            return False
        groups = [*self._sums.get(total, ()), _Group(rows, value, operation)]
        known = np.concatenate([group.rows.array for group in groups])
        if len(np.unique(known)) < len(known):  # several experts for one token: their results are added up
            return False
        (result,) = operation.results
        (self._groups if len(known) == len(result.array) else self._sums)[result] = groups
        return True

    def _takes_rows(self, operation: Operation) -> bool:
        """Whether an operation takes the rows of one group."""
        if operation.name != "index" or len(operation.operands) != 2:
            return False
        value, rows = operation.operands
        for group in self._groups.get(value, ()):
            if group.rows is rows or np.array_equal(group.rows.array, rows.array):
                self._new[operation.results[0]] = group.value
                return True
        return False

    def _by_group(self, operation: Operation) -> bool:
        """Whether an operation acts on each row by itself; it then acts on the groups."""
        first = next((x for x in operation.operands if x in self._groups), None)
        if first is None or parameter_operands(operation):
            return False
        groups, count = self._groups[first], len(first.array)
        steps: list[Operation] = []
        results: list[list[_Group]] = [[] for _ in operation.results]
        for k, group in enumerate(groups):
            operands = []
            for x in operation.operands:
                if x in self._groups:
                    operands.append(self._groups[x][k].value)
                elif x.data and x.array.ndim and len(x.array) == count:
                    steps.append(_index(x, group.rows, operation))
                    operands += steps[-1].results
                else:
                    operands.append(x)
            try:
                arrays = operation.again([x.array for x in operands])
            except REFUSALS:
                return False
            made = tuple(
                Value(np.asarray(array), data=True, leaves=x.leaves)
                for array, x in zip(arrays, operation.results, strict=True)
            )
            if not all(_are_rows(x.array, group.rows, y.array) for x, y in zip(made, operation.results, strict=True)):
                return False
            steps.append(replace(operation, operands=tuple(operands), results=made))
            for of, x in zip(results, made, strict=True):
                of.append(replace(group, value=x))
        self.operations += steps
        self._groups |= dict(zip(operation.results, results, strict=True))
        return True


def experts_apart(program: Program) -> Program:
    """Return the program with the experts one after the other."""
    if not any(operation.name == "index_add" for operation in program.operations):
        return program
    rewriting = _Rewriting()
    for operation in program.operations:
        rewriting.read(operation)
    for value in program.outputs.values():
        rewriting.put_together(value)
    return replace(program, operations=tuple(rewriting.operations))


def _are_rows(array: Array, rows: Value, whole: Array) -> bool:
    """Whether an array is some rows of another."""
    if not whole.ndim or array.shape != (len(rows.array), *whole.shape[1:]):
        return False
    scale = np.abs(whole).max(initial=0)
    return bool(np.allclose(array, whole[rows.array], rtol=0, atol=SAME * scale, equal_nan=True))


def _added(total: Array, group: _Group) -> Array:
    made = total.copy()
    np.add.at(made, group.rows.array, group.value.array)
    return made


def _index_add(total: Value, group: _Group, result: Value) -> Operation:
    def again(arrays: Sequence[Array]) -> list[Array]:
        made = np.array(arrays[0])
        np.add.at(made, arrays[1], arrays[2])
        return [made]

    return replace(group.put, operands=(total, group.rows, group.value), results=(result,), again=again)


def _index(value: Value, rows: Value, user: Operation) -> Operation:
    made = Value(value.array[rows.array], data=True, leaves=value.leaves)
    return replace(
        user, name="index", operands=(value, rows), results=(made,), settings={}, again=lambda x: [x[0][x[1]]]
    )


def _late(operations: Sequence[Operation], chain: Sequence[Operation]) -> Iterator[Operation]:
    """Yield operations and a chain of further ones, with what only the chain needs in front of the one that needs it."""
    made_by = producers_of(operations)
    needed = {operation: k for k, operation in enumerate(operations)}
    others = set(operations) - _only_for(operations, chain)
    yield from (operation for operation in operations if operation in others)
    done = others
    for last in chain:
        todo, found = [last], set[Operation]()
        while todo:
            for value in todo.pop().operands:
                made = made_by.get(value)
                if made is not None and made not in done and made not in found:
                    found.add(made)
                    todo.append(made)
        yield from sorted(found, key=needed.__getitem__)
        done |= found
        yield last


def _only_for(operations: Sequence[Operation], chain: Sequence[Operation]) -> set[Operation]:
    """Return the operations whose results nothing but a chain needs."""
    found = set[Operation]()
    needed = {value for operation in chain for value in operation.operands}
    others = set[Value]()
    for operation in reversed(operations):
        if any(x in needed for x in operation.results) and not any(x in others for x in operation.results):
            found.add(operation)
            needed.update(operation.operands)
        else:
            others.update(operation.operands)
    return found
