"""Find the operations at which one program departs from another, and prove it: with the other's values there, it gives the same.

A value of the target is *known* if the source has it. Programs that compute the same are taken apart differently, so an unknown
value is no fault by itself: the faulty region is what the output is reached from through unknown values alone. Its *entries* are
the operations that are given known values only. At the first entry the target's record is given a value of the source's instead,
one after another; the one from which known values follow is what the source computes there. Then the next entry, to the output.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np

from convert.numerics.magnitude import relative_error
from convert.programs.divergence.constants import other_constants
from convert.programs.divergence.graph import on_the_way, root
from convert.programs.divergence.kinds import ELEMENTWISE, LAYOUT, kind_of
from convert.programs.divergence.knowledge import Knowledge
from convert.programs.divergence.layouts import same
from convert.programs.divergence.needed import needed
from convert.programs.divergence.padding_rows import with_rows_filled
from convert.programs.divergence.repair import LAYERS, Repair, few, is_local, place_of
from convert.programs.divergence.rerun import Change, Rerun
from convert.programs.divergence.shared_values import SharedValues, confirms, is_rare, same_numbers, tells
from convert.programs.divergence.trials import Trial, after_in_source, trials
from convert.programs.fingerprint import EXACT
from convert.programs.program import Operation, Program, Value

Array = np.ndarray[Any, np.dtype[Any]]
TRIALS = 80  # values put in at an entry
UNKNOWN = 14  # operations that may follow one another without a known result before a trial ends
REPAIRS = 400  # entries of a program
PLACES = 3  # lines at which repairs explain a difference; with more of them any two programs are made equal
WORK = 10**9  # elements that all trials may compute; an operation counts as `CALL` more
CALL = 5000


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


@np.errstate(all="ignore")
def diverge(
    source: Program,
    target: Program,
    output: str,
    error: Callable[[Array], float],
    enough: float,
    tolerance: float,
    lacking: Collection[str] = (),
) -> Divergence | None:
    """Find where the target departs from the source on the way to an output; None if all values on the way are the source's.

    Args:
        error: of an array as this output.
        enough: the error up to which the output is equal.
        tolerance: relative error up to which values inside the programs are equal.
        lacking: parameters of the target for which nothing was found.
    """
    whole_source, source = source, on_the_way(source, output)
    used = on_the_way(target, output)
    shared = SharedValues(source, tolerance)
    found = _diverge(Knowledge(source, used, output, shared, lacking), error, enough)
    goal = used.outputs[output]
    if (found is None or not found.proven) and is_rare(goal.array) and error(goal.array) > enough:
        with_numbers = SharedValues(source, tolerance, numbers=True)  # the terms of a loss are single numbers
        of_numbers = _diverge(Knowledge(source, used, output, with_numbers, lacking), error, enough)
        found = of_numbers if found is None or (of_numbers is not None and of_numbers.proven) else found
    if found is not None and not found.proven and len(source.operations) < len(whole_source.operations):
        # What the target joins and takes apart again, such as a box and its score, the source may have for another output.
        values = SharedValues(whole_source, tolerance)
        of_all = _diverge(Knowledge(whole_source, used, output, values, lacking), error, enough)
        found = found if of_all is None else of_all
    if found is None or not _is_vague(found) or len(used.operations) == len(target.operations):
        return found
    if target.taken_out:  # what the record does not use may be used outside of the framework
        return found
    # What the target computes and does not use may be what is missing: a residual, a gate.
    whole = _diverge(Knowledge(source, target, output, shared, lacking), error, enough)
    return whole if whole is not None and whole.proven else found


def _is_vague(found: Divergence) -> bool:
    """Whether nothing restores the output, or a value that a layer is given, without a word of how it is computed."""
    return not found.proven or any(one.layer is not None and not one.source and not one.made for one in found.repairs)


def _diverge(plain: Knowledge, error: Callable[[Array], float], enough: float) -> Divergence | None:
    """Find where a target departs, with the operations that it has."""
    found = _of_parameters(plain, error, enough)
    for known in dict.fromkeys((with_rows_filled(plain), plain)):  # the rows of zeros may be the fault
        if found is not None and found.proven:
            break
        found = _searched(known, error, enough)
        if known is not plain and found is not None and found.proven:
            found = _alone(plain.target, found, plain.goal, error, enough)
    if (
        found is None
        or not found.proven
        or any(not one.change.values and not one.change.operands for one in found.repairs)
    ):
        return found
    kept = needed(plain.target, found.repairs, lambda run: error(run.array(plain.goal)), enough)
    return replace(found, repairs=kept)


def _of_parameters(known: Knowledge, error: Callable[[Array], float], enough: float) -> Divergence | None:
    """Return other constants in what is computed from parameters alone, where they restore the output."""
    repairs = other_constants(known)
    if not repairs or error(known.goal.array) <= enough:
        return None
    return _alone(known.target, Divergence(repairs, 0.0, proven=True), known.goal, error, enough)


def _searched(known: Knowledge, error: Callable[[Array], float], enough: float) -> Divergence | None:
    """Return what a search finds.

    First, an operation that differs in a constant alone is replaced before anything confirms it: RoPE has eight of them in front of
    the next value that the source has.
    """
    found = None
    for tentative in (True, False):
        search = _Search(known, lambda got: error(got) <= enough, tentative)
        found = search.run(error)
        if found is None or found.proven or not search.took_tentative:
            break
    return found


def _alone(
    target: Program, found: Divergence, goal: Value, error: Callable[[Array], float], enough: float
) -> Divergence | None:
    """Return a divergence whose repairs restore the output without what was put into rows of padding; None if they do not."""
    rerun = Rerun(target)
    try:
        for repair in found.repairs:
            list(rerun.put(repair.change))
    except ValueError:
        return None
    left = error(rerun.array(goal))
    return replace(found, error=left) if left <= enough else None


class _Search:
    """One search; `known` changes with each repair."""

    def __init__(self, known: Knowledge, equal: Callable[[Array], bool], tentative: bool) -> None:
        self.known, self.equal, self.tentative, self.took_tentative = known, equal, tentative, False
        self.work = 0
        self.last: dict[tuple[str, str], Trial] = {}  # the last repair at a place

    def at_goal(self, rerun: Rerun) -> bool:
        """Whether the output is equal."""
        return self.equal(rerun.array(self.known.goal))

    def run(self, error: Callable[[Array], float]) -> Divergence | None:
        """Repair one entry after another."""
        region = self.known.region()
        if not region:
            return self.behind_the_end([])
        repairs: list[Repair] = []
        first: Operation | None = None
        given_up: set[int] = set()
        proven = False
        while region and not proven and len(repairs) < REPAIRS:
            entry = next((k for k in region if k not in given_up and self.known.is_entry(k)), None)
            if entry is None:
                break
            repair = self.repair(entry, set(region))
            if repair is None:
                given_up.add(entry)
                first = first or self.known.target.operations[entry]
                continue
            repairs.append(repair)
            region = self.known.region()
            proven = self.at_goal(self.known.rerun)
        if not region and not proven and (found := self.behind_the_end(repairs)) is not None:
            return found
        left = error(self.known.array(self.known.goal))
        if proven and len({place_of(one) for one in repairs}) > PLACES:
            begins = self.known.target.operations[repairs[0].index]
            return Divergence(tuple(repairs[:1]), left, False, begins, self.instead(begins))
        if proven or first is None:
            return Divergence(tuple(repairs), left, proven)
        return Divergence(self.needed(repairs, given_up), left, proven, first, self.instead(first))

    def needed(self, repairs: Sequence[Repair], given_up: Collection[int]) -> tuple[Repair, ...]:
        """Return the repairs that change what the operations that nothing restores are given: a mask that a later one covers does not."""
        known = self.known
        given = {v for k in given_up for v in known.target.operations[k].data if not same(known.array(v), v.array)}

        def error(run: Rerun) -> float:
            return max(relative_error(run.array(v), known.array(v)) for v in given)

        return needed(known.target, repairs, error, EXACT) if given else tuple(repairs)

    def behind_the_end(self, repairs: Sequence[Repair]) -> Divergence | None:
        """Return what the source computes of the target's output, where that is one of its values; None if it computes nothing."""
        known = self.known
        parts = () if self.at_goal(known.rerun) else known.found.get(known.goal, ())
        if not parts:
            return None
        source = few(known.between([part.value for part in parts], known.source_goal))
        if not source and not confirms(known.array(known.goal)):  # signs in another order are no sign of anything
            return None
        got, want, last = known.array(known.goal), known.source_goal, len(known.target.operations)
        begin = (parts[0].value,) if source and parts[0].axis is None else (want,)
        repair = Repair((), source, (known.goal,), (got,), begin, got, want.array, last, Change())
        return Divergence((*repairs, repair), 0.0, proven=True)

    def repair(self, entry: int, region: set[int]) -> Repair | None:
        """Find a value of the source's that restores what follows the entry, and put it in."""
        operation = self.known.target.operations[entry]
        place = (operation.where, operation.name)
        last = self.last.get(place)
        every = list(trials(self.known, entry, region))
        found = sorted(
            (t for t in every if not t.of_layer),
            key=lambda t: (last is None or t.depths != last.depths, not t.similar, sum(t.depths)),
        )
        expected = [
            t for t in every if last is not None and self.same(t, last)
        ]  # the same difference in the next layer
        best: tuple[int, Trial, Repair, Knowledge] | None = None
        weak = False  # then all are tried, and the one is taken that leaves least
        missing = [t for t in found[TRIALS:] if t.missing_at is not None]
        for trial in (*expected, *(t for t in every if t.of_layer), *found[:TRIALS], *missing):
            for change in trial.changes():
                described = cache(partial(self.described, entry, trial, change))
                outcome = self.attempt(change, len(region), trial.similar and self.tentative, described)
                repair = described() if outcome is not None else None
                if outcome is None or repair is None:
                    continue
                left = 0 if self.at_goal(outcome.rerun) else len(outcome.region())
                if best is not None and (
                    (left, _is_weak(trial, outcome)) >= (best[0], _is_weak(best[1], best[3]))
                    or _goes_on_from(repair, best[2])
                ):
                    continue
                best = left, trial, repair, outcome
                if not left or trial.missing_at is None:  # of a missing operation, all ways to put it in are compared
                    break
            weak = weak or (best is not None and _is_weak(best[1], best[3]))
            if best is not None and (best[1] in expected or not (best[0] and weak)):
                break
        if best is None:
            return None
        _, trial, repair, self.known = best
        self.last[place] = trial
        return repair

    def same(self, one: Trial, other: Trial) -> bool:
        """Whether two trials put in values that the same line of the source gives, in the same way."""
        ours, theirs = (self.known.source_producer.get(trial.part.value) for trial in (one, other))
        if ours is None or theirs is None or (ours.where, ours.name) != (theirs.where, theirs.name):
            return False
        ways = [(t.depths, t.of_layer, t.missing_at is None, t.part.axis, t.part.index) for t in (one, other)]
        return ways[0] == ways[1]

    def attempt(
        self, change: Change, region: int, tentative: bool, described: Callable[[], Repair | None]
    ) -> Knowledge | None:
        """Return what is known with the change, if known values follow it; None if none do.

        Args:
            region: number of operations of the faulty region without it.
            tentative: whether to accept it where nothing tells.
            described: returns the repair that it is; None if no such repair is accepted.
        """
        rerun = Rerun(self.known.target, self.known.rerun)
        confirmed, failed = self.confirmed(change, rerun, described)
        if not failed and confirmed:
            after = self.known.with_rerun(rerun, dict(change.values))
            if len(after.region()) < region:
                return after
        if not tentative or described() is None:
            return None
        if failed:  # it ended early
            rerun = Rerun(self.known.target, self.known.rerun)
            try:
                list(rerun.put(change))
            except ValueError:
                return None
        self.took_tentative = True
        return self.known.with_rerun(rerun, dict(change.values))

    def confirmed(self, change: Change, rerun: Rerun, described: Callable[[], Repair | None]) -> tuple[bool, bool]:
        """Run what follows a change; return whether known values follow it, and whether the run ended early."""
        known, goal = self.known, self.known.goal
        moved, unknown, present = set(change.values), 0, known.present()
        lacking: set[Value] = set()
        confirmed = goal in change.values and self.equal(change.values[goal])
        try:
            for index, operation in rerun.put(change):
                self.work += CALL + sum(value.array.size for value in operation.results)
                if self.work > WORK:
                    return False, True
                moved |= set(operation.results)
                if goal in operation.results and self.at_goal(rerun):
                    confirmed = True
                if confirmed or kind_of(operation) == LAYOUT:
                    continue
                found = [known.look_up(operation, v, rerun) for v in operation.results]
                shared = all(is_known for _, is_known in found)
                # A value that the target has already may be one in front: s * x + (1 - s) * x is x.
                news = any(part.value not in present for parts, _ in found for part in parts)
                news = shared and news and not all(known.known[v] for v in operation.results)
                given = [k for at, k in change.operands if at == index]
                cut = kind_of(operation) == "part" and operation.operands[0] in lacking
                confirmed = news and (cut or _is_evidence(operation, moved, given, rerun))
                if confirmed and described() is None:  # to run all of the rest takes most of the time
                    return False, True
                lacking |= {v for v, (_, is_known) in zip(operation.results, found, strict=True) if not is_known}
                unknown += not shared
                if unknown > UNKNOWN:
                    return False, True
        except ValueError:
            return False, True
        return confirmed, False

    def described(self, entry: int, trial: Trial, change: Change) -> Repair | None:
        """Return the repair that a change is; None if it is not a local one."""
        repair = self.describe(entry, trial, change)
        return repair if trial.settings is not None or is_local(repair, self.known) else None

    def describe(self, entry: int, trial: Trial, change: Change) -> Repair:
        """Return the operations of both sides that the change stands for."""
        known = self.known
        if trial.of_layer:
            return self.describe_layer(entry, trial, change)
        target = known.behind(trial.value) if trial.missing_at is None else ()
        present = known.present() | known.had | known.fused - {root(trial.part.value, known.source_producer)}
        source = known.behind_in_source(trial.part.value, present)
        if trial.missing_at is not None:
            after = known.reached_in_source([part.value for part in known.found[trial.value]])
            source = tuple(one for one in source if one in after)
        operands = tuple({v: None for one in target for v in one.data if known.is_shown(v)}) or (trial.value,)
        theirs = tuple({v: None for one in source for v in one.data if v in present}) or (trial.part.value,)
        put_in = next(iter((*change.values.values(), *change.operands.values())))
        given = tuple(map(known.array, operands))
        value, part = trial.value, trial.part
        if trial.missing_at is not None and (unchanged := self.unchanged(change, part.value, put_in)) is not None:
            value, target = unchanged, known.behind(unchanged)
            put_in = put_in.reshape(unchanged.array.shape)
        taken = None if part.axis is None else (part.axis, part.index)
        settings = None if trial.settings is None else trial.settings[0]
        got = known.array(value)
        return Repair(
            target, source, operands, given, theirs, got, put_in, entry, change, taken=taken, settings=settings
        )

    def unchanged(self, change: Change, value: Value, put_in: Array) -> Value | None:
        """Return the value that the target computes where another one is put in, if its operations give that back as it is.

        LeakyReLU(ReLU(x)) is ReLU(x): nothing is missing in front of the LeakyReLU, which stands in the place of the ReLU. None where
        they change it, or where the source's own next operation of the kind gives it back, too.
        """
        if not tells(put_in):
            return None  # zeros are given back by any product
        known, rerun = self.known, Rerun(self.known.target, self.known.rerun)
        of_source = {
            kind_of(one)
            for one in known.source_users.get(value, ())
            if any(same_numbers(x.array, put_in) for x in one.results)
        }
        try:
            for _, operation in rerun.put(change):
                if kind_of(operation) in LAYERS:
                    return None
                made = operation.results[0]
                if kind_of(operation) in (LAYOUT, *of_source) or known.is_known(made):
                    continue
                if same(rerun.array(made), put_in):
                    return made
        except ValueError:
            return None
        return None

    def describe_layer(self, entry: int, trial: Trial, change: Change) -> Repair:
        """Return what the source computes of the value that a layer is given, and gives the layer."""
        known = self.known
        layer, given = known.target.operations[entry], known.array(trial.value)
        source = few(known.between([part.value for part in known.found.get(trial.value, ())], trial.part.value))
        put_in = next(iter(change.operands.values()))
        made = () if source else few(known.behind_in_source(trial.part.value, known.present()))
        theirs = (trial.part.value,)
        return Repair((), source, (trial.value,), (given,), theirs, given, put_in, entry, change, layer, None, made)

    def instead(self, entry: Operation) -> tuple[Operation, ...]:
        """Return what the source computes of the values that an entry is given."""
        known = self.known
        values = [part.value for v in entry.data for part in known.found.get(v, ())]
        behind = [(known.source_producer[v], depth) for v, depth in after_in_source(known, values, known.present())]
        picks = [one for one, _ in behind if kind_of(one) == "pick"] if kind_of(entry) == "pick" else []
        # In front of a lookup JAX compares the indices with 0.
        return tuple(dict.fromkeys(picks or (one for one, depth in behind if depth == 1)))


