"""Continue the search behind a difference: a value of the source replaces the target's there, so that the parameters that follow can be found.

What is found completes the target's weights, and then both programs are compared operation by operation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from convert.inference.derivation import Role
from convert.inference.search import RETURNS, WITHOUT_PROGRESS, Search
from convert.inference.segments import LEVELS, Given, Segment, Solution
from convert.inference.sites import parameter_operands, role_of
from convert.programs.program import Operation

Array = np.ndarray[Any, np.dtype[Any]]
_Merit = tuple[
    bool, int, int
]  # whether it is a whole segment, constants that stand for parameters as a negative number, known values
PATIENCE = 150  # candidates after the deepest operation was reached
TRIED = 700  # candidates in all, and for each tensor
EACH = 20
VALUES = 6  # so many values of the source's are tried at one operation


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
    if enters and not (known and any(len(s.solution.choices) > _constants(s.solution) for _, s in found)):
        found += _with_values(search, at, operation)
    if not found:
        return None
    _, best = max(found, key=lambda way: way[0])
    if best.given is not None:
        search.give(best)
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


def _with_values(search: Search, at: int, operation: Operation) -> Iterator[tuple[_Merit, Segment]]:
    """Yield ways on with a value of the source's in place of the data of an operation, with their merits."""
    own = search.replay.value(operation.data[0])
    for given in _values(search, operation):
        search.replay.values[operation.data[0]] = given.array
        segment = search.solved(at)
        if segment is None:
            yield from _partial(search, at, given)
            continue
        segment.given = given
        yield _merit(search, segment.solution, whole=True), segment
        if not _constants(segment.solution):
            break
    search.replay.values[operation.data[0]] = own


def _values(search: Search, operation: Operation) -> Iterator[Given]:
    """Yield data of the source that parameters meet in this way and nothing else has used, laid out as the target's."""
    if not parameter_operands(operation):
        return
    shape, near = operation.data[0].array.shape, search.context.near
    axes = _axes_of(operation, parameter_operands(operation)[0])
    meetings = [m for m in search.source.meetings[role_of(operation)] if len(m.operations) == 1 and m.instead is None]
    seen: list[Array] = []
    for meeting in sorted(meetings, key=lambda m: (m.index < near, m.index)):
        array = meeting.data[0]
        order = tuple(range(array.ndim))
        if (layout := getattr(meeting.operation.settings.get("dimension_numbers"), "lhs_spec", None)) is not None:
            order = tuple(layout)
        elif role_of(operation) in (Role.SCALE, Role.SHIFT) and array.ndim == len(shape):
            order = _along(array.ndim, _axes_of(meeting.operation, meeting.side), axes)
        used = any(not search.context.free(elements) for elements in meeting.weight.elements)
        if used or array.size != int(np.prod(shape)) or any(meeting.data[0] is other for other in seen):
            continue
        seen.append(meeting.data[0])
        yield Given(meeting, array.transpose(order).reshape(shape).copy(), order)  # a view of it may be read-only
        if len(seen) == VALUES:
            return


def _axes_of(operation: Operation, side: int) -> list[int]:
    """Return the axes of the data along which the parameter has several elements."""
    rank, weight = operation.data[0].array.ndim, operation.operands[side].array.shape
    return [k + rank - len(weight) for k, size in enumerate(weight) if size > 1]


def _along(rank: int, axes: Sequence[int], wanted: Sequence[int]) -> tuple[int, ...]:
    """Return the order of axes in which some, such as that of the channels, are where the target has them."""
    if len(axes) != len(wanted) or min([*axes, *wanted], default=0) < 0:
        return tuple(range(rank))
    placed = dict(zip(wanted, axes, strict=True))
    others = iter(k for k in range(rank) if k not in axes)
    return tuple(placed[k] if k in placed else next(others) for k in range(rank))


def _merit(search: Search, solution: Solution, whole: bool = False) -> _Merit:
    known = [search.source.has(array, search.context.tolerance) for array in solution.values.values()]
    return whole, -_constants(solution), 2 * sum(known) - len(known)


def _constants(solution: Solution) -> int:
    """Return how many choices take a parameter for a constant, such as a bias of zeros, which fits wherever the rest does."""
    return sum(choice.candidate.constant for choice in solution.choices)
