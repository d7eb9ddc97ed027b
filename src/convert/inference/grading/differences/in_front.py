"""What holds although the programs differ: values that both have, in each draw of weights and inputs.

A segment of the search ends at a value that everything in it takes part in. If the target computes this value of its inputs, and it is
the source's with fresh weights, too, no difference is in front of it. If it is computed of a value that was given, it is known to be
right from there on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from convert.inference.candidates.candidate import Choice
from convert.inference.candidates.replay import Replay
from convert.inference.candidates.source import Source
from convert.inference.derivation import Grade, Tensor
from convert.inference.forms.as_data import outputs_as_data
from convert.inference.grading.differences.given import give, moving
from convert.inference.grading.differences.other_orders import other_orders, reordered_weights
from convert.inference.grading.differences.rivals import (
    behind_open,
    computed_with,
    leaves_of,
    made_of,
    not_taken,
    rivals_of,
)
from convert.inference.grading.proof import weights
from convert.inference.grading.ties import told_apart
from convert.inference.meetings.added_up import weighs_rows
from convert.inference.search import Search
from convert.inference.segment.segments import Segment, Solution
from convert.numerics.magnitude import relative_error
from convert.programs.fingerprint import EXACT, fingerprint
from convert.programs.program import REFUSALS, Program, Value

Array = np.ndarray[Any, np.dtype[Any]]
FOLLOWED = 64  # so many operations behind a parameter are looked at, to tell its columns apart
CLAIMED = (Grade.TIED, Grade.IN_FRONT, Grade.BEHIND)


@dataclass(frozen=True, eq=False)
class _Draw:
    """A run of the source, and one of the target with the weights and inputs of it; which values the target weighs row by row."""

    source: Source
    values: dict[Value, Array]
    weighed: frozenset[Value]

    def shares(self, value: Value, tolerance: float) -> bool:
        array = self.values.get(value)
        if array is None or np.isnan(array).any():
            return False
        return self.source.has(array, tolerance) or (value in self.weighed and self.source.adds_up(array, tolerance))


def graded_up_to_the_difference(
    search: Search,
    tensors: Sequence[Tensor],
    undecided: Sequence[tuple[int, Solution]],
    fresh: Sequence[Program],
    allowed: float,
    *,
    repeated: bool,
) -> tuple[Tensor, ...]:
    """Return the tensors with the grades that fresh draws show, where the programs differ.

    Args:
        search: after it was resumed.
        tensors: all of them open, with the parts that were found.
        undecided: (segment, another solution of it) that nothing in front of the difference refutes.
        fresh: runs of the source with other weights and inputs, of the same operations.
        allowed: relative error up to which a value in front of the difference is equal.
        repeated: as in `Source`.
    """
    weighed = frozenset(o.results[0] for o in search.target.operations if weighs_rows(o))
    states = [weights(tensors, program) for program in fresh]
    draws = [
        _Draw(source, _values(search, state, source.program), weighed)
        for program, state in zip(fresh, states, strict=True)
        for source in [Source(outputs_as_data(program), repeated=repeated)]
    ]
    grades: dict[str, list[Grade]] = {}
    rivals: list[tuple[str, Solution]] = []
    given = _behind_given(search)
    end = len(search.target.operations)
    for number, segment in enumerate(search.segments):
        behind = search.segments[number + 1] if number + 1 < len(search.segments) else None
        ends = segment.solution.end < end and (behind is None or not behind.exact or behind.given is not None)
        # Between two values that were given nothing is computed of the target's own, and a constant fits wherever the rest does.
        is_alone = segment.given is not None and ends and (behind is None or behind.given is not None)
        for choice in segment.solution.choices:
            grade = Grade.OPEN
            if not (ends and choice.candidate.constant):
                grade = _grade(search, segment, choice, draws, given, allowed)
                if is_alone and grade is Grade.BEHIND:
                    grade = Grade.OPEN
                if grade is not Grade.OPEN and not _shows_each_part(search, segment, choice, states[0], draws[0]):
                    grade = Grade.OPEN
            for name in {piece.tensor for piece in choice.candidate.pieces}:
                grades.setdefault(name, []).append(grade)
        others = [solution for k, solution in undecided if k == number]
        rivals += rivals_of(search, segment, others if segment.exact else segment.solutions[1:])
    leaves: dict[str, set[str]] = {}
    shown = _with_own_output(search)
    chosen = {tensor.name: set(tensor.nearest) for tensor in tensors}
    of_other_leaves: set[str] = set()  # and not of the same leaf in another order
    for name, rival in not_taken(search, rivals, shown):
        of_rival, taken = leaves_of(search, rival, name), made_of(search, rival, name) - shown
        leaves.setdefault(name, set()).update(of_rival)
        for other in taken:  # it was found as the others of these leaves
            leaves.setdefault(other, set())
        of_other_leaves |= {name, *taken} if of_rival - chosen[name] else set()
    for name in behind_open(search, undecided, of_other_leaves) - shown:
        leaves.setdefault(name, set())
    made = tuple(_graded(t, grades.get(t.name, []), leaves.get(t.name)) for t in tensors)
    made = _without_doubtful_constants(made, search.source.program)
    doubtful = _in_a_worse_order(search, made, states, draws, given, allowed)
    made = tuple(replace(t, grade=Grade.OPEN, guessed=True) if t.name in doubtful else t for t in made)
    if draws and any(tensor.grade is Grade.TIED for tensor in made):
        return _told_apart(search, made, draws, given, allowed)
    return made


def _in_a_worse_order(
    search: Search,
    tensors: Sequence[Tensor],
    states: Sequence[dict[str, Array]],
    draws: Sequence[_Draw],
    given: set[Value],
    allowed: float,
) -> set[str]:
    """Return the tensors in front of the difference of which another order of the columns gives more values of the source.

    In front of what splits the columns, each order gives as many.
    """
    claimed = {tensor.name for tensor in tensors if tensor.grade is Grade.IN_FRONT}
    found: set[str] = set()
    if not draws or not claimed:
        return found
    draw = draws[0]

    def shared(values: dict[Value, Array]) -> int:
        one = replace(draw, values=values)
        return sum(one.shares(value, allowed) for value in values if value not in given)

    own: int | None = None
    for places in other_orders(search.target):
        names = claimed.intersection(places)
        if names - found:
            own = shared(draw.values) if own is None else own
            values = _values(search, reordered_weights(states[0], places), draw.source.program)
            if shared(values) > own:
                found |= names
    return found


def _told_apart(
    search: Search, tensors: tuple[Tensor, ...], draws: Sequence[_Draw], given: set[Value], allowed: float
) -> tuple[Tensor, ...]:
    """Return the tensors without the ties that values in front of the difference resolve: of these, the fingerprints are compared."""
    replays = {id(draw.source.program): _replayed(search, draw.values) for draw in draws}
    found = []
    for tensor in tensors:
        steps = [o for o in search.target.operations if o.data and any(tensor.name in x.leaves for x in o.operands)]
        made = [value for step in steps[:FOLLOWED] for value in step.results]
        shown = [value for value in made if _is_own(value, draws, given, allowed)]

        def outputs(state: Mapping[str, Array], source: Program, steps: Any = steps, shown: Any = shown) -> Array:
            replay = replays[id(source)]
            known = {name: state[name] for name in replay.parameters if state[name].dtype.kind == "f"}
            replay.assign([(name, np.arange(x.size), x.ravel()) for name, x in known.items()])
            for step in steps[:FOLLOWED]:
                replay.keep(step, replay.run(step))
            return np.concatenate([fingerprint(replay.value(value))[0] for value in shown])

        if tensor.grade is Grade.TIED and shown:
            of = [one if one is tensor else replace(one, ties=()) for one in tensors]
            told = told_apart(of, search.target, [d.source.program for d in draws], outputs, lambda *_: None)
            tensor = next(one for one in told if one.name == tensor.name)
            tensor = tensor if tensor.ties else replace(tensor, grade=Grade.IN_FRONT)
        found.append(tensor)
    return tuple(found)


def _replayed(search: Search, values: Mapping[Value, Array]) -> Replay:
    replay = Replay(search.target)
    replay.values.update(values)
    return replay


def _with_own_output(search: Search) -> set[str]:
    """Return the tensors whose product is an output of both programs."""
    found: set[str] = set()
    outputs = {value: name for name, value in search.target.outputs.items()}
    for segment in search.segments:
        for choice in segment.solution.choices:
            for value in computed_with(search, segment.solution, {choice.index}):
                if value in outputs and value in segment.solution.values:
                    want, got = search.source.program.outputs[outputs[value]].array, segment.solution.values[value]
                    if relative_error(got, want) <= EXACT:
                        found |= {piece.tensor for piece in choice.candidate.pieces}
    return found


def _graded(tensor: Tensor, grades: Sequence[Grade], rivals: set[str] | None) -> Tensor:
    """Return a tensor with the weakest of its grades; open, if other leaves fit as well."""
    size = int(np.prod(tensor.shape))
    known = sum(len(part.elements) for part in tensor.parts) == size
    grade = max(grades, key=list(Grade).index) if grades and known else Grade.OPEN
    if rivals is not None or (grade is Grade.BEHIND and tensor.ties):
        grade = Grade.OPEN
    elif grade is Grade.IN_FRONT and tensor.ties:
        grade = Grade.TIED
    every = tuple(sorted({*tensor.candidates, *rivals})) if rivals else tensor.candidates
    candidates = () if grade in CLAIMED else every
    return replace(tensor, grade=grade, candidates=candidates, guessed=grade in (Grade.BEHIND, Grade.OPEN))


def _without_doubtful_constants(tensors: Sequence[Tensor], source: Program) -> tuple[Tensor, ...]:
    """Return the tensors; those for which the source seems to have no leaf are open where a leaf that it computes with is left, which may be it, or a part of it."""
    read = frozenset[str]().union(*(value.leaves for value in source.outputs.values()))
    left = read - {leaf for tensor in tensors for leaf in tensor.nearest}
    least = min((source.parameters[leaf].array.size for leaf in left), default=None)
    return tuple(
        replace(t, grade=Grade.OPEN, guessed=True)
        if t.is_constant and least is not None and least <= np.prod(t.shape)
        else t
        for t in tensors
    )


def _values(search: Search, state: dict[str, Array], source: Program) -> dict[Value, Array]:
    """Return the values of the target with these weights, the inputs of a run of the source, and what was given; NaN where one is not known."""
    replay = Replay(search.target)
    for name, array in state.items():
        flat = array.ravel()
        if name in replay.parameters and replay.parameters[name].dtype.kind == "f":
            replay.assign([(name, known := np.flatnonzero(~np.isnan(flat)), flat[known])])
    for name, value in search.target.inputs.items():
        replay.values[value] = source.inputs[name].array.astype(value.array.dtype)
    given = {segment.begin: segment.given for segment in search.segments if segment.given is not None}
    for index, operation in enumerate(search.target.operations):
        if not operation.data:
            continue
        if index in given:
            give(replay, given[index], given[index].again(source), index)
        try:
            results = replay.run(operation)
        except REFUSALS:
            results = [np.full(x.array.shape, np.nan) for x in operation.results]
        replay.keep(operation, results)
    return replay.values


def _behind_given(search: Search) -> set[Value]:
    """Return the values of the target that are computed of one that was given."""
    found: set[Value] = set()
    given = {segment.begin: segment.given.value for segment in search.segments if segment.given is not None}
    for index, operation in enumerate(search.target.operations):
        if index in given:
            found.add(given[index])
            found.update(x for one in moving(search.target, given[index], index) for x in one.results)
        if any(operand in found for operand in operation.operands):
            found.update(operation.results)
    return found


def _grade(
    search: Search, segment: Segment, choice: Choice, draws: Sequence[_Draw], given: set[Value], allowed: float
) -> Grade:
    """Return what the draws show of a choice."""
    shown = list(_shown_by(search, segment, choice))
    if not draws or not shown:
        return Grade.OPEN
    if segment.exact:  # all of them: the outputs, or the only one
        behind = all(d.shares(v, EXACT) for d in draws for v in shown)
        own = search.target.operations[choice.index].results  # a small difference may follow it
        in_front = behind and any(all(_is_own(v, draws, given, allowed) for v in of) for of in (shown, own))
    else:
        in_front = any(_is_own(v, draws, given, allowed) for v in shown)
        behind = segment.given is None and any(  # a product of what was given is the source's, whichever it is
            all(d.shares(v, EXACT) for d in draws) for v in shown
        )
    return Grade.IN_FRONT if in_front else Grade.BEHIND if behind else Grade.OPEN


def _shows_each_part(search: Search, segment: Segment, choice: Choice, state: dict[str, Array], draw: _Draw) -> bool:
    """Whether each leaf of a fused layer takes part in the values that show it: of a layer for all blocks, a first block shows its own part."""
    pieces = choice.candidate.pieces
    if not segment.exact or len({id(piece.meeting) for piece in pieces}) < 2:
        return True
    shown = list(_shown_by(search, segment, choice))
    for piece in pieces:
        without = state | {piece.tensor: state[piece.tensor].copy()}
        without[piece.tensor].ravel()[piece.elements] = np.nan
        values = _values(search, without, draw.source.program)
        if not any(x in values and np.isnan(values[x]).any() for x in shown):
            return False
    return True


def _is_own(value: Value, draws: Sequence[_Draw], given: set[Value], allowed: float) -> bool:
    """Whether the target computes a value of the source's from its inputs."""
    return value not in given and all(draw.shares(value, allowed) for draw in draws)


def _shown_by(search: Search, segment: Segment, choice: Choice) -> Iterator[Value]:
    """Yield the values of the target that show whether a choice is right."""
    operations, end = search.target.operations, segment.solution.end
    if segment.exact and choice.index in segment.solution.aside:
        yield from segment.solution.aside[choice.index]
        return
    if segment.exact and weighs_rows(operations[end - 1]):
        yield operations[end - 1].results[0]
        return
    if segment.exact:
        yield from [operations[end].data[0]] if end < len(operations) else search.target.outputs.values()
        return
    pieces = choice.candidate.pieces
    if len({id(piece.meeting) for piece in pieces}) > 1:  # one of the parts says nothing of the others
        yield operations[choice.index].results[0]
        return
    yield from computed_with(search, segment.solution, {choice.index})
