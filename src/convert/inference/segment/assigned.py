"""What is known of the target so far: elements of its parameters, values that were computed, and values that were given."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from convert.inference.candidates.candidate import Candidate, Choice, equal, siblings
from convert.inference.candidates.context import Context
from convert.inference.candidates.replay import Replay
from convert.inference.candidates.source import Source
from convert.inference.segment.segments import Solution
from convert.programs.program import Program, Value

Array = np.ndarray[Any, np.dtype[Any]]


class Assigned:
    """What is known of the target.

    Attributes:
        source: the source.
        target: the target's record, with any weights.
        replay: the run of the target with what is known.
        used: how often each element of the source is used.
        context: what proposals are made from.
        path: of all that was assigned and given; equal wherever these are the same, in any order.
        taken: the choices that assigned it, in their order.
    """

    def __init__(self, source: Source, target: Program) -> None:
        self.source, self.target, self.replay = source, target, Replay(target)
        self.used = np.zeros(len(source.theta), np.int32)
        self.path = 0
        self.taken: list[Choice] = []
        self._given: dict[Value, int] = {}
        self._order, self._first = target.operations, target.first_element
        self._made_by = {result: k for k, operation in enumerate(self._order) for result in operation.results}
        self._origins = np.full(sum(value.array.size for value in target.parameters.values()), -1)
        self.context = Context(source, self.replay, self.used, self._origins)

    def know(self, tensor: str, elements: Array, values: Array, numbers: Array) -> None:
        """Take what is known of a tensor before the search; `numbers` are the source's elements that it is, or none."""
        self.replay.assign([(tensor, elements, values)])
        if len(numbers):
            self.used[np.unique(numbers)] += 1
            self._origins[self._first[tensor] + elements] = numbers

    def enter(self, solution: Solution) -> None:
        """Take what a solution assigns."""
        for choice in solution.choices:
            self.take(choice)
        self.replay.values.update(solution.values)

    def leave(self, solution: Solution) -> None:
        """Give back what a solution assigned."""
        for choice in reversed(solution.choices):
            self.give_back(choice)

    def mark(self, value: Value, array: Array | None) -> None:
        """Count an array of the source's that took the place of a value of the target in the path; None: the target's own is back."""
        self.path ^= self._given.pop(value, 0)
        if array is not None:
            self._given[value] = hash((value, array.tobytes()))
            self.path ^= self._given[value]

    def take(self, choice: Choice) -> None:
        """Take what a choice assigns."""
        candidate, operation = choice.candidate, self._order[choice.index]
        self.taken.append(choice)
        self.path ^= choice.digest
        self.replay.assign(candidate.changes)
        for piece in candidate.pieces:
            numbers = piece.numbers[piece.numbers >= 0]
            self.used[numbers] += 1  # a number that stands twice counts once, here and where it is given back
            self._origins[self._first[piece.tensor] + piece.elements] = piece.numbers
            if piece.meeting is not None:
                self.context.near = piece.meeting.index
                self.context.of_siblings[siblings(operation)] = operation, piece.meeting.index

    def give_back(self, choice: Choice) -> None:
        """Give back what a choice assigned, the last one that was taken."""
        self.taken.pop()
        self.path ^= choice.digest
        for piece in choice.candidate.pieces:
            self.replay.assign([(piece.tensor, piece.elements, np.full(len(piece.elements), np.nan))])
            numbers = piece.numbers[piece.numbers >= 0]
            self.used[numbers] -= 1
            self._origins[self._first[piece.tensor] + piece.elements] = -1

    def unknown(self, candidate: Candidate) -> Candidate:
        """Return a candidate with the elements that are not known; with none if it says other things of those that are."""
        pieces = []
        for piece in candidate.pieces:
            now = self.replay.parameters[piece.tensor][piece.elements]
            new = np.isnan(now)
            if not equal(now[~new], piece.values[~new]):
                return replace(candidate, pieces=())
            if new.any():
                pieces.append(piece if new.all() else piece.only(new))
        return replace(candidate, pieces=tuple(pieces))
