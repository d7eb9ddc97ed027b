"""Take rows of a value in front of what acts on each row: ``(x w + b)[rows]`` is ``x[rows] w + b``.

A network of causal convolutions adds up what its layers skip, for the last steps alone: one program takes these steps of each layer's data,
and another of the sum so far. A decoder may compute one step more than its loop takes. A network of relative positions may run once for
each distance, of which rows are then looked up, or for each pair of positions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod

import numpy as np

from convert.inference.derivation import Role
from convert.inference.forms.elements import are_same, elements_moved, step, take
from convert.inference.meetings.sites import role_of
from convert.programs.program import REFUSALS, Array, Operation, Program, Value, times_used

SLICES = frozenset(("slice", "narrow", "dynamic_slice"))
STEPS = SLICES | {"select"}
TAKES = SLICES | {"index", "index_select", "gather"}  # one row alone, such as a class token, is no such place
LAID_OUT = frozenset(("view", "reshape", "_unsafe_view", "flatten", "unflatten"))


@dataclass(frozen=True)
class _Rows:
    """Rows of an array: indices along some of its axes, taken as one.

    Attributes:
        axes: the first one, and the one behind the last.
        indices: in C order of these axes.
    """

    axes: tuple[int, int]
    indices: Array

    def of(self, array: Array) -> Array:
        """Return these rows of an array, along one axis in place of those."""
        first, behind = self.axes
        flat = array.reshape(*array.shape[:first], -1, *array.shape[behind:])
        return flat.take(self.indices, first)

    def at(self, first: int) -> _Rows:
        """Return the same rows of an array that has these axes elsewhere."""
        return _Rows((first, first + self.axes[1] - self.axes[0]), self.indices)


def takes_rows_late(program: Program) -> bool:
    """Whether rows are taken of a value that an operation on each row gives."""
    program = _steps_together(program, keep=False)
    made_by = program.made_by
    return any(_in_front(operation, made_by) is not None for operation in program.operations)


def rows_early(program: Program, *, keep: bool) -> Program:
    """Return the program in which rows are taken in front of what acts on each row.

    Args:
        keep: whether what is computed of all rows stays in the program as well. Otherwise it stays where anything else uses it.
    """
    program = _steps_together(program, keep=keep)
    made_by, uses = program.made_by, times_used(program)
    left_out: set[Operation] = set()
    operations: list[Operation] = []
    for operation in program.operations:
        steps = list(_early(operation, made_by, uses, left_out, keep=keep))
        operations += [*steps, operation] if keep and steps[-1] is not operation else steps
    return replace(program, operations=tuple(one for one in operations if keep or one not in left_out))


def _steps_together(program: Program, *, keep: bool) -> Program:
    """Return the program in which the rows that a loop takes of a value, one or more at a time, are taken at once in front of it.

    Args:
        keep: whether the loop goes on taking them of the whole value.
    """
    users, outputs = program.users, {*program.outputs.values()}
    in_front: dict[Operation, Operation] = {}
    instead: dict[Operation, Operation] = {}
    for value, takers in users.items():
        found = None if value in outputs or not value.data else _rows_of_all(value, takers)
        if found is not None:
            rows, instead_of = found
            in_front[takers[0]] = rows
            instead |= instead_of
    if not in_front:
        return program
    operations: list[Operation] = []
    for operation in program.operations:
        operations += [in_front[operation]] if operation in in_front else []
        operations.append(operation if keep else instead.get(operation, operation))
    return replace(program, operations=tuple(operations))


def _rows_of_all(value: Value, takers: Sequence[Operation]) -> tuple[Operation, dict[Operation, Operation]] | None:
    """Return the operation that takes the rows which several operations take of a value, and these of what it gives.

    None where they take rows of several axes, or all rows.
    """
    if len(takers) < 2 or not all(x.name in STEPS and len(x.data) == 1 and len(x.results) == 1 for x in takers):
        return None
    found = [elements_moved(taker) for taker in takers]
    places = [of[0].reshape(x.results[0].array.shape) for of, x in zip(found, takers, strict=True) if of is not None]
    if len(places) < len(takers):
        return None
    taken = np.unique(np.concatenate([of.ravel() for of in places]))
    rows = _rows_at(taken, value.array.shape)
    if rows is None:
        return None
    first = _taking(takers[0], value, rows)
    instead = {}
    for taker, of in zip(takers, places, strict=True):
        at = np.searchsorted(taken, of)
        operands = (first.results[0], *taker.operands[1:])
        if _gives(taker, operands, taker.results[0].array):
            instead[taker] = replace(taker, operands=operands)
        else:
            instead[taker] = step(taker, "slice", operands[:1], taker.results[0], partial(take, places=at))
    return first, instead


def _early(
    operation: Operation,
    made_by: Mapping[Value, Operation],
    uses: Counter[Value],
    left_out: set[Operation],
    *,
    keep: bool,
) -> Iterator[Operation]:
    """Yield what takes the place of an operation: of one that takes rows, those in front of what acts on them, and this on the rows."""
    alone = keep or (operation.name in TAKES and uses[operation.operands[0]] == 1)
    found = _in_front(operation, made_by) if alone else None
    if found is None:
        yield operation
        return
    taking, on_rows = found
    left_out.add(made_by[operation.operands[0]])
    for one in taking:
        yield from _early(one, made_by, uses, left_out, keep=keep)
    yield from on_rows


def _in_front(taking: Operation, made_by: Mapping[Value, Operation]) -> tuple[list[Operation], list[Operation]] | None:
    """Return the operations that take the rows of an operation's operands, and those on these; None where it does not act on each row."""
    if taking.name not in TAKES or not taking.operands[0].data or not all(x.constant for x in taking.operands[1:]):
        return None
    value, (result,) = taking.operands[0], taking.results
    before = made_by.get(value)
    if before is None or len(before.results) != 1 or before.name in TAKES:
        return None
    moved = elements_moved(taking)
    if moved is None:
        return None
    (places,) = moved
    if before.name in LAID_OUT:
        rows = _rows_at(places, before.operands[0].array.shape)
        own = None if rows is None else _taking(taking, before.operands[0], rows)
        if own is None or _in_front(own, made_by) is None:
            return None
        return [own], [_laid_out(before, own.results[0], result)]
    rows = _rows_at(places, value.array.shape)
    if rows is None:
        return None
    made = Value(result.array.reshape(rows.of(value.array).shape), data=True, leaves=result.leaves)
    same_shape = made.array.shape == result.array.shape
    for axes in _axes_of_rows(before, rows, value):
        steps = [
            None if k is None else _taking(taking, x, rows.at(k)) for x, k in zip(before.operands, axes, strict=True)
        ]
        operands = tuple(x if one is None else one.results[0] for x, one in zip(before.operands, steps, strict=True))
        if _gives(before, operands, made.array):
            own_rows = [one for one in steps if one is not None and not one.operands[0].constant]
            on_rows = replace(before, operands=operands, results=(result if same_shape else made,))
            return own_rows, [on_rows] if same_shape else [on_rows, _laid_out(before, made, result)]
    return None


