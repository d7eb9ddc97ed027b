"""Which elements of a value each of two programs takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from convert.core.text import in_runs, where_they_differ
from convert.programs.divergence.kinds import LAYOUT, kind_of
from convert.programs.divergence.naming.functions import MOST
from convert.programs.divergence.repair import Repair
from convert.programs.divergence.shared_values import same_numbers
from convert.programs.divergence.words import Words
from convert.programs.program import Operation, Value

Array = np.ndarray[Any, np.dtype[Any]]
Taken = tuple[Value, Array]
MOVES = (LAYOUT, "part", "pick")  # operations that compute nothing
LISTED = 6  # runs of indices that a sentence lists


def other_selection(repair: Repair, ours: Words, theirs: Words) -> str:
    """Say which indices of an axis of one value the two sides of a repair take; empty if they take none, or the same."""
    ends = [
        _taken_first(operations, alone, array)
        for operations, alone, array in (
            (repair.target, repair.operands[0], repair.got),
            (repair.source, repair.source_operands[0], repair.want),
        )
    ]
    return selection(ends[0], ends[1], ours, theirs)


def selection(mine_of: Taken, other_of: Taken, ours: Words, theirs: Words) -> str:
    """Say which indices of an axis two values, and their elements, have of one value; empty if they have none, or the same."""
    ends = (mine_of, other_of)
    roots = [taken_from(value, words.producer) for words, (value, _) in zip((ours, theirs), ends, strict=True)]
    for mine in reversed(roots[0]):
        for other in reversed(roots[1]):
            if mine.array.size != other.array.size or not same_numbers(mine.array, other.array):
                continue
            one, two = (indices(array, of.array) for (_, array), of in zip(ends, (mine, other), strict=True))
            differing = [(n, one[n], two[n]) for n in one if n in two and one[n] != two[n]]
            if len(differing) == 1:
                size, got, want = differing[0]
                taken, meant = where_they_differ(_runs(got), _runs(want), LISTED)
                return f"of {size} indices of {ours.value(mine)}, the target takes {taken}, and the JAX model {meant}"
    return ""


def _taken_first(operations: Sequence[Operation], alone: Value, array: Array) -> tuple[Value, Array]:
    """Return what operations take of a value before they compute something, and its elements; `array` where they compute nothing."""
    if not operations:
        return alone, array
    if all(kind_of(one) in MOVES for one in operations):
        return operations[-1].results[0], array  # of an operation with several results, it is one of them
    found = operations[0].results[0]
    for one in operations:
        if kind_of(one) not in MOVES:
            break
        found = one.results[0]
    return found, found.array


def taken_from(value: Value, producer: Mapping[Value, Operation]) -> list[Value]:
    """Return the larger values of which this one is a part, the nearest first."""
    found = []
    operation = producer.get(value)
    while operation is not None and kind_of(operation) in MOVES and operation.operands[0].data:
        before = operation.operands[0]
        if before.array.size > value.array.size:
            found.append(before)
        operation = producer.get(before)
    return found


def indices(part: Array, whole: Array) -> dict[int, tuple[int, ...]]:
    """Return by the length of an axis which of its indices a part has; nothing where numbers repeat, or lengths do."""
    if whole.size > MOST or part.dtype.kind != "f" or whole.dtype.kind != "f":
        return {}
    flat = whole.ravel()
    order = np.argsort(flat, kind="stable")
    if (np.diff(flat[order]) <= 0).any():
        return {}
    at = np.searchsorted(flat[order], part.ravel())
    at = order[np.minimum(at, flat.size - 1)]
    if not np.allclose(flat[at], part.ravel(), rtol=1e-12, atol=0):
        return {}
    places = np.unravel_index(at, whole.shape)
    found = {n: tuple(np.unique(x).tolist()) for n, x in zip(whole.shape, places, strict=True) if n > 1}
    return found if len(found) == sum(n > 1 for n in whole.shape) else {}


def _runs(numbers: Sequence[int]) -> list[str]:
    """Write numbers as runs: 0 to 3, 8 to 11."""
    return [str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in in_runs(numbers)]
