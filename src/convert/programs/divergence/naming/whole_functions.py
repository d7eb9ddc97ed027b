"""Differences within one known function of a value on each side: they are one difference, that of the two functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from convert.programs.divergence.kinds import LAYOUT, NO_FUNCTION, kind_of
from convert.programs.divergence.layouts import same
from convert.programs.divergence.naming.functions import FEWER, Function, elementwise, only_through
from convert.programs.divergence.repair import Repair
from convert.programs.divergence.words import Words
from convert.programs.program import Operation, Value


def in_whole_functions(
    repairs: Sequence[Repair], ours: Words, theirs: Words, activations: Mapping[str, Function]
) -> tuple[Repair, ...]:
    """Return the repairs, the first and those within the same function as one.

    Code that writes x * sigmoid(1.702 x) for a GELU differs from it in the factor of x, and again in the sigmoid.

    Args:
        ours, theirs: the words of the target and of the source.
        activations: known functions by name.
    """
    first = repairs[0]
    if not (first.target and first.source and len(first.operands) == len(first.source_operands) == 1):
        return tuple(repairs)
    mine, meant = _whole(first.operands[0], ours, activations), _whole(first.source_operands[0], theirs, activations)
    if mine is None or meant is None or mine[0] == meant[0]:
        return tuple(repairs)
    (_, target, got), (_, source, want) = mine, meant
    within = {*target, *source}
    if not within.issuperset(first.target + first.source) or within == {*first.target, *first.source}:
        return tuple(repairs)
    if got.array.shape != want.array.shape or not same(first.given[0], first.operands[0].array):
        return tuple(repairs)
    whole = replace(first, target=target, source=source, got=got.array, want=want.array)
    return (whole, *(one for one in repairs[1:] if not within.issuperset(one.target + one.source)))


def _whole(
    given: Value, words: Words, activations: Mapping[str, Function]
) -> tuple[str, tuple[Operation, ...], Value] | None:
    """Return the last known function of a value, its operations and what it gives; None if there is none."""
    if given.array.dtype.kind != "f" or not 0 < given.array.size <= FEWER:
        return None
    of_given, found = {given}, None
    for operation in words.operations:
        before = [value for value in operation.operands if not value.constant]
        if not before or not of_given.issuperset(before):
            continue
        of_given.update(operation.results)
        result = operation.results[0]
        if result.array.dtype.kind != "f" or result.array.shape != given.array.shape:
            continue
        steps = only_through(result, given, words.producer) or set()
        if {kind_of(one) for one in steps} <= NO_FUNCTION | {LAYOUT}:
            continue
        if name := elementwise(result.array, given.array, activations):
            found = name, tuple(one for one in words.operations if one in steps), result
    return found
