"""Add a number to the bias of a layer where a program adds it to a part of what the layer gives: ``(x + b)[part] + 1`` is
``(x + (b + n))[part]``, where n is 1 for the part and 0 for the rest.

haiku's cells add 1 to the forget gate, which other cells cut out of the same layer and use as it is; FiLM's scales are 1 plus a part of a
layer, or the part itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from convert.inference.forms.elements import MOVES, moved, places_before_moves, step
from convert.inference.forms.sums.reordered import SUMS
from convert.programs.program import Array, Operation, Program, Value

MOST_CUTS = 12  # operations between a sum and the number that is added to a part of it
LARGEST = 1e3  # number; a larger one hides what it is added to, as a mask does


@dataclass(frozen=True, eq=False)
class AddedLater:
    """What a program adds to parts of a sum.

    Attributes:
        numbers: what it adds to each element of the sum; 0 for the rest.
        adding: the operations that add it.
    """

    numbers: Array
    adding: tuple[Operation, ...]


def added_later(program: Program) -> dict[Operation, AddedLater]:
    """Return the sums to parts of which a program adds numbers."""
    made_by = program.made_by
    parts: dict[Operation, list[tuple[Operation, Array, Array]]] = {}
    for operation in program.operations:
        if (number := _number(operation)) is None:
            continue
        (value,) = operation.data
        value, places = places_before_moves(value, made_by, MOST_CUTS)
        made = made_by.get(value)
        if made is not None and made.name in SUMS and len(places) < value.array.size:
            parts.setdefault(made, []).append((operation, places, number.ravel()))
    return {total: later for total, of in parts.items() if (later := _numbers_of_all(total, of)) is not None}


def _numbers_of_all(total: Operation, parts: Sequence[tuple[Operation, Array, Array]]) -> AddedLater | None:
    """Return the numbers of all parts; None where a program adds different ones to one element."""
    places, added = (np.concatenate([part[k] for part in parts]) for k in (1, 2))
    numbers = np.zeros(total.results[0].array.size)
    numbers[places] = added
    if (numbers[places] != added).any():
        return None
    return AddedLater(numbers.reshape(total.results[0].array.shape), tuple(operation for operation, *_ in parts))


def numbers_early(program: Program) -> Program:
    """Return the program with the numbers added to the biases instead."""
    raised = _sums_to_raise(program)
    adding = {one for of, _ in raised.values() for one in of.adding}
    new: dict[Value, Value] = {}
    operations: list[Operation] = []
    for operation in program.operations:
        if operation in raised:
            operations += _with_numbers(operation, raised[operation][1])
            new[operation.results[0]] = operations[-1].results[0]
        elif operation in adding:
            (value,) = operation.data
            operations.append(step(operation, "clone", (new[value],), operation.results[0], np.copy))
        elif operation.name in MOVES and operation.operands and operation.operands[0] in new:
            operands = (new[operation.operands[0]], *operation.operands[1:])
            arrays = operation.again([x.array for x in operands])
            results = tuple(_as(x, of) for x, of in zip(arrays, operation.results, strict=True))
            new |= {x: y for x, y in zip(operation.results, results, strict=True) if x is not y}
            operations.append(replace(operation, operands=operands, results=results))
        else:
            operations.append(operation)
    return replace(program, operations=tuple(operations))


def _sums_to_raise(program: Program) -> dict[Operation, tuple[AddedLater, Array]]:
    """Return the sums of data and a bias of which a program uses the parts with the numbers alone, with the numbers of the bias."""
    users, outputs = program.users, frozenset(program.outputs.values())
    found = {}
    for operation, later in added_later(program).items():
        side = _bias(operation)
        numbers = None if side is None else _of_bias(later.numbers, operation.operands[side])
        if numbers is not None and _uses_with_numbers_alone(operation.results[0], later, users, outputs):
            found[operation] = later, numbers
    return found


def _as(array: Array, value: Value) -> Value:
    """Return a value with this array: the same one where it has it already."""
    return value if np.array_equal(array, value.array) else replace(value, array=np.asarray(array))


def _with_numbers(operation: Operation, numbers: Array) -> tuple[Operation, Operation]:
    """Return the operations that add numbers to a bias, and both to the data."""
    side = _bias(operation)
    assert side is not None, "`_sums_to_raise` has found it"
    bias = operation.operands[side]
    raised = replace(bias, array=bias.array + numbers)
    operands = tuple(raised if k == side else x for k, x in enumerate(operation.operands))
    total = replace(operation.results[0], array=np.asarray(operation.again([x.array for x in operands])[0]))
    return (
        step(operation, "add", (bias, Value(numbers)), raised, np.add),
        replace(operation, operands=operands, results=(total,)),
    )


def _number(operation: Operation) -> Array | None:
    """Return what an operation adds to each element of data, if these are constants that are not all zeros."""
    if operation.name not in SUMS or len(operation.operands) != 2 or len(operation.data) != 1:
        return None
    (value,) = operation.data
    side = 1 - operation.operands.index(value)
    other = operation.operands[side]
    subtracts = operation.name == "sub"
    if (
        not other.constant
        or not (np.abs(other.array) <= LARGEST).all()
        or not other.array.any()
        or (subtracts and side == 0)
    ):
        return None
    if operation.results[0].array.shape != value.array.shape or operation.settings.get("alpha", 1) != 1:
        return None
    return np.broadcast_to(-other.array if subtracts else other.array, value.array.shape)


def _bias(operation: Operation) -> int | None:
    """Return the position of the bias that an operation adds to data; None if it adds none."""
    if operation.name not in SUMS or operation.name == "sub" or operation.settings.get("alpha", 1) != 1:
        return None
    found = [k for k, x in enumerate(operation.operands) if x.of_parameters and len(x.elements) == 1]
    return found[0] if len(operation.operands) == 2 and len(operation.data) == len(found) == 1 else None


def _of_bias(of_result: Array, bias: Value) -> Array | None:
    """Return the numbers for the elements of a bias; None where one of its elements has several."""
    shape = (1,) * (of_result.ndim - bias.array.ndim) + bias.array.shape
    along = tuple(k for k, size in enumerate(shape) if size != of_result.shape[k])
    numbers = of_result.min(along, keepdims=True)
    return numbers.reshape(bias.array.shape) if (numbers == of_result).all() else None


def _uses_with_numbers_alone(
    total: Value, later: AddedLater, users: Mapping[Value, Sequence[Operation]], outputs: frozenset[Value]
) -> bool:
    """Whether a program uses no element without the number that is added to it."""
    todo = [(total, later.numbers.ravel())]
    while todo:
        value, numbers = todo.pop()
        if value in outputs and numbers.any():
            return False
        for user in users.get(value, ()):
            found = moved(user, value) if user.name in MOVES and user.operands[0] is value else None
            if found is not None:
                todo += [(x, numbers[at]) for x, at in zip(user.results, found, strict=True)]
            elif user not in later.adding and numbers.any():
                return False
    return True
