"""Take the mean of products where a program takes the product of a mean: ``mean(W) v`` is ``mean(W v)``, where v is the same for all.

Interpretable attention, as in the Temporal Fusion Transformer, has one matrix of values for all heads. One program averages the weights of
the heads, the other averages what each head gives.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from convert.inference.derivation import Role
from convert.inference.forms.elements import step
from convert.inference.meetings.sites import axes_of, role_of
from convert.programs.program import Array, Operation, Program, Value

SUMS = frozenset(("sum", "reduce_sum", "mean"))
FACTORS = frozenset(("mul", "div"))
MAX_STEPS = 6  # operations that change nothing, and a factor, between the mean and the product


@dataclass(frozen=True, eq=False)
class _Mean:
    """A value that is a number times the sum of another one along an axis.

    Attributes:
        side: of the product whose operand it is.
        value: what is added up.
        axis: the axis.
        factor: the number.
    """

    side: int
    value: Value
    axis: int
    factor: float


def products_of_means(program: Program) -> int:
    """Return how many products of two values of data there are of which one is a mean."""
    made_by = program.made_by
    return sum(_mean(operation, made_by) is not None for operation in program.operations)


def means_of_products(program: Program, *, keep: bool) -> Program:
    """Return the program with the mean behind each such product.

    Args:
        program: the record.
        keep: whether the products as they were stay in the program as well.
    """
    made_by = program.made_by
    operations: list[Operation] = []
    for operation in program.operations:
        mean = _mean(operation, made_by)
        operations += [operation] if mean is None or keep else []
        operations += [] if mean is None else _behind(operation, mean)
    return replace(program, operations=tuple(operations))


def _mean(product: Operation, made_by: Mapping[Value, Operation]) -> _Mean | None:
    """Return the mean that a product has as an operand; None if it is another operation, or has none."""
    operands = product.operands
    if role_of(product) is not Role.PRODUCT or len(operands) != 2 or not all(x.data and x.leaves for x in operands):
        return None
    if axes_of(product, 1) is None:
        return None
    found = (_sum(x, side, made_by) for side, x in enumerate(operands))
    return next((mean for mean in found if mean is not None), None)


def _sum(value: Value, side: int, made_by: Mapping[Value, Operation]) -> _Mean | None:
    before = value
    for _ in range(MAX_STEPS):
        made = made_by.get(before)
        data = made.data if made is not None else ()
        if made is None or len(data) != 1:
            return None
        if made.name in SUMS:
            return _along(data[0], value, side)
        same_shape = data[0].array.shape == before.array.shape
        numbers = all(x.array.size == 1 for x in made.operands if x is not data[0])
        if not same_shape or not ((made.name in FACTORS and numbers) or np.array_equal(data[0].array, before.array)):
            return None
        before = data[0]
    return None


def _along(added: Value, value: Value, side: int) -> _Mean | None:
    """Return the mean that a value is of another one; None if it is none along one axis."""
    shape = added.array.shape
    for axis in range(len(shape)):
        if (*shape[:axis], *shape[axis + 1 :]) == value.array.shape and shape[axis] > 1:
            total = added.array.sum(axis)
            factor = float(value.array.ravel() @ total.ravel() / max(total.ravel() @ total.ravel(), 1e-300))
            if np.allclose(factor * total, value.array, rtol=1e-12, atol=0):
                return _Mean(side, added, axis, factor)
    return None


def _behind(product: Operation, mean: _Mean) -> list[Operation]:
    """Return the product of all that is added up, and its mean, at the place of the product of the mean."""
    axes = axes_of(product, 1)
    if axes is None:
        return [product]
    (batch, summed), (of_batch, of_summed) = axes
    order = (mean.axis, *(k for k in range(mean.value.array.ndim) if k != mean.axis))
    moved = Value(mean.value.array.transpose(order), True, mean.value.leaves)
    moves = step(product, "transpose", (mean.value,), moved, lambda x: x.transpose(order))
    operands = list(product.operands)
    operands[mean.side] = moved
    sides = [(tuple(summed), tuple(batch)), (tuple(of_summed), tuple(of_batch))]
    sides[mean.side] = (tuple(k + 1 for k in sides[mean.side][0]), tuple(k + 1 for k in sides[mean.side][1]))
    numbers = ((sides[0][0], sides[1][0]), (sides[0][1], sides[1][1]))
    first = len(batch) + (0 if mean.side == 0 else product.operands[0].array.ndim - len(batch) - len(summed))

    def multiplied(*arrays: Array) -> Array:
        """Return the products, those of all that is added up along the first axis that is free."""
        other = arrays[1 - mean.side]
        each = ((x, other) if mean.side == 0 else (other, x) for x in arrays[mean.side])
        return np.stack([product.again(pair)[0] for pair in each], first)

    all_of_them = Value(multiplied(*(x.array for x in operands)), True, product.results[0].leaves)
    times = step(product, "dot_general", tuple(operands), all_of_them, multiplied)
    return [
        replace(moves, settings={"permutation": order}),
        replace(times, settings={"dimension_numbers": numbers}),
        step(product, "mean", (all_of_them,), product.results[0], lambda x: mean.factor * x.sum(first)),
    ]
