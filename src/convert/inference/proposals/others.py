"""Proposals for a table that rows are taken from, and for parameters that data meets in any other operation."""

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


def look_up(context: Context, operation: Operation, side: int) -> Iterator[Candidate]:
    """Yield the source's tables that rows are taken from by the same indices; either may have more rows."""
    weight = operation.operands[side]
    if not weight.elements:
        return
    elements = context.lacking(weight)
    data = context.replay.value(operation.data[0])
    same = context.source.same_data(Role.LOOKUP, data, context.tolerance)
    any_fits = False
    for meeting in context.near_first(same):
        source = meeting.weight
        for numbers in source.elements:
            if numbers.ndim != weight.array.ndim or numbers.shape[1:] != weight.array.shape[1:]:
                continue
            rows = min(len(numbers), len(weight.array))
            cut = np.s_[:rows]
            if not context.free(numbers[cut], elements[0][cut]):
                continue
            places = np.arange(source.array.size).reshape(source.array.shape)
            found = context.fitted(
                [t[cut] for t in elements],
                [numbers[cut]],
                source.array[cut],
                lambda cut=cut: context.replay.value(weight)[cut],  # type: ignore[misc]
                meeting,
                places[cut],
            )
            if found is not None:
                rest = elements[0][rows:]
                if rest.size:  # rows that the source has not got
                    nothing = np.full(rest.shape, -1)
                    found += context.pieces(rest, nothing, np.zeros(rest.shape), Arithmetic.CONSTANT, None, 0.0)
                any_fits = True
                yield Candidate(found, "rows taken by the same indices", ("rows", rows))
    if not any_fits:  # a product with rows of zeros and a one, or several indices, of which another table has the first
        yield from any_leaf(context, operation, side)


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
