"""Values of the source that take the place of the target's behind a difference.

The value of the target that is replaced is the one in front of what only moves elements, such as the steps of a loop. Thus the layout stays
the target's own, and all that is computed of it follows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from convert.inference.candidates.replay import Replay
from convert.inference.meetings.sites import Meeting, parameter_operands, role_of
from convert.inference.search import Search
from convert.inference.segment.segments import Given
from convert.programs.divergence.kinds import ELEMENTWISE, LAYOUT, kind_of
from convert.programs.program import REFUSALS, Operation, Program, Value

Array = np.ndarray[Any, np.dtype[Any]]
VALUES = 6  # so many values of the source's are tried at one operation
MOVES = (LAYOUT, "part", "join")
MAX_RANK = 6  # of values whose axes are tried in all orders


class _Operand(NamedTuple):
    """A value, as an operand of an operation by its number."""

    number: int
    side: int
    value: Value


def give(replay: Replay, given: Given, array: Array, end: int) -> None:
    """Replace a value of the target by an array, in front of an operation: what was computed of it before stays, but for what moves its elements."""
    replay.values[given.value] = array
    for operation in moving(replay.program, given.value, end):
        try:
            results = replay.run(operation)
        except REFUSALS:
            results = [np.full(x.array.shape, np.nan) for x in operation.results]
        replay.keep(operation, results)


def moving(program: Program, value: Value, end: int) -> list[Operation]:
    """Return the operations in front of one that do nothing but move the elements of a value."""
    found, moved = [], {value}
    for operation in program.operations[:end]:
        if kind_of(operation) in MOVES and moved.intersection(operation.operands):
            moved.update(operation.results)
            found.append(operation)
    return found


def values_for(search: Search, at: int) -> Iterator[Given]:
    """Yield data of the source that may be what enters an operation of the target, laid out as the target's.

    The source's parameters that meet it are the target's own there; if these are not known, they are some that nothing has used.
    """
    own, begin = _entering(search.target.operations[at], at), _begin(search, at)
    seen: list[Array] = []
    for meeting in _meetings(search, search.target.operations[at]):
        theirs = _entering(meeting.operation, meeting.index)
        pairs = [(own, theirs)]
        if begin.value is not own.value:
            pairs = [*((begin, x) for x in _begins(search.source.program, theirs)), *pairs]
        for mine, other in pairs:
            array, shape = other.value.array, mine.value.array.shape
            if array.size == mine.value.array.size and not any(array is one for one in seen):
                seen.append(array)
                order = _order(search, mine.value, array)
                placed = array.transpose(order).reshape(shape).copy()  # a view of it may be read-only
                yield Given(mine.value, other.number, other.side, placed, order)
        if len(seen) >= VALUES:
            return


def _meetings(search: Search, operation: Operation) -> list[Meeting]:
    """Return where data of the source meets the parameters of an operation, or those that they may be: what follows the last match first."""
    context, near = search.context, search.context.near
    program, weight = search.source.program, operation.operands[parameter_operands(operation)[0]]
    known = [np.unique(context.origins[x]) for x in weight.elements] if search.replay.known(weight) else []

    def fits(meeting: Meeting) -> bool:
        if len(meeting.operations) > 1 or meeting.operation is not program.operations[meeting.index]:
            return False
        theirs = meeting.weight.elements
        if not known:
            return all(map(context.free, theirs))
        return len(known) == len(theirs) and all(map(np.array_equal, known, map(np.unique, theirs)))

    found = filter(fits, search.source.meetings[role_of(operation)])
    return sorted(found, key=lambda meeting: (meeting.index < near, meeting.index))


def _entering(operation: Operation, index: int) -> _Operand:
    """Return the data of an operation."""
    side = next(k for k, operand in enumerate(operation.operands) if operand.data)
    return _Operand(index, side, operation.operands[side])


def _begin(search: Search, at: int) -> _Operand:
    """Return the value in front of what moves elements to an operation of the target, if it is the only one that the source lacks."""
    own = _entering(search.target.operations[at], at)
    inputs = search.target.inputs.values()
    lacking = [
        operand
        for operand in _begins(search.target, own)
        if not search.source.has(search.replay.value(operand.value), search.context.tolerance)
    ]
    return lacking[0] if len(lacking) == 1 and lacking[0].value not in inputs else own


def _begins(program: Program, operand: _Operand) -> list[_Operand]:
    """Return the values in front of what moves the elements of a value."""
    made_by = {result: k for k, operation in enumerate(program.operations) for result in operation.results}
    todo, found, seen = [operand], list[_Operand](), set[Value]()
    while todo:
        operand = todo.pop()
        if operand.value in seen:
            continue
        seen.add(operand.value)
        index = made_by.get(operand.value, -1)
        if index < 0 or kind_of(program.operations[index]) not in MOVES:
            found.append(operand)
        else:
            todo += [_Operand(index, k, x) for k, x in enumerate(program.operations[index].operands) if x.data]
    return found


def _order(search: Search, value: Value, array: Array) -> tuple[int, ...]:
    """Return the order of an array's axes in which it has those of a value of the target.

    Where sizes leave several orders, it is that of the nearest value in front that both programs have.
    """
    as_is = tuple(range(array.ndim))
    if array.ndim != value.array.ndim or array.ndim > MAX_RANK:
        return as_is
    orders = [x for x in itertools.permutations(as_is) if tuple(array.shape[k] for k in x) == value.array.shape]
    if len(orders) > 1:
        shared = (x for mine, other in _shared(search, value) for x in orders if is_same(other.transpose(x), mine))
        return next(shared, orders[0])
    return orders[0] if orders else as_is


def _shared(search: Search, value: Value) -> Iterator[tuple[Array, Array]]:
    """Yield what both programs have in front of a value of the target, of its shape: the target's and the source's array, the nearest first."""
    made_by = search.target.made_by
    todo, seen = [value], set[Value]()
    while todo:
        value = todo.pop(0)
        if value in seen:
            continue
        seen.add(value)
        mine = search.replay.value(value)
        yield from ((mine, theirs) for theirs in arrays_like(search, mine))
        before = made_by.get(value)
        if before is not None and kind_of(before) in ELEMENTWISE:
            todo += [x for x in before.data if x.array.shape == value.array.shape]


def arrays_like(search: Search, array: Array) -> Iterator[Array]:
    """Yield the values of the source with the numbers of an array and as many axes, in any order."""
    for index in search.source.table.find(array):
        results = search.source.program.operations[index].results if index >= 0 else ()
        yield from (x.array for x in results if x.array.ndim == array.ndim)


def is_same(one: Array, two: Array) -> bool:
    """Whether two arrays are equal as they lie."""
    return one.shape == two.shape and bool(np.allclose(one, two, equal_nan=True))
