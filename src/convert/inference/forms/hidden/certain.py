"""Which elements of the values of a program no parameter changes, such as the zeros that a mask of the inputs makes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from convert.inference.forms.hidden.perturbed import HUGE, changes, others, run
from convert.programs.program import Array, Operation, Program, Value


def certain_elements(program: Program) -> dict[Value, Array]:
    """Return the elements that no parameter changes, of values that have such and others."""
    found: dict[Value, Array] = {}
    for operation in program.operations:
        if not any(x.leaves for x in operation.operands) or not _may_be_certain(operation, found):
            continue
        before = run(operation, [x.array for x in operation.operands])
        after = [run(operation, operands) for operands in with_others(operation, found)]
        if before is None or any(made is None for made in after):
            continue
        for k, result in enumerate(operation.results):
            same = ~np.any([changes(before[k], made[k]) for made in after if made is not None], 0)
            if result.array.dtype.kind == "f" and same.any():
                found[result] = same
    return found


def with_others(operation: Operation, certain: Mapping[Value, Array]) -> Iterator[list[Array]]:
    """Yield the operands of an operation with other numbers where a parameter changes them."""
    free = [
        ~certain.get(x, np.zeros(x.array.shape, bool)) if x.leaves and x.array.dtype.kind == "f" else np.zeros((), bool)
        for x in operation.operands
    ]
    ways = [others(x.array, where, k) for k, (x, where) in enumerate(zip(operation.operands, free, strict=True))]
    return (list(arrays) for arrays in zip(*ways, strict=True))


def hides(value: Value, certain: Mapping[Value, Array]) -> bool:
    """Whether a value may hide what it meets: by truth values, or zeros that no parameter changes."""
    if value.array.dtype.kind == "b":
        return True
    zeros = value.array == 0
    if value.leaves:
        zeros = zeros & certain.get(value, np.False_)
    return bool(zeros.any())


def _may_be_certain(operation: Operation, certain: Mapping[Value, Array]) -> bool:
    if any(x.leaves and x.array.dtype.kind != "f" for x in operation.operands):
        return False  # other numbers of a choice are none of it
    floats = [x for x in operation.operands if x.leaves and x.data]
    return any(x in certain or hides(x, certain) for x in operation.operands if x.data or not x.leaves) or any(
        (np.abs(x.array) >= HUGE).any() for x in floats
    )
