"""Whether another solution of a segment gives the same outputs: it is followed until nothing differs any more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from convert.inference.search import Search
from convert.inference.segments import LEVELS, Level, Solution
from convert.programs.program import Value

Array = np.ndarray[Any, np.dtype[Any]]
Levels = Sequence[Level]
SAME = 1e-9  # relative: two values of the target, added up in different orders


def interchangeable(search: Search) -> list[tuple[int, Solution]]:
    """Return (segment, solution) of the solutions that were not chosen and reach the outputs as well.

    The search stands at the end of its way, and does so afterwards.
    """
    last = _last_uses(search)
    found = []
    for number, segment in enumerate(search.segments):
        # What a solution and its exchange need behind them is found at the same levels.
        levels = LEVELS[: 1 + max(LEVELS.index(later.level) for later in search.segments[number:])]
        for other in segment.solutions[segment.chosen + 1 :]:
            way = _followed(search, number, other, last, levels)
            found += [(number + k, solution) for k, solution in enumerate(way or ())]
    return found


def _last_uses(search: Search) -> dict[Value, int]:
    """Return the last operation that uses each value."""
    operations = search.target.operations
    last = {operand: index for index, operation in enumerate(operations) for operand in operation.operands}
    return last | dict.fromkeys(search.target.outputs.values(), len(operations))


def _followed(
    search: Search, number: int, other: Solution, last: Mapping[Value, int], levels: Levels
) -> list[Solution] | None:
    """Return the solutions of the segments from `number` on, up to where everything is as it was; None if one is refuted."""
    chosen = [segment.solution for segment in search.segments[number:]]
    for solution in reversed(chosen):
        search.leave(solution)
    used = search.used.copy()
    try:
        return _way(search, chosen, [other], used, last, levels)
    finally:
        for solution in chosen:
            search.enter(solution)


def _way(
    search: Search,
    chosen: list[Solution],
    ways: list[Solution],
    used: Array,
    last: Mapping[Value, int],
    levels: Levels,
) -> list[Solution] | None:
    search.enter(ways[-1])
    try:
        at = ways[-1].end
        if at == len(search.target.operations) or _converged(search, chosen, at, used, last):
            return ways
        segment = search.solved(at, levels)
        for solution in segment.solutions if segment else ():
            if found := _way(search, chosen, [*ways, solution], used, last, levels):
                return found
        return None
    finally:
        search.leave(ways[-1])


def _converged(search: Search, chosen: list[Solution], at: int, used: Array, last: Mapping[Value, int]) -> bool:
    """Whether the values and parameters that are still used, and the leaves that are left, are those of the chosen way here."""
    before = [solution for solution in chosen if solution.end <= at]
    if not before or before[-1].end != at:
        return False
    now = used.copy()
    for solution in before:
        for choice in solution.choices:
            for piece in choice.candidate.pieces:
                now[piece.numbers[piece.numbers >= 0]] += 1
    if not np.array_equal(now > 0, search.used > 0):
        return False
    for solution in before:
        for value, array in solution.values.items():
            if last.get(value, -1) >= at:
                scale = np.abs(array).max(initial=0)
                if not np.allclose(search.replay.value(value), array, rtol=0, atol=SAME * scale, equal_nan=True):
                    return False
    read = {
        name for operation in search.target.operations[at:] for value in operation.operands for name in value.leaves
    }
    pieces = (
        piece for s in before for choice in s.choices for piece in choice.candidate.pieces if piece.tensor in read
    )
    return all(np.array_equal(search.replay.parameters[p.tensor][p.elements], p.values, equal_nan=True) for p in pieces)
