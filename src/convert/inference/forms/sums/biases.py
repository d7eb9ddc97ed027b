"""Add up the biases of a sum by themselves: ``(x + b) + (y + c)`` is ``(x + y) + (b + c)``, and ``(x + b) + 1`` is ``x + (b + 1)``.

A cell adds two biases to a gate, or one and a number behind the cut into gates; the other program has one bias for both. Where what a
bias is added to is cut and added to more, the part of the bias is added to all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from convert.inference.forms.elements import MOVES, moved, step, take, taken
from convert.inference.forms.sums.numbers_early import AddedLater
from convert.inference.forms.sums.reordered import SUMS
from convert.programs.program import Array, Operation, Program, Value, times_used

MAX_TERMS = 8


@dataclass(frozen=True, eq=False)
class Term:
    """A term of a sum.

    Attributes:
        value: what it is an element of.
        places: which element, for each element of the sum.
    """

    value: Value
    places: Array


class Terms:
    """The terms of a program's sums."""

    def __init__(self, program: Program) -> None:
        self._uses, self._made_by = times_used(program), program.made_by

    def of(self, operation: Operation) -> list[Term]:
        """Return the terms of the sum that an operation completes; none if it completes none."""
        if not _is_sum(operation):
            return []
        (result,) = operation.results
        places = np.arange(result.array.size).reshape(result.array.shape)
        return list(self._added(operation, places))

    def _added(self, operation: Operation, places: Array) -> Iterator[Term]:
        shape = operation.results[0].array.shape
        for operand in operation.operands:
            every = np.arange(operand.array.size).reshape(operand.array.shape)
            yield from self._behind(operand, np.broadcast_to(every, shape).ravel()[places])

    def _behind(self, value: Value, places: Array) -> Iterator[Term]:
        made = self._made_by.get(value) if value.data and self._uses[value] == 1 else None
        if made is not None and _is_sum(made):
            yield from self._added(made, places)
            return
        found = moved(made, made.operands[0]) if made is not None and made.name in MOVES and made.operands else None
        if made is None or found is None:
            yield Term(value, places)
        else:
            yield from self._behind(made.operands[0], found[made.results.index(value)][places])


def biases_together(program: Program, added: Mapping[Operation, AddedLater]) -> Program:
    """Return the program with a further sum behind each of which several terms are parameters, or one and a constant.

    Args:
        program: the record.
        added: the numbers that it adds to parts of sums: these get one more sum, with the numbers.
    """
    terms = Terms(program)
    operations: list[Operation] = []
    for operation in program.operations:
        found = terms.of(operation)
        operations += (operation, *_again(program, operation, found))
        if operation in added:
            numbers = added[operation].numbers
            every = np.arange(numbers.size).reshape(numbers.shape)
            operations += _again(program, operation, [*found, Term(Value(numbers), every)])
    return replace(program, operations=tuple(operations))


def _again(program: Program, operation: Operation, terms: list[Term]) -> Iterator[Operation]:
    data = [term for term in terms if term.value.data]
    own = [term for term in terms if term.value.of_parameters and len(term.value.elements) == 1]
    constants = [term for term in terms if term.value.constant]
    if not (data and own) or len(own) + len(constants) + len(data) != len(terms) or len(terms) > MAX_TERMS:
        return
    numbers = [take(term.value.array, term.places) for term in constants if term.value.array.any()]
    elements = [take(term.value.elements[0], term.places) for term in own]
    several = len({k for of in (*elements, *numbers) for k in _varying(of)}) > 1
    if several and (numbers or len(own) < 2 or not all(is_whole(program, term.value) for term in own)):
        return  # one table, a mask, or a row of a table, which another program may lack
    cut = any(
        len(np.unique(of)) < len(np.unique(term.value.elements[0])) for of, term in zip(elements, own, strict=True)
    )
    if len(own) + len(numbers) < 2 and not (len(data) > 1 and cut):
        return
    places, of_own = np.stack([term.places for term in own]), np.stack(elements)
    number = np.asarray(sum(numbers) + np.zeros(places.shape[1:]))
    while places.ndim > 2 and (of_own == of_own[:, :1]).all() and (number == number[:1]).all():
        places, of_own, number = places[:, 0], of_own[:, 0], number[0]

    def together(*arrays: Array) -> Array:
        return np.asarray(sum(take(x, at) for x, at in zip(arrays, places, strict=True)) + number)

    bias = Value(
        together(*(term.value.array for term in own)),
        leaves=frozenset().union(*(term.value.leaves for term in own)),
        elements=tuple(of_own),
    )
    yield step(operation, "bias", tuple(term.value for term in own), bias, together)
    total: Value | None = None
    for term in data:
        part = taken(term.value, term.places)
        yield step(operation, "take", (term.value,), part, partial(take, places=term.places))
        if total is None:
            total = part
        else:
            added = Value(total.array + part.array, data=True, leaves=total.leaves | part.leaves)
            yield step(operation, "add", (total, part), added, np.add)
            total = added
    assert total is not None, "there is data"
    result = Value(total.array + bias.array, data=True, leaves=total.leaves | bias.leaves)
    yield step(operation, "add", (total, bias), result, np.add)


def is_whole(program: Program, value: Value) -> bool:
    """Whether a value of parameters has all elements of its leaves."""
    return len(np.unique(value.elements[0])) == sum(program.parameters[leaf].array.size for leaf in value.leaves)


def _varying(array: Array) -> list[int]:
    """Return the axes along which an array has several numbers."""
    return [k for k in range(array.ndim) if (array != array.take([0], k)).any()] if array.size else []


def _is_sum(operation: Operation) -> bool:
    """Whether an operation adds two values, of which data is one."""
    plain = operation.name in SUMS and operation.name != "sub" and operation.settings.get("alpha", 1) == 1
    return plain and len(operation.operands) == 2 and bool(operation.data) and operation.results[0].data
