"""`infer`: from two programs to a derivation."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from convert.inference.by_name import Arrays, outputs_by_name, require_outputs_by_name, shapes_by_name
from convert.inference.derivation import Derivation, Difference, Grade, Proof, Tensor
from convert.inference.draws import Draws, Shapes, whole_rows
from convert.inference.facts import facts
from convert.inference.forms.as_data import parameters_as_data
from convert.inference.grading import proof, unshown, weak_proof
from convert.inference.grading.alternatives import others
from convert.inference.grading.choices import hidden_by_choice
from convert.inference.grading.differences.explained import explained, not_reached, where_it_ended
from convert.inference.grading.differences.guessed import of_equal_programs
from convert.inference.grading.differences.in_front import graded_up_to_the_difference
from convert.inference.grading.differences.resumed import resume
from convert.inference.grading.grades import tensors
from convert.inference.grading.lost import require_followed
from convert.inference.grading.proof import Masks
from convert.inference.grading.reordered_ties import reordered
from convert.inference.grading.ties import told_apart, told_by_others, told_by_some
from convert.inference.grading.unmet import found_by_others
from convert.inference.grading.zeros import made_as_in_other_layers, without_ties_at_zeros
from convert.inference.last_digits import lost_digits
from convert.inference.meetings.sites import site_of
from convert.inference.models import Inputs, Models, Records, Runs
from convert.inference.recorded import PATHS
from convert.inference.requirements import require_same_inputs
from convert.inference.rounding import rounded_where, tolerance
from convert.programs.fingerprint import EXACT
from convert.programs.program import Program
from convert.programs.rerun import can_rerun, rerun

if TYPE_CHECKING:
    import torch

Array = np.ndarray[Any, np.dtype[Any]]
DRAWS = 3
ATTEMPTS = 3
HIDDEN = "the outputs show only what it chooses, and the JAX model chooses by other numbers; what is in front of it may differ"


def infer(
    function: Callable[[Arrays, Arrays], Any],
    module: torch.nn.Module,
    run: Callable[[Any, Arrays], Any],
    inputs: Inputs,
    shapes: Any,
    *,
    masks: Masks = lambda inputs: {},
    complex_leaves: Collection[str] = (),
    seed: int = 0,
) -> Derivation:
    """Derive which parameter of a JAX function becomes which of a PyTorch module.

    Both run with random weights. No name is compared.

    Args:
        function: (parameters, inputs), both by name -> an array, or several in a tuple or by name.
        module: computes the same, in eval mode, with any weights.
        run: (module, inputs as tensors) -> the same outputs, in the same way.
        inputs: seed -> the inputs by name.
        shapes: of the function's parameters: a tree of arrays, such as ``jax.eval_shape`` returns, or a tuple of sizes by name.
        masks: inputs -> name of an output -> true where it counts, as in a `Reference`. Rows of a batch that do not count as a whole,
            such as padded ones, are left out of the search; the proof has them, and compares what counts.
        complex_leaves: names of the function's parameters that are complex.
        seed: of the weights and inputs; those of the proof follow.

    Raises:
        ConvertError: a side does not run, is not deterministic, or gives NaN; or the two have not the same outputs.
        UserCodeError: the inputs are not arrays of numbers by name.
    """
    from convert.programs.record_torch import few_threads

    require_same_inputs(inputs, seed)
    own_sizes = shapes_by_name(shapes)
    sizes = {name: (*shape, 2) if name in complex_leaves else shape for name, shape in own_sizes.items()}

    def side(parameters: Arrays, given: Arrays) -> Arrays:
        return require_outputs_by_name(function(parameters, given), "the JAX function")

    def run_by_name(net: torch.nn.Module, given: Arrays) -> Arrays:
        return outputs_by_name(run(net, given))

    attempts: list[Derivation] = []
    for attempt in range(ATTEMPTS):
        with few_threads(module):
            models = Models(Runs(side, Draws(own_sizes, complex_leaves)), module, run_by_name, inputs, masks)
            found, again = _derived(models, sizes, complex_leaves, seed + attempt * (DRAWS + 1))
        attempts.append(found)
        ties = [[{tie.columns for tie in tensor.ties} for tensor in made.tensors] for made in attempts]
        if not again or (
            found.proof and ties[-1:] == ties[-2:-1]
        ):  # no weights tell columns apart that the inputs make equal
            break
    best = min(attempts, key=_is_open)
    others = [made for made in attempts if made is not best and made.proof is not None]
    return replace(best, tensors=told_by_others(best.tensors, [made.tensors for made in others]))


def _is_open(found: Derivation) -> tuple[bool, int, int]:
    """Return how much a derivation leaves open: the less, the better."""
    grades = [tensor.grade for tensor in found.tensors]
    return found.proof is None, grades.count(Grade.OPEN), grades.count(Grade.TIED)


def _derived(models: Models, shapes: Shapes, complex_leaves: Collection[str], seed: int) -> tuple[Derivation, bool]:
    """Derive with the weights and inputs of one seed; also return whether others may tell more columns apart."""
    both = models.record(seed)
    search = both.search()
    solved = search.solve()
    ended = None if solved else where_it_ended(search)
    if not solved:
        resume(search)
    rivals = others(search)
    names = {
        name: tuple(k for k, first in both.target.tied.items() if first == name) for name in both.target.parameters
    }
    found = tensors(search, names, solved, rivals.same)
    if solved:
        found = made_as_in_other_layers(found, both.as_run, shapes)
        found = without_ties_at_zeros(found, both.source, both.target)
        if search.met_nothing and not both.learned:
            found = found_by_others(found, [partial(models.search_again, seed + 1 + k) for k in range(PATHS)])
    again = any(tensor.ties for tensor in found)
    further = range(seed + 1, seed + 1 + DRAWS)
    tested = _Tested(None, found, both.source)
    if solved and all(tensor.grade is not Grade.OPEN for tensor in found):
        tested = _tested(models, both, found, [models.all_given(k) for k in (seed, *further)], further)
        again, found, ended = tested.again, tested.tensors, tested.ended
        if ended is not None:
            found = tensors(search, names, False, [])
    differences: tuple[Difference, ...] = ()
    if ended is not None:
        drawn = {k: models.all_given(k) for k in further}
        require_followed(models.module, models.run, both.as_run, list(drawn.values()))
        given = {k: whole_rows(x, models.masks) for k, x in drawn.items()}
        same = [
            parameters_as_data(models.runs.program(k, x), both.learned)
            for k, x in given.items()
            if can_rerun(both.target, x)
        ]
        allowed = tolerance(both.source, both.target)
        repeated = bool(both.learned)
        found = graded_up_to_the_difference(search, found, rivals.undecided, same, allowed, repeated=repeated)
        whole = of_equal_programs(found, both.source, both.as_run) if tested.ended is None else None
        by_guess = None
        if whole is not None:
            by_guess = _tested(models, both, whole, [models.all_given(seed), *drawn.values()], further)
        if by_guess is not None and by_guess.ended is None:
            tested, found, solved = by_guess, by_guess.tensors, True
        else:
            if by_guess is not None and by_guess.hidden and by_guess.ended is not None:
                tested, ended = by_guess, by_guess.ended
            shown = explained(
                ended,
                found,
                both.target.buffers,
                models.module,
                models.run,
                tested.shown_by,
                hidden=tested.hidden,
            )
            differences = (shown,)
            found = not_reached(found, both.target, ended.site.index)
    used = {leaf for tensor in found for part in tensor.parts for leaf in (part.leaf, *part.leaves)}
    if not solved or any(tensor.grade is Grade.OPEN for tensor in found):
        used.update(*(value.leaves for value in both.source.outputs.values()))
    made = Derivation(
        found,
        shapes,
        tuple(name for name in shapes if name not in used),
        facts(search),
        differences,
        tested.proof,
        search.tried,
        (*_notes(both.source, both.target), *tested.notes),
        {name: value.array for name, value in both.source.parameters.items()},
        proof.whole_numbers(models.module),
        frozenset(complex_leaves),
        frozenset(name for name, value in both.as_run.parameters.items() if value.complex),
    )
    grades = {tensor.grade for tensor in found}
    return made, (search.met_nothing and Grade.OPEN in grades) or (again and Grade.TIED in grades)


@dataclass(frozen=True, eq=False)
class _Tested:
    """What fresh weights and inputs show of a derivation.

    Attributes:
        proof: None where it does not hold.
        tensors: with what they tell of ties.
        shown_by: the run of the source that shows a difference best.
        ended: the difference; None where the outputs are equal.
        notes: what the proof does not show.
        again: whether other weights tell columns apart that the first ones make equal.
        hidden: whether the outputs are equal, and the values differ that decide a choice.
    """

    proof: Proof | None
    tensors: tuple[Tensor, ...]
    shown_by: Program
    ended: Difference | None = None
    notes: tuple[str, ...] = ()
    again: bool = False
    hidden: bool = False


def _tested(
    models: Models, both: Records, found: tuple[Tensor, ...], drawn: Sequence[Mapping[str, Array]], seeds: Sequence[int]
) -> _Tested:
    """Run both models with fresh weights and inputs.

    Args:
        models: the two.
        both: the records that the tensors were derived from.
        found: every tensor, none open.
        drawn: the inputs of the records, and those of each seed.
        seeds: of the weights.
    """
    source, target, (module, run, masks) = both.source, both.target, (models.module, models.run, models.masks)
    plain = [models.runs.program(seed, given) for seed, given in zip(seeds, drawn[1:], strict=True)]
    fresh = [parameters_as_data(program, both.learned) for program in plain]
    again = any(told_by_some(tensor, source, fresh) for tensor in found)
    allowed = tolerance(source, target)
    errors = [proof.error(module, run, masks, found, program) for program in fresh]
    if (
        max(errors) > allowed
        and any(tensor.ties for tensor in found)
        and all(can_rerun(target, given) for given in drawn)
    ):
        found = reordered(found, target, fresh, partial(_target_run, target), allowed)
        errors = [proof.error(module, run, masks, found, program) for program in fresh]
    evidence = Proof(DRAWS, max(errors), allowed, weak_proof.same_inputs(drawn))
    lost = None
    if allowed < evidence.error <= EXACT:
        lost = lost_digits(models, both.learned, found, plain, allowed)
    if lost is not None:
        evidence = replace(evidence, allowed=max(lost.allowed, evidence.error))
    elif evidence.error > allowed:
        problem = f"with fresh weights and inputs the outputs differ by {evidence.error:.1e}"
        last = len(target.operations) - 1
        ended = Difference(site_of("target", last, target.operations[last]), problem, evidence.error)
        return _Tested(None, found, fresh[errors.index(evidence.error)], ended, again=again)
    as_derived = _target_run(target, found, source)
    hides = hidden_by_choice(source, as_derived, allowed)
    if hides is not None:
        ended = Difference(site_of("target", as_derived.operations.index(hides), hides), HIDDEN, shown=False)
        return _Tested(None, found, source, ended, again=again, hidden=True)
    unseen = _unseen(target, found, [source, *fresh], as_derived, allowed)
    losses = () if lost is None else lost.notes
    notes = (*losses, *weak_proof.notes(plain, evidence.same_inputs), *unseen)
    if any(tensor.ties for tensor in found):
        outputs, slopes = partial(proof.outputs, module, run, masks), partial(proof.slopes, module, run, masks)
        found = told_apart(found, target, fresh, outputs, slopes)
    return _Tested(evidence, found, source, None, notes, again)


def _unseen(
    target: Program, found: Sequence[Tensor], runs: Sequence[Program], first: Program, allowed: float
) -> tuple[str, ...]:
    """Return notes on what no run shows, the first of them that of the records, in which the target ran as `first`."""
    ran = [first]
    unseen = unshown.notes(runs[:1], ran, allowed)
    if not unseen:  # most have nothing to show, and the first run says so
        return ()
    ran += [_target_run(target, found, other) for other in runs[1:] if can_rerun(target, _given(other))]
    return unshown.notes(runs, ran, allowed)


def _target_run(target: Program, tensors: Sequence[Tensor], source: Program) -> Program:
    """Return a run of the target with the weights and inputs of a run of the source."""
    weights = proof.weights(tensors, source)
    return rerun(target, {name: weights[name] for name in target.parameters}, _given(source))


def _given(program: Program) -> dict[str, Array]:
    return {name: value.array for name, value in program.inputs.items()}


def _notes(source: Program, target: Program) -> tuple[str, ...]:
    zeros = [name for name, value in source.inputs.items() if value.array.size and not value.array.any()]
    notes = [f"the input {name} has nothing but zeros, which show no parameter; give other numbers" for name in zeros]
    for side, program in (("JAX function", source), ("PyTorch module", target)):
        if program.path_taken:
            notes.append(
                f"the {side} chose a branch or a number of iterations by its values at {program.path_taken}; other paths were not seen"
            )
        if program.opaque:
            notes.append(f"operations of the {side} that were not looked into: {', '.join(program.opaque)}")
        elif (where := rounded_where(program)) is not None:
            notes.append(
                f"numbers of the {side} at {where} were rounded to float32 before it ran; a difference below 1e-6 is not seen"
            )
    return tuple(notes)
