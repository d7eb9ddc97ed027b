"""Take rows of a value in front of what acts on each row: ``(x w + b)[3:]`` is ``x[3:] w + b``.

A network of causal convolutions adds up what its layers skip, for the last steps alone: one program takes these steps of each layer's data,
and another of the sum so far. A decoder may compute one step more than its loop takes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from convert.inference.derivation import Role
from convert.inference.forms.elements import are_same, elements_moved, numbered, step, take
from convert.inference.meetings.sites import role_of
from convert.programs.program import REFUSALS, Array, Operation, Program, Value, times_used

SLICES = frozenset(("slice", "narrow", "dynamic_slice"))
STEPS = SLICES | {"select"}
LAID_OUT = frozenset(("view", "reshape", "_unsafe_view", "flatten", "unflatten"))


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
    for axis, size in enumerate(value.array.shape):
        rows = np.unique(np.unravel_index(taken, value.array.shape)[axis])
        numbers = np.arange(value.array.size).reshape(value.array.shape).take(rows, axis)
        if len(rows) < size and np.array_equal(np.sort(numbers, axis=None), taken):
            break
    else:
        return None
    first = _taking(takers[0], value, rows, axis)
    order = np.argsort(numbers, axis=None)
    instead = {}
    for taker, of in zip(takers, places, strict=True):
        at = order[np.searchsorted(taken, of)]
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
    alone = keep or (operation.name in SLICES and uses[operation.operands[0]] == 1)
    found = _in_front(operation, made_by) if alone else None
    if found is None:
        yield operation
        return
    *slices, on_rows = found
    left_out.add(made_by[operation.operands[0]])
    for one in slices:
        yield from _early(one, made_by, uses, left_out, keep=keep)
    yield on_rows


def _in_front(taking: Operation, made_by: Mapping[Value, Operation]) -> list[Operation] | None:
    """Return the operations that take the rows of an operation's operands, and the operation on these; None where it does not act on each row."""
    if taking.name not in SLICES or not taking.operands[0].data or not all(x.constant for x in taking.operands[1:]):
        return None
    value, (result,) = taking.operands[0], taking.results
    before = made_by.get(value)
    if before is None or len(before.results) != 1 or before.name in SLICES:
        return None
    shapes = value.array.shape, result.array.shape
    cut = [k for k, (all_, some) in enumerate(zip(*shapes, strict=False)) if all_ != some]
    if len(shapes[0]) != len(shapes[1]) or len(cut) != 1:
        return None
    places = np.asarray(taking.again([numbered(value), *(x.array for x in taking.operands[1:])])[0]).astype(int)
    rows = np.unique(np.unravel_index(places, shapes[0])[cut[0]])
    if before.name in LAID_OUT:
        in_front = _in_front_of_layout(taking, before, places)
        return in_front if in_front and _in_front(in_front[0], made_by) else None
    for axes in _axes_of_rows(before, cut[0], value):
        steps = [None if k is None else _taking(taking, x, rows, k) for x, k in zip(before.operands, axes, strict=True)]
        operands = tuple(x if one is None else one.results[0] for x, one in zip(before.operands, steps, strict=True))
        if _gives(before, operands, result.array):
            own = [one for one in steps if one is not None and not one.operands[0].constant]
            return [*own, replace(before, operands=operands, results=(result,))]
    return None


def _in_front_of_layout(taking: Operation, layout: Operation, places: Array) -> list[Operation] | None:
    """Return the operations that take the rows of what an operation lays out in another shape, and lay these out."""
    value, (result,) = layout.operands[0], taking.results
    numbers = np.arange(value.array.size).reshape(value.array.shape)  # C order: a layout keeps it
    taken = np.sort(places, axis=None)
    for axis, size in enumerate(value.array.shape):
        rows = np.unique(np.unravel_index(taken, value.array.shape)[axis])
        if len(rows) < size and np.array_equal(np.sort(numbers.take(rows, axis), axis=None), taken):
            own = _taking(taking, value, rows, axis)
            laid_out = partial(np.reshape, shape=result.array.shape)
            return [own, step(layout, layout.name, own.results, result, laid_out)]
    return None


def _axes_of_rows(operation: Operation, axis: int, value: Value) -> Iterator[list[int | None]]:
    """Yield, for each operand, which of its axes may be that of the rows of the result; None: it has none."""
    size, rank = value.array.shape[axis], value.array.ndim
    if role_of(operation) in (Role.SHIFT, Role.SCALE) or all(
        x.array.shape in ((), value.array.shape) for x in operation.operands
    ):
        at = [axis - rank + x.array.ndim for x in operation.operands]
        yield [k if k >= 0 and x.array.shape[k] == size else None for x, k in zip(operation.operands, at, strict=True)]
        return
    if len(operation.data) == 1:
        data = operation.data[0]
        for k in [k for k, n in enumerate(data.array.shape) if n == size]:
            yield [k if x is data else None for x in operation.operands]


def _taking(like: Operation, value: Value, rows: Array, axis: int) -> Operation:
    """Return the operation that takes rows of a value."""
    elements = tuple(numbers.take(rows, axis) for numbers in value.elements)
    result = Value(value.array.take(rows, axis), value.data, value.leaves, elements)
    return step(like, "slice", (value,), result, partial(_rows, rows=rows, axis=axis))


def _rows(array: Array, rows: Array, axis: int) -> Array:
    return array.take(rows, axis)


def _gives(operation: Operation, operands: tuple[Value, ...], result: Array) -> bool:
    """Whether an operation gives an array for some operands."""
    try:
        made = operation.again([x.array for x in operands])
    except REFUSALS:
        return False
    return are_same(np.asarray(made[0]), result)
