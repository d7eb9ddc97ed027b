"""The search: from one segment of the target to the next, and back where none leads on.

All solutions of a segment are found, and the search goes back to them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from convert.inference.candidates.source import Source
from convert.inference.derivation import Role
from convert.inference.forms.elements import JOINS
from convert.inference.meetings.sites import parameter_operands, role_of
from convert.inference.segment.segments import LEVELS, Failure, Level, Segment, Solution, Ways
from convert.inference.segment.walk import FORMS, OTHER_BEGIN, OTHER_LAYER, Signatures, Walk
from convert.programs.program import Operation, Program

MAX_SOLUTIONS = 8  # of a segment
BUDGET = 1000  # candidates that a segment may try
RETURNS = 8  # to other solutions of the segments before, after so many candidates
GUESSES = 60  # behind a difference
REMEMBERED = 4  # sets of solutions of segments that begin with the same operations


class Search(Walk):
    """The search for one pair of programs.

    Attributes:
        segments: the way that was found, or that led deepest.
        in_record: where the target's record has its operations, if the search has others between them.
        patient: whether what one level refutes takes none of the next one's patience; it costs more where the programs differ.
        ran_out: whether its patience has ended.
        returns: so often it goes back to other solutions of the segments before, at the first level alone, when its patience has ended.
    """

    def __init__(self, source: Source, target: Program, in_record: Sequence[int] = ()) -> None:
        super().__init__(source, target)
        self.segments: list[Segment] = []
        self.in_record = in_record
        self.patient = self.ran_out = False
        self.returns = RETURNS
        self._ways: dict[Any, list[Ways]] = {}

    def led_further(self, other: Search) -> bool:
        """Whether another search of the same operations ended with fewer parameters; or with as many, at the same operation, and more to find on the way to it."""
        ended = [one.target.operations[one.failure.index : one.failure.index + 1] for one in (self, other)]
        return self.found > other.found or (
            self.found == other.found and ended[0] == ended[1] and len(self._lacking) < len(other._lacking)
        )

    @property
    def found(self) -> int:
        """How many values of parameters are known on the way."""
        return _choices(self.segments)

    @property
    def known(self) -> int:
        """Of how many parameters something is known."""
        return len(self.replay.known_parameters())

    @property
    def met(self) -> int:
        """How many parameters data meets in front of the deepest operation at which everything was refuted."""
        in_front = self.target.operations[: max(self.failure.index, 0)]
        sides = [(one, parameter_operands(one)) for one in in_front if one.data]
        return len({name for one, operands in sides for side in operands for name in one.operands[side].leaves})

    @property
    def joins(self) -> bool:
        """Whether the target joins data."""
        return any(operation.name in JOINS and len(operation.data) > 1 for operation in self.target.operations)

    @property
    def _lacking(self) -> list[Operation]:
        """The operations that meet parameters between the end of the way and where it failed."""
        end = self.segments[-1].solution.end if self.segments else 0
        return [one for one in self.target.operations[end : self.failure.index + 1] if parameter_operands(one)]

    def solve(self) -> bool:
        """Find a way from the end of `segments` to the outputs; True if there is one. Otherwise the deepest goes on from there."""
        known = self.segments
        self.failure = self.strictly_failed = Failure()
        self._progress = self.tried
        deepest: list[Segment] = []
        ways: list[Segment] = []
        at = known[-1].solution.end if known else 0
        returns, failed = 0, -1
        seen: set[tuple[int, int, bool]] = set()  # where the search was, and no way led on
        while at < len(self._order):
            if self.failure.index > failed:
                failed, returns = self.failure.index, 0
            state = self.path, at, bool(returns)
            segment = None if state in seen else self._next(at, returns)
            if segment is not None:
                ways.append(segment)
            else:
                if not deepest or _choices(ways) > _choices(deepest):
                    deepest = [replace(s) for s in ways]
                returns += state not in seen and self.tried - self._progress > self.patience
                if returns > self.returns or not self._back(ways, loosely=not returns):
                    while ways:
                        self.leave(ways.pop().solution)
                    while deepest and deepest[-1].level.proposals == LEVELS[-1].proposals:
                        deepest.pop()  # elements that are used again fit by chance, if nothing that follows does
                    self.segments = [*known, *deepest]
                    for s in deepest:
                        self.enter(s.solution)
                    return False
            seen.add(state)
            self.enter(ways[-1].solution)
            at = ways[-1].solution.end
        self.segments = [*known, *ways]
        return True

    def _next(self, at: int, returns: int) -> Segment | None:
        """Return the segment that begins at an operation; where the programs differ, one that was found in another layer."""
        if self.code(at) in self.skipped:
            return self.remembered(at)
        return self.solved(at, LEVELS[:1] if returns else LEVELS)

    def _back(self, ways: list[Segment], *, loosely: bool) -> bool:
        """Leave the last segments, up to one that has another solution; False if none has.

        Args:
            loosely: whether solutions are looked for at further levels.
        """
        while ways:
            last = ways[-1]
            self.leave(last.solution)
            if last.chosen + 1 < len(last.solutions):
                last.chosen += 1
                return True
            ways.pop()
            further = LEVELS[LEVELS.index(last.level) + 1 :]
            again = self.solved(last.begin, further) if last.level.strict and loosely else None
            if again is not None:
                ways.append(again)
                return True
        return False

    def solved(self, at: int, levels: Sequence[Level] = LEVELS) -> Segment | None:
        """Return the segment that begins at an operation, with all its solutions at the first of the levels that has one."""
        segment = self.remembered(at, levels)
        if segment is not None:
            return segment
        ways = self._ways[self.like(self._first_meeting(at))]
        before: Level | None = None
        for level in levels:
            if before is not None and before.proposals == level.proposals and not self._hindered:
                continue  # the same candidates would be refuted again
            if level.proposals and level.strict and not self._takes_parts(at):
                continue
            before = level
            if self.patient or level.strict:
                self._start = self.tried
            segment = self._found(at, level)
            self.ran_out |= self._stuck
            if level.strict:
                self._start = self.tried
            if segment is not None:
                self._remember(ways, segment)
                return segment
            if self._differs:
                break  # what is tried in front of it does not help
        self.context.near = self._near
        return None

    def _remember(self, ways: list[Ways], segment: Segment) -> None:
        """Take the solutions of a segment for the next one like it."""
        signatures = tuple(tuple(self.signatures(x.choices, form) for x in segment.solutions) for form in FORMS)
        if (found := Ways(segment.level, signatures)) not in ways:
            ways.insert(0, found)
            del ways[REMEMBERED:]

    def _takes_parts(self, at: int) -> bool:
        """Whether the target splits what the next parameter gives, as gates: where they stand in another order, their functions tell."""
        first = self._first_meeting(at)
        if first == len(self._order):
            return False
        axis = 1 if role_of(self._order[first]) is Role.CONVOLUTION else -1
        return bool(self.context.cuts(self._order[first].results[0], axis))

    def remembered(self, at: int, levels: Sequence[Level] = LEVELS) -> Segment | None:
        """Return the segment that begins at an operation, with the solutions that one like it has in another layer or for another expert."""
        self._near, self._start = self.context.near, self.tried
        ways = self._ways.setdefault(self.like(self._first_meeting(at)), [])
        at_levels = [known for known in ways if known.level in levels]
        each = [(known, form) for known in at_levels for form in FORMS[:OTHER_BEGIN]]
        for known, form in (*each, *((known, OTHER_BEGIN) for known in at_levels)):
            wanted = known.signatures[form]
            segment = self._found(at, known.level, wanted, form)
            if segment is not None and len(segment.solutions) == len(wanted):
                if form == OTHER_BEGIN:  # the next one has the same operations in front of it as this one
                    self._remember(ways, segment)
                return segment
        self.context.near = self._near
        return None

    def _found(self, at: int, level: Level, wanted: Signatures = (), form: int = OTHER_LAYER) -> Segment | None:
        """Return the segment that begins at an operation, with the solutions at a level.

        Args:
            wanted: signatures of the solutions that are looked for; empty: all. In the layer where they were found, every other
                candidate was refuted.
            form: of these signatures.
        """
        before = self.tried
        walks = self.walks(at, min(BUDGET, 2 * self.patience), level, wanted, form)
        solutions = list(itertools.islice(walks, MAX_SOLUTIONS))
        if not solutions:
            return None
        return Segment(at, solutions, level, self.tried - before, self._refuted)

    def partial(self, at: int) -> list[Solution]:
        """Return ways from an operation to the next one whose data or result is no value of the source; outputs may differ."""
        self._near, self._start = self.context.near, self.tried
        found: list[Solution] = []
        for self.context.level in (0, 1):
            found += itertools.islice(self.walks(at, GUESSES), GUESSES)
            self.context.near = self._near  # what was tried moved it
            if any(solution.choices for solution in found):
                break
        return found


def _choices(ways: Sequence[Segment]) -> int:
    return sum(len(segment.solution.choices) for segment in ways)
