"""Proposals for parameters that data meets in any other operation."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from convert.inference.candidates.candidate import Candidate
from convert.inference.candidates.context import Context
from convert.inference.derivation import Arithmetic, Role
from convert.inference.meetings.sites import Meeting
from convert.programs.program import Operation, Value

Array = np.ndarray[Any, np.dtype[Any]]
MAX_LEAVES = 24  # so many leaves of this size are tried


def of_kernels(context: Context, operation: Operation, side: int) -> Iterator[Candidate]:
    """Yield the leaves of this size that enter a kernel which nothing looks into: there they meet data that the source has not got."""
    opaque = context.source.program.opaque
    met = [meeting for meeting in context.source.meetings[Role.OTHER] if meeting.operation.name in opaque]
    if met:
        yield from any_leaf(context, operation, side, met)


def any_leaf(
    context: Context, operation: Operation, side: int, among: Sequence[Meeting] | None = None
) -> Iterator[Candidate]:
    """Yield any leaf of this size in any order of its axes; what the operation gives decides.

    Args:
        among: where the leaves meet data; None: anywhere.
    """
    target = _numbers(context, operation.operands[side])
    if target is None:
        return
    target = _once(target)
    if (target < 0).any() or len(np.unique(target)) != target.size:
        return
    seen: set[int] = set()
    if among is None:
        among = [meeting for role in Role for meeting in context.source.meetings[role]]
    for meeting in context.near_first(among):
        for numbers in meeting.weight.elements:
            numbers = _once(numbers)
            if numbers.size != target.size or numbers.min() in seen or not context.free(numbers):
                continue
            if len(np.unique(numbers)) != numbers.size or (numbers < 0).any():
                continue
            if len(seen) == MAX_LEAVES:
                return
            seen.add(numbers.min())
            axes = [axis for axis in range(numbers.ndim) if numbers.shape[axis] > 1]
            for order in itertools.permutations(axes):
                one = [axis for axis in range(numbers.ndim) if axis not in order]
                chosen = numbers.transpose(*one, *order).ravel()
                pieces = context.pieces(target, chosen, context.source.theta[chosen], Arithmetic.SAME, meeting)
                yield Candidate(pieces, "a leaf of this size; what it gives", ("leaf", order))


def _once(numbers: Array) -> Array:
    """Return numbers without their repetitions: along the batch, or as groups of a convolution."""
    while numbers.ndim > 1 and (numbers == numbers[:1]).all():
        numbers = numbers[0]
    times = numbers.size // max(len(np.unique(numbers)), 1)
    for axis, size in enumerate(numbers.shape) if times > 1 else ():
        part = numbers.take(range(size // times), axis)
        if size % times == 0 and np.array_equal(np.concatenate([part] * times, axis), numbers):
            return part
    return numbers


def _numbers(context: Context, weight: Value) -> Array | None:
    """Return the numbers of the elements of a value of parameters; where an operation mixes them, those of its only unknown parameter."""
    if weight.elements:
        return context.lacking(weight)[0]
    replay = context.replay
    unknown = [name for name in weight.leaves if np.isnan(replay.parameters[name]).any()]
    return replay.program.parameters[unknown[0]].elements[0] if len(unknown) == 1 else None
