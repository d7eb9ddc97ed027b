"""Continue the search behind a difference: a value of the source replaces the target's there, so that the parameters that follow can be found.

What is found completes the target's weights, and then both programs are compared operation by operation.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from convert.inference.derivation import Role
from convert.inference.grading.differences.given import arrays_like, give, is_same, values_for
from convert.inference.meetings.sites import parameter_operands, role_of
from convert.inference.search import RETURNS, Search
from convert.inference.segment.segments import LEVELS, Given, Segment, Solution
from convert.inference.segment.walk import WITHOUT_PROGRESS
from convert.programs.fingerprint import EXACT, size_of

Array = np.ndarray[Any, np.dtype[Any]]
_Merit = tuple[int, int, int, int]  # as `_merit` counts
PATIENCE = 150  # candidates after the deepest operation was reached
TRIED = 700  # candidates in all, and for each tensor
EACH = 20


def resume(search: Search) -> None:
    """Go on from the deepest segment to the outputs, as far as values of the source's help.

    From a value that was given, the search goes on as that of programs that do not differ, up to the next difference.
    """
    left: set[int] = set()
    search.patience, search.returns = PATIENCE, 0
    most = search.tried + TRIED + EACH * len(search.target.parameters)
    while search.tried < most:
        last = search.segments[-1] if search.segments else None
        if last is not None and last.begin not in left and _has_ones(search, last.solution):
            left.add(last.begin)  # a norm that differs has the source's values without its scale
            search.leave(search.segments.pop().solution)
        at = search.segments[-1].solution.end if search.segments else 0
        if at == len(search.target.operations):
            break
        search.skipped.add(search.code(at))
        segment = _step(search, at)
        if segment is None:
            break
        search.segments.append(segment)
        search.enter(segment.solution)
        if search.solve():
            break
    search.skipped.clear()
    search.patience, search.returns = WITHOUT_PROGRESS, RETURNS


def _has_ones(search: Search, solution: Solution) -> bool:
    """Whether a solution takes a scale for ones."""
    operations = search.target.operations
    return any(c.candidate.constant and role_of(operations[c.index]) is Role.SCALE for c in solution.choices)


def _step(search: Search, at: int) -> Segment | None:
    """Return the best way on from an operation at which the search ended."""
    operation = search.target.operations[at]
    enters = bool(parameter_operands(operation))
    known = not enters or search.source.has(search.replay.value(operation.data[0]), search.context.tolerance)
    found = list(_partial(search, at, None))
    deepest = search.to_the_failure(at)
    most = max((len(s.solution.choices) for _, s in found), default=0)
    if deepest is not None and len(deepest.choices) > most:
        found.append((_merit(search, deepest), Segment(at, [deepest], LEVELS[0], 0, {}, exact=False)))
    if enters and not (known and any(len(s.solution.choices) > _constants(s.solution) for _, s in found)):
        found += _with_values(search, at)
    if not found:
        return None
    _, best = max(found, key=lambda way: way[0])
    if best.given is not None:
        give(search.replay, best.given, best.given.array, at)
        search.mark(best.given.value, best.given.array)
    if not best.exact:
        best.solutions += [s.solution for _, s in found if s is not best and not s.exact and s.given is best.given]
    return best


def _partial(search: Search, at: int, given: Given | None) -> Iterator[tuple[_Merit, Segment]]:
    before = search.tried
    for solution in search.partial(at):
        if given is None or solution.choices:
            tried = search.tried - before
            segment = Segment(at, [solution], LEVELS[0], tried, {}, exact=False, given=given)
            yield _merit(search, solution), segment


def _with_values(search: Search, at: int) -> Iterator[tuple[_Merit, Segment]]:
    """Yield ways on with a value of the source's in place of the data of an operation, with their merits."""
    own = search.replay.values
    for given in values_for(search, at):
        search.replay.values = dict(own)
        give(search.replay, given, given.array, at)
        search.mark(given.value, given.array)
        segment = search.solved(at)
        if segment is None:
            yield from _partial(search, at, given)
        else:
            segment.given = given
            whole = 2 if _leads_on(search, segment.solution) else 1
            yield _merit(search, segment.solution, whole), segment
        search.mark(given.value, None)
        search.replay.values = own
        if segment is not None and whole == 2 and not _constants(segment.solution):
            break


def _leads_on(search: Search, solution: Solution) -> bool:
    """Whether the source gives parameters of the same role what a solution ends with.

    A norm of another place fits with the scale of that place, and what follows there is no product.
    """
    operations = search.target.operations
    if solution.end == len(operations) or not parameter_operands(operations[solution.end]):
        return True
    search.enter(solution)
    size = size_of(search.replay.value(operations[solution.end].data[0]))
    search.leave(solution)
    meetings = search.source.meetings[role_of(operations[solution.end])]
    return any(abs(size_of(x.array) - size) <= EXACT * size for meeting in meetings for x in meeting.operation.data)


def _merit(search: Search, solution: Solution, whole: int = 0) -> _Merit:
    """Return what speaks for a solution, the most important first.

    These are: whether it is a whole segment (1) that leads on (2); how few constants stand for parameters; how many of its values the
    source has with the same axes, which the scores of attention lack where queries and keys are exchanged; and how many it has in any order.
    """
    known = [array for array in solution.values.values() if search.source.has(array, search.context.tolerance)]
    laid_out = sum(any(map(partial(is_same, array), arrays_like(search, array))) for array in known)
    return whole, -_constants(solution), laid_out, 2 * len(known) - len(solution.values)


def _constants(solution: Solution) -> int:
    """Return how many choices take a parameter for a constant, such as a bias of zeros, which fits wherever the rest does."""
    return sum(choice.candidate.constant for choice in solution.choices)
