"""Write squared distances from vectors of parameters as ``|z|^2 - 2 z E^T + |e|^2``: those of a codebook, of centres, of prototypes.

One program takes the differences of all pairs, and adds up their squares, the other has a product.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from convert.inference.forms.elements import step
from convert.inference.forms.products.contractions import SUMS, axes_kept, reshaped, summed_axes, without_repeats
from convert.programs.program import Array, Operation, Program, Value, times_used

POWERS = ("integer_pow", "pow")


@dataclass(frozen=True)
class _Distance:
    """A sum of squared differences of data and parameters.

    Attributes:
        difference, square, total: its operations.
        side: position of the parameters in the difference.
        axes: that are summed over.
        kept: axes along which the data is not repeated, and the parameters.
    """

    difference: Operation
    square: Operation
    total: Operation
    side: int
    axes: tuple[int, ...]
    kept: tuple[list[int], list[int]]


def distances(program: Program) -> list[int]:
    """Return the sizes of the parameters from which a program takes squared distances as sums of squared differences."""
    made_by = program.made_by
    found = [made for operation in program.operations if (made := _distance(operation, made_by))]
    return sorted(each.difference.operands[each.side].array.size for each in found)


def distances_as_products(program: Program, *, keep: bool) -> Program:
    """Return the program with a product in place of the differences of all pairs.

    Args:
        keep: whether the differences stay values of the program.
    """
    made_by, uses = program.made_by, times_used(program)
    operations: list[Operation] = []
    left_out: set[Operation] = set()
    for operation in program.operations:
        found = _distance(operation, made_by)
        alone = found and uses[found.square.results[0]] == 1 and uses[found.difference.results[0]] <= 2
        if found is None or not (alone or keep):
            operations.append(operation)
            continue
        operations += _as_product(found)
        left_out |= set() if keep else {found.difference, found.square}
    return replace(program, operations=tuple(x for x in operations if x not in left_out))


def _distance(total: Operation, made_by: Mapping[Value, Operation]) -> _Distance | None:
    square = made_by.get(total.operands[0]) if total.name in SUMS and total.operands else None
    if square is None or not _is_square(square):
        return None
    difference = made_by.get(square.operands[0])
    if difference is None or difference.name != "sub" or len(difference.operands) != 2 or len(difference.data) != 1:
        return None
    side = 1 if difference.operands[0].data else 0
    shape = difference.results[0].array.shape
    axes = summed_axes(total, len(shape))
    data, weight = difference.operands[1 - side], difference.operands[side]
    kept = axes_kept(data, shape, made_by), axes_kept(weight, shape, made_by)
    if not weight.of_parameters or not axes or not all(set(axes) <= set(of) for of in kept):
        return None
    return _Distance(difference, square, total, side, axes, kept)


def _is_square(operation: Operation) -> bool:
    name, operands = operation.name, operation.operands
    if name in POWERS:
        exponent = operation.settings.get("y", operation.settings.get("exponent"))
        if exponent is None and len(operands) == 2 and operands[1].constant and operands[1].array.size == 1:
            exponent = operands[1].array.item()
        return bool(exponent == 2)
    return name == "square" or (name == "mul" and len(operands) == 2 and operands[0] is operands[1])


def _as_product(found: _Distance) -> list[Operation]:
    """Return the operations that take the place of a distance; the last one gives its result."""
    total, axes = found.total, found.axes
    data, weight = (found.difference.operands[k] for k in (1 - found.side, found.side))
    shape = found.difference.results[0].array.shape
    short = [
        without_repeats(found.difference, x, len(shape), of) for x, of in zip((data, weight), found.kept, strict=True)
    ]

    def summed(array: Array) -> Array:
        return np.asarray(array.sum(axes, keepdims=True))

    squares = [_made(total, "square", x.results, np.square) for x in short]
    of_data, of_weight = (_made(total, "reduce_sum", x.results, summed) for x in squares)
    plain = [reshaped(x, tuple(shape[k] for k in of)) for x, of in zip(short, found.kept, strict=True)]
    pairs, places = _pairs(found, plain[0].results[0], plain[1].results[0])
    twice = _made(total, "mul", (pairs.results[0], Value(np.array(2.0))), np.multiply)
    once = [n if k in places else 1 for k, n in enumerate(shape)]
    placed = _made(total, "reshape", twice.results, lambda x: x.transpose(np.argsort(places)).reshape(once))
    less = _made(total, "sub", (of_data.results[0], placed.results[0]), np.subtract)
    whole = _made(total, "add", (less.results[0], of_weight.results[0]), np.add)
    (result,) = total.results
    last = step(total, "reshape", whole.results, result, lambda x: x.reshape(result.array.shape))
    return [*short, *plain, *squares, of_data, of_weight, pairs, twice, placed, less, whole, last]


def _pairs(found: _Distance, data: Value, weight: Value) -> tuple[Operation, list[int]]:
    """Return the product of data and parameters, and which axes of the differences those of its result are."""
    of_data, of_weight = found.kept
    both = [k for k in of_data if k in of_weight and k not in found.axes]
    places = [*both, *(k for of in found.kept for k in of if k not in (*both, *found.axes))]
    summed, batch = (tuple(tuple(of.index(k) for k in axes) for of in found.kept) for axes in (found.axes, both))

    def run(one: Array, two: Array) -> Array:
        return np.asarray(np.einsum(one, of_data, two, of_weight, places))

    made = _made(found.total, "dot_general", (data, weight), run)
    return replace(made, settings={"dimension_numbers": (summed, batch)}), places


def _made(like: Operation, name: str, operands: tuple[Value, ...], run: Callable[..., Array]) -> Operation:
    """Return an operation at the place of another one, with what it gives."""
    result = Value(
        run(*(x.array for x in operands)),
        data=any(x.data for x in operands),
        leaves=frozenset[str]().union(*(x.leaves for x in operands)),
    )
    return step(like, name, operands, result, run)
