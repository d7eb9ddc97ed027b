"""Compare sums in front of a softmax where the mask lets them through.

One program adds a mask to its scores or to the bias table that they meet, another chooses between them and a large negative number.
What stands at hidden positions differs, and the softmax makes zeros of all of it, or numbers that no sum shows. Here the operands are
zeros there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from convert.inference.derivation import Role
from convert.inference.forms.elements import LAYOUTS, moved_by
from convert.inference.meetings.sites import VISIBLE_SUM, role_of
from convert.programs.program import Array, Operation, Program, Value

SOFTMAX = frozenset(("exp", "_softmax", "_safe_softmax"))
BY_ELEMENT = frozenset(("add", "add_any", "sub", "mul", "div", "where", "select_n", "masked_fill"))
COPIES = LAYOUTS | {"convert_element_type", "_to_copy", "clone", "contiguous", "copy", "stop_gradient"}
UNSEEN = 1e-30  # a weight below it changes no sum of float64


@dataclass(frozen=True, eq=False)
class VisibleSum:
    """A sum of data and a parameter in front of a softmax.

    Attributes:
        index: of the operation in the program.
        operation: the same with operands that are zeros where they are hidden.
        masks: give these operands.
        side: position of the parameter.
    """

    index: int
    operation: Operation
    masks: tuple[Operation, ...]
    side: int


def visible_sums(program: Program) -> Iterator[VisibleSum]:
    """Yield the sums of data and a parameter of which a softmax hides a part, in order."""
    return _visible_sums(program, _hidden(program))


def _visible_sums(program: Program, hides: Mapping[int, Array]) -> Iterator[VisibleSum]:
    made = program.made_by
    for index, hidden in sorted(hides.items()):
        operation = program.operations[index]
        if role_of(operation) is not Role.SHIFT or len(operation.operands) != 2 or not hidden.any():
            continue
        parts = [_parameter(x, _within(hidden, x.array.shape), made) for x in operation.operands]
        sides = [k for k, part in enumerate(parts) if part is not None]
        if len(sides) != 1:
            continue
        (side,) = sides
        before, parameter = parts[side] or ((), operation.operands[side])
        given = [parameter if k == side else x for k, x in enumerate(operation.operands)]
        masks = tuple(_masked(operation, x, _within(hidden, x.array.shape)) for x in given)
        operands = tuple(mask.results[0] for mask in masks)
        if not operands[1 - side].array.any():  # a mask of the inputs alone
            continue
        again = partial(_shown, operation, hidden)
        own = Value(again([x.array for x in operands])[0], True, operation.results[0].leaves)
        whole = replace(operation, name=VISIBLE_SUM, operands=operands, results=(own,), settings={}, again=again)
        yield VisibleSum(index, whole, (*before, *masks), side)


def visible_sums_first(program: Program) -> Program:
    """Return the program with the visible part of each such sum in front of the sum itself, whose data depends on it.

    A mask of the inputs that meets the parameter before meets it behind the visible part.
    """
    hides = _hidden(program)
    found = {each.index: each for each in _visible_sums(program, hides)}
    late = _late(program, hides)
    operations: list[Operation] = []

    def append(operation: Operation) -> None:
        for operand in operation.operands:
            if (needed := late.pop(operand, None)) is not None:
                append(needed)
        operations.append(operation)

    for index, operation in enumerate(program.operations):
        if index in found:
            part = found[index]
            k = 1 - part.side
            own, data = part.operation, operation.operands[k]
            behind = Value(data.array, True, data.leaves)
            pair = (data, own.results[0])
            operations += [
                *part.masks,
                own,
                replace(own, name="copy", operands=pair, results=(behind,), again=lambda arrays: [arrays[0]]),
            ]
            operation = replace(operation, operands=(*operation.operands[:k], behind, *operation.operands[k + 1 :]))
        if operation.results[:1] and operation.results[0] in late:
            continue
        append(operation)
    for value in program.outputs.values():
        if (needed := late.pop(value, None)) is not None:
            append(needed)
    return replace(program, operations=tuple(operations))


def _late(program: Program, hides: Mapping[int, Array]) -> dict[Value, Operation]:
    """Return the operations, by result, that apply a mask of the inputs to a parameter in front of a softmax."""
    found: dict[Value, Operation] = {}
    for index in sorted(hides):
        operation = program.operations[index]
        own = [x for x in operation.operands if x.leaves]
        if len(own) == 1 and operation.data and (own[0].of_parameters or own[0] in found):
            found[operation.results[0]] = operation
    return found


def _parameter(
    value: Value, hidden: Array, made: Mapping[Value, Operation]
) -> tuple[tuple[Operation, ...], Value] | None:
    """Return the value of parameters that an operand is where it is seen, with the operations that give it; None if it is another."""
    if value.of_parameters:
        return (), value
    by = made.get(value)
    if by is None or not value.data or not value.leaves:
        return None
    own = [x for x in by.operands if x.leaves]
    if len(own) != 1:
        return None
    if by.name in BY_ELEMENT:
        shape = value.array.shape
        part = _parameter(own[0], _within(hidden, own[0].array.shape), made)
        move = replace(by, name="expand", settings={}, again=lambda x: [np.array(np.broadcast_to(x[0], shape))])
    elif by.name in COPIES and len(by.operands) == 1:
        part, move = _parameter(own[0], _before(by, hidden), made), by
    else:
        return None
    if part is None:
        return None
    moved = moved_by(move, part[1])
    if not np.array_equal(moved.array[~hidden], value.array[~hidden]):
        return None
    return (*part[0], replace(move, operands=(part[1],), results=(moved,))), moved


def _hidden(program: Program) -> dict[int, Array]:
    """Return which elements of the result of an operation a softmax hides; nothing there shows in what follows."""
    made = {result: k for k, operation in enumerate(program.operations) for result in operation.results}
    found: dict[int, Array] = {}
    for operation in program.operations:
        if operation.name in SOFTMAX and operation.operands[0].data:
            todo = [(operation.operands[0], np.asarray(operation.results[0].array < UNSEEN))]
            while todo:
                value, hidden = todo.pop()
                index = made.get(value)
                if index is None or not hidden.any():
                    continue
                before = program.operations[index]
                found[index] = hidden & found.get(index, hidden)
                if before.name in BY_ELEMENT:
                    todo += [(x, _within(hidden, x.array.shape)) for x in before.data]
                elif before.name in COPIES and len(before.operands) == 1:
                    todo.append((before.operands[0], _before(before, hidden)))
    return found


def _shown(operation: Operation, hidden: Array, arrays: Sequence[Array]) -> list[Array]:
    return [np.where(hidden, 0.0, operation.again(arrays)[0])]


def _within(hidden: Array, shape: tuple[int, ...]) -> Array:
    """Return what is hidden of an operand that is broadcast: what is hidden wherever it is used."""
    lead = hidden.ndim - len(shape)
    axes = (*range(lead), *(k + lead for k, size in enumerate(shape) if size == 1))
    return np.asarray(hidden.all(axes, keepdims=True).reshape(shape) if axes else hidden)


def _before(move: Operation, hidden: Array) -> Array:
    """Return what is hidden of an array whose elements an operation moves, or repeats."""
    shape = move.operands[0].array.shape
    places = np.asarray(move.again([np.arange(int(np.prod(shape)), dtype=np.float64).reshape(shape)])[0])
    shown = np.zeros(shape, bool)
    shown.ravel()[places[~hidden].astype(np.int64)] = True
    return ~shown


def _masked(operation: Operation, value: Value, hidden: Array) -> Operation:
    """Return the operation that puts zeros where an operand is hidden."""
    shown = replace(
        value,
        array=np.where(hidden, 0.0, value.array),
        elements=tuple(np.where(hidden, -1, numbers) for numbers in value.elements),
    )
    return Operation(
        "copy",
        (value,),
        (shown,),
        {},
        lambda arrays: [np.where(hidden, 0.0, arrays[0])],
        operation.where,
        operation.module,
    )
