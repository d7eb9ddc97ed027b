"""Add constants last: ``x + (b + mask)`` and ``(x + mask) + b`` become ``(x + b) + mask``. Products of factors in the same way.

One program adds a mask to its bias before data meets both, another adds one behind the other, or chooses by the mask. What data gives
with the parameter alone is a value of all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from convert.inference.forms.elements import LAYOUTS, before_moves, moved_by, spread_like
from convert.programs.program import Operation, Program, Value, times_used

KINDS: dict[str, Any] = {"add": np.add, "add_any": np.add, "sub": np.add, "mul": np.multiply}
NAMES = {np.add: "add", np.multiply: "mul"}


@dataclass(frozen=True, eq=False)
class _Term:
    """A term of a sum, or a factor of a product.

    Attributes:
        value: what it is.
        moves: how the program moves the elements of a sum of which it is a term, before it is added to the rest.
    """

    value: Value
    moves: tuple[Operation, ...] = ()


@dataclass(eq=False)
class _Rewriting:
    """The sums of a program.

    Attributes:
        program: the program.
        inner: operations that complete a part of a sum, and are not needed any more.
    """

    program: Program
    inner: set[Operation] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._uses = times_used(self.program)
        self._made_by = self.program.made_by

    def steps(self, operation: Operation) -> list[Operation] | None:
        """Return what takes the place of the last operation of a sum; None if nothing does."""
        if not _joins(operation) or not operation.results[0].data:
            return None
        inner: list[Operation] = []
        terms = list(self._terms(operation, inner))
        late = [self._is_late(operation, term.value) for term in terms]
        early = [term for term, last in zip(terms, late, strict=True) if not last]
        if late == sorted(late) and not any(term.moves for term in terms):
            return None
        if not any(t.value.data for t in early) or not any(t.value.of_parameters for t in early):
            return None
        self.inner.update(inner)
        ordered = early + [term for term, last in zip(terms, late, strict=True) if last]
        return list(_added(operation, ordered))

    def _terms(self, operation: Operation, inner: list[Operation]) -> Iterator[_Term]:
        for operand in _operands(operation):
            made = self._made_by.get(operand)
            if operand.data and made is not None and self._uses[operand] == 1 and _same_kind(made, operation):
                inner.append(made)
                yield from self._terms(made, inner)
            elif operand.of_parameters:
                yield from self._apart(operation, operand)
            else:
                yield _Term(operand)

    def _apart(self, operation: Operation, value: Value, moves: tuple[Operation, ...] = ()) -> Iterator[_Term]:
        """Yield the terms of a value of parameters or a constant; the value itself if it is no sum, or a constant one."""
        _, made, between = before_moves(value, self._made_by, LAYOUTS)
        terms = _operands(made) if made is not None and _same_kind(made, operation) else []
        known = [term.constant and not self._is_late(operation, term) for term in terms]
        if made is None or not terms or any(known) or all(self._is_late(operation, term) for term in terms):
            yield _Term(value, moves)
            return
        spread = spread_like(made)
        for term in terms:
            yield from self._apart(operation, term, (spread, *between, *moves))

    def _is_late(self, operation: Operation, value: Value) -> bool:
        """Whether a term is a constant of several numbers; of a sum, also a buffer, which the module may compute itself."""
        buffer = value.of_parameters and value.leaves <= self.program.buffers and KINDS[operation.name] is np.add
        array = value.array
        return (value.constant or buffer) and array.size > 0 and bool((array != array.flat[0]).any())


def constants_last(program: Program) -> Program:
    """Return the program with the constants of each sum and product that data and parameters meet as its last terms."""
    rewriting = _Rewriting(program)
    found: list[Operation] = []
    for operation in reversed(program.operations):
        if operation not in rewriting.inner:
            found += reversed(rewriting.steps(operation) or [operation])
    return replace(program, operations=tuple(reversed(found)))


def _joins(operation: Operation) -> bool:
    """Whether an operation is a sum or a product; a difference is one if it takes a constant away."""
    if operation.name not in KINDS or len(operation.operands) != 2 or operation.settings.get("alpha", 1) != 1:
        return False
    return operation.name != "sub" or operation.operands[1].constant


def _operands(operation: Operation) -> list[Value]:
    one, two = operation.operands
    return [one, Value(-two.array) if operation.name == "sub" else two]


def _same_kind(one: Operation, two: Operation) -> bool:
    return _joins(one) and KINDS[one.name] is KINDS[two.name]


def _added(last: Operation, terms: Sequence[_Term]) -> Iterator[Operation]:
    """Yield the operations that move each term to its place, and those that add them up, data first."""
    join = KINDS[last.name]
    first = next(k for k, term in enumerate(terms) if term.value.data)
    total = terms[first].value
    rest = [*terms[:first], *terms[first + 1 :]]
    for number, term in enumerate(rest, 1):
        value = term.value
        for move in term.moves:
            moved = moved_by(move, value)
            yield replace(move, operands=(value,), results=(moved,))
            value = moved
        leaves = total.leaves | value.leaves
        result = last.results[0] if number == len(rest) else Value(join(total.array, value.array), True, leaves)
        yield replace(
            last,
            name=NAMES[join],
            operands=(total, value),
            results=(result,),
            settings={},
            again=lambda x: [join(x[0], x[1])],
        )
        total = result
