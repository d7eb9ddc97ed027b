"""Run the target through a segment, propose what its parameters are, and refute.

What enters a product or a convolution must be a value of the source; so must what a scale or a bias gives, at first. A segment
ends where a value depends on everything that was assigned.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from convert.inference.candidates.candidate import Candidate, Choice, shapes_but_rows
from convert.inference.candidates.factors import carriers, factor_of
from convert.inference.candidates.replay import OtherPathError
from convert.inference.candidates.source import Source
from convert.inference.derivation import Role
from convert.inference.forms.elements import JOINS, MOVES, behind_moves
from convert.inference.meetings.added_up import weighs_rows
from convert.inference.meetings.columns import are_few
from convert.inference.meetings.sites import VISIBLE_SUM, parameter_operands, role_of
from convert.inference.proposals import (
    computed,
    convolutions,
    elementwise,
    lookups,
    others,
    own,
    products,
    with_vectors,
)
from convert.inference.proposals.first_steps import AT_ZEROS, FirstSteps
from convert.inference.proposals.gates import Cells
from convert.inference.segment.aside import Aside
from convert.inference.segment.of_source import OfSource
from convert.inference.segment.segments import Failure, Level, Solution
from convert.numerics.magnitude import relative_error
from convert.programs.program import REFUSALS, Operation, Program, Value

Array = np.ndarray[Any, np.dtype[Any]]
Signatures = tuple[tuple[Any, ...], ...]  # of the choices of several solutions
# What a choice is compared with; the first two as `Candidate.places`.
OTHER_LAYER, NEXT_EXPERT, OTHER_BEGIN = FORMS = 0, 1, 2

PROPOSE = {
    Role.PRODUCT: products.propose,
    Role.CONVOLUTION: convolutions.propose,
    Role.SCALE: elementwise.propose,
    Role.SHIFT: elementwise.propose,
    Role.LOOKUP: lookups.look_up,
    Role.OTHER: others.any_leaf,
}

WITHOUT_PROGRESS = 600  # candidates after the deepest operation was reached
FUSED = ("anywhere", "partly", "zeros", "absent")  # kinds of candidates


@dataclass(frozen=True)
class _Dead:
    """A state of a level from which no solution was found.

    Attributes:
        tried: so many candidates.
        complete: whether there were no more.
        hindered: whether the level left out what the next one tries.
    """

    tried: int
    complete: bool
    hindered: bool


class Walk(OfSource):
    """Walks through segments, and how much was tried in them.

    Attributes:
        failure: the deepest operation at which everything was refuted.
        strictly_failed: the deepest one at a strict level, which refutes the first wrong value, with what was assigned on the way.
        tried: candidates in all.
        patience: so many candidates after the deepest operation was reached.
        by_parts: whether each value that is joined with others must be the source's: a source that joins nothing has none.
        skipped: what begins like an operation at which the programs differ (`code`): there only what was found in another layer is tried.
        met_nothing: whether no row met some parameter, so that other weights may show more.
        elsewhere: the parameters that were known where the target first took another path than in its record; None if it did not.
    """

    def __init__(self, source: Source, target: Program) -> None:
        super().__init__(source, target)
        self.failure = self.strictly_failed = Failure()
        self.tried, self.patience = 0, WITHOUT_PROGRESS
        self.by_parts = False
        self.skipped: set[Any] = set()
        self.met_nothing = False
        self.elsewhere: Mapping[str, Array] | None = None
        self._cells = Cells(self.context)
        self._first_steps = FirstSteps(self.context, self._cells)
        self._aside = Aside(self._order, target.outputs.values())
        self._inputs = [tuple(self._made_by.get(x, -1) for x in operation.data) for operation in self._order]
        self._dead: dict[Any, _Dead] = {}  # by path, operation and level
        self._reached = -1
        self._near = self._begin = self._budget = self._limit = self._progress = self._start = 0
        self._cuts = 0  # how often candidates were left out
        self._passed = 0  # how often a product was reached that ends no segment
        self._loose = self._early = self._strict = self._hindered = self._differs = False
        self._wanted: Signatures = ()
        self._form = OTHER_LAYER
        self._refuted: dict[int, int] = {}

    def walks(
        self, begin: int, limit: int, level: Level | None = None, wanted: Signatures = (), form: int = OTHER_LAYER
    ) -> Iterator[Solution]:
        """Yield the ways through the segment that begins at an operation.

        Args:
            begin: the operation.
            limit: candidates that are tried, and again so many behind the deepest operation that they lead to: a segment may hold the
                layers of whole models that run beside one another.
            level: what is tried, and how soon it is refuted. Without one, at `Context.level`, the ways go to the next operation whose
                data or result is no value of the source, and outputs may differ.
            wanted: signatures of the solutions that are looked for; empty: all.
            form: of these signatures.
        """
        self._loose, self._begin, self._wanted, self._form = level is None, begin, wanted, form
        self._early = self._strict = self._hindered = self._differs = False
        if level is not None:
            self.context.level, self._early, self._strict = level
        self.context.strict = self._strict
        self.context.near, self._budget, self._limit, self._refuted = self._near, limit, self.tried + limit, {}
        yield from self._walk(begin, [])

    def to_the_failure(self, begin: int) -> Solution | None:
        """Return the way from an operation to the deepest one that a strict level reached; None if another one led there."""
        failed = self.strictly_failed
        choices = failed.choices[len(self.taken) :]
        if failed.index <= begin or list(failed.choices[: len(self.taken)]) != self.taken:
            return None
        self._begin = begin
        for choice in choices:
            self.take(choice)
        try:
            for operation in self._order[begin : failed.index]:
                if operation.data:
                    self.replay.keep(operation, self.replay.run(operation))
            return self._solution(failed.index, choices)
        except REFUSALS:
            return None
        finally:
            for choice in reversed(choices):
                self.give_back(choice)

    def code(self, at: int) -> Any:
        """Return what an operation has in common with the same one in another layer."""
        if at == len(self._order):
            return None
        operation = self._order[at]
        return operation.where, operation.name, tuple(x.array.shape for x in operation.operands)

    def like(self, at: int) -> Any:
        """Return what an operation has in common with the same one in another layer, or for another expert, which has its own tokens."""
        if at == len(self._order):
            return None
        operation = self._order[at]
        return operation.where, operation.name, shapes_but_rows(operation)

    def signatures(self, choices: Sequence[Choice], form: int) -> tuple[Any, ...]:
        """Return what each choice has in common with that of the same operation in another layer, also one that other operations are in front of, or for the next expert."""
        candidates = [choice.candidate for choice in choices]
        return tuple(self._signature(candidate, candidates, form) for candidate in candidates)

    def _signature(self, candidate: Candidate, candidates: Sequence[Candidate], form: int) -> Any:
        """Return it of one of the choices of a segment: how far its meeting is from the last one in front of it, or from its first."""
        first = self._near
        if form != OTHER_LAYER:
            first = next((p.meeting.index for x in candidates for p in x.pieces if p.meeting is not None), first)
        steps = tuple(None if p.meeting is None else p.meeting.index - first for p in candidate.pieces)
        return candidate.kind, steps, candidate.places[NEXT_EXPERT if form == NEXT_EXPERT else OTHER_LAYER]

    def _first_meeting(self, at: int) -> int:
        """Return the next operation in which data meets a parameter; how many operations there are if there is none."""
        return next((k for k in range(at, len(self._order)) if parameter_operands(self._order[k])), len(self._order))

    def _walk(self, first: int, choices: list[Choice]) -> Iterator[Solution]:
        """Run the target from an operation on; yield the solutions of the segment."""
        for at in range(first, len(self._order)):
            operation = self._order[at]
            if not any(operand.data for operand in operation.operands):
                continue
            sides = parameter_operands(operation)
            if sides and role_of(operation) in (Role.PRODUCT, Role.CONVOLUTION):
                if not self.is_of_source(operation):
                    if self._loose and at > self._begin:
                        yield self._solution(at, choices)
                    self._refute(at, "no value of the source equals what enters")
                    return
                weighed = self._strict and self.context.is_weighed(operation)  # the rows of any expert enter it
                indices = {choice.index for choice in choices}
                aside = {k: ends for k in indices if (ends := self._aside.ends(k, at))}
                known = all(map(self._is_known_value, itertools.chain(*aside.values())))
                if self._strict and not known:
                    self._hindered = True
                    self._refute(at, "the source has no such value as its branch ends with")
                    return
                others = [choice for choice in choices if choice.index not in aside]
                met = not others or self._depends_on(operation.data[0], others)
                if choices and not weighed and known and met:
                    yield replace(self._solution(at, choices), aside=aside)
                    return
                self._passed += bool(choices)
            lacking = [side for side in sides if not self.replay.known(operation.operands[side])]
            replaced: dict[int, Array] = {}
            if lacking and (self._shows_nothing(operation) or self.is_zero(operation.operands[lacking[0]])):
                replaced = {side: np.nan_to_num(self.replay.value(operation.operands[side])) for side in lacking}
            elif lacking:
                further = self._loosely if self._loose else self._strictly
                yield from further(at, operation, lacking[0], choices)
                return
            try:
                results = self.replay.run(operation, replaced)
            except REFUSALS as error:  # a wrong candidate may not run
                if self._strict and self.elsewhere is None and isinstance(error, OtherPathError):
                    self.elsewhere = self.replay.known_parameters()
                self._refute(at, f"it does not run: {error}")
                return
            self.replay.keep(operation, results)
            if not choices or sides:
                continue
            if self._strict and not self.is_computed(operation, results[0], choices):
                self._hindered = True
                self._refute(at, f"the source computes no {operation.name} of this value")
                return
            factor = None if self._loose else factor_of(self.context, operation)
            if factor is not None:
                yield from self._carried(at, choices, factor)
                return
            if self._early and not self.pairs(operation, results[0]):
                self._hindered = True
                self._refute(at, "no product of two values of the source has this result")
                return
            if self.by_parts and self._is_joined(operation) and not self._is_known_value(operation.results[0]):
                self._refute(at, "the source has no such value as is joined with others")
                return
            if not self._strict or not weighs_rows(operation) or not results[0].any():
                continue
            gates = min(operation.operands, key=lambda x: x.array.shape[-1])
            if not gates.leaves or any(self._depends_on(gates, [choice]) for choice in choices):
                continue  # they are no gates, such as a number of edges, or what the segment looks for
            if not self.is_added(results[0]):
                self._hindered = True
                self._refute(at, "the source adds up no such rows")
                return
            if self._depends_on(operation.results[0], choices):
                yield self._solution(at + 1, choices)
                return
        if self._loose or self._outputs_agree():
            yield self._solution(len(self._order), choices)

    def _loosely(self, at: int, operation: Operation, side: int, choices: list[Choice]) -> Iterator[Solution]:
        """Yield the solutions with each choice for an operand, or that end in front of it."""
        further = at > self._begin
        if further and not self.is_of_source(operation):
            yield self._solution(at, choices)
            return
        children = self._children(at, operation, side, choices)
        if further:  # a constant fits wherever the rest does
            children = [choice for choice in children if not choice.candidate.constant]
            if not children:
                yield self._solution(at, choices)
        yield from self._with_each(at, children, choices)

    def _strictly(self, at: int, operation: Operation, side: int, choices: list[Choice]) -> Iterator[Solution]:
        """Yield the solutions with each choice for an operand; none where none was found before with what is assigned now."""
        key = self.path, at, self.context.level, self._early, self._strict
        dead = self._dead.get(key)
        if dead is not None and (dead.complete or dead.tried >= self.patience):
            self._refute(at, "no parameter of the source fits")
            self._hindered |= dead.hindered
            self._progress -= dead.tried  # as if they were tried again
            self._start -= dead.tried
            return
        if at > self._begin and not self._strict and self.code(at) in self.skipped:
            self._refute(at, "the programs differ at an operation like this one")
            self._differs = True
            return
        if choices and self._early and self.context.level and not self.pairs_ahead(at):
            self._refute(at, "no product of two values of the source has the result that follows")
            return
        before, cuts, passed = self.tried, self._cuts, self._passed
        hindered, self._hindered = self._hindered, False
        found = False
        for solution in self._with_each(at, self._children(at, operation, side, choices), choices):
            found = True
            yield solution
        if not (found or self._wanted or passed < self._passed):
            self._dead[key] = _Dead(self.tried - before, self._cuts == cuts, self._hindered)
        self._hindered |= hindered

    def _with_each(self, at: int, children: Sequence[Choice], choices: list[Choice]) -> Iterator[Solution]:
        for choice in children:
            self.take(choice)
            try:
                yield from self._walk(at, [*choices, choice])
            finally:
                self.give_back(choice)

    def _shows_nothing(self, operation: Operation) -> bool:
        """Whether no result tells the parameter: a matrix that meets zeros, or what meets no row, as an expert without tokens."""
        met = self.replay.value(operation.data[0])
        if operation.name == VISIBLE_SUM and not self.source.same_data(Role.SHIFT, met, self.context.tolerance):
            return True  # the programs hide other positions; the sum itself follows
        self.met_nothing |= not met.size
        return not met.size or (role_of(operation) in (Role.PRODUCT, Role.CONVOLUTION) and not met.any())

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
            self.give_back(choice)
        for choice in new:
            self.take(choice)
        for operation in self._order[self._begin : at + 1]:
            if operation.data:
                self.replay.keep(operation, self.replay.run(operation))

    def _solution(self, end: int, choices: Sequence[Choice]) -> Solution:
        begin = self._begin
        values = {
            result: self.replay.values[result]
            for operation in self._order[begin:end]
            for result in operation.results
            if result.data and result in self.replay.values  # what an exchange made unknown again has none
        }
        return Solution(begin, end, tuple(choices), values)

    def _refute(self, at: int, problem: str) -> None:
        self._refuted[at] = self._refuted.get(at, 0) + 1
        if self._strict and at > self.strictly_failed.index:
            self.strictly_failed = Failure(at, problem, tuple(self.taken))
        if at > self.failure.index:
            self.failure = Failure(at, problem)
            self._progress = self.tried

    def _is_joined(self, operation: Operation) -> bool:
        """Whether an operation that joins nothing gives a value that the target only joins with others."""
        users = list(behind_moves(operation.results[0], self.target.users))
        return bool(users) and operation.name not in MOVES and all(user.name in JOINS for user in users)

    def _is_known_value(self, value: Value) -> bool:
        array = self.replay.value(value)
        return bool(array.any()) and self.source.has(array, self.context.tolerance)

    def _depends_on(self, value: Value, choices: Sequence[Choice]) -> bool:
        """Whether a value is computed from the results of all operations of these choices."""
        indices = {choice.index for choice in choices}
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
            if got.shape != expected.shape:
                shapes = f"the target gives shape {list(got.shape)}, the source {list(expected.shape)}"
                self._refute(len(self._order), f"the output {name!r} differs: {shapes}")
                return False
            if relative_error(got, expected) > self.context.tolerance:
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
            if self._first_steps.are_met(operation, side):
                yield from self._first_steps.of_joined(operation, side)
                yield from self._first_steps.of_blocks(at, operation, side)
            else:
                yield from PROPOSE[role_of(operation)](self.context, operation, side)
            if role_of(operation) is Role.PRODUCT:
                yield from self._cells.of_one_product(at)
            elif role_of(operation) is Role.SHIFT and self.context.level > 0:
                yield from self._first_steps.of_gates(at)
            yield from computed.propose(self.context, operation, side)
            if role_of(operation) in (Role.PRODUCT, Role.CONVOLUTION):
                yield from with_vectors.propose(self.context, operation, side, PROPOSE[role_of(operation)])
            yield from own.propose(self.context, operation, side)
            if not self._strict:
                yield from others.of_kernels(self.context, operation, side)

    def _children(self, at: int, operation: Operation, side: int, before: Sequence[Choice]) -> list[Choice]:
        """Return the choices for an operand; those whose result is a value of the source alone, if there are any."""
        role = role_of(operation)
        if at > self._reached:
            self._reached, self._progress = at, self.tried
            self._limit = self._limit if self._loose else self.tried + self._budget
        taken = self.signatures(before, self._form)
        wanted = {way[len(taken)] for way in self._wanted if way[: len(taken)] == taken and len(way) > len(taken)}
        good: list[Choice] = []
        rest: list[Choice] = []
        factors: list[Choice] = []  # what follows at this operation decides
        made: dict[Choice, Array] = {}
        for choice in self._choices(at, operation, side, before, wanted):
            candidate = choice.candidate
            if candidate.kind[:2] == own.FACTOR or candidate.kind in (elementwise.BEHIND_PRODUCT, AT_ZEROS):
                factors.append(choice)
            elif (out := self._result(operation, candidate)) is None:
                self._refute(at, "it does not run")
            elif self._is_value(out, candidate):
                made[choice] = out
                good.append(choice)
            elif candidate.kind != own.KIND:
                made[choice] = out
                rest.append(choice)
            elif not self._strict:
                factors.append(choice)  # of a mask or a turn that the source writes in another way
            else:
                self._hindered = True
                self._refute(at, "the numbers of its buffers give no value of the source")
            if self._wanted and len(good) + len(rest) + len(factors) == len(wanted):
                break
        if (self.context.level == 0 or self._strict) and role in (Role.SCALE, Role.SHIFT):
            rest = list(self._of_fused(operation, rest))
        if role is Role.PRODUCT and self.context.level == 0:
            good, rest = self._with_sums_first(at, made, good, rest)
        chosen = factors + (good if good and role is not Role.PRODUCT else good + rest)
        self._refuted[at] = self._refuted.get(at, 0) + len(factors) + len(good) + len(rest) - len(chosen)
        if not chosen:
            self._refute(at, "no parameter of the source fits")
        return chosen

    def _with_sums_first(
        self, at: int, made: Mapping[Choice, Array], good: list[Choice], rest: list[Choice]
    ) -> tuple[list[Choice], list[Choice]]:
        """Return the choices for a term of a sum with which the sum is a value of the source, and the others; at first only these.

        Of matrices that lie in one leaf, the data that they meet tells none apart.

        Args:
            made: what the product gives with each choice.
        """
        steps = self.up_to_a_sum(at)
        if not steps or len(good) + len(rest) < 2:
            return good, rest
        product = self._order[at]
        added = [x for x in (*good, *rest) if self.is_sum(product, made[x], steps, len(x.candidate.pieces))]
        others = [x for x in (*good, *rest) if x not in added]
        self._hindered |= self._strict and bool(others)
        return added, [] if self._strict else others

    def _is_value(self, out: Array, candidate: Candidate) -> bool:
        """Whether what an operation gives with a candidate is a value of the source; zeros in place of a parameter are no sign of it."""
        shows = out.any() or candidate.kind[0] != "zeros"
        return bool(shows) and not np.isnan(out).any() and self.source.has(out, self.context.tolerance)

    def _choices(
        self, at: int, operation: Operation, side: int, before: Sequence[Choice], wanted: Collection[Any]
    ) -> Iterator[Choice]:
        """Yield what is proposed for an operand, as far as it is wanted and the patience lasts; each once."""
        seen, taken = set(), [choice.candidate for choice in before]
        for proposed in self._proposed(at, operation, side):
            candidate = self.unknown(proposed)
            if not candidate.pieces:
                continue
            if self.tried > self._limit or self._stuck:
                self._hindered |= self._strict and self._stuck  # what comes next may try as many again
                self._cuts += 1
                return
            further = candidate.kind[0] == products.TOGETHER or are_few(candidate.tied)
            self._hindered |= self._strict and further  # single experts come next, and other orders of equal columns
            if candidate.key in seen:
                continue
            seen.add(candidate.key)
            if self._wanted and self._signature(candidate, [*taken, candidate], self._form) not in wanted:
                continue
            self.tried += 1
            yield Choice(at, side, candidate)

    def _result(self, operation: Operation, candidate: Candidate) -> Array | None:
        """Return what an operation gives with a candidate; None if it does not run."""
        with self.replay.assigned(candidate.changes):
            try:
                return self.replay.run(operation)[0]
            except REFUSALS:
                return None

    def _of_fused(self, operation: Operation, rest: Sequence[Choice]) -> Sequence[Choice]:
        """Return the choices that may be right although the result is no value of the source, as those of fused layers."""
        fused = [choice for choice in rest if choice.candidate.kind[0] in FUSED]
        if self._strict and role_of(operation) is Role.SCALE:  # without a factor it is no more a value than before
            fused = [choice for choice in fused if choice.candidate.kind[0] != "absent"]
        met = len(fused) == len(rest) or self.source.has(self.replay.value(operation.data[0]), self.context.tolerance)
        self._hindered |= self._strict and not met
        # Of fused layers each part is a value of the source, not the whole.
        return fused if self._strict or met else rest