def _rows_at(places: Array, shape: tuple[int, ...]) -> _Rows | None:
    """Return which rows of an array of a shape elements are, in C order, that stand at these places; None where they are none, or it is all of them."""
    numbers, places = np.arange(prod(shape)).reshape(shape), places.ravel()
    alone = [(k, k + 1) for k in range(len(shape))]
    for axes in (*alone, *((0, behind) for behind in range(2, len(shape) + 1))):
        size, each = prod(shape[slice(*axes)]), prod(shape[axes[1] :])
        others = numbers.size // max(size, 1)
        if not others or len(places) % others:
            continue
        indices = places[: len(places) // others * each : each] // each % size
        rows = _Rows(axes, indices)
        if not np.array_equal(indices, np.arange(size)) and np.array_equal(rows.of(numbers).ravel(), places):
            return rows
    return None


def _laid_out(like: Operation, value: Value, result: Value) -> Operation:
    """Return the operation that gives a value another shape."""
    return step(like, "reshape", (value,), result, partial(np.reshape, shape=result.array.shape))


def _axes_of_rows(operation: Operation, rows: _Rows, value: Value) -> Iterator[list[int | None]]:
    """Yield, for each operand, the first of its axes that may be those of the rows of the result; None: it has none."""
    (first, behind), rank = rows.axes, value.array.ndim
    sizes = value.array.shape[first:behind]
    if role_of(operation) in (Role.SHIFT, Role.SCALE) or all(
        x.array.shape in ((), value.array.shape) for x in operation.operands
    ):
        yield [_with_sizes(x, first - rank + x.array.ndim, sizes) for x in operation.operands]
        return
    if len(operation.data) == 1:
        data = operation.data[0]
        for k in range(data.array.ndim):
            if _with_sizes(data, k, sizes) is not None:
                yield [k if x is data else None for x in operation.operands]


def _with_sizes(value: Value, first: int, sizes: tuple[int, ...]) -> int | None:
    """Return an axis of a value if it and the next ones have these sizes; otherwise None."""
    return first if first >= 0 and value.array.shape[first : first + len(sizes)] == sizes else None


def _taking(like: Operation, value: Value, rows: _Rows) -> Operation:
    """Return the operation that takes rows of a value."""
    elements = tuple(map(rows.of, value.elements))
    result = Value(rows.of(value.array), value.data, value.leaves, elements)
    return step(like, "slice", (value,), result, rows.of)


def _gives(operation: Operation, operands: tuple[Value, ...], result: Array) -> bool:
    """Whether an operation gives an array for some operands."""
    try:
        made = operation.again([x.array for x in operands])
    except REFUSALS:
        return False
    return are_same(np.asarray(made[0]), result)
