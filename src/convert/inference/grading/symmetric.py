"""Columns that are products of two elements of one value: ``x_i x_j`` and ``x_j x_i`` are equal for all inputs.

A compressed interaction network, or a quadratic layer, takes both. What its matrix has for one of them may be what it has for the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from convert.inference.derivation import Role, Tensor, Tie
from convert.inference.forms.elements import places_before_moves
from convert.inference.meetings.sites import axes_of, role_of
from convert.programs.program import Operation, Program, Value

Array = np.ndarray[Any, np.dtype[Any]]
MAX_STEPS = 16  # layouts between a value, the products of its elements, and the layer behind them


def in_the_other_order(tensor: Tensor, target: Program, tie: Tie, columns: list[Array], way: int) -> Tensor | None:
    """Return a tensor with the other way to fill the columns of a tie; None if they are not the products of two elements in either order.

    Args:
        target: the record of the tie's site.
        columns: numbers of the target's elements that meet each of them.
        way: the number of the other way.
    """
    partner = _partners(target, tie)
    moved_elements = np.concatenate([np.zeros(0, int), *columns]) - target.first_element[tensor.name]
    parts = [part for part in tensor.parts if np.isin(part.elements, moved_elements).any()]
    if partner is None or len(columns) != len(tie.columns) or len(parts) != 1 or parts[0].leaves or not parts[0].leaf:
        return None
    (part,) = parts
    place = {int(element): k for k, element in enumerate(part.elements)}
    if not all(int(element) in place for element in moved_elements):
        return None
    start = target.first_element[tensor.name]
    other = [columns[tie.columns.index(partner[column])] - start for column in tie.columns]
    positions = part.positions[[place[int(element)] for element in np.concatenate(other)]]
    swapped = replace(part, elements=moved_elements, positions=positions)
    return replace(tensor, alternatives={**tensor.alternatives, way: (swapped,)})


def _partners(target: Program, tie: Tie) -> dict[int, int] | None:
    """Return for each column of a tie the one with the same two factors in the other order, if the data has no further equal columns."""
    operation, side = target.operations[tie.site.index], tie.site.operand
    axis = None if side is None else _summed_axis(operation, side)
    if side is None or axis is None:
        return None
    data = operation.operands[0 if role_of(operation) is Role.CONVOLUTION else 1 - side]
    factors = _factors(data, target.made_by)
    if factors is None:
        return None
    one, two = (np.moveaxis(x, axis, 0).reshape(data.array.shape[axis], -1) for x in factors)
    values = np.moveaxis(data.array, axis, 0).reshape(len(one), -1)
    keys = {(row.tobytes(), other.tobytes()): k for k, (row, other) in enumerate(zip(one, two, strict=True))}
    found: dict[int, int] = {}
    for column in tie.columns:
        partner = keys.get((two[column].tobytes(), one[column].tobytes()))
        equal = np.flatnonzero((values == values[column]).all(1))
        if partner is None or {column, partner} != set(equal.tolist()):
            return None
        found[column] = partner
    return found if set(found.values()) == set(found) else None


def _summed_axis(operation: Operation, side: int) -> int | None:
    if role_of(operation) is Role.CONVOLUTION:
        return 1
    axes = axes_of(operation, side) if role_of(operation) is Role.PRODUCT else None
    return None if axes is None or axes[0][0] or len(axes[0][1]) != 1 else int(axes[0][1][0])


def _factors(value: Value, made_by: Mapping[Value, Operation]) -> tuple[Array, Array] | None:
    """Return the two elements of one value whose product each element of a value is, as their numbers; None if it is no such product."""
    product, places = places_before_moves(value, made_by, MAX_STEPS)
    made = made_by.get(product)
    if made is None or made.name.removesuffix("_") != "mul" or len(made.data) != 2 or len(made.operands) != 2:
        return None
    found = []
    for operand in made.operands:
        every = np.arange(operand.array.size).reshape(operand.array.shape)
        at = np.broadcast_to(every, product.array.shape).ravel()[places]
        base, numbers = places_before_moves(operand, made_by, MAX_STEPS)
        found.append((base, numbers[at].reshape(value.array.shape)))
    (base, one), (other, two) = found
    return (one, two) if base is other else None
