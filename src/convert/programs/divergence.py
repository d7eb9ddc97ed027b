"""Find the operations at which one program departs from another, and prove it: with the other's values there, it gives the same.

A value of the target is *known* if the source has it. Programs that compute the same are taken apart differently, so an unknown
value is no fault by itself: the faulty region is what the output is reached from through unknown values alone. Its *entries* are
the operations that are given known values only. At the first entry the target's record is given a value of the source's instead,
one after another; the one from which known values follow is what the source computes there. Then the next entry, to the output.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from convert.programs.kinds import ELEMENTWISE, LAYOUT, kind_of
from convert.programs.layouts import layouts, places
from convert.programs.program import Operation, Program, Value
from convert.programs.rerun import Change, Rerun
from convert.programs.shared_values import FEW, STACKED, Part, SharedValues, tells

Array = np.ndarray[Any, np.dtype[Any]]
DEPTH = 8  # operations from an entry to the value that is replaced, and in the source to the one that replaces it
NEAREST = 40  # values that far, on each side
TRIALS = 80  # values put in at an entry
UNKNOWN = 14  # operations that may follow one another without a known result before a trial ends
REPAIRS = 400  # entries of a program
WORK = 3 * 10**9  # elements that all trials may compute; an operation counts as `CALL` more
CALL = 5000


@dataclass(frozen=True)
class Repair:
    """A value of the target that is replaced by one of the source's.

    Attributes:
        target: the operations from known values to the replaced one, in order; empty: a known value is replaced as it is.
        source: those of the source from values that the target has to the one that replaces it; empty: the target has it, too.
        operands: the known values that the target's operations are given, or the known value that is replaced.
        source_operands: the source's values that its operations are given.
        got: the target's value.
        want: the source's, laid out as the target's.
        index: number of the entry in the target.
    """

    target: tuple[Operation, ...]
    source: tuple[Operation, ...]
    operands: tuple[Value, ...]
    source_operands: tuple[Value, ...]
    got: Array = field(repr=False)
    want: Array = field(repr=False)
    index: int


@dataclass(frozen=True)
class Divergence:
    """Where a target departs from its source.

    Attributes:
        repairs: in the order of execution.
        error: of the output with all of them.
        proven: whether the output is equal with them.
        entry: the first operation that is given known values and gives an unknown one, where nothing restores it.
        instead: what the source computes of the same values.
    """

    repairs: tuple[Repair, ...]
    error: float
    proven: bool
    entry: Operation | None = None
    instead: tuple[Operation, ...] = ()


def diverge(
    source: Program,
    target: Program,
    output: str,
    error: Callable[[Array], float],
    enough: float,
    tolerance: float,
) -> Divergence | None:
    """Find where the target departs from the source on the way to an output; None if all values on the way are the source's.

    Args:
        error: of an array as this output.
        enough: the error up to which the output is equal.
        tolerance: relative error up to which values inside the programs are equal.
    """
    source, target = (_on_the_way(program, output) for program in (source, target))
    shared = SharedValues(source, tolerance)
    work = _Work()
    for tentative in (True, False):
        search = _Search(source, target, output, error, enough, shared, tentative, work)
        found = search.run()
        if found is None or found.proven or not search.took_tentative:
            return found
    return found


@dataclass
class _Work:
    done: int = 0

    def add(self, operation: Operation) -> bool:
        """Count an operation that ran; tell whether there may be more."""
        self.done += CALL + sum(value.array.size for value in operation.results)
        return self.done < WORK


class _Search:
    """The state of the target's record, and what of it is known."""

    def __init__(
        self,
        source: Program,
        target: Program,
        output: str,
        error: Callable[[Array], float],
        enough: float,
        shared: SharedValues,
        tentative: bool,
        work: _Work,
    ) -> None:
        self.target, self.shared, self.error, self.enough = target, shared, error, enough
        self.tentative, self.took_tentative, self.work = tentative, False, work
        self.goal = target.outputs[output]
        self.rerun = Rerun(target)
        self.producer = {v: k for k, operation in enumerate(target.operations) for v in operation.results}
        self.source_producer = {v: operation for operation in source.operations for v in operation.results}
        self.users = _users(target.operations)
        self.source_users = _users(source.operations)
        self.found: dict[Value, tuple[Part, ...]] = {}
        self.known: dict[Value, bool] = {}
        for value in target.inputs.values():
            self.found[value], self.known[value] = shared.find(value.array), True
        for operation in target.operations:
            self.assess(operation)
        self.shapes: dict[tuple[str, str], tuple[int, int]] = {}  # of the last repair at a place: its depths

    # ---- what is known

    def assess(self, operation: Operation) -> None:
        """Find the results of an operation among the source's values."""
        for value in operation.results:
            self.found[value], self.known[value] = self.look_up(operation, value, self.rerun)

    def look_up(self, operation: Operation, value: Value, rerun: Rerun) -> tuple[tuple[Part, ...], bool]:
        if not value.data:
            return (), True
        array = rerun.array(value)
        found = self.shared.find(array)
        if found or (array.dtype.kind == "f" and array.size >= FEW):
            return found, bool(found)
        return (), all(self.is_known(operand) for operand in operation.data)

    def is_known(self, value: Value) -> bool:
        return not value.data or self.known.get(value, False)

    def present(self) -> set[Value]:
        """Return the source's values that the target has, as they are or in parts."""
        found = {part for parts in self.found.values() for part in parts}
        counts = Counter((part.value, part.axis) for part in found)
        return {value for (value, axis), n in counts.items() if axis is None or n == value.array.shape[axis]}

    def region(self) -> list[int]:
        """Return the numbers of the operations from which the output is reached through unknown values, in order."""
        region: set[int] = set()
        waiting = [self.goal]
        while waiting:
            value = waiting.pop()
            index = self.producer.get(value)
            if index is None or self.is_known(value) or index in region:
                continue
            region.add(index)
            waiting.extend(self.target.operations[index].operands)
        return sorted(region)

    # ---- the search

    def run(self) -> Divergence | None:
        region = self.region()
        if not region:
            return None
        repairs: list[Repair] = []
        first: Operation | None = None
        given_up: set[int] = set()
        while region and len(repairs) < REPAIRS:
            entries = [k for k in region if all(map(self.is_known, self.target.operations[k].data))]
            entry = next((k for k in entries if k not in given_up), None)
            if entry is None:
                break
            repair = self.repair(entry, set(region))
            if repair is None:
                given_up.add(entry)
                first = first or self.target.operations[entry]
            else:
                repairs.append(repair)
                region = self.region()
            if self.error(self.rerun.array(self.goal)) <= self.enough:
                break
        error = self.error(self.rerun.array(self.goal))
        proven = error <= self.enough
        if proven:
            first = None
        instead = self.instead(first) if first is not None else ()
        return Divergence(tuple(repairs), error, proven, first, instead)

    def repair(self, entry: int, region: set[int]) -> Repair | None:
        """Find a value of the source's that restores what follows the entry, and put it in."""
        operation = self.target.operations[entry]
        place = (operation.where, operation.name)
        before = self.shapes.get(place)
        trials = sorted(self.trials(entry, region), key=lambda t: (t.depths != before, not t.alike, sum(t.depths)))
        for trial in trials[:TRIALS]:
            for change in trial.changes():
                outcome = self.attempt(change, trial, len(region))
                if outcome is None and trial.alike and self.tentative:
                    outcome = self.attempt(change, trial, len(region), tentative=True)
                if outcome is None:
                    continue
                repair = self.describe(entry, trial, change)
                self.rerun = outcome
                for changed in self.target.operations:
                    if any(v in outcome.changed for v in changed.results):
                        self.assess(changed)
                for value, array in change.values.items():
                    self.found[value], self.known[value] = self.shared.find(array), True
                self.shapes[place] = trial.depths
                return repair
        return None

    def attempt(self, change: Change, trial: _Trial, region: int, tentative: bool = False) -> Rerun | None:
        """Return the record with the change if known values follow it; None if none do."""
        rerun = Rerun(self.target, self.rerun)
        moved = set(change.values)
        unknown = 0
        confirmed = tentative
        fresh: dict[Value, bool] = {}
        try:
            for index, operation in rerun.put(change):
                if not self.work.add(operation):
                    return None
                moved |= set(operation.results)
                if confirmed or kind_of(operation) == LAYOUT and self.goal not in operation.results:
                    continue
                if self.goal in operation.results and self.error(rerun.array(self.goal)) <= self.enough:
                    confirmed = True
                    continue
                known = all(self.look_up(operation, v, rerun)[1] for v in operation.results)
                news = known and not all(self.known[v] for v in operation.results)
                if news and _is_evidence(operation, moved, [k for at, k in change.operands if at == index]):
                    confirmed = True
                unknown += not known
                if unknown > UNKNOWN:
                    return None
        except ValueError:
            return None
        if self.goal in change.values and self.error(rerun.array(self.goal)) <= self.enough:
            confirmed = True
        if not confirmed:
            return None
        if tentative:
            self.took_tentative = True
            return rerun
        before = (self.rerun, self.found, self.known)
        self.rerun, self.found, self.known = rerun, dict(self.found), dict(self.known)
        for value in change.values:
            self.known[value] = True
        for operation in self.target.operations:
            if any(v in moved and v not in change.values for v in operation.results):
                self.assess(operation)
        shrinks = len(self.region()) < region
        self.rerun, self.found, self.known = before
        return rerun if shrinks else None

    def trials(self, entry: int, region: set[int]) -> Iterator[_Trial]:
        """Yield what may be replaced near an entry by which value of the source's."""
        operation = self.target.operations[entry]
        present = self.present()
        anchors = [(v, part) for v in operation.data for part in self.found.get(v, ())]
        near: list[tuple[Value, int]] = list(self.after_in_source([part.value for _, part in anchors], present))
        near += [(part.value, 0) for _, part in anchors]
        seen: set[tuple[Value, Value]] = set()
        for value, depth in self.after(operation, region):
            for other, far in near:
                if (value, other) not in seen:
                    seen.add((value, other))
                    alike = depth == far == 1 and self.alike(operation, self.source_producer[other])
                    for part in _parts(other, value):
                        yield _Trial(self, value, part, (depth, far), alike, None)
        for value in operation.data:  # an operation that is missing in front of the entry
            for other, far in near:
                if far and other.array.size == value.array.size and tells(self.rerun.array(value)):
                    yield _Trial(self, value, Part(other), (0, far), False, entry)

    def after(self, operation: Operation, region: set[int]) -> Iterator[tuple[Value, int]]:
        """Yield unknown values of the target behind an operation, with their distance."""
        waiting: list[tuple[Value, int]] = [(v, 1) for v in operation.results if not self.is_known(v)]
        seen: set[Value] = set()
        while waiting and len(seen) < NEAREST:
            value, depth = waiting.pop(0)
            if value in seen or depth > DEPTH:
                continue
            seen.add(value)
            if value.array.size >= FEW and value.array.dtype.kind == "f":
                yield value, depth
            for user in self.users.get(value, ()):
                further = depth + (kind_of(user) != LAYOUT)
                waiting += [
                    (v, further) for v in user.results if self.producer[v] in region and not self.is_known(v)
                ]

    def after_in_source(self, values: Sequence[Value], present: set[Value]) -> Iterator[tuple[Value, int]]:
        """Yield values of the source behind these that the target lacks, with their distance."""
        waiting = [(v, 0) for v in values]
        seen: set[Value] = set()
        while waiting and len(seen) < NEAREST:
            value, depth = waiting.pop(0)
            if value in seen or depth > DEPTH or (depth and value in present):
                continue
            seen.add(value)
            if depth and value.array.size >= FEW and value.array.dtype.kind == "f":
                yield value, depth
            for user in self.source_users.get(value, ()):
                waiting += [(v, depth + (kind_of(user) != LAYOUT)) for v in user.results]

    def alike(self, one: Operation, two: Operation) -> bool:
        """Whether two operations are the same but for a constant, a setting or the order of elements."""
        if kind_of(one) != kind_of(two) or len(one.data) != len(two.data):
            return False
        ours = {part.value for operand in one.data for part in self.found.get(operand, ())}
        return all(root(operand, self.source_producer) in ours or operand in ours for operand in two.data)

    def root(self, value: Value) -> Value:
        """Return the value of the target whose elements this one has in another layout."""
        return root(value, {v: self.target.operations[k] for v, k in self.producer.items()})

    def at_entries(self, value: Value, array: Array) -> dict[tuple[int, int], Array]:
        """Return the operands of entries that are a value in any layout, with other elements for it."""
        made = {}
        first = self.root(value)
        for index in self.region():
            operation = self.target.operations[index]
            if not all(map(self.is_known, operation.data)):
                continue
            for k, operand in enumerate(operation.operands):
                if operand.data and self.root(operand) is first:
                    order = places(self.rerun.array(value), self.rerun.array(operand))
                    laid = array if order is None else array.ravel()[order]
                    made[index, k] = laid.reshape(operand.array.shape)
        return made

    # ---- what was found

    def describe(self, entry: int, trial: _Trial, change: Change) -> Repair:
        """Return the operations of both sides that the change stands for."""
        target = self.behind_target(trial.value) if trial.missing_at is None else ()
        present = self.present()
        source = self.behind_source(trial.part.value, present)
        operands = tuple({v: None for o in target for v in o.data if self.is_known(v)}) or (trial.value,)
        theirs = tuple({v: None for o in source for v in o.data if v in present}) or (trial.part.value,)
        want = next(iter(change.values.values()), None)
        if want is None:
            want = next(iter(change.operands.values()))
        return Repair(target, source, operands, theirs, self.rerun.array(trial.value), want, entry)

    def behind_target(self, value: Value) -> tuple[Operation, ...]:
        """Return the operations that compute an unknown value from known ones."""
        found: set[int] = set()
        waiting = [value]
        while waiting:
            one = waiting.pop()
            index = self.producer.get(one)
            if index is not None and not self.is_known(one) and index not in found:
                found.add(index)
                waiting.extend(self.target.operations[index].operands)
        return tuple(self.target.operations[k] for k in sorted(found))

    def behind_source(self, value: Value, present: set[Value]) -> tuple[Operation, ...]:
        """Return the operations of the source that compute a value from those that the target has."""
        found: dict[Operation, None] = {}
        waiting = [value]
        while waiting:
            one = waiting.pop()
            operation = self.source_producer.get(one)
            if operation is not None and one.data and one not in present and operation not in found:
                found[operation] = None
                waiting.extend(operation.operands)
        return tuple(reversed(found))

    def instead(self, entry: Operation) -> tuple[Operation, ...]:
        """Return what the source computes of the values that an entry is given."""
        values = [part.value for v in entry.data for part in self.found.get(v, ())]
        near = [value for value, depth in self.after_in_source(values, self.present()) if depth == 1]
        return tuple(dict.fromkeys(self.source_producer[value] for value in near))


