"""A number for each group behind the sum of the group: the sum of ``x / s`` is the sum of x, divided by s.

A graph layer divides the gate of each edge by the sum of the gates of its node, or what the edges of the node add up to; one program
multiplies each edge by the degrees of its two nodes, another the nodes before and behind the sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from convert.inference.forms.elements import step, with_instead
from convert.programs.program import REFUSALS, Array, Operation, Program, Value

SUMS_OF_ROWS = frozenset(("scatter-add", "scatter_add", "index_add", "reduce_sum", "sum"))
MAX_DEPTH = 3  # products and quotients in which a number stands
MAX_NUMBERS = 3  # of one sum
ROUNDING = 1e-13  # relative, of a sum
ONE = 1e-9  # how near to 1 the numbers of a softmax add up


@dataclass(frozen=True, eq=False)
class _Scaled:
    """What is added up, with a number for each group.

    Attributes:
        way: the products and quotients from the number to what is added up.
        plain, factor: the operands of the first of them; the factor is the number.
        divides: whether it divides.
    """

    way: tuple[Operation, ...]
    plain: Value
    factor: Value
    divides: bool


def sums_of_scaled_groups(program: Program) -> int:
    """Return how many sums have a number for each group in what they add up."""
    made_by = program.made_by
    return sum(_scaled(operation, made_by) is not None for operation in program.operations)


def group_factors_behind(program: Program, *, keep: bool) -> Program:
    """Return the program with these numbers behind the sums.

    Args:
        keep: whether the sums of the scaled elements stay in the program as well.
    """
    made_by = dict(program.made_by)
    return with_instead(program, lambda operation: _without_numbers(operation, made_by, MAX_NUMBERS), keep=keep)


def _without_numbers(operation: Operation, made_by: dict[Value, Operation], left: int) -> list[Operation]:
    """Return a sum with its numbers behind it; nothing where it has none."""
    scaled = _scaled(operation, made_by) if left else None
    if scaled is None:
        return []
    *before, plain, numbers, behind = _behind(operation, scaled)
    made_by.update((one.results[0], one) for one in before)
    return [*before, *(_without_numbers(plain, made_by, left - 1) or [plain]), numbers, behind]


def _added(operation: Operation) -> int | None:
    """Return which operand a sum adds up; None if it is no sum, or begins with anything but zeros."""
    name = operation.name.removesuffix("_")
    if name not in SUMS_OF_ROWS or len(operation.results) > 1:
        return None
    if len(operation.operands) == 1:
        return 0 if operation.data and operation.data[0].array.dtype.kind == "f" else None
    added = [k for k, x in enumerate(operation.operands) if k and x.data and x.array.dtype.kind == "f"]
    return added[0] if len(added) == 1 and not operation.operands[0].array.any() else None


def _total(operation: Operation, at: int, array: Array) -> Array:
    operands = [array if k == at else x.array for k, x in enumerate(operation.operands)]
    return np.asarray(operation.again(operands)[0])


def _scaled(operation: Operation, made_by: Mapping[Value, Operation]) -> _Scaled | None:
    """Return what a sum adds up as scaled by a number for each group; None if it is not, or if it is a softmax, whose numbers add up to 1."""
    at = _added(operation)
    todo: list[tuple[Value, tuple[Operation, ...]]] = [] if at is None else [(operation.operands[at], ())]
    while todo and at is not None:
        value, way = todo.pop(0)
        made = made_by.get(value)
        name = "" if made is None else made.name.removesuffix("_")
        if made is None or name not in ("mul", "div") or len(made.data) != 2 or len(way) == MAX_DEPTH:
            continue
        shape = value.array.shape
        for plain, factor in (made.operands, made.operands[::-1])[: 2 if name == "mul" else 1]:
            if factor is plain or plain.array.shape != shape:
                continue
            if _is_of_groups(operation, at, np.broadcast_to(factor.array, shape), value.array):
                return _Scaled((made, *way), plain, factor, name == "div")
            todo.append((plain, (made, *way)))
    return None


def _is_of_groups(operation: Operation, at: int, factor: Array, value: Array) -> bool:
    """Whether there is one number for all that are added up: then the mean of the squares is the square of the mean."""
    if (
        factor.dtype.kind != "f"
        or not factor.size
        or not (np.isfinite(factor).all() and factor.all())
        or (factor == factor.flat[0]).all()
    ):
        return False
    try:
        counts, sums, squares = (_total(operation, at, x) for x in (np.ones(factor.shape), factor, factor**2))
        is_softmax = (np.abs(_total(operation, at, value) - 1) < ONE).all()
    except REFUSALS:
        return False
    equal = np.abs(squares * counts - sums**2) <= ROUNDING * sums**2  # their difference is that of the numbers, squared
    return bool(counts.max() > 1 and equal.all()) and not is_softmax


def _behind(operation: Operation, scaled: _Scaled) -> Iterator[Operation]:
    """Yield the sum of the elements as they are, with what it is given, and what multiplies or divides it."""
    at, (first, *others), (result,) = _added(operation), scaled.way, operation.results
    assert at is not None, "the sum has a number for each group"
    old, now, shape = first.results[0], scaled.plain, operation.operands[at].array.shape
    for made in others:
        operands = tuple(now if x is old else x for x in made.operands)
        old = made.results[0]
        now = replace(old, array=np.asarray(made.again([x.array for x in operands])[0]))
        yield replace(made, operands=operands, results=(now,))
    plain = replace(result, array=_total(operation, at, now.array))
    yield replace(
        operation,
        operands=tuple(now if k == at else x for k, x in enumerate(operation.operands)),
        results=(plain,),
    )

    def of_groups(array: Array) -> Array:
        """Return the number of each group; 1 of one that has no elements."""
        counts = _total(operation, at, np.ones(shape))
        sums = _total(operation, at, np.array(np.broadcast_to(array, shape)))
        return np.divide(sums, counts, out=np.ones_like(sums), where=counts > 0)

    numbers = replace(scaled.factor, array=of_groups(scaled.factor.array), elements=())
    yield step(first, "select", (scaled.factor,), numbers, of_groups)
    yield step(first, first.name, (plain, numbers), result, np.divide if scaled.divides else np.multiply)
