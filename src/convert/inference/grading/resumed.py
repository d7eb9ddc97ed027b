"""Continue the search behind a difference: a value of the source replaces the target's there, so that the parameters that follow can be found.

What is found is a guess. It completes the target's weights, and then both programs are compared operation by operation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from convert.inference.derivation import Arithmetic, Role
from convert.inference.search import Search
from convert.inference.segments import LEVELS, Segment, Solution
from convert.inference.sites import parameter_operands, role_of
from convert.programs.program import Operation

Array = np.ndarray[Any, np.dtype[Any]]
RESUMED = 40  # so many times
LAYERS = 2  # in so many layers a whole segment is looked for where none is found
_Merit = tuple[
    bool, int, int
]  # whether it is a whole segment, constants that stand for parameters as a negative number, known values
_Way = tuple[_Merit, Array | None, Solution]
VALUES = 6  # so many values of the source's are tried at one operation


def resume(search: Search) -> None:
    """Go on from the deepest segment to the outputs, as far as values of the source's help; the segments are not exact."""
    search.guessing = True
    failed = Counter[Any]()
    for _ in range(RESUMED):
        at = search.segments[-1].solution.end if search.segments else 0
        if at == len(search.target.operations) or not _step(search, at, failed):
            break
    search.guessing = False


def _step(search: Search, at: int, failed: Counter[Any]) -> bool:
    """Append the best way on from an operation; True if there is one.

    Args:
        failed: how often in a row no whole segment was found from an operation like this one, in other layers.
    """
    before = search.tried
    operation = search.target.operations[at]
    enters = bool(parameter_operands(operation))
    known = not enters or search.source.has(search.replay.value(operation.data[0]), search.context.tolerance)
    code = search.code(at)
    segment = search.solved(at) if known and failed[code] < LAYERS else None
    if known:
        failed[code] = failed[code] + 1 if segment is None else 0
    if segment is None:
        found: list[_Way] = [(_merit(search, solution), None, solution) for solution in search.partial(at)]
        if enters and not (known and any(len(solution.choices) > _constants(solution) for *_, solution in found)):
            found += _with_values(search, at, operation)
        if not found:
            return False
        _, value, best = max(found, key=lambda way: way[0])
        if value is not None:
            search.replay.values[operation.data[0]] = value
        segment = Segment(at, [best], LEVELS[0], search.tried - before, {}, exact=False)
    search.segments.append(segment)
    search.enter(segment.solution)
    return True


def _with_values(search: Search, at: int, operation: Operation) -> Iterator[_Way]:
    """Yield ways on with a value of the source's in place of the data of an operation, with their merits."""
    own = search.replay.value(operation.data[0])
    for value in _values(search, operation):
        search.replay.values[operation.data[0]] = value
        segment = search.solved(at)
        if segment is not None:
            yield _merit(search, segment.solution, whole=True), value, segment.solution
            if not _constants(segment.solution):
                break
            continue
        for solution in search.partial(at):
            if solution.choices:
                yield _merit(search, solution), value, solution
    search.replay.values[operation.data[0]] = own


def _values(search: Search, operation: Operation) -> Iterator[Array]:
    """Yield data of the source that parameters meet in this way and nothing else has used, laid out as the target's."""
    if not parameter_operands(operation):
        return
    shape, near = operation.data[0].array.shape, search.context.near
    axes = _axes_of(operation, parameter_operands(operation)[0])
    meetings = [m for m in search.source.meetings[role_of(operation)] if len(m.operations) == 1 and m.instead is None]
    seen: list[Array] = []
    for meeting in sorted(meetings, key=lambda m: (m.index < near, m.index)):
        array = meeting.data[0]
        if (layout := getattr(meeting.operation.settings.get("dimension_numbers"), "lhs_spec", None)) is not None:
            array = array.transpose(layout)
        elif role_of(operation) in (Role.SCALE, Role.SHIFT) and array.ndim == len(shape):
            array = _along(array, _axes_of(meeting.operation, meeting.side), axes)
        used = any(not search.context.free(elements) for elements in meeting.weight.elements)
        if used or array.size != int(np.prod(shape)) or any(meeting.data[0] is other for other in seen):
            continue
        seen.append(meeting.data[0])
        yield array.reshape(shape).copy()  # a view of it may be read-only
        if len(seen) == VALUES:
            return


def _axes_of(operation: Operation, side: int) -> list[int]:
    """Return the axes of the data along which the parameter has several elements."""
    rank, weight = operation.data[0].array.ndim, operation.operands[side].array.shape
    return [k + rank - len(weight) for k, size in enumerate(weight) if size > 1]


def _along(array: Array, axes: Sequence[int], wanted: Sequence[int]) -> Array:
    """Return an array with its axes moved, such as that of the channels, to where the target has them."""
    if len(axes) != len(wanted) or min([*axes, *wanted], default=0) < 0:
        return array
    return np.moveaxis(array, axes, wanted)


def _merit(search: Search, solution: Solution, whole: bool = False) -> _Merit:
    known = [search.source.has(array, search.context.tolerance) for array in solution.values.values()]
    return whole, -_constants(solution), 2 * sum(known) - len(known)


def _constants(solution: Solution) -> int:
    """Return how many choices take a parameter for a constant, such as a bias of zeros, which fits wherever the rest does."""
    constant = [{piece.arithmetic for piece in choice.candidate.pieces} for choice in solution.choices]
    return constant.count({Arithmetic.CONSTANT})
