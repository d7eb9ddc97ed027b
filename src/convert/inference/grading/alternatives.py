"""Whether another solution of a segment gives the same outputs: it is followed until nothing differs any more."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from convert.inference.grading.differences.given import give
from convert.inference.search import Search
from convert.inference.segment.segments import LEVELS, Level, Segment, Solution
from convert.numerics.magnitude import magnitudes
from convert.programs.program import Value

Array = np.ndarray[Any, np.dtype[Any]]
Levels = Sequence[Level]
Way = Sequence[tuple[int, Solution]]  # of segments, each with its number
PAIRS = ("halves", "pairs")  # orders of the features of a layer
SAME = 1e-9  # relative: two values of the target, added up in different orders


@dataclass(frozen=True, eq=False)
class Others:
    """Solutions that were not chosen and that nothing refutes, each with the number of its segment.

    Attributes:
        same: ways after which everything is as it was: with these weights and inputs they give the same outputs.
        undecided: solutions that lead to a difference of the programs as well as the chosen ones.
    """

    same: list[Way] = field(default_factory=list)
    undecided: list[tuple[int, Solution]] = field(default_factory=list)


def others(search: Search) -> Others:
    """Return the other solutions of the way that was found, or of its stretches between two differences.

    The search stands at the end of its way, and does so afterwards.
    """
    last = _last_uses(search)
    found = Others()
    for number, segment in enumerate(search.segments):
        if not segment.exact:
            continue
        stretch = list(itertools.takewhile(lambda s: s.exact, search.segments[number:]))
        stretch = stretch[: 1 + next((k for k, s in enumerate(stretch[1:]) if s.given is not None), len(stretch))]
        # What a solution and its exchange need behind them is found at the same levels.
        levels = LEVELS[: 1 + max(LEVELS.index(later.level) for later in stretch)]
        solved = stretch[-1].solution.end == len(search.target.operations)
        rest = segment.solutions if not solved else segment.solutions[segment.chosen + 1 :]
        for other in rest:
            if other is not segment.solution and not _is_renumbered(segment.solution, other):
                way = _followed(search, number, other, stretch, last, levels)
                end = solved or way is None or way[-1].end != stretch[-1].solution.end
                numbered = [(min(number + k, number + len(stretch) - 1), s) for k, s in enumerate(way or ())]
                if end and numbered:
                    found.same.append(numbered)
                elif not end:
                    found.undecided.extend(numbered)
    return found


def _is_renumbered(chosen: Solution, other: Solution) -> bool:
    """Whether another solution has the features of layers in the order of pairs, and nothing else: no run shows how features are numbered."""
    kinds = [[choice.candidate.kind for choice in of.choices] for of in (chosen, other)]
    return kinds[0] != kinds[1] and kinds[0] == [_without_pairs(kind) for kind in kinds[1]]


def _without_pairs(kind: tuple[Any, ...]) -> tuple[Any, ...]:
    if kind[0] != "product":
        return kind
    layouts = ((order[:-1] if order[-1] in PAIRS else order, *rest) for order, *rest in kind[1])
    return ("product", tuple(layouts))


def _last_uses(search: Search) -> dict[Value, int]:
    """Return the last operation that uses each value."""
    operations = search.target.operations
    last = {operand: index for index, operation in enumerate(operations) for operand in operation.operands}
    return last | dict.fromkeys(search.target.outputs.values(), len(operations))


def _followed(
    search: Search,
    number: int,
    other: Solution,
    stretch: Sequence[Segment],
    last: Mapping[Value, int],
    levels: Levels,
) -> list[Solution] | None:
    """Return the solutions of the segments from `number` on, up to where everything is as it was; None if one is refuted."""
    behind = search.segments[number:]
    for segment in reversed(behind):
        search.leave(segment.solution)
    used = search.used.copy()
    try:
        return _way(search, [segment.solution for segment in stretch], [other], used, last, levels)
    finally:
        for segment in behind:
            if segment.given is not None:
                give(search.replay, segment.given, segment.given.array, segment.begin)
            search.enter(segment.solution)


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
        if at >= chosen[-1].end or _converged(search, chosen, at, used, last):
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
                size = magnitudes(array) if array.dtype.kind == "f" else 0
                if not np.allclose(search.replay.value(value), array, rtol=0, atol=SAME * size, equal_nan=True):
                    return False
    read = {
        name for operation in search.target.operations[at:] for value in operation.operands for name in value.leaves
    }
    pieces = (
        piece for s in before for choice in s.choices for piece in choice.candidate.pieces if piece.tensor in read
    )
    return all(np.array_equal(search.replay.parameters[p.tensor][p.elements], p.values, equal_nan=True) for p in pieces)