@dataclass(frozen=True)
class _Trial:
    """A value of the target, and one of the source's to put there.

    Attributes:
        depths: the distance of the two from the entry.
        alike: whether both are results of operations that differ in a constant or a setting alone.
        missing_at: number of the entry, where the value is known and an operation is missing behind it.
    """

    search: _Search
    value: Value
    part: Part
    depths: tuple[int, int]
    alike: bool
    missing_at: int | None

    def changes(self) -> Iterator[Change]:
        """Yield the ways to put it in."""
        search = self.search
        anchors = [
            (part.array, search.rerun.array(v))
            for v in search.target.operations[self.missing_at].data
            for part in search.found.get(v, ())
        ] if self.missing_at is not None else self._anchors()
        if self.missing_at is None:
            for array in layouts(self.part.array, search.rerun.array(self.value), anchors):
                yield Change({self.value: array})
            return
        first = search.root(self.value)
        for array in layouts(self.part.array, search.rerun.array(first), anchors):
            yield Change({first: array})
        for array in layouts(self.part.array, search.rerun.array(self.value), anchors):
            yield Change(operands=search.at_entries(self.value, array))

    def _anchors(self) -> list[tuple[Array, Array]]:
        search = self.search
        operation = search.target.operations[search.producer[self.value]]
        return [(part.array, search.rerun.array(v)) for v in operation.data for part in search.found.get(v, ())]


