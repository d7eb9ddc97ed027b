"""Sums and products of several terms in other orders: ``(x + y) + b`` has the value ``x + b`` as well, and meets `b` there.

Models add biases before or behind a residual, and multiply by a scale before or behind a factor that is computed from data. ``t (x + y)``
has ``t x`` and ``t y``, too.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np

from convert.programs.program import Operation, Program, Value, times_used

Array = np.ndarray[Any, np.dtype[Any]]
SUMS = ("add", "add_any", "sub")
KINDS = {"add": np.add, "add_any": np.add, "mul": np.multiply}
MAX_TERMS = 5  # in a longer sum, a parameter meets the term in front of it
MAX_LONG = 32


@dataclass(frozen=True, eq=False)
class Term:
    """A value of parameters in a sum or product of at least three terms, or a factor of a sum.

    Attributes:
        index: of the operation that it is an operand of.
        operation: that operation.
        side: position among the operands.
        data: what else may meet it: the sum (product) of some of the other terms; a term of the sum that it multiplies.
        result: what that gives.
    """

    index: int
    operation: Operation
    side: int
    data: Array
    result: Array


def terms(program: Program) -> Iterator[Term]:
    """Yield the meetings of parameters with data that another order of the terms would have."""
    uses = times_used(program)
    made = {result: k for k, operation in enumerate(program.operations) for result in operation.results}
    inner = set()
    for operation in program.operations:
        if operation.name in KINDS:
            inner |= {x for x in operation.operands if _is_inner(program, x, operation, uses, made)}
    for index, operation in enumerate(program.operations):
        result = operation.results[0] if operation.results else None
        if operation.name in KINDS and result is not None and result.data and result not in inner:
            leaves = list(_flattened(program, index, inner, made))
            if 2 < len(leaves) <= MAX_LONG:
                yield from _orders(program, leaves, KINDS[operation.name])


def distributed(program: Program) -> Iterator[Term]:
    """Yield the meetings of parameters with the terms of a sum that they multiply."""
    made_by = program.made_by
    for index, operation in enumerate(program.operations):
        if operation.name != "mul" or len(operation.operands) != 2 or len(operation.data) != 1:
            continue
        side = 0 if operation.operands[1].data else 1
        weight, total = operation.operands[side], operation.operands[1 - side]
        for term in _summands(total, made_by) if weight.of_parameters else ():
            data = np.broadcast_to(term, total.array.shape)
            yield Term(index, operation, side, data, data * weight.array)


def _summands(total: Value, made_by: Mapping[Value, Operation]) -> list[Array]:
    """Return the terms of a sum or difference of data; none if it is none, or a long one."""
    found: list[Array] = []
    todo = [total]
    while todo and len(found) <= MAX_TERMS:
        value = todo.pop()
        made = made_by.get(value)
        if made is not None and made.name in SUMS and all(x.array.dtype.kind == "f" for x in made.operands):
            todo += [x for x in made.operands if x.data]
        else:
            found.append(value.array)
    return found if 1 < len(found) <= MAX_TERMS and not todo else []


def _is_inner(program: Program, value: Value, by: Operation, uses: Counter[Value], made: dict[Value, int]) -> bool:
    """Whether a value is an intermediate result of the same sum or product, that nothing else uses."""
    if uses[value] != 1 or value not in made:
        return False
    return KINDS.get(program.operations[made[value]].name) is KINDS[by.name]


def _flattened(program: Program, index: int, inner: set[Value], made: dict[Value, int]) -> Iterator[tuple[int, int]]:
    """Yield the terms of the sum that an operation completes, as (operation, position of the operand)."""
    for side, operand in enumerate(program.operations[index].operands):
        if operand in inner:
            yield from _flattened(program, made[operand], inner, made)
        else:
            yield index, side


def _orders(program: Program, leaves: list[tuple[int, int]], join: Any) -> Iterator[Term]:
    values = [program.operations[index].operands[side] for index, side in leaves]
    for k, (index, side) in enumerate(leaves):
        if not values[k].of_parameters:
            continue
        others = [value for j, value in enumerate(values) if j != k]
        if len(leaves) > MAX_TERMS:
            others = values[k - 1 : k] if k and values[k - 1].data else values[k + 1 : k + 2]
        for count in range(1, len(others) + 1):
            for chosen in itertools.combinations(others, count):
                if any(value.data for value in chosen):
                    data = reduce(join, [value.array for value in chosen])
                    yield Term(index, program.operations[index], side, data, join(data, values[k].array))
