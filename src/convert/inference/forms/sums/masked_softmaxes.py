"""Hide scores in front of a softmax where its weights are masked behind it, and divided by what is left of their sum.

``w m / sum(w m)`` with ``w = softmax(s)`` or ``w = exp(s)``, and a mask ``m`` of zeros and ones, is the softmax of ``s`` with ``-inf`` where
``m`` is zero. Then the scores that are masked are seen in no output, as in a program that hides them first: of padding, each program
may compute others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from convert.inference.forms.elements import before_moves, step, without_idle
from convert.programs.program import Array, Operation, Program, Value

SUMS = frozenset(("sum", "reduce_sum"))
MASKS = frozenset(("mul", "where", "select_n", "masked_fill"))
AS_IT_IS = frozenset(("_to_copy", "convert_element_type", "clone", "contiguous", "copy", "detach"))


def scores_masked_first(program: Program) -> Program:
    """Return the program in which no softmax is masked and divided by its sum again."""
    made_by = program.made_by
    made = [_masked_first(operation, made_by) for operation in program.operations]
    if not any(made):
        return program
    operations = [each for new, old in zip(made, program.operations, strict=True) for each in new or [old]]
    return replace(program, operations=tuple(without_idle(operations, program)))


def _masked_first(operation: Operation, made_by: Mapping[Value, Operation]) -> list[Operation]:
    """Return the mask of the scores and their softmax; nothing for an operation that divides no masked weights by their sum."""
    if operation.name != "div" or len(operation.operands) != 2:
        return []
    masked = operation.operands[0]
    axis, mask = _summed_axis(operation, made_by), made_by.get(masked)
    if axis is None or mask is None or mask.name not in MASKS:
        return []
    for k, weights in enumerate(mask.operands):
        scores = _scores(weights, axis, made_by) if weights.leaves else None
        others = [x for j, x in enumerate(mask.operands) if j != k]
        if scores is not None and scores.array.shape == masked.array.shape and not any(x.leaves for x in others):
            return _softmax_of_masked(operation, scores, kept_by(mask, k), axis)
    return []


def kept_by(mask: Operation, k: int) -> Operation | None:
    """Return the operation that says which elements of its operand `k` a mask keeps; None if it is no mask."""
    others = tuple(x for j, x in enumerate(mask.operands) if j != k)
    ones = np.ones(mask.operands[k].array.shape)

    def kept(*arrays: Array) -> Array:
        return np.asarray(mask.again([*arrays[:k], ones, *arrays[k:]])[0])

    found = kept(*(x.array for x in others))
    if not np.isin(found, (0, 1)).all():
        return None
    return step(mask, "ne", others, Value(found != 0, any(x.data for x in others)), lambda *x: kept(*x) != 0)


def _softmax_of_masked(like: Operation, scores: Value, seen: Operation | None, axis: int) -> list[Operation]:
    """Return the operations that hide scores, and give the result of another operation as their softmax."""
    if seen is None:
        return []
    (of,) = seen.results
    shown = Value(np.where(of.array, scores.array, -np.inf), True, scores.leaves)
    softmax = step(like, "_softmax", (shown,), like.results[0], lambda x: _softmax(x, axis))
    return [
        seen,
        step(like, "where", (of, scores, Value(np.array(-np.inf))), shown, np.where),
        replace(softmax, settings={"dim": axis, "half_to_float": False}),
    ]


def _softmax(scores: Array, axis: int) -> Array:
    exponentials = np.exp(scores - scores.max(axis, keepdims=True))
    quotients: Array = exponentials / exponentials.sum(axis, keepdims=True)
    return quotients


def _summed_axis(quotient: Operation, made_by: Mapping[Value, Operation]) -> int | None:
    """Return the axis of a value whose sum is what it is divided by; None if it is divided by another number."""
    value, divisor = quotient.operands
    shape = value.array.shape
    _, made, _ = before_moves(divisor, made_by)
    if made is None or made.name not in SUMS or before_moves(made.operands[0], made_by)[0] is not value:
        return None
    if quotient.results[0].array.shape != shape:
        return None
    sums = ((axis, value.array.sum(axis, keepdims=True)) for axis in range(len(shape)))
    return next((axis for axis, total in sums if _same(divisor.array, total, shape)), None)


def _scores(weights: Value, axis: int, made_by: Mapping[Value, Operation]) -> Value | None:
    """Return what weights are the softmax of along an axis, or the exponentials; None if they are something else."""
    _, made, _ = before_moves(weights, made_by, AS_IT_IS)
    if made is not None and made.name == "div" and _summed_axis(made, made_by) == axis:
        made = made_by.get(made.operands[0])
    if made is None:
        return None
    (scores, *_) = made.operands
    if made.name == "_softmax":
        return scores if made.settings.get("dim", 0) % scores.array.ndim == axis else None
    if made.name != "exp":
        return None
    before = made_by.get(scores)
    if before is not None and before.name == "sub":  # of the largest score
        value, number = before.operands
        spread = np.broadcast_to(number.array, scores.array.shape)
        if value.array.shape == scores.array.shape and (spread == spread.take([0], axis)).all():
            return value
    return scores


def _same(array: Array, other: Array, shape: tuple[int, ...]) -> bool:
    """Whether two arrays are equal when they are repeated to a shape."""
    one, two = np.broadcast_to(array, shape), np.broadcast_to(other, shape)
    return bool(np.allclose(one, two, rtol=1e-12, atol=0))
