"""The search: replay the target, propose what its parameters are, and refute.

What enters a product or a convolution must be a value of the source; so must what a scale or a bias gives, at first. A segment
ends where a value depends on everything that was assigned. All solutions of a segment are found, and the search goes back to them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from convert.inference.candidates import Candidate, Choice, Context, Source, equal, siblings
from convert.inference.derivation import Role
from convert.inference.factors import carriers, factor_of
from convert.inference.proposals import convolutions, elementwise, others, own, products
from convert.inference.proposals.gates import Cells
from convert.inference.proposals.side_by_side import values_of
from convert.inference.replay import Replay
from convert.inference.segments import LEVELS, Failure, Level, Segment, Solution, Ways
from convert.inference.sites import VISIBLE_SUM, parameter_operands, role_of
from convert.programs.program import Operation, Program, Value

Array = np.ndarray[Any, np.dtype[Any]]

PROPOSE = {
    Role.PRODUCT: products.propose,
    Role.CONVOLUTION: convolutions.propose,
    Role.SCALE: elementwise.propose,
    Role.SHIFT: elementwise.propose,
    Role.LOOKUP: others.look_up,
    Role.OTHER: others.any_leaf,
}

MAX_SOLUTIONS = 8  # of a segment
REFUSALS = (RuntimeError, ValueError, TypeError, IndexError)  # of an operation on operands that do not fit
BUDGET = 1000  # candidates that a segment may try
WITHOUT_PROGRESS = 600  # candidates after the deepest operation was reached
RETURNS = 8  # to other solutions of the segments before, after so many candidates
FUSED = ("anywhere", "partly", "zeros", "absent")  # kinds of candidates
GUESSES = 60  # behind a difference
REMEMBERED = 4  # sets of solutions of segments that begin with the same operations


@dataclass(eq=False)
class Search:
    """The search for one pair of programs.

    Attributes:
        source: the source.
        target: the target's record, with any weights.
        segments: the way that was found, or that led deepest.
        failure: why it went no further.
        tried: candidates in all.
        patience: so many candidates after the deepest operation was reached.
        returns: so often it goes back to other solutions of the segments before, at the first level alone, when its patience has ended.
        skipped: what begins like an operation at which the programs differ (`code`): there only what was found in another layer is tried.
        met_nothing: whether no row met some parameter, so that other weights may show more.
    """

    source: Source
    target: Program
    segments: list[Segment] = field(default_factory=list)
    failure: Failure = field(default_factory=Failure)
    tried: int = 0
    patience: int = WITHOUT_PROGRESS
    returns: int = RETURNS
    skipped: set[Any] = field(default_factory=set)
    met_nothing: bool = False

    def __post_init__(self) -> None:
        self.replay = Replay(self.target)
        self.used = np.zeros(len(self.source.theta), np.int32)
        self._first = self.target.first_element
        self._origins = np.full(sum(value.array.size for value in self.target.parameters.values()), -1)
        self.context = Context(self.source, self.replay, self.used, self._origins)
        self._cells = Cells(self.context)
        self._progress = self._start = 0
        self._reached = -1
        self._loose = self._strict = self._hindered = False
        self._ways: dict[Any, list[Ways]] = {}
        self._wanted: tuple[tuple[Any, ...], ...] = ()
        self._order = self.target.operations
        self._made_by = {result: k for k, operation in enumerate(self._order) for result in operation.results}
        self._inputs = [tuple(self._made_by.get(x, -1) for x in operation.data) for operation in self._order]

    # ---- segments

    def solve(self) -> bool:
        """Find a way from the end of `segments` to the outputs; True if there is one. Otherwise the deepest goes on from there."""
        known = self.segments
        self.failure, self._progress = Failure(), self.tried
        deepest: list[Segment] = []
        ways: list[Segment] = []
        at = known[-1].solution.end if known else 0
        returns, failed = 0, -1
        while True:
            if self.failure.index > failed:
                failed, returns = self.failure.index, 0
            if self.code(at) in self.skipped:
                segment = self.remembered(at)
            else:
                segment = self.solved(at, LEVELS[:1] if returns else LEVELS)
            if segment is not None:
                ways.append(segment)
            else:
                if not deepest or sum(len(s.solution.choices) for s in ways) > sum(
                    len(s.solution.choices) for s in deepest
                ):
                    deepest = [replace(s) for s in ways]
                returns += self.tried - self._progress > self.patience
                if returns > self.returns or not self._back(ways, loosely=not returns):
                    while ways:
                        self.leave(ways.pop().solution)
                    self.segments = [*known, *deepest]
                    for s in deepest:
                        self.enter(s.solution)
                    return False
            self.enter(ways[-1].solution)
            at = ways[-1].solution.end
            if at == len(self._order):
                self.segments = [*known, *ways]
                return True

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
            again = self.solved(last.begin, LEVELS[1:]) if last.level.strict and loosely else None
            if again is not None:
                ways.append(again)
                return True
        return False

    def know(self, tensor: str, elements: Array, values: Array, numbers: Array) -> None:
        """Take what is known of a tensor before the search; `numbers` are the source's elements that it is, or none."""
        self.replay.assign([(tensor, elements, values)])
        if len(numbers):
            self.used[np.unique(numbers)] += 1
            self._origins[self._first[tensor] + elements] = numbers

    def enter(self, solution: Solution) -> None:
        """Take what a solution assigns."""
        for choice in solution.choices:
            self._take(choice)
        self.replay.values.update(solution.values)

    def leave(self, solution: Solution) -> None:
        """Give back what a solution assigned."""
        for choice in reversed(solution.choices):
            self._give_back(choice.candidate)

    def _take(self, choice: Choice) -> None:
        candidate, operation = choice.candidate, self._order[choice.index]
        self.replay.assign(candidate.changes)
        for piece in candidate.pieces:
            numbers = piece.numbers[piece.numbers >= 0]
            self.used[numbers] += 1  # a number that stands twice counts once, here and where it is given back
            self._origins[self._first[piece.tensor] + piece.elements] = piece.numbers
            if piece.meeting is not None:
                self.context.near = piece.meeting.index
                self.context.of_siblings[siblings(operation)] = operation, piece.meeting.index

    def _give_back(self, candidate: Candidate) -> None:
        for piece in candidate.pieces:
            self.replay.assign([(piece.tensor, piece.elements, np.full(len(piece.elements), np.nan))])
            numbers = piece.numbers[piece.numbers >= 0]
            self.used[numbers] -= 1
            self._origins[self._first[piece.tensor] + piece.elements] = -1

    def solved(self, at: int, levels: Sequence[Level] = LEVELS) -> Segment | None:
        """Return the segment that begins at an operation, with all its solutions at the first of the levels that has one."""
        segment = self.remembered(at, levels)
        if segment is not None:
            return segment
        ways = self._ways[self.code(at)]
        before: Level | None = None
        for level in levels:
            if before is not None and before.proposals == level.proposals and not self._hindered:
                continue  # the same candidates would be refuted again
            before = level
            segment = self._found(at, level)
            if level.strict:
                self._start = self.tried
            if segment is not None:
                found = Ways(level, tuple(self._signatures(x.choices) for x in segment.solutions))
                if found not in ways:
                    ways.insert(0, found)
                    del ways[REMEMBERED:]
                return segment
        self.context.near = self._near
        return None

    def remembered(self, at: int, levels: Sequence[Level] = LEVELS) -> Segment | None:
        """Return the segment that begins at an operation, with the solutions that one like it has in another layer."""
        self._near, self._start = self.context.near, self.tried
        for known in self._ways.setdefault(self.code(at), []):
            segment = self._found(at, known.level, known.signatures) if known.level in levels else None
            if segment is not None and len(segment.solutions) == len(known.signatures):
                return segment
        self.context.near = self._near
        return None

    def _found(self, at: int, level: Level, wanted: tuple[tuple[Any, ...], ...] = ()) -> Segment | None:
        """Return the segment that begins at an operation, with the solutions at a level.

        Args:
            wanted: signatures of the solutions that are looked for; empty: all. In the layer where they were found, every other
                candidate was refuted.
        """
        (self.context.level, self._early, self._strict), self.context.near, self._wanted = level, self._near, wanted
        before = self.tried
        self._limit = self.tried + min(BUDGET, 2 * self.patience)
        self._refuted: dict[int, int] = {}
        self._begin, self._hindered = at, False
        solutions = list(itertools.islice(self._walk(at, []), MAX_SOLUTIONS))
        if not solutions:
            return None
        return Segment(at, solutions, level, self.tried - before, self._refuted)

    def partial(self, at: int) -> list[Solution]:
        """Return ways from an operation to the next one whose data or result is no value of the source; outputs may differ."""
        self._loose, self._begin, self._refuted, self._start = True, at, {}, self.tried
        self._near, self._wanted, self._early, self._strict = self.context.near, (), False, False
        found: list[Solution] = []
        for self.context.level in (0, 1):
            self._limit = self.tried + GUESSES
            found += itertools.islice(self._walk(at, []), GUESSES)
            self.context.near = self._near  # what was tried moved it
            if any(solution.choices for solution in found):
                break
        self._loose = False
        return found

    def _unknown(self, candidate: Candidate) -> Candidate:
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

    def _signature(self, candidate: Candidate) -> Any:
        """Return what a candidate has in common with that of the same operation in another layer."""
        steps = tuple(None if p.meeting is None else p.meeting.index - self._near for p in candidate.pieces)
        return candidate.kind, steps

    def _signatures(self, choices: Sequence[Choice]) -> tuple[Any, ...]:
        return tuple(self._signature(choice.candidate) for choice in choices)

    def code(self, at: int) -> Any:
        """Return what an operation has in common with the same one in another layer."""
        if at == len(self._order):
            return None
        operation = self._order[at]
        return operation.where, operation.name, tuple(x.array.shape for x in operation.operands)

    # ---- within a segment

    def _walk(self, at: int, choices: list[Choice]) -> Iterator[Solution]:
        """Run the target from an operation on; yield the solutions of the segment."""
        while at < len(self._order):
            operation = self._order[at]
            if any(operand.data for operand in operation.operands):
                sides = parameter_operands(operation)
                enters = sides and role_of(operation) in (Role.PRODUCT, Role.CONVOLUTION)
                if enters:
                    if not self._is_source(operation):
                        if self._loose and at > self._begin:
                            yield self._solution(at, choices)
                        self._refute(at, "no value of the source equals what enters")
                        return
                    if choices and self._depends(operation.data[0], {choice.index for choice in choices}):
                        yield self._solution(at, choices)
                        return
                lacking = [side for side in sides if not self.replay.known(operation.operands[side])]
                replaced: dict[int, Array] = {}
                if lacking and self._shows_nothing(operation):
                    replaced = {side: np.nan_to_num(self.replay.value(operation.operands[side])) for side in lacking}
                elif lacking:
                    further = self._loose and at > self._begin
                    if further and not self._is_source(operation):
                        yield self._solution(at, choices)
                        return
                    children = self._children(at, operation, lacking[0], choices)
                    if further:  # a constant fits wherever the rest does
                        children = [choice for choice in children if not choice.candidate.constant]
                        if not children:
                            yield self._solution(at, choices)
                    for choice in children:
                        self._take(choice)
                        try:
                            yield from self._walk(at, [*choices, choice])
                        finally:
                            self._give_back(choice.candidate)
                    return
                try:
                    results = self.replay.run(operation, replaced)
                except REFUSALS as error:  # a wrong candidate may not run
                    self._refute(at, f"it does not run: {error}")
                    return
                self.replay.keep(operation, results)
                factor = factor_of(self.context, operation) if choices and not sides and not self._loose else None
                if factor is not None:
                    yield from self._carried(at, choices, factor)
                    return
                if self._early and choices and not sides and not self._pairs(operation, results[0]):
                    self._hindered = True
                    self._refute(at, "no product of two values of the source has this result")
                    return
            at += 1
        if self._loose or self._outputs_agree():
            yield self._solution(at, choices)

    def _shows_nothing(self, operation: Operation) -> bool:
        """Whether no result tells the parameter: a matrix that meets zeros, or what meets no row, as an expert without tokens."""
        met = self.replay.value(operation.data[0])
        if operation.name == VISIBLE_SUM and not self.source.same_data(Role.SHIFT, met, self.context.tolerance):
            return True  # the programs hide other positions; the sum itself follows
        self.met_nothing |= not met.size
        return not met.size or (role_of(operation) is Role.PRODUCT and not met.any())

    def _carried(self, at: int, choices: list[Choice], factor: float) -> Iterator[Solution]:
        """Go on as the target is; if that finds no solution, with a parameter that carries the factor of an operation."""
        found = False
        for solution in self._walk(at + 1, choices):
            found = True
            yield solution
        if found:
            return
        for changed in carriers(self._order, self._made_by, at, choices, factor):
            self.tried += 1
            self._exchange(choices, changed, at)
            try:
                yield from self._walk(at + 1, changed)
            finally:
                self._exchange(changed, choices, at)

    def _exchange(self, old: Sequence[Choice], new: Sequence[Choice], at: int) -> None:
        """Replace the choices of the segment, and run it again up to an operation."""
        for choice in reversed(old):
            self._give_back(choice.candidate)
        for choice in new:
            self._take(choice)
        for operation in self._order[self._begin : at + 1]:
            if operation.data:
                self.replay.keep(operation, self.replay.run(operation))

    def _solution(self, end: int, choices: Sequence[Choice]) -> Solution:
        begin = self._begin
        values = {
            result: self.replay.values[result]
            for operation in self._order[begin:end]
            for result in operation.results
            if result.data
        }
        return Solution(begin, end, tuple(choices), values)

    def _refute(self, at: int, problem: str) -> None:

        self._refuted[at] = self._refuted.get(at, 0) + 1
        if at > self.failure.index:
            self.failure = Failure(at, problem)
            self._progress = self.tried

    def _is_source(self, operation: Operation) -> bool:
        array = self.replay.value(operation.data[0])
        if not array.any() or self.source.has(array, self.context.tolerance):
            return True
        if role_of(operation) is not Role.PRODUCT:
            return False
        batch = array.ndim == 3 and all(self.source.has(rows, self.context.tolerance) for rows in array)
        if batch or self.source.has_rows(array, self.context.tolerance):  # one value for each expert, or some rows
            return True
        parts = [array[..., place] for place in values_of(self.context, operation.data[0])]
        return bool(parts) and all(self.source.same_rows([part], self.context.tolerance) for part in parts)

    def _pairs(self, operation: Operation, result: Array) -> bool:
        """Whether the product of two values of data is one of the source, up to a factor; if it is one, and the source has any."""
        if role_of(operation) is not Role.PRODUCT:
            return True
        return self.source.data_products.has(result, self.context.tolerance)

    def _depends(self, value: Value, indices: set[int]) -> bool:
        """Whether a value is computed from the results of all these operations."""
        todo, seen, first = [self._made_by.get(value, -1)], set[int](), min(indices)
        while todo and not indices <= seen:
            at = todo.pop()
            if at >= first and at not in seen:
                seen.add(at)
                todo += self._inputs[at]
        return indices <= seen

    def _outputs_agree(self) -> bool:
        for name, value in self.source.program.outputs.items():
            got, expected = self.replay.value(self.target.outputs[name]), value.array
            scale = np.abs(expected[np.isfinite(expected)]).max(initial=0) or 1.0
            if got.shape != expected.shape:
                shapes = f"the target gives shape {list(got.shape)}, the source {list(expected.shape)}"
                self._refute(len(self._order), f"the output {name!r} differs: {shapes}")
                return False
            if not np.allclose(got, expected, rtol=0, atol=self.context.tolerance * scale, equal_nan=True):
                self._refute(len(self._order), f"the output {name!r} differs")
                return False
        return True

    @property
    def _stuck(self) -> bool:
        """Whether so many candidates of this segment led no deeper."""
        return self.tried - max(self._progress, self._start) > self.patience

    def _proposed(self, at: int, operation: Operation, side: int) -> Iterator[Candidate]:
        """Yield the proposals for an operand; at first those for a recurrent cell as a whole, where it begins one."""
        yield from own.factors(self.context, operation, side)
        cells: list[Candidate] | None = None
        if self.context.level == 0 and role_of(operation) is Role.PRODUCT:
            cells = self._cells.propose(at)
        yield from cells or ()
        self._hindered |= self._strict and cells == []
        if cells is None or not (cells or self._strict):
            yield from PROPOSE[role_of(operation)](self.context, operation, side)
            yield from own.propose(self.context, operation, side)

    def _children(self, at: int, operation: Operation, side: int, before: Sequence[Choice]) -> list[Choice]:
        """Return the choices for an operand; those whose result is a value of the source alone, if there are any."""
        role, seen = role_of(operation), set()
        if at > self._reached:
            self._reached, self._progress = at, self.tried
        taken = self._signatures(before)
        wanted = {way[len(taken)] for way in self._wanted if way[: len(taken)] == taken and len(way) > len(taken)}
        good: list[Choice] = []
        rest: list[Choice] = []
        factors: list[Choice] = []  # what follows at this operation decides
        for candidate in self._proposed(at, operation, side):
            candidate = self._unknown(candidate)
            if not candidate.pieces:
                continue
            if self.tried > self._limit or self._stuck:
                self._hindered |= self._strict and self._stuck  # what comes next may try as many again
                break
            if candidate.key in seen:
                continue
            seen.add(candidate.key)
            if self._wanted and self._signature(candidate) not in wanted:
                continue
            self.tried += 1
            choice = Choice(at, side, candidate)
            if candidate.kind[:2] == own.FACTOR:
                factors.append(choice)
                continue
            with self.replay.assigned(candidate.changes):
                try:
                    out = self.replay.run(operation)[0]
                except REFUSALS:
                    self._refute(at, "it does not run")
                    continue
            if not np.isnan(out).any() and self.source.has(out, self.context.tolerance):
                good.append(choice)
            elif candidate.kind != own.KIND or self.context.level:
                rest.append(choice)
            else:
                self._refute(at, "the numbers of its buffers give no value of the source")
            if self._wanted and len(good) + len(rest) + len(factors) == len(wanted):
                break
        if self.context.level == 0 and role in (Role.SCALE, Role.SHIFT):
            fused = [choice for choice in rest if choice.candidate.kind[0] in FUSED]
            if self._strict and role is Role.SCALE:  # without a factor it is no more a value than before
                fused = [choice for choice in fused if choice.candidate.kind[0] != "absent"]
            met = len(fused) == len(rest) or self.source.has(
                self.replay.value(operation.data[0]), self.context.tolerance
            )
            self._hindered |= self._strict and not met
            if self._strict or met:  # of fused layers each part is a value of the source, not the whole
                rest = fused
        chosen = factors + (good if good and role is not Role.PRODUCT else good + rest)
        self._refuted[at] = self._refuted.get(at, 0) + len(factors) + len(good) + len(rest) - len(chosen)
        if not chosen:
            self._refute(at, "no parameter of the source fits")
        return chosen
