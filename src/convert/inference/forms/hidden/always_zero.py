"""Which elements of a program's values are zero for any inputs: zeros that no input is in, and what is multiplied by them, such as by a mask."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from convert.inference.derivation import Role
from convert.inference.forms.elements import elements_looked_up, take
from convert.inference.meetings.sites import products, role_of
from convert.programs.divergence.kinds import ELEMENTWISE, LAYOUT, kind_of
from convert.programs.program import REFUSALS, Operation, Program, Value

Array = np.ndarray[Any, np.dtype[Any]]
# Value of data -> true where it is zero for any inputs, for those that have such elements.
Zeros = Mapping[Value, Array]
WEIGHTED = (Role.PRODUCT, Role.CONVOLUTION)


def always_zero(program: Program) -> Zeros:
    """Return where the values are zero for any inputs and weights."""
    found: dict[Value, Array] = {}
    for operation in program.operations:
        zeros = [_zeros(x, program, found) for x in operation.operands]
        if not any(x.any() for x in zeros):
            continue
        for place, result in enumerate(operation.results):
            if (result.data or result.leaves) and result.array.size:
                made = _of_result(operation, place, zeros) & (result.array == 0)
                if made.any():
                    found[result] = made
    return found


@dataclass(frozen=True, eq=False)
class Met:
    """What the elements of a program's parameters meet, numbered as in `Program.first_element`.

    Attributes:
        at_all: whether an operation uses an element, but to move it.
        numbers: whether one uses it with anything but zeros.
    """

    at_all: Array
    numbers: Array

    @property
    def zeros_alone(self) -> Array:
        """Whether each element meets zeros and nothing else."""
        return self.at_all & ~self.numbers


def met_by_parameters(program: Program, zeros: Zeros) -> Met:
    """Return what the elements of a program's parameters meet.

    Args:
        zeros: where the values of data are zero.
    """
    size = sum(value.array.size for value in program.parameters.values())
    found = Met(np.zeros(size, bool), np.zeros(size, bool))
    for operation in program.operations:
        if operation.results[0].elements or not operation.results[0].array.size:
            continue  # it moves them, or has no rows for them
        for side in range(len(operation.operands)):
            for numbers in _used(operation, side):
                found.at_all[numbers[numbers >= 0]] = True
            for numbers in _beside_numbers(operation, side, program, zeros):
                found.numbers[numbers[numbers >= 0]] = True
    return found


def zeros_of(program: Program) -> Zeros:
    """Return where the values of a run are zero; with other inputs or weights they may not be."""
    return {value: value.array == 0 for operation in program.operations for value in operation.operands if value.data}


def _zeros(value: Value, program: Program, found: Zeros) -> Array:
    if not value.data and value.leaves <= program.buffers:
        return np.asarray(value.array == 0)
    return found.get(value, np.zeros(value.array.shape, bool))


def _of_result(operation: Operation, place: int, zeros: Sequence[Array]) -> Array:
    """Return where a result is zero, given where the operands are."""
    shape: tuple[int, ...] = operation.results[place].array.shape
    kind = kind_of(operation)
    data = [x for x, operand in zip(zeros, operation.operands, strict=True) if operand.data]
    if (operation.name == "mul" or role_of(operation) in WEIGHTED) and any(x.all() and x.size for x in zeros):
        return np.ones(shape, bool)
    if data and all(x.all() for x in data) and role_of(operation) not in WEIGHTED:
        return np.ones(shape, bool)  # its result says whether they stay zeros
    try:
        if kind == "multiply":
            return np.asarray(np.broadcast_to(zeros[0] | zeros[1], shape))
        if kind in ("add", "subtract"):
            return np.asarray(np.broadcast_to(zeros[0] & zeros[1], shape))
        if kind in (LAYOUT, "part", "join", "pick"):
            moved = [x.astype(float) if x.dtype == bool else x for x in _instead(operation, zeros, kind)]
            return np.asarray(np.asarray(operation.again(moved)[place]) == 1)
        if kind == "divide" or (kind in ELEMENTWISE and len(zeros) == 1):
            return np.asarray(np.broadcast_to(zeros[0], shape))
    except REFUSALS:
        pass
    return np.zeros(shape, bool)


def _instead(operation: Operation, zeros: Sequence[Array], kind: str) -> list[Array]:
    """Return the operands with truth values for what is moved; indices stay."""
    return [
        x if kind == "join" or k == 0 or (operand.data and operand.array.dtype.kind == "f") else operand.array
        for k, (x, operand) in enumerate(zip(zeros, operation.operands, strict=True))
    ]


def _beside_numbers(operation: Operation, side: int, program: Program, zeros: Zeros) -> Iterator[Array]:
    """Yield the numbers of the elements of an operand that an operation uses with anything but zeros."""
    operand = operation.operands[side]
    if not operand.elements:
        return  # data, a constant, or a value in which elements are mixed
    others = [_zeros(x, program, zeros) for k, x in enumerate(operation.operands) if k != side]
    if role_of(operation) in WEIGHTED and any(x.size and x.all() for x in others):
        return
    if len(others) == 1 and others[0].any():
        if operation.name == "mul":
            shape = operation.results[0].array.shape
            shown = ~np.broadcast_to(others[0], shape)
            yield from (np.broadcast_to(numbers, shape)[shown] for numbers in operand.elements)
            return
        if role_of(operation) is Role.PRODUCT and len(operation.data) == 1:
            as_data = tuple(Value(others[0].astype(float), data=True) if x.data else x for x in operation.operands)
            found = list(products([replace(operation, operands=as_data)], side))
            yield from (numbers[(one.rows[0] != 1).any(0)].ravel() for one in found for numbers in one.numbers)
            if found:
                return
    yield from _used(operation, side)


def _used(operation: Operation, side: int) -> Iterator[Array]:
    """Yield the numbers of the elements of an operand that an operation uses: the rows of a table that a lookup takes, all of another."""
    looks_up = role_of(operation) is Role.LOOKUP and side == 0
    at = elements_looked_up(operation, ()) if looks_up else None
    yield from (numbers.ravel() if at is None else take(numbers, at) for numbers in operation.operands[side].elements)
