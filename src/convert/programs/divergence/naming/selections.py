"""Which elements of a value each of two programs takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from convert.core.text import in_runs, where_they_differ
from convert.programs.divergence.kinds import LAYOUT, kind_of
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
            one, two = (
                indices(_places(end, of, words.producer), of.array.shape)
                for words, end, of in zip((ours, theirs), ends, (mine, other), strict=True)
            )
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


def indices(places: Array, shape: tuple[int, ...]) -> dict[int, tuple[int, ...]]:
    """Return by the length of an axis which of its indices the elements at these places have; nothing without places.

    A length that repeats does not tell the axis: such axes are left out where these elements have all of their indices.
    """
    found = [
        (n, tuple(np.unique(x).tolist())) for n, x in zip(shape, np.unravel_index(places, shape), strict=True) if n > 1
    ]
    lengths = Counter(n for n, _ in found)
    if not places.size or any(lengths[n] > 1 and len(which) < n for n, which in found):
        return {}
    return {n: which for n, which in found if lengths[n] == 1}


def _places(end: Taken, whole: Value, producer: Mapping[Value, Operation]) -> Array:
    """Return the places in a value of the elements that operations take of it, which compute nothing; none where an end has others."""
    value, array = end
    meant = next((x for x in producer[value].results if same_numbers(x.array, array)), None)
    if meant is None:
        return np.zeros(0, int)
    way = [meant]
    while way[-1] is not whole:
        way.append(producer[way[-1]].operands[0])
    places = np.arange(whole.array.size, dtype=np.float64).reshape(whole.array.shape)
    for made in reversed(way[:-1]):
        operation = producer[made]
        moved = operation.again([places, *(x.array for x in operation.operands[1:])])
        places = np.asarray(moved[operation.results.index(made)])
    inside = bool(((places >= 0) & (places < whole.array.size)).all())
    found = places.ravel().astype(int) if inside else np.zeros(0, int)
    return found if np.array_equal(whole.array.ravel()[found], meant.array.ravel()) else np.zeros(0, int)


def _runs(numbers: Sequence[int]) -> list[str]:
    """Write numbers as runs: 0 to 3, 8 to 11."""
    return [str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in in_runs(numbers)]
