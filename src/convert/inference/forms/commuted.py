"""Products in front of what mixes rows, and behind it: ``(A x) W`` is ``A (x W)``.

A graph layer applies its matrix to the nodes before it adds up the neighbours, or to the sums; a number multiplies what enters a
layer, or what it gives. The source's record has one of the two; the other one is computed here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from convert.inference.derivation import Role
from convert.inference.meetings.sites import axes_of, role_of
from convert.programs.program import Operation, Program, Value, producers_of, users_of

Array = np.ndarray[Any, np.dtype[Any]]
LAYOUTS = frozenset(
    ("transpose", "reshape", "broadcast_in_dim", "squeeze", "expand_dims", "convert_element_type", "copy", "slice")
)
LINEAR = frozenset(
    [
        *LAYOUTS,
        "dot_general",
        "reduce_sum",
        "gather",
        "scatter-add",
        "mul",
        "div",
        "neg",
        "concatenate",
        "pad",
        "cumsum",
    ]
)
MAX_DEPTH = 6
SAME = 1e-9  # relative
REFUSALS = (TypeError, ValueError, IndexError, RuntimeError)  # of an operation on operands of other sizes


@dataclass(frozen=True, eq=False)
class Commuted:
    """A product as it is in front of an operation that the source applies before it, or behind one that it applies to its result.

    Attributes:
        index: of the source's product.
        operation: the product, with other data.
        side: position of the weight.
    """

    index: int
    operation: Operation
    side: int


@dataclass(frozen=True, eq=False)
class _Product:
    index: int
    operation: Operation
    side: int
    axis: int  # of the data, that is summed over
    matrix: Array  # [I, O]


def commuted(program: Program) -> Iterator[Commuted]:
    """Yield the products that another order of linear operations would have."""
    made_by = producers_of(program.operations)
    users = users_of(program.operations)
    for product in _products(program):
        data = product.operation.operands[1 - product.side]
        for array, axis in (*_in_front(product, data, made_by), *_behind(product, data, users)):
            yield _with(product, array, axis)


def _products(program: Program) -> Iterator[_Product]:
    for index, operation in enumerate(program.operations):
        if role_of(operation) is not Role.PRODUCT or len(operation.operands) != 2 or len(operation.data) != 1:
            continue
        side = 0 if operation.operands[1].data else 1
        axes, weight = axes_of(operation, side), operation.operands[side]
        if axes is None or axes[1][0] or len(axes[0][1]) != 1 or weight.array.ndim != 2 or not weight.elements:
            continue
        (_, (axis,)), (_, (summed,)) = axes
        yield _Product(index, operation, side, axis, np.moveaxis(weight.array, summed, 0))


def _in_front(product: _Product, value: Value, made_by: dict[Value, Operation]) -> Iterator[tuple[Array, int]]:
    """Yield the data that linear operations are applied to before the product, with the axis of its features."""
    size = len(product.matrix)
    turn = np.random.default_rng(0).normal(size=(size, size))
    axis = product.axis
    for _ in range(MAX_DEPTH):
        made = made_by.get(value)
        if made is None or made.name not in LINEAR:
            return
        found = next(
            (
                (x, k)
                for x in made.data
                for k in range(x.array.ndim)
                if x.array.shape[k] == size and _commutes(made, x, k, axis, turn)
            ),
            None,
        )
        if found is None:
            return
        value, axis = found
        if made.name not in LAYOUTS:
            yield value.array, axis


def _commutes(made: Operation, x: Value, axis: int, behind: int, turn: Array) -> bool:
    """Whether features of an operand may be mixed before an operation or in its result."""
    try:
        out = _run(made, x, _times(x.array, axis, turn))
    except REFUSALS:
        return False
    return _equal(out, _times(made.results[0].array, behind, turn))


def _behind(product: _Product, data: Value, users: dict[Value, list[Operation]]) -> Iterator[tuple[Array, int]]:
    """Yield what linear operations that are applied to the product's result make of its data, with the axis of its features."""
    value = product.operation.results[0]
    order = [k for k in range(data.array.ndim) if k != product.axis]
    axis = value.array.ndim - 1 if product.side else 0
    array = np.moveaxis(data.array.transpose(*order, product.axis), -1, axis)
    for _ in range(MAX_DEPTH):
        using = users.get(value, [])
        if len(using) != 1 or using[0].name not in LINEAR or using[0].data.count(value) != 1:
            return
        (used,) = using
        try:
            array = _run(used, value, array)
        except REFUSALS:
            return
        value = used.results[0]
        axes = (k for k in range(array.ndim) if array.shape[k] == len(product.matrix))
        found = next((k for k in axes if _equal(_times(array, k, product.matrix), value.array)), None)
        if found is None:
            return
        if used.name not in LAYOUTS:
            yield array, found


def _run(operation: Operation, value: Value, array: Array) -> Array:
    """Return the first result of an operation with another array in the place of one operand."""
    operands = [array if operand is value else operand.array for operand in operation.operands]
    with np.errstate(all="ignore"):
        return np.asarray(operation.again(operands)[0])


def _times(array: Array, axis: int, matrix: Array) -> Array:
    return np.moveaxis(np.moveaxis(array, axis, -1) @ matrix, -1, axis)


def _equal(one: Array, two: Array) -> bool:
    if one.shape != two.shape or not two.size or not np.isfinite(two).all():
        return False
    return float(np.abs(one - two).max()) <= SAME * float(np.abs(two).max())


def _with(product: _Product, array: Array, axis: int) -> Commuted:
    """Return the product with other data."""
    operation, side = product.operation, product.side
    weight = operation.operands[side]
    axes = axes_of(operation, side)
    summed = axes[1][1] if axes is not None else ()
    data = Value(array, data=True)
    both = ((axis,), tuple(summed)) if side else (tuple(summed), (axis,))
    result = np.moveaxis(array, axis, -1) @ product.matrix

    def again(arrays: Sequence[Array]) -> list[Array]:
        given, by = (arrays[0], arrays[1]) if side else (arrays[1], arrays[0])
        return [np.moveaxis(given, axis, -1) @ np.moveaxis(by, summed[0], 0)]

    made = replace(
        operation,
        name="dot_general",
        operands=(data, weight) if side else (weight, data),
        results=(Value(result, data=True, leaves=operation.results[0].leaves),),
        settings={"dimension_numbers": (both, ((), ()))},
        again=again,
    )
    return Commuted(product.index, made, side)
