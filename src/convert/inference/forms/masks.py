"""Compare sums in front of a softmax where the mask lets them through.

One program adds a mask to its scores or to the bias table that they meet, another chooses between them and a large negative number.
What stands at hidden positions differs, and the softmax makes zeros of all of it. Here the operands are zeros there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from convert.inference.derivation import Role
from convert.inference.forms.sums import MOVES
from convert.inference.sites import VISIBLE_SUM, parameter_operands, role_of
from convert.programs.program import Array, Operation, Program, Value

SOFTMAX = frozenset(("exp", "_softmax", "_safe_softmax"))
BY_ELEMENT = frozenset(("add", "add_any", "sub", "mul", "div", "where", "select_n", "masked_fill"))
COPIES = MOVES | {"convert_element_type", "_to_copy", "clone", "contiguous", "copy", "stop_gradient"}


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
    for index, hidden in sorted(_hidden(program).items()):
        operation = program.operations[index]
        sides = parameter_operands(operation)
        if role_of(operation) is not Role.SHIFT or len(sides) != 1 or not hidden.any():
            continue
        masks = tuple(_masked(operation, x, _within(hidden, x.array.shape)) for x in operation.operands)
        operands = tuple(mask.results[0] for mask in masks)
        result = np.asarray(operation.again([x.array for x in operands])[0])
        own = Value(np.where(hidden, 0.0, result), True, operation.results[0].leaves)
        again = partial(_shown, operation, hidden)
        made = replace(operation, name=VISIBLE_SUM, operands=operands, results=(own,), settings={}, again=again)
        yield VisibleSum(index, made, masks, sides[0])


def visible_sums_first(program: Program) -> Program:
    """Return the program with the visible part of each such sum in front of the sum itself, whose data depends on it."""
    found = {each.index: each for each in visible_sums(program)}
    operations: list[Operation] = []
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
            operands = (*operation.operands[:k], behind, *operation.operands[k + 1 :])
            operation = replace(operation, operands=operands)
        operations.append(operation)
    return replace(program, operations=tuple(operations))


def _hidden(program: Program) -> dict[int, Array]:
    """Return which elements of the result of an operation a softmax hides; nothing there shows in what follows."""
    made = {result: k for k, operation in enumerate(program.operations) for result in operation.results}
    found: dict[int, Array] = {}
    for operation in program.operations:
        if operation.name in SOFTMAX and operation.operands[0].data:
            todo = [(operation.operands[0], np.asarray(operation.results[0].array == 0))]
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
