"""A number for each row behind the product with a parameter: ``(x / s) W`` is ``(x W) / s``.

A cosine with learned vectors divides the data by its norm before the product in one program, and what the product gives in the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from convert.inference.derivation import Role
from convert.inference.forms.elements import as_moved, before_moves, step, with_instead
from convert.inference.meetings.sites import axes_of, parameter_operands, role_of
from convert.programs.program import Array, Operation, Program, Value


@dataclass(frozen=True, eq=False)
class _Scaled:
    """The data of a product as a value whose rows are multiplied or divided by a number each.

    Attributes:
        by: the operation that does so.
        value, factor: what it is given.
        moves: what moves the elements of its result before the product.
    """

    by: Operation
    value: Value
    factor: Value
    moves: tuple[Operation, ...]


def products_of_scaled_rows(program: Program) -> int:
    """Return how many products with a parameter are given rows that are multiplied or divided by a number each."""
    made_by = program.made_by
    return sum(_scaled(operation, made_by) is not None for operation in program.operations)


def row_factors_behind(program: Program, *, keep: bool) -> Program:
    """Return the program with these numbers behind the products.

    Args:
        keep: whether the products of the scaled rows stay in the program as well.
    """
    made_by = program.made_by

    def instead(operation: Operation) -> list[Operation]:
        scaled = _scaled(operation, made_by)
        return [] if scaled is None else list(_behind(operation, scaled))

    return with_instead(program, instead, keep=keep)


def _scaled(product: Operation, made_by: Mapping[Value, Operation]) -> _Scaled | None:
    """Return the rows of a product with a parameter as scaled ones; None if they are not, or if they add up to 1, as a softmax makes them."""
    sides = parameter_operands(product)
    if role_of(product) is not Role.PRODUCT or len(product.operands) != 2 or len(sides) != 1:
        return None
    axes, data = axes_of(product, sides[0]), product.operands[1 - sides[0]]
    value, made, moves = before_moves(data, made_by)
    name = "" if made is None else made.name.removesuffix("_")
    if axes is None or made is None or name not in ("mul", "div") or len(made.data) != 2:
        return None
    summed = tuple(axes[0][1])
    if np.allclose(data.array.sum(summed), 1):
        return None
    for plain, factor in (made.operands, made.operands[::-1])[: 2 if name == "mul" else 1]:
        if plain.array.shape == value.array.shape and factor is not plain:
            array = np.broadcast_to(factor.array, value.array.shape)
            for move in moves:
                array = np.asarray(move.again([array])[0])
            if all((array == array.take([0], axis)).all() for axis in summed) and (array != 0).all():
                return _Scaled(made, plain, factor, moves)
    return None


def _behind(product: Operation, scaled: _Scaled) -> Iterator[Operation]:
    """Yield the product of the rows as they are, and what multiplies or divides its result."""
    (side,), (result,) = parameter_operands(product), product.results
    rows, weight, shape = scaled.value, product.operands[side], scaled.value.array.shape

    def spread(array: Array) -> Array:
        """Return the number of each element of the rows; it may be a whole number, or a truth value."""
        return np.array(np.broadcast_to(array, shape), np.float64)

    factor = replace(scaled.factor, array=spread(scaled.factor.array), elements=())
    yield step(product, "expand", (scaled.factor,), factor, spread)
    for move in scaled.moves:
        one, other = (as_moved(move, x) for x in (rows, factor))
        yield replace(move, operands=(rows,), results=(one,))
        yield replace(move, operands=(factor,), results=(other,))
        rows, factor = one, other
    first = _of_first_columns(product, side)

    def laid_out(array: Array) -> Array:
        """Return the number of each row as the product lays out its results."""
        return np.asarray(product.again([array, first] if side else [first, array])[0])

    numbers = replace(factor, array=laid_out(factor.array))
    yield step(product, "select", (factor,), numbers, laid_out)
    operands = (rows, weight) if side else (weight, rows)
    plain = replace(result, array=np.asarray(product.again([x.array for x in operands])[0]))
    yield replace(product, operands=operands, results=(plain,))
    run = np.multiply if scaled.by.name.startswith("mul") else np.divide
    yield step(scaled.by, scaled.by.name, (plain, numbers), result, run)


def _of_first_columns(product: Operation, side: int) -> Array:
    """Return the weight with which a product gives the first element of each row."""
    weight, axes = product.operands[side].array, axes_of(product, side)
    assert axes is not None, "the rows were found by these axes"
    first = np.zeros(weight.shape)
    first[tuple(0 if axis in axes[1][1] else slice(None) for axis in range(weight.ndim))] = 1
    return first
