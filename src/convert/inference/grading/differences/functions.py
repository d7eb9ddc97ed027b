"""What a program computes of one value alone: functions of each of its elements, and masks.

Constants may take part, and what is computed of inputs alone, such as which positions are padding. Nothing that a weight is in does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from convert.programs.divergence.graph import root
from convert.programs.divergence.kinds import ELEMENTWISE, LAYOUT, kind_of
from convert.programs.divergence.layouts import same
from convert.programs.divergence.rerun import again
from convert.programs.program import Operation, Program, Value

Array = np.ndarray[Any, np.dtype[Any]]
FURTHER = {
    *("gt", "lt", "ge", "le", "eq", "ne", "and", "or", "not", "sign", "floor", "ceil", "round", "erf_inv", "is_finite", "cbrt"),
    *("logical_and", "logical_or", "logical_not", "isfinite", "leaky_relu", "hardtanh", "hardswish", "hardsigmoid", "celu"),
    *("selu", "mish", "log_sigmoid_forward", "softshrink", "hardshrink", "threshold", "square", "isnan"),
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Function:
    """What a program computes of one value.

    Attributes:
        given: the value.
        made: what it gives.
        steps: the operations, in order; those that compute what else they are given of inputs come first.
        inputs: of the program, that take part.
        of_each: whether each element is computed of one element, in the same way.
    """

    given: Value
    made: Value
    steps: tuple[Operation, ...]
    inputs: Mapping[str, Value]
    of_each: bool

    def __call__(self, array: Array, inputs: Mapping[str, Array]) -> Array:
        """Compute it of another array: of as many elements in the same order, or of any if it is `of_each`.

        Raises:
            ValueError: the operations do not take it.
        """
        shape, flat = self.given.array.shape, np.asarray(array).ravel()
        if not self.of_each or flat.size == self.given.array.size:
            return self._run(flat.reshape(shape), inputs).reshape(array.shape)
        size = self.given.array.size
        filled = np.resize(flat, -(-flat.size // size) * size)
        parts = [self._run(x.reshape(shape), inputs).ravel() for x in filled.reshape(-1, size)]
        return np.concatenate(parts)[: flat.size].reshape(array.shape)

    def _run(self, array: Array, inputs: Mapping[str, Array]) -> Array:
        given = {self.given: array, **{value: inputs[name] for name, value in self.inputs.items()}}
        made = again(self.steps, given, self.made)
        if made is None:
            raise ValueError("the operations do not take the array")
        return made


def functions_of(given: Value, program: Program) -> Iterator[Function]:
    """Yield what a program computes of a value alone and gives to other operations, the last first."""
    of_given, steps = {given}, list[Operation]()
    for operation in program.operations:
        if of_given.isdisjoint(operation.operands) or len(operation.results) != 1:
            continue
        others = [value for value in operation.operands if value not in of_given]
        result = operation.results[0].array
        if any(value.leaves for value in others) or result.size != given.array.size or not _keeps_places(operation):
            continue
        of_given.update(operation.results)
        steps.append(operation)
    users, outputs = program.users, set(program.outputs.values())
    made_by = program.made_by
    seen = [given.array]
    for step in reversed(steps):
        value = root(step.results[0], made_by)  # in front of what only lays it out anew
        goes_on = step.results[0] in outputs or any(x not in steps for x in users.get(step.results[0], ()))
        if goes_on and value.array.dtype.kind == "f" and not any(same(value.array, x) for x in seen):
            seen.append(value.array)
            yield _function(given, value, steps, program, made_by)


def _function(
    given: Value, made: Value, steps: Sequence[Operation], program: Program, made_by: Mapping[Value, Operation]
) -> Function:
    taken, inputs = set[Operation](), dict[str, Value]()
    names = {value: name for name, value in program.inputs.items()}
    waiting, beside = [made], list[Value]()
    while waiting:
        value = waiting.pop()
        operation = made_by.get(value)
        if value is given or value.constant or operation in taken:
            continue
        if value in names:
            inputs[names[value]] = value
        elif operation is not None:
            taken.add(operation)
            waiting.extend(operation.operands)
            beside += [x for x in operation.operands if operation in steps and not _is_of(x, given, steps)]
    in_order = tuple(one for one in program.operations if one in taken)
    return Function(given, made, in_order, inputs, all(_is_one_number(x) for x in beside))


def _is_of(value: Value, given: Value, steps: Sequence[Operation]) -> bool:
    return value is given or any(value in one.results for one in steps)


def _is_one_number(value: Value) -> bool:
    return value.constant and bool((value.array == value.array.flat[0]).all() if value.array.size else True)


def _keeps_places(operation: Operation) -> bool:
    """Whether each element of the result is computed of the element in the same place."""
    if kind_of(operation) in ELEMENTWISE or operation.name.removesuffix("_") in FURTHER:
        return True
    if kind_of(operation) != LAYOUT:
        return False
    moved = [x for x in operation.operands if x.array.size == operation.results[0].array.size]
    return len(moved) == 1 and bool(
        np.array_equal(moved[0].array.ravel(), operation.results[0].array.ravel(), equal_nan=True)
    )
