"""Take a product apart where a program uses other rows of it for some columns than for others: ``(x W)[rows, columns]`` is
``x[rows] W[:, columns]``.

A layer makes queries, keys and values of all rows by one matrix, and takes the queries of the last ones: a memory, a cache, a prefix.
Or it is applied to two values, and gives the queries of one and the keys of the other. Other code multiplies each by a matrix of its own.

Rows that a program joins first are taken apart too, where the other program multiplies each value by the matrix: ``[m; x] W`` is
``[m W; x W]``, as the memory tokens in front of a sequence.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from convert.inference.derivation import Role
from convert.inference.forms.elements import JOINS, moved, places_before_moves, step, take, taken
from convert.inference.meetings.sites import axes_of, role_of
from convert.programs.program import Array, Operation, Program, Value

MAX_PARTS = 8  # of one product
MAX_MOVES = 6  # between values that are joined and the product


@dataclass(frozen=True, eq=False)
class Matrices:
    """A product as one of two matrices.

    Attributes:
        side: position of the weight.
        data: positions of the data's elements, [R, I].
        weight: positions of the weight's elements, [I, ...].
        result: positions of the result's elements, [R, C].
    """

    side: int
    data: Array
    weight: Array
    result: Array

    @property
    def columns(self) -> Array:
        """Which column each element of the result is in."""
        found = np.empty(self.result.size, int)
        found[self.result] = np.arange(self.result.shape[1])
        return found


@dataclass(frozen=True, eq=False)
class _Part:
    """Some elements of a value.

    Attributes:
        value: the elements.
        places: where they are, like `value`.
    """

    value: Value
    places: Array


@dataclass(frozen=True, eq=False)
class _Rows:
    """Rows of a product's data that are those of one value.

    Attributes:
        here: which rows they are.
        value: the value.
        places: where the elements of the data are in it, like the data flattened; -1 for the others.
    """

    here: Array
    value: Value
    places: Array


def products_of_joined_rows(program: Program) -> int:
    """Return how many products are applied to rows of several values."""
    made_by = program.made_by
    found = ((operation, matrices_of(operation)) for operation in program.operations)
    return sum(len(_rows(operation, m, made_by)) > 1 for operation, m in found if m is not None)


def used_parts(program: Program, *, keep: bool, apart: bool = False) -> Program:
    """Return the program with a product for each set of rows that it uses of some columns, where there are several.

    Args:
        keep: whether the whole products stay in the program as well.
        apart: whether rows of several values are multiplied apart.
    """
    made_by = program.made_by if apart else {}
    users = program.users
    outputs = set(program.outputs.values())
    products: dict[Operation, tuple[Matrices, Array, Sequence[_Rows]]] = {}
    total = max([1 + int(n.max(initial=0)) for x in program.parameters.values() for n in x.elements], default=0)
    met = np.zeros(total, bool)  # elements of parameters whose products are used
    for operation in program.operations:
        matrices = matrices_of(operation)
        if matrices is not None:
            used = _used(operation.results[0], users, outputs)[matrices.result]
            met[_columns(operation, matrices)[:, used.any(0)]] = True
            of_values = _rows(operation, matrices, made_by)
            if not used.all() or len(of_values) > 1:
                products[operation] = matrices, used, of_values
    known: dict[Value, tuple[_Part, ...]] = {}
    operations: list[Operation] = []
    joins: set[Operation] = set()
    for operation in program.operations:
        if operation in products:
            matrices, used, rows = products[operation]
            used = used | ~met[_columns(operation, matrices)].any(0)  # what no product uses is found with the rest
            steps = _apart(operation, matrices, used, rows, known)
        else:
            steps = _followed(operation, known)
        if keep or steps is None:
            operations.append(operation)
        operations += steps or ()
        if steps is not None and not keep:
            of_parts = [_joined(operation, result, known[result]) for result in operation.results]
            operations += of_parts
            joins.update(of_parts)
    needed = {value for operation in operations if operation not in joins for value in operation.operands} | outputs
    return replace(program, operations=tuple(x for x in operations if x not in joins or x.results[0] in needed))


def _rows(operation: Operation, matrices: Matrices, made_by: Mapping[Value, Operation]) -> list[_Rows]:
    """Return the values that the rows of a product's data are those of.

    Rows of constants are no value of their own: a packed sequence that is read backwards begins from zeros beside the states of
    those that have begun.
    """
    whole = operation.operands[1 - matrices.side]
    value, places = places_before_moves(whole, made_by, MAX_MOVES)
    made = made_by.get(value)
    rows: list[_Rows] = []
    if made is not None and made.name in JOINS and not any(x.constant for x in made.operands):
        sizes = [x.array.size for x in made.operands]
        numbers = np.split(np.arange(float(sum(sizes))), np.cumsum(sizes)[:-1])
        joined = made.again([n.reshape(x.array.shape) for n, x in zip(numbers, made.operands, strict=True)])[0]
        origin = np.asarray(joined).ravel()[places].astype(int)
        for start, size, x in zip(np.cumsum([0, *sizes]), sizes, made.operands, strict=False):
            at = np.where((origin >= start) & (origin < start + size), origin - start, -1)
            rows.append(_Rows(np.asarray((at[matrices.data] >= 0).all(1)), x, at))
    of_one = len(rows) > 1 and np.sum([of.here for of in rows], 0).min() == 1
    return rows if of_one else [_Rows(np.ones(len(matrices.data), bool), whole, np.arange(whole.array.size))]


def matrices_of(operation: Operation) -> Matrices | None:
    """Return the two matrices of a product of data with one value of parameters; None if it is no such product."""
    if role_of(operation) is not Role.PRODUCT or len(operation.operands) != 2 or len(operation.data) != 1:
        return None
    side = 1 if operation.operands[0].data else 0
    weight, data, result = operation.operands[side], operation.operands[1 - side], operation.results[0]
    axes = axes_of(operation, side)
    if axes is None or not weight.of_parameters or not weight.elements or not result.array.size:
        return None
    (x_batch, x_sum), (w_batch, w_sum) = axes
    shape = weight.array.shape
    free = [k for k in range(len(shape)) if k not in (*w_batch, *w_sum)]
    rest = [k for k in range(data.array.ndim) if k not in (*x_batch, *x_sum)]
    count, size = (math.prod(shape[k] for k in of) for of in (w_batch, w_sum))
    order = (*w_batch, *w_sum, *free)
    stack = [n.transpose(order).reshape(count, -1) for n in weight.elements]
    if not all((numbers == numbers[:1]).all() for numbers in stack):  # a matrix for each group
        return None
    x = np.arange(data.array.size).reshape(data.array.shape).transpose(*x_batch, *rest, *x_sum).reshape(-1, size)
    w = np.arange(weight.array.size).reshape(shape).transpose(order).reshape(count, size, *(shape[k] for k in free))[0]
    columns = w.size // size
    places = np.arange(result.array.size)
    y: Array = (
        places.reshape(count, -1, columns) if side else places.reshape(count, columns, -1).swapaxes(1, 2)
    ).reshape(-1, columns)
    return Matrices(side, x, w, y)


def _columns(operation: Operation, matrices: Matrices) -> Array:
    """Return the numbers of the parameter's elements as a matrix [I, C]."""
    numbers: Array = operation.operands[matrices.side].elements[0].ravel()[matrices.weight]
    return numbers.reshape(len(numbers), -1)


