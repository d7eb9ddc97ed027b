"""Take constants that are joined with data apart, where parameters multiply both: ``[1, x] * w`` is ``[w0, x * w1]``.

One program has a class token as a row of the matrix that multiplies its features, and puts a one in front of them; another has the token
by itself, and joins it with the products.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from convert.inference.forms.lookups import step
from convert.inference.forms.sums import MOVES
from convert.programs.program import Array, Operation, Program, Value

JOINS = {"cat": "dim", "concatenate": "dimension"}  # -> the setting that names the axis
SAME_ELEMENTS = MOVES | {"convert_element_type", "_to_copy", "clone", "contiguous", "copy"}
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


def parts_apart(program: Program) -> Program:
    """Return the program with products and sums of parameters and the parts of values in which constants are joined with data."""
    marked: dict[Value, Array] = {}  # values with joined constants -> which part each element is
    constants: dict[Value, list[float | None]] = {}  # -> what each part is; None: data
    known: dict[Value, _Parts] = {}  # products and sums
    operations: list[Operation] = []
    joins: set[Operation] = set()
    for operation in program.operations:
        steps = None
        if operation.name in JOINS:
            _mark(operation, marked, constants)
        elif operation.name in SAME_ELEMENTS and len(operation.operands) == 1 and operation.operands[0] in marked:
            (given,), (result,) = operation.operands, operation.results
            marked[result] = np.rint(np.asarray(operation.again([marked[given].astype(float)])[0])).astype(int)
            constants[result] = constants[given]
        elif operation.name in (*TIMES, *PLUS) and len(operation.operands) == 2:
            steps = _apart(operation, marked, constants, known)
        operations += steps or [operation]
        joins.update(steps[-1:] if steps else ())
    used = {value for operation in operations if operation not in joins for value in operation.operands}
    used |= {*program.outputs.values()}
    return replace(program, operations=tuple(x for x in operations if x not in joins or x.results[0] in used))


def _mark(join: Operation, marked: dict[Value, Array], constants: dict[Value, list[float | None]]) -> None:
    """Remember a value in which constants are joined with data."""
    result = join.results[0]
    of = [
        float(x.array.flat[0]) if x.constant and x.array.size and np.ptp(x.array) == 0 else None for x in join.operands
    ]
    if not result.data or all(one is None for one in of) or not all(x.data or x.constant for x in join.operands):
        return
    axis = int(join.settings.get(JOINS[join.name], 0))
    marked[result] = np.concatenate([np.full(x.array.shape, k) for k, x in enumerate(join.operands)], axis)
    constants[result] = of


def _apart(
    operation: Operation,
    marked: dict[Value, Array],
    constants: dict[Value, list[float | None]],
    known: dict[Value, _Parts],
) -> list[Operation] | None:
    """Return the operations on each part, and the one that joins their results; None where the operation stays as it is."""
    side = 0 if operation.operands[1].data else 1
    weight, data = operation.operands[side], operation.operands[1 - side]
    if not weight.of_parameters or len(weight.elements) != 1 or operation.settings.get("alpha", 1) != 1:
        return None
    rank = operation.results[0].array.ndim
    parts: _Parts | None = None
    own: list[float | None] = []  # what each part is; None: data
    if operation.name in TIMES and data in marked and set(constants[data]) <= {None, 1.0}:
        parts, own = _parts(data, marked[data], rank), constants[data]
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
    join = partial(_joined, axis=parts.axis)
    return [*steps, step(operation, "concatenate", tuple(made), operation.results[0], join)]


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
