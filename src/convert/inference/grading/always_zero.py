"""Which elements of a program's values are zero for any inputs: zeros that no input is in, and what is multiplied by them, such as by a mask."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from convert.inference.derivation import Role
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


def meet_zeros(numbers: Array, program: Program, zeros: Zeros) -> bool:
    """Whether products multiply elements of parameters by zeros for any inputs, and nothing else reads them.

    Args:
        numbers: of the elements, as `Program.first_element` numbers them.
    """
    met = False
    for operation in program.operations:
        for side, operand in enumerate(operation.operands):
            if operation.results[0].elements or not any(np.isin(numbers, x).any() for x in operand.elements):
                continue  # it moves them, or has none of them
            if not _meets_zeros(operation, side, numbers, program, zeros):
                return False
            met = True
    return met


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


def _meets_zeros(operation: Operation, side: int, numbers: Array, program: Program, zeros: Zeros) -> bool:
    others = [_zeros(x, program, zeros) for k, x in enumerate(operation.operands) if k != side]
    if role_of(operation) in WEIGHTED and any(x.size and x.all() for x in others):
        return True
    if len(others) != 1 or not others[0].any():
        return False
    if operation.name == "mul":
        shape = operation.results[0].array.shape
        here = [np.broadcast_to(np.isin(x, numbers), shape) for x in operation.operands[side].elements]
        return bool(np.broadcast_to(others[0], shape)[np.any(here, 0)].all())
    if role_of(operation) is not Role.PRODUCT or len(operation.data) != 1:
        return False
    as_data = tuple(Value(others[0].astype(float), data=True) if x.data else x for x in operation.operands)
    found = list(products([replace(operation, operands=as_data)], side))
    rows = [np.any([np.isin(x, numbers).reshape(len(x), -1).any(1) for x in one.numbers], 0) for one in found]
    return bool(found) and all((one.rows[0][:, here] == 1).all() for one, here in zip(found, rows, strict=True))
