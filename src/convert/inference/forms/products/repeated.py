"""Take a product with a parameter once for all its rows, where a program repeats the data for each of them.

``torch.matmul(w, x[:, :, None, :, None])`` with a parameter [inputs, outputs, m, n], as in a capsule network, repeats the parameter for
each row of the batch and the data for each output. Other code has it as an einsum, whose outputs are free axes of the parameter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from convert.inference.forms.elements import step
from convert.inference.forms.products.contractions import is_repeated, reshaped, without_repeats
from convert.programs.program import Array, Operation, Program, Value

VIEWS = ("view", "reshape", "_unsafe_view")


def data_once(program: Program) -> Program:
    """Return the program without repeated data in its products with parameters."""
    made_by = program.made_by
    operations = [made for operation in program.operations for made in _once(operation, made_by) or [operation]]
    return replace(program, operations=tuple(operations))


def _once(product: Operation, made_by: Mapping[Value, Operation]) -> list[Operation]:
    """Return the operations that take the place of a product; none if it repeats no data."""
    if product.name != "bmm" or len(product.data) != 1 or not any(x.elements for x in product.operands):
        return []
    whole = [_before_views(x, made_by) for x in product.operands]
    (groups, *others) = [x.array.shape[:-2] for x in whole]
    if others != [groups]:
        return []
    kept = [
        [k for k in range(len(groups)) if groups[k] > 1 and not is_repeated(x, k - len(groups) - 2, made_by)]
        for x in whole
    ]
    weight = 1 if product.operands[0].data else 0
    if set(kept[weight]) <= set(kept[1 - weight]):
        return []
    steps = [_short(product, x, groups, of) for x, of in zip(whole, kept, strict=True)]
    left, right = ([*of, *ends] for of, ends in zip(kept, ((-2, -1), (-1, -3)), strict=True))  # names of their axes
    common = [k for k in left if k in right and k >= 0]
    free = [[k for k in of if k not in common and k != -1] for of in (left, right)]
    made = [*common, *free[0], *free[1]]
    numbers = (
        ((left.index(-1),), (right.index(-1),)),
        tuple(tuple(of.index(k) for k in common) for of in (left, right)),
    )
    letters = ["".join(chr(ord("d") + k) for k in of) for of in (left, right, made)]  # -3 is the first letter
    (result,) = product.results

    def times(one: Array, other: Array) -> Array:
        found: Array = np.einsum(f"{letters[0]},{letters[1]}->{letters[2]}", one, other)
        return found

    def placed(array: Array) -> Array:
        order = [made.index(k) for k in sorted(made, key=lambda k: (k < 0, abs(k)))]  # groups, rows (-2), columns (-3)
        ones = [groups[k] if k in made else 1 for k in range(len(groups))]
        spread = array.transpose(order).reshape(*ones, *result.array.shape[1:])
        return np.array(np.broadcast_to(spread, (*groups, *spread.shape[-2:]))).reshape(result.array.shape)

    operands = tuple(of[-1].results[0] for of in steps)
    value = Value(times(*(x.array for x in operands)), data=True, leaves=result.leaves)
    once = step(product, "dot_general", operands, value, times)
    return [
        *(made for of in steps for made in of),
        replace(once, settings={"dimension_numbers": numbers}),
        step(product, "expand", (value,), result, placed),
    ]


def _before_views(value: Value, made_by: Mapping[Value, Operation]) -> Value:
    """Return the value whose axes in front of the last two a view has put together."""
    ends = value.array.shape[-2:]
    while (made := made_by.get(value)) and made.name in VIEWS and made.operands[0].array.shape[-2:] == ends:
        value = made.operands[0]
    return value


def _short(product: Operation, value: Value, groups: Sequence[int], kept: Sequence[int]) -> list[Operation]:
    """Return the operation that gives a value without the axes along which it is repeated."""
    rank = value.array.ndim
    sliced = without_repeats(product, value, rank, [*kept, rank - 2, rank - 1])
    return [reshaped(sliced, (*(groups[k] for k in kept), *value.array.shape[-2:]))]
