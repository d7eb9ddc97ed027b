"""Take rows of one table at a time, where a program takes rows of several by one operation.

A table for each field of a record, a codebook for each step of a quantizer: JAX code stacks them, and takes rows by `vmap` or by a
second index; PyTorch code has a list of embeddings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import numpy as np

from convert.inference.derivation import Role
from convert.inference.forms.elements import moved_by, step
from convert.inference.meetings.sites import role_of
from convert.programs.program import Array, Operation, Program, Value

MAX_TABLES = 64
T = TypeVar("T")


@dataclass(frozen=True)
class _Layout:
    """Where the tables of a lookup are.

    Attributes:
        tables: axis of the parameter along which they lie.
        rows: axis along which rows are taken.
        features: the further axes of the parameter.
        along: axis of the result along which the tables lie.
        places: for each axis in `features`, its axis of the result.
    """

    tables: int
    rows: int
    features: tuple[int, ...]
    along: int
    places: tuple[int, ...]


def table_by_table(program: Program) -> Program:
    """Return the program with a lookup for each table, and with the table taken first where each lookup has one of a stack, as `tables[0, ids]`."""
    return each_lookup(each_lookup(program, _layout, _apart), _one_table, _taken_first)


def each_lookup(
    program: Program,
    read: Callable[[Operation, Mapping[Value, Operation]], T | None],
    apart: Callable[[Operation, T], Iterable[Operation]],
) -> Program:
    """Return the program with several operations for each lookup of which something is read.

    Args:
        read: from a lookup and the operations by their results.
    """
    made_by = program.made_by
    operations: list[Operation] = []
    for operation in program.operations:
        found = read(operation, made_by) if role_of(operation) is Role.LOOKUP else None
        operations += [operation] if found is None else apart(operation, found)
    return replace(program, operations=tuple(operations))


def _layout(operation: Operation, made_by: Mapping[Value, Operation]) -> _Layout | None:
    """Return where the tables are; None if there is one, or if the data chooses among them."""
    weight, data = operation.operands[0], operation.data
    if not weight.of_parameters or len(weight.elements) != 1 or weight.array.ndim < 2 or len(data) != 1:
        return None
    shape = weight.array.shape
    first = np.unravel_index(_positions(operation, _without_data(data[0], made_by)), shape)
    along = [_axes(at) for at in first]
    rows = [k for k, at in enumerate(first) if shape[k] > 1 and not at.any()]
    wide = [k for k in range(len(shape)) if shape[k] > 1 and k not in rows]
    if len(rows) != 1 or any(len(along[k]) != 1 for k in wide):
        return None
    chosen = _axes(np.unravel_index(_positions(operation, data[0].array), shape)[rows[0]])
    tables = [k for k in wide if along[k][0] in chosen]
    if len(tables) != 1 or not 1 < shape[tables[0]] <= MAX_TABLES:
        return None
    axis = along[tables[0]][0]
    if (
        operation.results[0].array.shape[axis] != shape[tables[0]]
        or len(np.unique(first[tables[0]])) != shape[tables[0]]
    ):
        return None
    features = tuple(k for k in wide if k not in tables)
    return _Layout(tables[0], rows[0], features, axis, tuple(along[k][0] for k in features))


def _without_data(index: Value, made_by: Mapping[Value, Operation], number: int = 0) -> Array:
    """Return an index with a number in place of what an input chooses; constants that are joined with it stay."""
    made = made_by.get(index)
    if made is None or made.name not in ("concatenate", "cat", "stack"):
        return np.full_like(index.array, number)
    parts = [np.full_like(x.array, number) if x.data else x.array for x in made.operands]
    return np.asarray(made.again(parts)[0])


def _one_table(operation: Operation, made_by: Mapping[Value, Operation]) -> tuple[int, int] | None:
    """Return the axis of the parameter along which a lookup has the same number for all inputs, and the number; None if there is none."""
    weight, data = operation.operands[0], operation.data
    if not weight.of_parameters or len(weight.elements) != 1 or weight.array.ndim < 2 or len(data) != 1:
        return None
    shape, index = weight.array.shape, data[0]
    given = (index.array, *(_without_data(index, made_by, number) for number in (0, 1)))
    at = [np.unravel_index(_positions(operation, one), shape) for one in given]
    fixed = [k for k in range(len(shape)) if shape[k] > 1 and len({n for one in at for n in one[k].ravel()}) == 1]
    return (fixed[0], int(at[0][fixed[0]].flat[0])) if len(fixed) == 1 else None


def _taken_first(operation: Operation, table: tuple[int, int]) -> Iterator[Operation]:
    """Yield the operation that takes a table out of a stack, and the lookup of its rows."""
    axis, number = table
    weight, index, result = operation.operands[0], operation.data[0], operation.results[0]
    taken = step(operation, "select", (weight,), weight, lambda x: x.take(number, axis))
    one = moved_by(taken, weight)

    def rows(one: Array, index: Array) -> Array:
        at = np.unravel_index(_positions(operation, index), weight.array.shape)
        kept = tuple(n for k, n in enumerate(at) if k != axis)
        return one[kept]

    yield replace(taken, results=(one,))
    yield step(operation, operation.name, (one, index), result, rows)


def _positions(operation: Operation, index: Array) -> Array:
    """Return which element of the parameter each element of the result is, for an index; 0 where it is none."""
    weight = operation.operands[0].array
    arrays = [index if operand.data else operand.array for operand in operation.operands]
    arrays[0] = np.arange(weight.size, dtype=weight.dtype).reshape(weight.shape)
    found: Array = np.nan_to_num(np.asarray(operation.again(arrays)[0])).astype(np.int64)
    return found


def _axes(array: Array) -> list[int]:
    """Return the axes along which an array is not constant."""
    return [axis for axis in range(array.ndim) if (array != array.take([0], axis)).any()]


def _apart(operation: Operation, layout: _Layout) -> Iterator[Operation]:
    """Yield the lookups of single tables, and the operation that joins their results."""
    weight, index, result = operation.operands[0], operation.data[0], operation.results[0]
    order = (layout.tables, layout.rows, *layout.features)
    kept = [weight.array.shape[k] for k in order]

    def table(array: Array, k: int) -> Array:
        found: Array = array.transpose(*order, *(a for a in range(array.ndim) if a not in order)).reshape(kept)[k]
        return found

    def rows(array: Array, k: int) -> Array:
        at = np.unravel_index(_positions(operation, array), weight.array.shape)[layout.rows]
        found: Array = np.take(at, k, layout.along)[_first(layout, result.array.ndim)]
        return found

    made = []
    for k in range(kept[0]):
        one = Value(table(weight.array, k), leaves=weight.leaves, elements=(table(weight.elements[0], k),))
        chosen = Value(rows(index.array, k), data=True, leaves=index.leaves)
        made.append(Value(one.array[chosen.array], data=True, leaves=result.leaves))
        yield step(operation, "slice", (weight,), one, partial(table, k=k))
        yield step(operation, "slice", (index,), chosen, partial(rows, k=k))
        yield step(operation, operation.name, (one, chosen), made[-1], lambda one, at: one[at])
    rest = [axis for axis in range(result.array.ndim) if axis not in (layout.along, *layout.places)]
    back = np.argsort([layout.along, *rest, *layout.places])
    yield step(operation, "stack", tuple(made), result, lambda *x: np.stack(x).transpose(back))


def _first(layout: _Layout, rank: int) -> tuple[int | slice, ...]:
    """Return the index that takes the first feature, of an array without the axis of the tables."""
    return tuple(0 if axis in layout.places else slice(None) for axis in range(rank) if axis != layout.along)
