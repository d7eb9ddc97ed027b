"""Sums over three factors, of which one is a vector of parameters: ``(h * w) @ u.T`` is ``(h * u) @ w`` of all pairs of rows.

The similarity of BiDAF, or the scores of a bilinear layer with a diagonal: one program scales one value before the product of both, the
other multiplies both element by element, and has a layer behind that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from convert.inference.derivation import Role
from convert.inference.forms.elements import product_at
from convert.inference.forms.products.joined import OfOne
from convert.inference.meetings.sites import axes_of, role_of
from convert.programs.program import Array, Operation, Program, Value

MOST = 1_000_000  # numbers that two values give element by element


def of_all_pairs(program: Program) -> Iterator[OfOne]:
    """Yield the products of a vector with what two values give element by element, where the program scales one of them by it."""
    made_by = program.made_by
    for index, operation in enumerate(program.operations):
        if role_of(operation) is not Role.PRODUCT or len(operation.operands) != 2 or len(operation.data) != 2:
            continue
        for side, value in enumerate(operation.operands):
            scaled = made_by.get(value)
            product = _of_pairs(operation, side, scaled) if scaled is not None else None
            if product is not None:
                yield OfOne(index, product, 1, None, product.results[0].array)


def _of_pairs(product: Operation, side: int, scaled: Operation) -> Operation | None:
    """Return the product with the vector; None if the operand is not scaled by one along the axes that are summed over."""
    axes = axes_of(product, side)
    if axes is None or role_of(scaled) is not Role.SCALE or scaled.name != "mul" or len(scaled.data) != 1:
        return None
    one, two = scaled.operands
    data, weight = (one, two) if one.data else (two, one)
    shape, other = scaled.results[0].array.shape, product.operands[1 - side]
    if not weight.of_parameters or len(weight.elements) != 1 or product.results[0].array.size == 0:
        return None
    (other_batch, other_sum), (batch, summed) = axes
    size = int(np.prod([shape[k] for k in summed]))
    pairs = product.results[0].array.size * size
    vectors, numbers = (
        _rows(np.broadcast_to(x, shape), batch, summed).reshape(-1, size) for x in (weight.array, weight.elements[0])
    )
    if pairs > MOST or len(np.unique(numbers[0])) < size or (numbers != numbers[0]).any():
        return None
    left = _rows(np.broadcast_to(data.array, shape), batch, summed)
    right = _rows(other.array, other_batch, other_sum)
    both = Value((left[:, :, None] * right[:, None]).reshape(-1, size), data=True, leaves=data.leaves | other.leaves)
    vector = Value(vectors[0], leaves=weight.leaves, elements=(numbers[0],))
    return product_at(product, both, vector)


def _rows(array: Array, batch: Sequence[int], summed: Sequence[int]) -> Array:
    """Return an array as [batch, rows, what is summed over]."""
    count, size = (int(np.prod([array.shape[k] for k in axes])) for axes in (batch, summed))
    rest = [k for k in range(array.ndim) if k not in (*batch, *summed)]
    return array.transpose(*batch, *rest, *summed).reshape(count, -1, size)
