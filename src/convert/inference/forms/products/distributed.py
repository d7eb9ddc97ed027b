"""Products of sums as sums of products: ``(q + u) k`` is ``q k + u k``, and ``q (k + a)`` is ``q k + q a``.

Attention with relative positions adds a parameter to its queries or keys, or to the scores what the parameter gives with the other.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from convert.inference.derivation import Role
from convert.inference.forms.elements import COPIES, SPLITS, as_moved, before_moves, without_idle
from convert.inference.meetings.sites import axes_of, parameter_operands, role_of
from convert.programs.program import REFUSALS, Array, Operation, Program, Value, times_used

SUMS = ("add", "add_any", "sub")
MOST = 3  # sums in front of one product


@dataclass(frozen=True, eq=False)
class _Sum:
    """What a product is given, as a sum of data and a parameter.

    Attributes:
        side: position of the operand.
        operation: the sum.
        moves: what moves its elements before the product.
    """

    side: int
    operation: Operation
    moves: tuple[Operation, ...]


def products_of_sums(program: Program) -> Counter[int]:
    """Return the sizes over which products of two values of data sum that are given a sum with a parameter: features, or what scores weigh."""
    made_by, uses = program.made_by, times_used(program)
    first: dict[
        Value, Operation
    ] = {}  # a form may keep the product that it writes in another way, which gives the same value
    for operation in program.operations:
        first.update((x, operation) for x in operation.results if x not in first)
    products = (op for op in dict.fromkeys(first.values()) if _sum(op, made_by, uses) is not None)
    found = ((op, axes_of(op, 1)) for op in products)
    return Counter(math.prod(op.operands[1].array.shape[k] for k in axes[1][1]) if axes else 0 for op, axes in found)


def distributed(program: Program, *, keep: bool) -> Program:
    """Return the program with a product for each term of such sums.

    Args:
        keep: whether the products of the sums stay in the program as well.
    """
    made_by, uses = dict(program.made_by), times_used(program)
    operations: list[Operation] = []
    for operation in program.operations:
        steps = _steps(operation, made_by, uses, MOST)
        operations += steps or ()
        if steps is None or keep:
            operations.append(operation)
    return replace(program, operations=tuple(operations if keep else without_idle(operations, program)))


def _steps(
    product: Operation, made_by: dict[Value, Operation], uses: Counter[Value], most: int
) -> list[Operation] | None:
    """Return the products of the terms, and their sum; None where nothing is to be distributed."""
    found = _sum(product, made_by, uses) if most else None
    if found is None:
        return None
    terms = []
    for term in found.operation.operands:
        steps = list(_moved(term, found))
        value = steps[-1].results[0] if steps else term
        if term.of_parameters:
            steps += _once(product, found.side, value)
            value = steps[-1].results[0]
        operands = tuple(value if k == found.side else x for k, x in enumerate(product.operands))
        try:
            array = np.asarray(product.again([x.array for x in operands])[0])
        except REFUSALS:
            return None
        leaves = frozenset[str]().union(*(x.leaves for x in operands))
        terms.append((steps, replace(product, operands=operands, results=(Value(array, data=True, leaves=leaves),))))
    made: list[Operation] = []
    for steps, term_product in terms:
        made += steps
        for step in steps:
            made_by.update(dict.fromkeys(step.results, step))
        further = _steps(term_product, made_by, uses, most - 1)
        made += further or [term_product]
    one, two = (term_product.results[0] for _, term_product in terms)
    sign = -1.0 if found.operation.name == "sub" else 1.0
    total = replace(
        found.operation,
        name="sub" if sign < 0 else "add",
        operands=(one, two),
        results=product.results,
        settings={},
        again=lambda x: [np.asarray(x[0] + sign * x[1])],
    )
    return [*made, total]


def _sum(product: Operation, made_by: Mapping[Value, Operation], uses: Counter[Value]) -> _Sum | None:
    """Return the first operand of a product of data that is a sum with a parameter."""
    if role_of(product) is not Role.PRODUCT or len(product.data) != 2 or len(product.operands) != 2:
        return None
    for side, value in enumerate(product.operands):
        _, made, moves = before_moves(value, made_by)
        if made is not None and _adds_parameter(made, made_by, uses):
            return _Sum(side, made, moves)
    return None


def _adds_parameter(operation: Operation, made_by: Mapping[Value, Operation], uses: Counter[Value]) -> bool:
    """Whether an operation adds a parameter to data that is not the product of a layer as it is, or a part of it, whose bias it would be."""
    if operation.name not in SUMS or len(operation.operands) != 2 or operation.settings.get("alpha", 1) != 1:
        return False
    data, other = sorted(operation.operands, key=lambda x: not x.data)
    if not data.data or not other.of_parameters or not other.elements:
        return False
    if operation.name == "sub" and operation.operands[0] is not data:
        return False
    size = operation.results[0].array.size
    while uses[data] == 1 and data.array.size == size:
        made = made_by.get(data)
        if made is None:
            return False
        if role_of(made) in (Role.PRODUCT, Role.CONVOLUTION) and parameter_operands(made):
            return False
        if made.name not in COPIES | SPLITS or len(made.operands) != 1:
            break
        data = made.operands[0]
        size = data.array.size if made.name in SPLITS else size
    return True


def _moved(term: Value, found: _Sum) -> Iterator[Operation]:
    """Yield the operations that move a term to where the product takes the sum."""
    shape = found.operation.results[0].array.shape
    moves = list(found.moves)
    if term.array.shape != shape:
        spread = replace(
            found.operation,
            name="expand",
            settings={},
            again=lambda x: [np.array(np.broadcast_to(x[0], shape))],
        )
        moves.insert(0, spread)
    for move in moves:
        moved = as_moved(move, term)
        yield replace(move, operands=(term,), results=(moved,))
        term = moved


def _once(product: Operation, side: int, value: Value) -> list[Operation]:
    """Return the operation that takes one place of each axis along which a parameter is repeated, of those that the product keeps."""
    axes = axes_of(product, side)
    inside = {k for of in axes[1] for k in of} if axes is not None else set(range(value.array.ndim))
    numbers = value.elements[0]
    index = tuple(
        slice(1) if k not in inside and (numbers == numbers.take([0], k)).all() else slice(None)
        for k in range(numbers.ndim)
    )
    short = replace(value, array=value.array[index], elements=tuple(x[index] for x in value.elements))

    def again(arrays: Sequence[Array]) -> list[Array]:
        return [np.ascontiguousarray(arrays[0][index])]

    return [replace(product, name="slice", operands=(value,), results=(short,), settings={}, again=again)]
