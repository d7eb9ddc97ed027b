"""Products of rows with the matrix of a stack that is chosen for each row, as one product for each matrix.

A mixture of experts sorts its tokens by expert and multiplies them group by group (`jax.lax.ragged_dot`), or it takes the matrices of
the experts that each token chose and multiplies each token by its own. Other code takes the tokens of one expert at a time, or
multiplies all tokens by all matrices.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from convert.inference.derivation import Role
from convert.inference.forms.elements import before_moves, elements_looked_up, step, take, taken
from convert.inference.meetings.sites import axes_of, role_of
from convert.programs.program import Array, Operation, Program, Value

GROUPED = "ragged_dot_general"
PLAIN = (((1,), (0,)), ((), ()))


@dataclass(frozen=True, eq=False)
class _Chosen:
    """The rows that one matrix multiplies.

    Attributes:
        data: that has the rows; weight: that has the matrix.
        rows: elements of the data, [row, summed].
        matrix: elements of the weight, [summed, column].
    """

    data: Value
    weight: Value
    rows: Array
    matrix: Array


def matrix_by_matrix(program: Program) -> Program:
    """Return the program with further products: of the rows for which a matrix is chosen, with that matrix alone."""
    made_by = program.made_by
    operations: list[Operation] = []
    for operation in program.operations:
        for chosen in (*_of_groups(operation), *_of_lookups(operation, made_by)):
            operations += _product(operation, chosen)
        operations.append(operation)
    return replace(program, operations=tuple(operations))


def _of_groups(operation: Operation) -> Iterator[_Chosen]:
    """Yield what each matrix multiplies, of rows that stand in groups."""
    numbers = operation.settings.get("ragged_dot_dimension_numbers")
    if operation.name != GROUPED or numbers is None:
        return
    data, weight, sizes = operation.operands
    known = (numbers.dot_dimension_numbers, *numbers.lhs_ragged_dimensions, *numbers.rhs_group_dimensions)
    if known != ((((1,), (1,)), ((), ())), 0, 0) or not (data.data and weight.of_parameters):
        return
    rows, matrices = (np.arange(x.array.size).reshape(x.array.shape) for x in (data, weight))
    ends = np.cumsum(sizes.array.astype(int))
    for k, end in enumerate(ends):
        begin = ends[k - 1] if k else 0
        if end > begin:
            yield _Chosen(data, weight, rows[begin:end], matrices[k])


def _of_lookups(operation: Operation, made_by: Mapping[Value, Operation]) -> Iterator[_Chosen]:
    """Yield what each matrix multiplies, where a lookup takes a matrix for each row."""
    if role_of(operation) is not Role.PRODUCT or len(operation.data) != 2:
        return
    for side in (0, 1):
        found = _looked_up(operation.operands[side], made_by)
        if found is not None:
            yield from _of_lookup(operation, side, *found)


def _looked_up(value: Value, made_by: Mapping[Value, Operation]) -> tuple[Value, Array] | None:
    """Return a stack of matrices, and which element of it each element of a value is that a lookup takes of it."""
    _, made, moves = before_moves(value, made_by)
    if made is None or role_of(made) is not Role.LOOKUP:
        return None
    weight = made.operands[0]
    if not weight.of_parameters or weight.array.ndim < 3 or len(made.data) != 1:
        return None
    places = elements_looked_up(made, moves)
    return None if places is None else (weight, places)


def _of_lookup(operation: Operation, side: int, weight: Value, places: Array) -> list[_Chosen]:
    """Return what each matrix multiplies; nothing where a row meets parts of several.

    Args:
        side: position of the matrices.
        weight: the stack.
        places: which element of it each element of the matrices is.
    """
    axes = axes_of(operation, side)
    data = operation.operands[1 - side]
    if axes is None:
        return []
    (batch, summed), (batch_of, summed_of) = axes
    own = [axis for axis in range(data.array.ndim) if axis not in (*batch, *summed)]
    free = [axis for axis in range(places.ndim) if axis not in (*batch_of, *summed_of)]
    begin, middle = len(batch), len(summed)
    # In both: the batch, then what is summed, then what is not. Along an axis of the matrices, one may follow the other.
    places = places.transpose(*batch_of, *summed_of, *free)
    count = weight.array[0].size
    widths = [_width(places // count, axis) for axis in range(begin, places.ndim)]
    outer = [begin + 2 * k for k in range(len(widths))]
    inner = [axis + 1 for axis in outer]
    shared = [*range(begin), *outer[:middle]]
    matrices = _in_order(_split(places, begin, widths), shared, outer[middle:], inner[:middle], inner[middle:])
    numbers = np.arange(data.array.size).reshape(data.array.shape).transpose(*batch, *summed, *own)
    split = _split(numbers, begin, widths[:middle])
    rows = _in_order(split, shared, range(begin + 2 * middle, split.ndim), inner[:middle])
    of = matrices[..., 0, 0] // count
    found = []
    for k in np.unique(of):
        one, two = np.nonzero(of == k)
        matrix = matrices[one[0], two[0]]
        if matrix.size != count or (matrices[one, two] != matrix).any():
            return []
        found.append(_Chosen(data, weight, rows[one].reshape(-1, rows.shape[-1]), matrix))
    return found


def _width(array: Array, axis: int) -> int:
    """Return after how many steps along an axis an array changes; all of them where it does not."""
    along = np.moveaxis(array, axis, 0).reshape(array.shape[axis], -1)
    changes = (along != along[0]).any(1)
    width = int(changes.argmax()) or len(along)
    return width if len(along) % width == 0 else len(along)


def _split(array: Array, begin: int, widths: Sequence[int]) -> Array:
    """Return an array with two axes in place of each from one on: which part of it, and where in that."""
    shape = list(array.shape)
    parts = [n for size, width in zip(shape[begin:], widths, strict=False) for n in (size // width, width)]
    return array.reshape([*shape[:begin], *parts, *shape[begin + len(widths) :]])


def _in_order(array: Array, *axes: Sequence[int]) -> Array:
    """Return an array with groups of its axes in this order, each as one axis."""
    order = [axis for group in axes for axis in group]
    return array.transpose(order).reshape([math.prod(array.shape[axis] for axis in group) for group in axes])


def _product(like: Operation, chosen: _Chosen) -> list[Operation]:
    rows, matrix = taken(chosen.data, chosen.rows), taken(chosen.weight, chosen.matrix)
    made = Value(rows.array @ matrix.array, data=True, leaves=rows.leaves | matrix.leaves)
    return [
        step(like, "slice", (chosen.data,), rows, partial(take, places=chosen.rows)),
        step(like, "slice", (chosen.weight,), matrix, partial(take, places=chosen.matrix)),
        replace(step(like, "dot_general", (rows, matrix), made, np.matmul), settings={"dimension_numbers": PLAIN}),
    ]
