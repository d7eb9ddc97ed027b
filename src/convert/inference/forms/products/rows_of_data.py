"""Products with rows that are taken of data, as products of the data: ``[x[i], y[j]] w`` is ``(x u)[i] + (y v)[j]``, where u and v are the parts of w.

A graph network joins both ends of each edge, and multiplies them by a vector of each head and relation; or it multiplies the nodes by
the vector of each end, and takes what belongs to the ends of an edge.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from convert.inference.derivation import Role
from convert.inference.forms.elements import (
    JOINS,
    before_moves,
    elements_looked_up,
    in_turn,
    numbered,
    step,
    take,
    taken,
)
from convert.inference.forms.products.commuted import equal
from convert.inference.forms.products.taken_rows import rows_of, taken_behind
from convert.inference.meetings.sites import axes_of, parameter_operands, role_of
from convert.programs.program import Array, Operation, Program, Value

MOST_AXES = 5  # of a result whose order is looked for


@dataclass(frozen=True, eq=False)
class _Part:
    """Columns of a product's data that come from one value.

    Attributes:
        columns: where they are along the axis that is summed over.
        value: the value.
        places: where the elements of the data with these columns are in it.
        looked_up: whether rows of it are taken.
    """

    columns: Array
    value: Value
    places: Array
    looked_up: bool


def products_of_taken_rows(program: Program) -> int:
    """Return how many products with a parameter are given rows that are taken of data."""
    made_by = program.made_by
    return sum(bool(_parts(operation, made_by)) for operation in program.operations)


def rows_of_data_behind(program: Program, *, keep: bool) -> Program:
    """Return the program with products of the data in place of those with rows that are taken of it.

    Args:
        keep: whether the products with the rows stay in the program as well.
    """
    made_by = program.made_by
    operations: list[Operation] = []
    for operation in program.operations:
        steps = list(_of_parts(operation, _parts(operation, made_by)))
        operations += [*steps, operation] if keep or not steps else steps
    return replace(program, operations=tuple(operations))


def _parts(product: Operation, made_by: Mapping[Value, Operation]) -> list[_Part]:
    """Return the values of which a product with a parameter is given rows, side by side; none where no rows are taken."""
    sides = parameter_operands(product)
    if role_of(product) is not Role.PRODUCT or len(product.operands) != 2 or len(sides) != 1:
        return []
    axes, data = axes_of(product, sides[0]), product.operands[1 - sides[0]]
    if axes is None or len(axes[0][1]) != 1:
        return []
    (axis,) = axes[0][1]
    value, made, moves = before_moves(data, made_by)
    if made is None or made.name not in JOINS:
        found = [_part(data, np.arange(data.array.shape[axis]), numbered(data).astype(int), made_by)]
    else:
        found = list(_joined_parts(made, in_turn(moves, numbered(value)).astype(int), axis, made_by))
    return found if any(part.looked_up for part in found) and all(part.value.data for part in found) else []


def _joined_parts(join: Operation, at: Array, axis: int, made_by: Mapping[Value, Operation]) -> Iterator[_Part]:
    """Yield the values that are joined, if each has some columns whole.

    Args:
        at: which element of the joined value each element of the data is.
        axis: of the data, that is summed over.
    """
    sizes = [x.array.size for x in join.operands]
    numbers = np.split(np.arange(float(sum(sizes))), np.cumsum(sizes)[:-1])
    joined = join.again([n.reshape(x.array.shape) for n, x in zip(numbers, join.operands, strict=True)])[0]
    at = np.moveaxis(take(np.asarray(joined).astype(int), at), axis, -1)
    owner = np.searchsorted(np.cumsum(sizes), at, "right")
    if (owner != owner.reshape(-1, owner.shape[-1])[0]).any():
        return
    for k, (value, start) in enumerate(zip(join.operands, np.cumsum([0, *sizes]), strict=False)):
        columns = np.flatnonzero(owner.reshape(-1, owner.shape[-1])[0] == k)
        if len(columns):
            yield _part(value, columns, np.moveaxis(at[..., columns] - start, -1, axis), made_by)


def _part(value: Value, columns: Array, at: Array, made_by: Mapping[Value, Operation]) -> _Part:
    """Return the rows of a value, or of that of which a lookup that no parameter decides takes them."""
    _, made, moves = before_moves(value, made_by)
    if made is not None and role_of(made) is Role.LOOKUP and made.operands[0].data:
        found = None if any(x.leaves for x in made.operands[1:]) else elements_looked_up(made, moves)
        if found is not None and found.size == value.array.size:
            return _Part(columns, made.operands[0], found.ravel()[at], True)
    return _Part(columns, value, at, False)


def _of_parts(product: Operation, parts: list[_Part]) -> Iterator[Operation]:
    """Yield the products of the values with their parts of the parameter, and what adds up the results; nothing where they give another one."""
    if not parts:
        return
    side, (result,) = parameter_operands(product)[0], product.results
    weight, data = product.operands[side], product.operands[1 - side]
    order = _order(_product(product, side, data.array, weight.array), result.array)
    axes = axes_of(product, side)
    if order is None or axes is None:
        return
    places = np.arange(weight.array.size).reshape(weight.array.shape)
    total: Value | None = None
    steps: list[Operation] = []
    for part in parts:
        own = taken(weight, places.take(part.columns, axes[1][1][0]))
        steps.append(
            step(product, "slice", (weight,), own, partial(take, places=places.take(part.columns, axes[1][1][0])))
        )
        rows = Value(take(part.value.array, part.places), True, part.value.leaves)
        term = Value(_product(product, side, rows.array, own.array), True, rows.leaves | own.leaves)
        of_part = replace(product, operands=(rows, own) if side else (own, rows), results=(term,))
        found = rows_of(of_part, 1 - side, part.value, part.places)
        if found is None or found.summed not in found.axes:  # columns are taken, not whole rows
            return
        steps += taken_behind(found)
        if not equal(steps[-1].again([steps[-1].operands[0].array])[0], term.array):
            return
        if total is not None:
            both = Value(total.array + term.array, True, total.leaves | term.leaves)
            steps.append(step(product, "add", (total, term), both, np.add))
            term = both
        total = term
    assert total is not None, "there are parts"
    yield from steps
    shape = result.array.shape
    yield step(product, "transpose", (total,), result, lambda x: x.squeeze().transpose(order).reshape(shape))


def _product(product: Operation, side: int, data: Array, weight: Array) -> Array:
    """Return a product with its axes in the order of `dot_general`: those of both, then those of the first operand, then of the second."""
    axes = axes_of(product, side)
    assert axes is not None, "it was found by these axes"
    (of_data, (data_sum,)), (of_weight, (weight_sum,)) = axes
    at = list(range(weight.ndim))
    along = [weight.ndim + k for k in range(data.ndim)]
    for k, j in zip((*of_data, data_sum), (*of_weight, weight_sum), strict=True):
        along[k] = j
    free = [
        [k for j, k in enumerate(ks) if j not in (*batch, summed)]
        for ks, batch, summed in ((along, of_data, data_sum), (at, of_weight, weight_sum))
    ]
    given = [*of_weight, *(free[0] + free[1] if side else free[1] + free[0])]
    return np.asarray(np.einsum(data, along, weight, at, given, optimize=True))


def _order(array: Array, like: Array) -> tuple[int, ...] | None:
    """Return the order of an array's axes in which it has the elements of another one; axes of size 1 do not count."""
    one, two = array.squeeze(), like.squeeze()
    if one.ndim != two.ndim or one.ndim > MOST_AXES:
        return None
    orders = itertools.permutations(range(one.ndim))
    return next((order for order in orders if equal(one.transpose(order), two)), None)