def _goes_on_from(repair: Repair, other: Repair) -> bool:
    """Whether a repair stands for what the target computes too much of one value, as another one does, and for a layer behind it.

    What that leaves, such as the same in the next layer, is repaired in its turn.
    """
    of_one = bool(other.target) and not other.source and all(len(set(one.data)) == 1 for one in other.target)
    more = set(repair.target) - set(other.target)
    return of_one and set(other.target) < set(repair.target) and any(kind_of(one) in LAYERS for one in more)


def _is_weak(trial: Trial, known: Knowledge) -> bool:
    """Whether a trial may restore values of another place.

    It may be those of another layer, where what the source computes is known; or an operation that seems to be missing, behind which
    something that uses the value gives none of the source's, or only chooses among its elements.
    """
    if trial.of_layer or trial.depths[1] == 0:
        return True
    if trial.missing_at is None:
        return False
    users = known.uses(trial.value)
    return any(kind_of(one) in ("sort", "pick") or not all(map(known.is_known, one.results)) for one in users)


def _is_evidence(operation: Operation, moved: set[Value], given: Sequence[int], rerun: Rerun) -> bool:
    """Whether a known result of an operation on replaced values shows that these are right, and laid out rightly.

    Of a value alone it shows nothing: all that the source computes of the replacing value is known. Neither does an operation that
    only moves them, such as one that spreads them among zeros.
    """
    kind = kind_of(operation)
    if kind in (LAYOUT, "part", "join", "pick"):
        return False
    numbers = [_nonzero(rerun.array(v)) for v in operation.operands if v in moved]
    if any(np.array_equal(_nonzero(rerun.array(v)), x) for v in operation.results for x in numbers):
        return False
    if kind not in ELEMENTWISE:
        return True
    others = [v for k, v in enumerate(operation.operands) if k not in given and v not in moved]
    return any(v.data or (v.leaves and v.array.size > 1) for v in others)


def _nonzero(array: Array) -> Array:
    """Return the numbers of an array that are not zero, in order."""
    return np.sort(array[array != 0], axis=None)
