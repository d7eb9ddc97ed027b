"""Write a weight of which code sets elements to zero as the weight times a mask.

PyTorch code does so in many ways: a condition fills them, an operation works in place on the data of a parameter, zeros are joined to a
part of it. The product with zeros and ones is what the search knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from convert.inference.forms.elements import before_zeros, step, with_new, without_idle
from convert.programs.program import Operation, Program, Value


def zeroed_as_masked(program: Program) -> Program:
    """Return the program in which each value of one parameter that has zeros in place of some elements is a product with a mask."""
    whole = [value for value in program.parameters.values() if len(value.elements) == 1]
    new: dict[Value, Value] = {}
    operations: list[Operation] = []
    for operation in program.operations:
        made = _masked(operation, whole) or with_new(operation, new)
        new.update({old: x for old, x in zip(operation.results, made.results, strict=True) if x is not old})
        whole += [x for x in made.results if len(x.elements) == 1 and (x.elements[0] >= 0).all()]
        operations.append(made)
    if not new:
        return program
    changed = replace(program, outputs={name: new.get(value, value) for name, value in program.outputs.items()})
    return replace(changed, operations=tuple(without_idle(operations, changed)))


def zeroed_in_both(source: Program, target: Program) -> bool:
    """Whether the source sets elements of a weight to zero, and the target multiplies one by zeros and ones."""
    whole = [value for value in source.parameters.values() if len(value.elements) == 1]
    return any(map(_is_mask, target.operations)) and any(_masked(operation, whole) for operation in source.operations)


def _is_mask(operation: Operation) -> bool:
    """Whether an operation multiplies parameters by zeros and ones."""
    masks = [x for x in operation.operands if x.constant and x.array.ndim]
    weights = [x for x in operation.operands if x.of_parameters]
    zeros_and_ones = bool(masks) and bool(np.isin(masks[0].array, (0, 1)).all())
    return operation.name == "mul" and len(weights) == 1 and zeros_and_ones


def _masked(operation: Operation, whole: Sequence[Value]) -> Operation | None:
    """Return the product that gives an operation's result: with the first value that has its elements where these are no zeros."""
    result = operation.results[0] if len(operation.results) == 1 else None
    value = None if result is None else before_zeros(result, whole)
    if result is None or value is None:
        return None
    masked = replace(result, elements=value.elements)
    return step(operation, "mul", (value, Value(np.where(result.elements[0] < 0, 0.0, 1.0))), masked, np.multiply)