def _used(result: Value, users: Mapping[Value, Sequence[Operation]], outputs: set[Value]) -> Array:
    """Return which elements of a value the program uses, behind operations that only move elements or treat each by itself."""
    used = np.zeros(result.array.size, bool)
    todo = [(result, np.arange(used.size))]
    while todo and not used.all():
        value, places = todo.pop()
        of_users = [(operation, moved(operation, value)) for operation in users.get(value, [])]
        if value in outputs or any(found is None for _, found in of_users):
            used[places] = True
            continue
        for operation, found in of_users:
            todo += [(out, places[at]) for out, at in zip(operation.results, found or (), strict=True)]
    return used


def _apart(
    operation: Operation,
    matrices: Matrices,
    used: Array,
    rows: Sequence[_Rows],
    known: dict[Value, tuple[_Part, ...]],
) -> list[Operation] | None:
    """Return the products with the rows that are used of some columns each; None if all are used of all, and are those of one value."""
    groups: dict[bytes, list[int]] = {}
    for column in range(used.shape[1]):
        groups.setdefault(used[:, column].tobytes(), []).append(column)
    sets = [(used[:, columns[0]] & of.here, columns, of) for columns in groups.values() for of in rows]
    sets = [of for of in sets if of[0].any()]
    if (used.all() and len(rows) == 1) or not sets or len(sets) > MAX_PARTS * len(rows):
        return None
    weight = operation.operands[matrices.side]
    steps: list[Operation] = []
    parts: list[_Part] = []
    for here, columns, of in sets:
        x_at, w_at = of.places[matrices.data[here]], _of_columns(matrices.weight, columns)
        x, w = of.value, weight
        if not np.array_equal(x_at.ravel(), np.arange(x.array.size)) or x.array.shape != x_at.shape:
            x = taken(of.value, x_at)
            steps.append(step(operation, "take", (of.value,), x, partial(take, places=x_at)))
        w = taken(weight, w_at)
        steps.append(step(operation, "slice", (weight,), w, partial(take, places=w_at)))
        made = Value(np.tensordot(x.array, w.array, 1), data=x.data, leaves=x.leaves | weight.leaves)
        name = operation.name if w.array.ndim > 2 or operation.name == "dot_general" else "mm"
        product = step(operation, name, (x, w), made, partial(np.tensordot, axes=1))
        steps.append(replace(product, settings={"dimension_numbers": (((1,), (0,)), ((), ()))}))
        parts.append(_Part(made, matrices.result[here][:, columns].reshape(made.array.shape)))
    known[operation.results[0]] = tuple(parts)
    return steps


