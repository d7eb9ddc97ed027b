"""Other solutions that fit as well as the chosen ones, and what they leave open: the tensors that they make, and those behind these."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np

from convert.inference.candidates.candidate import Piece
from convert.inference.grading.differences.given import moving
from convert.inference.search import Search
from convert.inference.segment.segments import Segment, Solution
from convert.numerics.magnitude import relative_error
from convert.programs.divergence.kinds import LAYOUT, kind_of
from convert.programs.fingerprint import EXACT
from convert.programs.program import Value

Array = np.ndarray[Any, np.dtype[Any]]


def rivals_of(search: Search, segment: Segment, others: Sequence[Solution]) -> Iterator[tuple[str, Solution]]:
    """Yield (tensor, another solution of a segment that fits it as well), for solutions that fit every other tensor as well."""
    names = {piece.tensor for choice in segment.solution.choices for piece in choice.candidate.pieces}
    while True:
        known = {name for name in names if not any(_fits_as_well(search, segment, one, name) for one in others)}
        left = [one for one in others if not any(_differs(segment.solution, one, name) for name in known)]
        if len(left) == len(others):
            break
        others = left
    yield from ((name, one) for name in names for one in others if _fits_as_well(search, segment, one, name))


def not_taken(
    search: Search, rivals: Sequence[tuple[str, Solution]], shown: set[str]
) -> Sequence[tuple[str, Solution]]:
    """Return the rivals without those that make a tensor of elements that others in front of the difference are made of."""
    while True:
        doubtful = {name for name, _ in rivals}
        pieces = [p for s in search.segments for choice in s.solution.choices for p in choice.candidate.pieces]
        sure = shown - doubtful
        taken = np.zeros(len(search.source.theta) + 1, bool)  # the last is what is no element
        for piece in pieces:
            if piece.tensor in sure:
                taken[piece.numbers] = True
        taken[-1] = False
        left = [
            (name, rival)
            for name, rival in rivals
            if not any(taken[piece.numbers].any() for piece in _pieces(rival, name))
        ]
        if len(left) == len(rivals):
            return rivals
        rivals = left


def made_of(search: Search, rival: Solution, name: str) -> set[str]:
    """Return the other tensors that are made of elements of which another solution makes a tensor."""
    taken = np.zeros(len(search.source.theta) + 1, bool)
    for piece in _pieces(rival, name):
        taken[piece.numbers] = True
    taken[-1] = False
    pieces = (p for s in search.segments for choice in s.solution.choices for p in choice.candidate.pieces)
    return {piece.tensor for piece in pieces if piece.tensor != name and taken[piece.numbers].any()}


def leaves_of(search: Search, solution: Solution, name: str) -> set[str]:
    """Return the leaves that a solution makes a tensor of."""
    numbers = (piece.numbers for piece in _pieces(solution, name))
    return {search.source.leaf(int(of[0])) for of in numbers if len(of) and of[0] >= 0}


def behind_open(search: Search, undecided: Sequence[tuple[int, Solution]], open_: Collection[str]) -> set[str]:
    """Return the tensors that meet what is computed with open ones: they fit what was chosen for these, and others fit the rest.

    Args:
        undecided: as of `graded_up_to_the_difference`. Where these solutions give the same values as the chosen one, nothing behind them is open.
        open_: tensors for which other leaves fit as well, or whose leaf may be another one's.
    """
    unsure: set[Value] = set()
    for number, segment in enumerate(search.segments):
        rivals = [solution for k, solution in undecided if k == number]
        mine = segment.solution.values
        for choice in segment.solution.choices:
            names = {piece.tensor for piece in choice.candidate.pieces}
            if names.isdisjoint(open_):
                continue
            others = [one.values for one in rivals if any(_differs(segment.solution, one, name) for name in names)]
            for value in computed_with(search, segment.solution, {choice.index}):
                known = [relative_error(of[value], mine[value]) for of in others if value in of and value in mine]
                if not known or max(known) > EXACT:
                    unsure.add(value)
    choices = {choice.index: choice for segment in search.segments for choice in segment.solution.choices}
    given = {segment.begin: segment.given.value for segment in search.segments if segment.given is not None}
    found: set[str] = set()
    for index, operation in enumerate(search.target.operations):
        if index in given:  # it is the source's
            moved = (value for one in moving(search.target, given[index], index) for value in one.results)
            unsure.difference_update([given[index], *moved])
        if unsure.intersection(operation.operands):
            unsure.update(operation.results)
            found |= {piece.tensor for piece in choices[index].candidate.pieces} if index in choices else set()
    return found


def _pieces(solution: Solution, name: str) -> list[Piece]:
    """Return the pieces of which a solution makes a tensor."""
    return [p for choice in solution.choices for p in choice.candidate.pieces if p.tensor == name]


def computed_with(search: Search, solution: Solution, indices: set[int]) -> Iterator[Value]:
    """Yield the values of a solution that are computed of the results of some operations, these included."""
    found: set[Value] = set()
    for index in range(solution.begin, solution.end):
        operation = search.target.operations[index]
        if index in indices or any(operand in found for operand in operation.operands):
            new = [result for result in operation.results if result.data]
            found.update(new)
            yield from new


def _fits_as_well(search: Search, segment: Segment, other: Solution, name: str) -> bool:
    """Whether another solution makes other numbers of a tensor, and as many values of the source's with it.

    The source has no value of its own of one head of a layer for all heads. Where the chosen solution gives nothing but the whole
    result of a layer, which it would for any tensor that meets the same data, that refutes no such part.
    """
    if not _differs(segment.solution, other, name):
        return False
    if segment.exact or _count(search, other, name) >= _count(search, segment.solution, name):
        return True
    return _is_part(other, name) and not _is_followed(search, segment.solution, name)


def _is_part(solution: Solution, name: str) -> bool:
    """Whether a solution makes a tensor of a part of what the source multiplies at once."""
    pieces = _pieces(solution, name)
    taken = np.concatenate([np.zeros(0, int), *(piece.numbers for piece in pieces)])
    at_once = (numbers for p in pieces if p.meeting is not None for numbers in p.meeting.weight.elements[:1])
    return any(not np.isin(numbers[numbers >= 0], taken).all() for numbers in at_once)


def _is_followed(search: Search, solution: Solution, name: str) -> bool:
    """Whether a value of the source's is computed of what a tensor gives, by more than a bias, another layout, and values beside it."""
    indices = {c.index for c in solution.choices if any(p.tensor == name for p in c.candidate.pieces)}
    behind = set(computed_with(search, solution, indices))
    for index in range(solution.begin, solution.end):
        operation = search.target.operations[index]
        bias = kind_of(operation) == "add" and len(operation.data) == 1
        if index in indices or bias or kind_of(operation) in (LAYOUT, "join"):
            continue
        made = [v for v in operation.results if v in behind and v in solution.values]
        if any(search.source.has(solution.values[v], EXACT) for v in made):
            return True
    return False


def _differs(one: Solution, other: Solution, name: str) -> bool:
    """Whether both solutions make a tensor, of other numbers."""
    mine, theirs = (_made(solution, name) for solution in (one, other))
    return mine is not None and theirs is not None and not np.array_equal(mine, theirs)


def _made(solution: Solution, name: str) -> Array | None:
    pieces = _pieces(solution, name)
    if not pieces:
        return None
    made = np.concatenate([np.stack([p.elements.astype(float), p.values]) for p in pieces], 1)
    return np.asarray(made[:, np.argsort(made[0], kind="stable")])


def _count(search: Search, solution: Solution, name: str) -> int:
    """Return how many values that a tensor takes part in are the source's."""
    indices = {c.index for c in solution.choices if any(p.tensor == name for p in c.candidate.pieces)}
    values = computed_with(search, solution, indices)
    return sum(v in solution.values and search.source.has(solution.values[v], EXACT) for v in values)
