"""Factors that the source folds into a weight, and that the target's code applies itself: ``1/sqrt(H)`` of the queries.

Where the target multiplies a value of the source by a number, and the source multiplies it by none, a parameter that the value is
made of may carry the number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from convert.inference.candidates.candidate import Candidate, Choice, Piece
from convert.inference.candidates.context import Context
from convert.inference.derivation import Role
from convert.inference.meetings.sites import role_of
from convert.programs.program import Operation, Value

Array = np.ndarray[Any, np.dtype[Any]]
CARRIERS = (Role.PRODUCT, Role.LOOKUP, Role.SCALE)


def factor_of(context: Context, operation: Operation) -> float | None:
    """Return the number that an operation of the target multiplies a value of the source by, and the source does not."""
    if (
        operation.name.removesuffix("_") not in ("mul", "div")
        or len(operation.data) != 1
        or len(operation.operands) < 2
    ):
        return None
    constants = [operand for operand in operation.operands if operand.constant]
    if len(constants) != 1 or (operation.operands[-1] is not constants[0] and operation.name.startswith("div")):
        return None
    numbers = np.unique(np.asarray(constants[0].array, np.float64))
    if len(numbers) != 1 or not np.isfinite(numbers[0]) or numbers[0] <= 0:
        return None
    factor = float(1 / numbers[0] if operation.name.startswith("div") else numbers[0])
    value = context.replay.value(operation.data[0])
    if (
        factor == 1
        or not context.source.has(value, context.tolerance)
        or context.source.scales(value, context.tolerance)
    ):
        return None
    return None if context.source.has(value * factor, context.tolerance) else factor


def carriers(
    order: Sequence[Operation], made_by: Mapping[Value, int], at: int, choices: Sequence[Choice], factor: float
) -> Iterator[list[Choice]]:
    """Yield the choices with one of the layers in front of an operation divided by a factor: its weight, and its bias."""
    behind = _ancestors(order, made_by, order[at].data[0])
    for k, choice in enumerate(choices):
        if choice.index not in behind or role_of(order[choice.index]) not in CARRIERS:
            continue
        biases = [
            j
            for j, other in enumerate(choices)
            if other.index in behind and role_of(order[other.index]) is Role.SHIFT
            and _products(order, choices, _ancestors(order, made_by, order[other.index].data[0])) == {choice.index}
        ]  # fmt: skip
        for piece in choice.candidate.pieces:
            changed = list(choices)
            changed[k] = replace(choice, candidate=_divided(choice.candidate, factor, [piece]))
            for j in biases:
                other = choices[j].candidate
                changed[j] = replace(
                    choices[j], candidate=_divided(other, factor, _beside(choice.candidate, piece, other))
                )
            yield changed


def _beside(weights: Candidate, piece: Piece, bias: Candidate) -> list[Piece]:
    """Return the pieces of a bias that are added to the rows of a piece of the weight; all of them if it has no such rows."""
    size, rows = (sum(len(p.elements) for p in candidate.pieces) for candidate in (weights, bias))
    if len(weights.pieces) == 1 or size % rows:
        return list(bias.pieces)
    return [p for p in bias.pieces if np.isin(p.elements, piece.elements // (size // rows)).all()]


def _ancestors(order: Sequence[Operation], made_by: Mapping[Value, int], value: Value) -> set[int]:
    """Return the operations that a value is computed by."""
    todo, seen = [value], set()
    while todo:
        at = made_by.get(todo.pop(), -1)
        if at >= 0 and at not in seen:
            seen.add(at)
            todo += order[at].data
    return seen


def _products(order: Sequence[Operation], choices: Sequence[Choice], behind: set[int]) -> set[int]:
    return {c.index for c in choices if c.index in behind and role_of(order[c.index]) in CARRIERS}


def _divided(candidate: Candidate, factor: float, of: Sequence[Piece]) -> Candidate:
    """Return a candidate with some of its pieces divided by a number."""

    def divided(piece: Piece) -> Piece:
        return replace(piece, values=piece.values / factor, factor=piece.factor / factor)

    pieces = tuple(divided(p) if any(p is one for one in of) else p for p in candidate.pieces)
    return replace(
        candidate,
        pieces=pieces,
        by=f"{candidate.by}; divided by a factor of the target",
        kind=("carries", *candidate.kind),
    )