def _of_columns(weight: Array, columns: Sequence[int]) -> Array:
    """Return some columns of a weight [I, ...], with the axes that it has, if they are some places along each."""
    places = np.unravel_index(columns, weight.shape[1:])
    along = [np.unique(at) for at in places]
    axes = math.prod(len(at) for at in along) == len(columns)
    found: Array = (
        weight[np.ix_(np.arange(len(weight)), *along)] if axes else weight.reshape(len(weight), -1)[:, list(columns)]
    )
    return found


def _followed(operation: Operation, known: dict[Value, tuple[_Part, ...]]) -> list[Operation] | None:
    """Return the operation on each known part of what it is given, and remember those of its results; None if it stays as it is."""
    value = next((x for x in operation.operands if x in known), None)
    found = moved(operation, value) if value is not None else None
    if value is None or found is None:
        return None
    steps: list[Operation] = []
    if role_of(operation) in (Role.SHIFT, Role.SCALE):
        known[operation.results[0]] = tuple(_on(operation, value, part, steps) for part in known[value])
        return steps
    for result, at in zip(operation.results, found, strict=True):
        back = np.full(value.array.size, -1)
        back[at] = np.arange(at.size)
        moved_parts = (replace(part, places=back[part.places]) for part in known[value])
        known[result] = tuple(_kept(operation, part, steps) for part in moved_parts if (part.places >= 0).any())
    return steps


def _on(operation: Operation, value: Value, part: _Part, steps: list[Operation]) -> _Part:
    """Return a part of the result of a sum or product, and add the operations that give it."""
    side = operation.operands.index(value)
    other = operation.operands[1 - side]
    if other.array.size > 1:
        at = np.broadcast_to(np.arange(other.array.size).reshape(other.array.shape), value.array.shape)
        at = at.ravel()[part.places]
        while at.ndim > 1 and (at == at[:1]).all():
            at = at[0]
        cut = taken(other, at)
        if other.leaves:
            steps.append(step(operation, "slice", (other,), cut, partial(take, places=at)))
        other = cut
    operands = (other, part.value) if side else (part.value, other)
    result = np.asarray(operation.again([x.array for x in operands])[0])
    made = Value(result, data=part.value.data, leaves=part.value.leaves | other.leaves)
    steps.append(replace(operation, operands=operands, results=(made,)))
    return replace(part, value=made)


def _kept(operation: Operation, part: _Part, steps: list[Operation]) -> _Part:
    """Return a part without the elements that are in no place, if the others are some places along each axis."""
    here = part.places >= 0
    along = [np.flatnonzero(here.any(tuple(j for j in range(here.ndim) if j != k))) for k in range(here.ndim)]
    if here.all() or math.prod(len(at) for at in along) != here.sum():
        return part
    chosen = np.arange(here.size).reshape(here.shape)[np.ix_(*along)]
    value = taken(part.value, chosen)
    steps.append(step(operation, "take", (part.value,), value, partial(take, places=chosen)))
    return _Part(value, part.places.ravel()[chosen])


def _joined(operation: Operation, result: Value, parts: Sequence[_Part]) -> Operation:
    """Return the operation that makes a value of its parts, with zeros where nothing is used."""

    def run(*arrays: Array) -> Array:
        whole = np.zeros(result.array.size)
        for array, part in zip(arrays, parts, strict=True):
            whole[part.places[part.places >= 0]] = array[part.places >= 0]
        return whole.reshape(result.array.shape)

    return step(operation, "join", tuple(part.value for part in parts), result, run)
