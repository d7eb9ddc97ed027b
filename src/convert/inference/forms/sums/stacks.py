"""Take parameters apart that stand in a stack, each for the same data: of ``z[:, None] * g + b`` the row 0 is ``z * g[0] + b[0]``.

A gated attention unit makes queries and keys of one value, with a scale and an offset for each: in one program as a stack, in the other
one by one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from convert.inference.derivation import Role
from convert.inference.forms.elements import LAYOUTS, elements_moved, step, take, taken, without_idle
from convert.inference.meetings.sites import role_of
from convert.programs.program import Array, Operation, Program, Value

TAKES = frozenset(
    ("slice", "select", "unbind", "unstack", "split", "split_with_sizes", "unsafe_split", "chunk", "squeeze", "gather")
)
MOVED = LAYOUTS | TAKES | frozenset(("clone", "contiguous", "detach", "copy", "convert_element_type", "flatten"))
MOST = 12  # operations between the data and the part that is taken


@dataclass(frozen=True, eq=False)
class _Taken:
    """Some elements of what parameters that stand in a stack make of a value.

    Attributes:
        data: the value.
        places: for each element taken, which of the value's it is made of.
        by: each operation with a parameter, in the order in which they run, and for each element taken its place in the result.
    """

    data: Value
    places: Array
    by: tuple[tuple[Operation, Array], ...]


def parts_of_stacks(program: Program) -> int:
    """Return how many values are parts of what parameters in a stack make of one value."""
    made_by = program.made_by
    return sum(_taken(operation, k, made_by) is not None for operation, k in _takes(program))


def stacks_apart(program: Program, *, keep: bool) -> Program:
    """Return the program with each such part computed by itself.

    Args:
        keep: whether the parts are taken of the whole as well.
    """
    made_by = program.made_by
    steps: dict[tuple[Operation, int], list[Operation]] = {}
    for operation, k in _takes(program):
        taken = _taken(operation, k, made_by)
        if taken is not None:
            steps[operation, k] = _by_itself(operation, k, taken)
    operations: list[Operation] = []
    for operation in program.operations:
        of = [steps.get((operation, k)) for k in range(len(operation.results))]
        operations += [one for found in of for one in found or ()]
        if keep or None in of or not of:
            operations.append(operation)
    return replace(program, operations=tuple(operations if keep else without_idle(operations, program)))


def _takes(program: Program) -> list[tuple[Operation, int]]:
    """Return the operations that take some elements of data, each with the number of a result."""
    return [
        (operation, k)
        for operation in program.operations
        if operation.name in TAKES and operation.operands and operation.operands[0].data
        for k, result in enumerate(operation.results)
        if result.array.size < operation.operands[0].array.size
    ]


def _taken(take: Operation, number: int, made_by: Mapping[Value, Operation]) -> _Taken | None:
    """Return of what a result is a part; None if no parameters in a stack make it, or of other elements than all of one value."""
    places = _moved(take)
    if places is None:
        return None
    at, value = places[number], take.operands[0]
    by: list[tuple[Operation, Array]] = []
    some, found = False, None
    for _ in range(MOST):
        made = made_by.get(value)
        if made is None or not made.operands:
            break
        if role_of(made) in (Role.SCALE, Role.SHIFT) and _is_by_element(made):
            (data,) = made.data
            weight = next(x for x in made.operands if not x.data)
            by.insert(0, (made, at))
            shape = made.results[0].array.shape
            numbers = np.broadcast_to(weight.elements[0], shape).ravel()
            some |= len(np.unique(numbers[at])) < len(np.unique(numbers))
            spread = np.broadcast_to(np.arange(data.array.size).reshape(data.array.shape), shape).ravel()
            at, value = spread[at], data
        elif made.name in MOVED and (places := _moved(made)) is not None:
            at, value = places[made.results.index(value)][at], made.operands[0]
        else:
            break
        if some and len(np.unique(at)) == at.size == value.array.size:
            found = _Taken(value, at, tuple(by))
    return found


def _is_by_element(operation: Operation) -> bool:
    """Whether an operation multiplies or adds data and one parameter."""
    others = [x for x in operation.operands if not x.data]
    plain = operation.settings.get("alpha", 1) == 1 and len(operation.data) == len(others) == 1
    return plain and others[0].of_parameters and len(others[0].elements) == 1


def _moved(operation: Operation) -> list[Array] | None:
    """Return which element of the first operand each element of the results is; None if it is no data, or others decide that."""
    value, *others = operation.operands
    return elements_moved(operation) if value.data and all(x.constant for x in others) else None


def _by_itself(take: Operation, number: int, taken: _Taken) -> list[Operation]:
    result = take.results[number]
    shape = result.array.shape
    value, steps = _part(take, taken.data, taken.places, shape)
    for operation, at in taken.by:
        side = 0 if operation.operands[1].data else 1
        weight = operation.operands[side]
        spread = np.broadcast_to(
            np.arange(weight.array.size).reshape(weight.array.shape), operation.results[0].array.shape
        )
        part, more = _part(take, weight, spread.ravel()[at], shape)
        operands = (value, part) if side else (part, value)
        made = np.asarray(operation.again([x.array for x in operands])[0])
        value = Value(made, data=True, leaves=value.leaves | part.leaves)
        steps += [*more, replace(operation, operands=operands, results=(value,))]
    return [*steps[:-1], replace(steps[-1], results=(result,))]


def _part(like: Operation, value: Value, places: Array, shape: Sequence[int]) -> tuple[Value, list[Operation]]:
    """Return some elements of a value in a shape, and the operation that takes them."""
    at = places.reshape(shape)
    part = taken(value, at)
    return part, [step(like, "slice", (value,), part, partial(take, places=at))]
