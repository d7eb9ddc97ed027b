"""What fresh weights and inputs show of a derivation: that both programs agree, or where they do not."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from convert.inference.derivation import Difference, Fact, Proof, Tensor
from convert.inference.forms.as_data import parameters_as_data
from convert.inference.grading import proof
from convert.inference.grading.choices import hidden_by_choice
from convert.inference.grading.exchanged_terms import with_exchanged_terms
from convert.inference.grading.notes import (
    factors,
    fast_path,
    paddings,
    small_weights,
    thresholds,
    unread_rows,
    unshown,
    weak_proof,
)
from convert.inference.grading.other_ways import in_right_ways, with_ways_that_hold
from convert.inference.grading.reordered_ties import reordered
from convert.inference.grading.ties import told_apart, told_by_some
from convert.inference.grading.zeros import without_hidden_elements
from convert.inference.last_digits import lost_digits
from convert.inference.meetings.sites import site_of
from convert.inference.models import Models
from convert.inference.records import Records
from convert.inference.rounding import tolerance
from convert.inference.small_differences import small_difference
from convert.programs.fingerprint import EXACT
from convert.programs.program import Program
from convert.programs.rerun import can_rerun, rerun

Array = np.ndarray[Any, np.dtype[Any]]
DRAWS = 3  # of fresh weights and inputs
HIDDEN = "the outputs show only what it chooses, and the JAX model chooses by other numbers; what is in front of it may differ"


@dataclass(frozen=True, eq=False)
class Tested:
    """What fresh weights and inputs show of a derivation.

    Attributes:
        proof: None where it does not hold.
        tensors: with what they tell of ties.
        shown_by: the run of the source that shows a difference best.
        ended: the difference; None where the outputs are equal.
        notes: what the proof does not show.
        again: whether other weights tell columns apart that the first ones make equal.
        hidden: whether the outputs are equal, and the values differ that decide a choice.
        facts: of the tensors that the outputs alone have shown.
    """

    proof: Proof | None
    tensors: tuple[Tensor, ...]
    shown_by: Program
    ended: Difference | None = None
    notes: tuple[str, ...] = ()
    again: bool = False
    hidden: bool = False
    facts: tuple[Fact, ...] = ()


def further(seed: int) -> range:
    """Return the seeds of the weights and inputs that are drawn after those of the records."""
    return range(seed + 1, seed + 1 + DRAWS)


def tested(models: Models, both: Records, found: tuple[Tensor, ...], seed: int) -> Tested:
    """Run both models with fresh weights and inputs.

    Args:
        models: the two.
        both: the records that the tensors were derived from.
        found: every tensor, none open.
        seed: of the records.
    """
    drawn = [models.all_given(k) for k in (seed, *further(seed))]
    source, target, (module, run, masks) = both.source, both.target, (models.module, models.run, models.masks)
    plain, fresh = _fresh_runs(models, both, seed, drawn[1:])
    again = any(told_by_some(tensor, source, fresh) for tensor in found)
    allowed = tolerance(source, target)

    def errors_of(made: Sequence[Tensor]) -> list[float]:
        return [proof.error(module, run, masks, made, program) for program in fresh]

    errors = errors_of(found)
    if (
        max(errors) > allowed
        and any(tensor.ties for tensor in found)
        and all(can_rerun(target, given) for given in drawn)
    ):
        found = reordered(found, target, fresh, partial(_target_run, target), allowed)
        errors = errors_of(found)
    if max(errors) > allowed and (right := in_right_ways(found, errors_of, errors, allowed)) is not None:
        found, errors = right
    evidence = Proof(DRAWS, max(errors), allowed, weak_proof.same_inputs(drawn))
    lost = None
    if allowed < evidence.error <= EXACT:
        lost = lost_digits(models, both.learned, found, plain, allowed)
    if lost is not None:
        evidence = replace(evidence, allowed=max(lost.allowed, evidence.error))
    elif evidence.error > allowed:
        problem = f"with fresh weights and inputs the outputs differ by {evidence.error:.1e}"
        ended = _of_outputs(target, problem, evidence.error)
        return Tested(None, found, fresh[errors.index(evidence.error)], ended, again=again)
    small = None
    if lost is None and allowed < EXACT:
        small = small_difference(models, both.learned, found, (further(seed)[0], plain[0]), allowed)
    if small is not None and small.problem:
        ended = _of_outputs(target, small.problem, small.error)
        return Tested(None, found, parameters_as_data(small.run, both.learned), ended, again=again)
    as_derived = _target_run(target, found, source)
    hides = hidden_by_choice(source, as_derived, allowed)
    if hides is not None:
        ended = Difference(site_of("target", as_derived.operations.index(hides), hides), HIDDEN, shown=False)
        return Tested(None, found, source, ended, again=again, hidden=True)
    every = [source, *fresh]
    ran, of_rows, of_hidden = itertools.tee(
        _target_runs(both.as_run, found, every), 3
    )  # each is run once, if it is asked for
    unseen = _unseen(every, ran, allowed)
    losses = () if lost is None else lost.notes
    fast = fast_path.notes(module, run, masks, proof.weights(found, fresh[0]), fresh[0], allowed)
    masked = small_weights.notes(source, as_derived)
    rows = unread_rows.notes(found, source, of_rows)
    bends = thresholds.notes(source, as_derived)
    pads = paddings.notes(source, target)
    notes = (*losses, *weak_proof.notes(plain, evidence.same_inputs), *fast, *unseen, *pads, *bends, *masked, *rows)
    notes = notes if small is None else (*notes, small.note)
    if any(tensor.ties for tensor in found):
        outputs, slopes = partial(proof.outputs, module, run, masks), partial(proof.slopes, module, run, masks)
        found = told_apart(found, target, fresh, outputs, slopes)
    found = with_exchanged_terms(found, both.as_run)

    def holds(made: Sequence[Tensor]) -> bool:
        return all(proof.error(module, run, masks, made, program) <= evidence.allowed for program in fresh)

    found = with_ways_that_hold(found, holds)
    found = without_hidden_elements(found, of_hidden)
    notes = (*notes, *factors.notes(found))
    leaves = {name: value.array for name, value in plain[0].parameters.items()}
    evidence = replace(evidence, leaves=leaves, tensors=proof.weights(found, fresh[0]))
    return Tested(evidence, found, source, None, notes, again)


def largest_error(models: Models, both: Records, seed: int, tensors: Sequence[Tensor]) -> float:
    """Return the largest error of tensors with the fresh weights and inputs of a seed, as `tested` draws them."""
    _, fresh = _fresh_runs(models, both, seed, [models.all_given(k) for k in further(seed)])
    return max(proof.error(models.module, models.run, models.masks, tensors, program) for program in fresh)


def _fresh_runs(
    models: Models, both: Records, seed: int, drawn: Sequence[Mapping[str, Array]]
) -> tuple[list[Program], list[Program]]:
    """Return the runs of the source with fresh weights and inputs, as they ran, and with the learned inputs as data."""
    plain = [models.runs.program(k, given) for k, given in zip(further(seed), drawn, strict=True)]
    return plain, [parameters_as_data(program, both.learned) for program in plain]


def _of_outputs(target: Program, problem: str, error: float) -> Difference:
    last = len(target.operations) - 1
    return Difference(site_of("target", last, target.operations[last]), problem, error)


def _unseen(runs: Sequence[Program], ran: Iterator[Program], allowed: float) -> tuple[str, ...]:
    """Return notes on what no run shows.

    Args:
        runs: of the source, the first of them that of the records.
        ran: of the target as it ran: the search takes a mask apart where it takes apart what is masked, and one part may hide nothing.
    """
    first = next(ran)
    unseen = unshown.notes(runs[:1], [first], allowed)
    if not unseen:  # most have nothing to show, and the first run says so
        return ()
    return unshown.notes(runs, [first, *ran], allowed)


def _target_runs(as_run: Program, tensors: Sequence[Tensor], runs: Sequence[Program]) -> Iterator[Program]:
    """Yield the runs of the target for those of the source, the first of them that of the records; without those of another path."""
    for number, run in enumerate(runs):
        if not number or can_rerun(as_run, _given(run)):
            yield _target_run(as_run, tensors, run)


def _target_run(target: Program, tensors: Sequence[Tensor], source: Program) -> Program:
    """Return a run of the target with the weights and inputs of a run of the source."""
    weights = proof.weights(tensors, source)
    return rerun(target, {name: weights[name] for name in target.parameters}, _given(source))


def _given(program: Program) -> dict[str, Array]:
    return {name: value.array for name, value in program.inputs.items()}
