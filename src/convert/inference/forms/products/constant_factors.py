"""Numbers behind the products of parameters: ``(c x) W`` and ``x (c W)`` are ``c (x W)``, of a matrix or a kernel.

One program scales the values that enter a layer, as distances from a codebook have ``(2 z) E^T``, and the other its weight, or what the
layer gives.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from convert.inference.derivation import Role
from convert.inference.forms.elements import COPIES, as_moved, step, with_instead
from convert.inference.meetings.sites import parameter_operands, role_of
from convert.programs.program import Operation, Program, Value, producers_of

BILINEAR = (Role.PRODUCT, Role.CONVOLUTION)
DIGITS = 6  # in which two factors are the same


@dataclass(frozen=True, eq=False)
class _Scaled:
    """An operand as a number times a value.

    Attributes:
        factor: the number.
        value: what it multiplies.
        moves: what moves the elements of the value behind that.
    """

    factor: float
    value: Value
    moves: tuple[Operation, ...]


def at_other_operands(source: Program, target: Program) -> frozenset[str]:
    """Return the numbers that scale as many products of both programs, at other operands."""
    one, two = (_factors(program) for program in (source, target))
    return frozenset(k for k, places in one.items() if two[k] != places and two[k].total() == places.total())


def _factors(program: Program) -> dict[str, Counter[tuple[bool, ...]]]:
    """Return by what products with parameters are scaled, and how often at which operands: those of data or of parameters."""
    made_by = program.made_by
    found: dict[str, Counter[tuple[bool, ...]]] = defaultdict(Counter)
    for operation in program.operations:
        scaled = _scaled(operation, made_by)
        if scaled:
            found[_whole(scaled)][tuple(sorted(operation.operands[side].data for side in scaled))] += 1
    return found


def _whole(scaled: dict[int, _Scaled]) -> str:
    """Return the number by which a product of such operands is scaled."""
    return f"{math.prod(of.factor for of in scaled.values()):.{DIGITS}g}"


def factors_behind(program: Program, numbers: frozenset[str], *, keep: bool) -> Program:
    """Return the program with some numbers behind the products that they scale.

    Args:
        numbers: these.
        keep: whether the products of what is scaled stay in the program as well.
    """
    made_by = dict(program.made_by)

    def instead(operation: Operation) -> list[Operation]:
        scaled = _scaled(operation, made_by)
        made = list(_behind(operation, scaled)) if scaled and _whole(scaled) in numbers else []
        made_by.update(producers_of(made))
        return made

    return with_instead(program, instead, keep=keep)


def _scaled(operation: Operation, made_by: Mapping[Value, Operation]) -> dict[int, _Scaled]:
    """Return the operands of a product with parameters that are scaled by a number, by position."""
    if role_of(operation) not in BILINEAR or not parameter_operands(operation) or len(operation.operands) != 2:
        return {}
    return {k: scaled for k, x in enumerate(operation.operands) if (scaled := _as_scaled(x, made_by))}


def _as_scaled(value: Value, made_by: Mapping[Value, Operation]) -> _Scaled | None:
    """Return a value as a number times another one; None if it is not multiplied by one."""
    factor, moves, found = 1.0, list[Operation](), None
    while (made := made_by.get(value)) is not None:
        times = _number(made)
        if times is not None:
            number, value = times
            factor *= number
            found = _Scaled(factor, value, tuple(moves))
        elif made.name in COPIES and len(made.operands) == 1:
            moves.insert(0, made)
            value = made.operands[0]
        else:
            break
    return found


def _number(operation: Operation) -> tuple[float, Value] | None:
    """Return the number that an operation multiplies all elements of a value by, and the value."""
    name = operation.name.removesuffix("_")
    if name not in ("mul", "div") or len(operation.operands) != 2 or operation.settings.get("rounding_mode"):
        return None
    value, other = sorted(operation.operands, key=lambda x: x.constant)
    if value.constant or not other.constant or (name == "div" and operation.operands[1] is not other):
        return None
    numbers = np.unique(np.asarray(other.array, np.float64))
    same_shape = operation.results[0].array.shape == value.array.shape
    if len(numbers) != 1 or not np.isfinite(numbers[0]) or numbers[0] == 0 or not same_shape:
        return None
    number = float(numbers[0])
    return 1 / number if name == "div" else number, value


def _behind(product: Operation, scaled: dict[int, _Scaled]) -> Iterator[Operation]:
    """Yield the product of what is not scaled, and its multiplication by the numbers."""
    operands, factor = list(product.operands), 1.0
    for side, of in scaled.items():
        value = of.value
        for move in of.moves:
            moved = as_moved(move, value)
            yield replace(move, operands=(value,), results=(moved,))
            value = moved
        operands[side] = value
        factor *= of.factor
    (result,) = product.results
    plain = replace(result, array=result.array / factor)
    yield replace(product, operands=tuple(operands), results=(plain,))
    yield step(product, "mul", (plain, Value(np.array(factor))), result, np.multiply)
