"""Take constants that are joined with data apart, where parameters multiply both: ``[1, x] * w`` is ``[w0, x * w1]``, and ``[x, t] W``
is ``x V + t u``, where u is the last row of W.

One program has a class token as a row of the matrix that multiplies its features, and puts a one in front of them; another has the token
by itself, and joins it with the products. One neural ODE has the time as one more feature; another adds the time times a parameter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from convert.inference.derivation import Role
from convert.inference.forms.elements import JOINS, LAYOUTS, step
from convert.inference.meetings.sites import axes_of, role_of
from convert.programs.program import Array, Operation, Program, Value

SAME_ELEMENTS = LAYOUTS | {"convert_element_type", "_to_copy", "clone", "contiguous", "copy"}
TIMES, PLUS = ("mul",), ("add", "add_any")


@dataclass(frozen=True, eq=False)
class _Parts:
    """What a value is made of, one part after the other along an axis.

    Attributes:
        axis: the axis.
        bounds: where each part ends.
        values: the parts.
    """

    axis: int
    bounds: tuple[int, ...]
    values: tuple[Value, ...]

    def cut(self, array: Array, part: int, rank: int) -> Array:
        """Return what meets a part, of an array that is broadcast to a value of this rank."""
        axis = self.axis - (rank - array.ndim)
        if axis < 0 or array.shape[axis] != self.bounds[-1]:
            return array
        start = self.bounds[part - 1] if part else 0
        return np.take(array, np.arange(start, self.bounds[part]), axis)


@dataclass(frozen=True, eq=False)
class _Marks:
    """A value in which constants are joined with data.

    Attributes:
        part: which part each element is.
        constants: what each part is; None: data.
    """

    part: Array
    constants: list[float | None]

    def columns(self, axis: int) -> list[float | None]:
        """Return what each place along an axis is; None for all where a place is several parts."""
        line = np.moveaxis(self.part, axis, -1).reshape(-1, self.part.shape[axis])
        if not len(line) or (line != line[0]).any():
            return [None] * self.part.shape[axis]
        return [self.constants[k] for k in line[0]]


@dataclass(frozen=True, eq=False)
class _Columns:
    """A product of data that has columns of constants.

    Attributes:
        side: position of the weight.
        axis: of the data, that is summed over.
        summed: axis of the weight.
        constants: what each column is; None: data.
    """

    side: int
    axis: int
    summed: int
    constants: list[float | None]


def products_of_constant_columns(program: Program) -> int:
    """Return how many products are given columns of constants beside those of data."""
    marks = _marks(program)
    return sum(_columns(operation, marks) is not None for operation in program.operations)


def columns_apart(program: Program, *, keep: bool) -> Program:
    """Return the program with products of the columns of data alone, to which the rows are added that constants multiply.

    Args:
        keep: whether the products of all columns stay in the program as well.
    """
    marks = _marks(program)
    operations: list[Operation] = []
    for operation in program.operations:
        columns = _columns(operation, marks)
        operations += [] if columns is None else _with_rows_added(operation, columns)
        if columns is None or keep:
            operations.append(operation)
    return replace(program, operations=tuple(operations))


def _columns(operation: Operation, marks: dict[Value, _Marks]) -> _Columns | None:
    """Return the columns of constants in what a product is given; None if it has none, or only such."""
    if role_of(operation) is not Role.PRODUCT or len(operation.operands) != 2 or len(operation.data) != 1:
        return None
    side = 1 if operation.operands[0].data else 0
    weight, data = operation.operands[side], operation.operands[1 - side]
    axes = axes_of(operation, side)
    if data not in marks or not weight.of_parameters or len(weight.elements) != 1 or axes is None:
        return None
    (x_batch, x_sum), (_, w_sum) = axes
    if x_batch or len(x_sum) != 1:
        return None
    constants = marks[data].columns(x_sum[0])
    if {type(x) for x in constants} != {type(None), float} or constants.count(0.0) > 1:
        return None  # more zeros than one are a state that a recurrent layer starts from
    return _Columns(side, x_sum[0], w_sum[0], constants)


def _with_rows_added(product: Operation, of: _Columns) -> list[Operation]:
    weight, data = product.operands[of.side], product.operands[1 - of.side]
    of_data = [k for k, x in enumerate(of.constants) if x is None]
    take = partial(np.take, indices=of_data)
    x = Value(take(data.array, axis=of.axis), data=True, leaves=data.leaves)
    rows = _cut(weight, partial(take, axis=of.summed))
    operands = (x, rows) if of.side else (rows, x)
    axes = (of.axis, of.summed) if of.side else (of.summed, of.axis)
    times = partial(np.tensordot, axes=axes)
    total = Value(times(*(v.array for v in operands)), data=True, leaves=product.results[0].leaves)
    numbers = (((axes[0],), (axes[1],)), ((), ()))
    steps = [
        step(product, "slice", (data,), x, partial(take, axis=of.axis)),
        step(product, "slice", (weight,), rows, partial(take, axis=of.summed)),
        replace(step(product, "dot_general", operands, total, times), settings={"dimension_numbers": numbers}),
    ]
    ones = 0 if of.side else data.array.ndim - 1  # axes behind those of the weight
    for column, constant in enumerate(of.constants):
        if constant is None:
            continue
        row = partial(_row, place=column, axis=of.summed, ones=ones)
        vector, number = _cut(weight, row), Value(np.asarray(constant))
        several = Value(constant * vector.array, leaves=vector.leaves, elements=vector.elements)
        added = Value(total.array + several.array, data=True, leaves=total.leaves)
        steps += [
            step(product, "slice", (weight,), vector, row),
            step(product, "mul", (vector, number), several, np.multiply),
            step(product, "add", (total, several), added, np.add),
        ]
        total = added
    return [*steps[:-1], replace(steps[-1], results=product.results)]


def _row(array: Array, place: int, axis: int, ones: int) -> Array:
    row: Array = np.take(array, place, axis)
    return row.reshape(*row.shape, *(1,) * ones)


def _marks(program: Program) -> dict[Value, _Marks]:
    """Return the values in which constants are joined with data."""
    marks: dict[Value, _Marks] = {}
    for operation in program.operations:
        if operation.name in JOINS:
            found = _joined_with_constants(operation)
            if found is not None:
                marks[operation.results[0]] = found
        elif operation.name in SAME_ELEMENTS and len(operation.operands) == 1 and operation.operands[0] in marks:
            given = marks[operation.operands[0]]
            moved = np.rint(np.asarray(operation.again([given.part.astype(float)])[0])).astype(int)
            marks[operation.results[0]] = replace(given, part=moved)
    return marks


def parts_apart(program: Program) -> Program:
    """Return the program with products and sums of parameters and the parts of values in which constants are joined with data."""
    marks = _marks(program)
    known: dict[Value, _Parts] = {}  # products and sums
    operations: list[Operation] = []
    joins: set[Operation] = set()
    for operation in program.operations:
        steps = None
        if operation.name in (*TIMES, *PLUS) and len(operation.operands) == 2:
            steps = _apart(operation, marks, known)
        operations += steps or [operation]
        joins.update(steps[-1:] if steps else ())
    used = {value for operation in operations if operation not in joins for value in operation.operands}
    used |= {*program.outputs.values()}
    return replace(program, operations=tuple(x for x in operations if x not in joins or x.results[0] in used))


def _joined_with_constants(join: Operation) -> _Marks | None:
    """Return which parts of a value are which constants; None where no constant is joined with data."""
    of = [_one_number(x) for x in join.operands]
    if not join.results[0].data or all(one is None for one in of):
        return None
    if not all(x.data or x.constant for x in join.operands):
        return None
    axis = int(join.settings.get(JOINS[join.name], 0))
    return _Marks(np.concatenate([np.full(x.array.shape, k) for k, x in enumerate(join.operands)], axis), of)


def _one_number(value: Value) -> float | None:
    """Return the number that a constant has everywhere; None if it has others, or if it is infinite, as what a pooling layer is padded with."""
    array = value.array
    if not value.constant or not array.size or not np.isfinite(array.flat[0]) or (array != array.flat[0]).any():
        return None
    return float(array.flat[0])


def _apart(operation: Operation, marks: dict[Value, _Marks], known: dict[Value, _Parts]) -> list[Operation] | None:
    """Return the operations on each part, and the one that joins their results; None where the operation stays as it is."""
    side = 0 if operation.operands[1].data else 1
    weight, data = operation.operands[side], operation.operands[1 - side]
    if not weight.of_parameters or len(weight.elements) != 1 or operation.settings.get("alpha", 1) != 1:
        return None
    rank = operation.results[0].array.ndim
    parts: _Parts | None = None
    own: list[float | None] = []  # what each part is; None: data
    if operation.name in TIMES and data in marks and set(marks[data].constants) <= {None, 1.0}:
        parts, own = _parts(data, marks[data].part, rank), marks[data].constants
    elif operation.name in PLUS and data in known:
        parts = known[data]
        own = [None if part.data else 0.0 for part in parts.values]
    if parts is None:
        return None
    steps: list[Operation] = []
    made: list[Value] = []
    for k, (part, constant) in enumerate(zip(parts.values, own, strict=True)):
        cut = partial(parts.cut, part=k, rank=rank)
        meets = _cut(weight, cut)
        if constant == 0 and (meets.array.any() or (meets.elements[0] >= 0).any()):
            return None  # a sum of two parameters, which no leaf is
        if constant == 0:
            made.append(part)
            continue
        if meets is not weight:
            steps.append(step(operation, "slice", (weight,), meets, cut))
        if constant == 1:
            shape = np.broadcast_shapes(part.array.shape, meets.array.shape)
            spread = partial(np.broadcast_to, shape=shape)
            made.append(Value(spread(meets.array), leaves=meets.leaves, elements=(spread(meets.elements[0]),)))
            steps.append(step(operation, "expand", (meets,), made[-1], spread))
            continue
        if operation.name in TIMES:
            steps.append(step(operation, "slice", (data,), part, cut))
        operands = (part, meets) if side else (meets, part)
        result = np.asarray(operation.again([x.array for x in operands])[0])
        made.append(Value(result, data=True, leaves=part.leaves | meets.leaves))
        steps.append(replace(operation, operands=operands, results=(made[-1],)))
    known[operation.results[0]] = replace(parts, values=tuple(made))
    join = step(operation, "concatenate", tuple(made), operation.results[0], partial(_joined, axis=parts.axis))
    return [*steps, replace(join, settings={JOINS["concatenate"]: parts.axis})]


def _parts(value: Value, marks: Array, rank: int) -> _Parts | None:
    """Return the parts of a value; None where they do not lie one after the other along an axis."""
    along = [axis for axis in range(marks.ndim) if (np.diff(marks, axis=axis) != 0).any()]
    if len(along) != 1 or marks.ndim != rank:
        return None
    line = np.moveaxis(marks, along[0], 0).reshape(marks.shape[along[0]], -1)[:, 0]
    if (np.diff(line) < 0).any():
        return None
    bounds = (*tuple(int(k) for k in np.flatnonzero(np.diff(line)) + 1), len(line))
    if len(bounds) != line.max() + 1:
        return None
    whole = _Parts(along[0], bounds, ())
    values = (Value(whole.cut(value.array, k, rank), data=True, leaves=value.leaves) for k in range(len(bounds)))
    return replace(whole, values=tuple(values))


def _cut(weight: Value, cut: Callable[[Array], Array]) -> Value:
    array, elements = cut(weight.array), cut(weight.elements[0])
    return weight if array is weight.array else Value(array, leaves=weight.leaves, elements=(elements,))


def _joined(*arrays: Array, axis: int) -> Array:
    return np.concatenate(arrays, axis)