def _on_the_way(program: Program, output: str) -> Program:
    """Return the program with the operations alone that an output is computed from."""
    producer = {value: operation for operation in program.operations for value in operation.results}
    needed: set[Operation] = set()
    waiting = [program.outputs[output]]
    while waiting:
        operation = producer.get(waiting.pop())
        if operation is not None and operation not in needed:
            needed.add(operation)
            waiting.extend(operation.operands)
    return replace(program, operations=tuple(one for one in program.operations if one in needed))


def _users(operations: Sequence[Operation]) -> dict[Value, list[Operation]]:
    """Return the operations that use each value."""
    users: dict[Value, list[Operation]] = {}
    for operation in operations:
        for value in dict.fromkeys(operation.operands):
            users.setdefault(value, []).append(operation)
    return users


def _parts(value: Value, like: Value) -> Iterator[Part]:
    """Yield the value, or what stands at the indices of an axis, with as many elements as another value."""
    size = like.array.size
    if value.array.size == size:
        yield Part(value)
        return
    for axis, length in enumerate(value.array.shape):
        if 1 < length <= STACKED and value.array.size == size * length:
            yield from (Part(value, axis, index) for index in range(length))


def root(value: Value, producer: Mapping[Value, Operation]) -> Value:
    """Return the value whose elements this one has in another layout."""
    operation = producer.get(value)
    while operation is not None and kind_of(operation) == LAYOUT and len(operation.data) == 1:
        if operation.data[0].array.size != value.array.size:
            break
        value = operation.data[0]
        operation = producer.get(value)
    return value


def _is_evidence(operation: Operation, moved: set[Value], given: Sequence[int]) -> bool:
    """Whether a known result of an operation on replaced values shows that these are right, and laid out rightly.

    Of a value alone it shows nothing: whatever the source computes of the replacing value is known.
    """
    kind = kind_of(operation)
    if kind in (LAYOUT, "part", "join"):
        return False
    if kind not in ELEMENTWISE:
        return True
    others = [v for k, v in enumerate(operation.operands) if k not in given and v not in moved]
    return any(v.data or (v.leaves and v.array.size > 1) for v in others)
