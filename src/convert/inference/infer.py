"""`infer`: from two programs to a derivation."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from convert.core.errors import ConvertError
from convert.core.system.recursion import deep_calls
from convert.inference.attempts import searched
from convert.inference.by_name import Arrays, outputs_by_name, require_outputs_by_name, shapes_by_name
from convert.inference.derivation import BY_OUTPUTS, Derivation, Difference, Grade, Tensor
from convert.inference.draws import Draws, Shapes, whole_rows
from convert.inference.facts import facts, facts_by_outputs
from convert.inference.grading import proof
from convert.inference.grading.alternatives import others
from convert.inference.grading.differences.corrected import of_corrected, with_those_behind
from convert.inference.grading.differences.explained import (
    GuessedRun,
    explained,
    not_reached,
    run_with_guesses,
    where_it_ended,
)
from convert.inference.grading.differences.guessed import of_equal_programs
from convert.inference.grading.differences.in_front import graded_up_to_the_difference
from convert.inference.grading.differences.other_orders import reordered_tensors, runs_in_other_orders
from convert.inference.grading.differences.other_weights import are_the_same, with_other_weights
from convert.inference.grading.differences.resumed import resume
from convert.inference.grading.grades import tensors
from convert.inference.grading.lost import require_followed
from convert.inference.grading.notes import whole_numbers
from convert.inference.grading.own_buffers import with_own_buffers
from convert.inference.grading.proof import Masks
from convert.inference.grading.row_lengths import with_row_lengths
from convert.inference.grading.ties import numbered_as_recorded, told_by_others
from convert.inference.grading.unmet import found_by_others
from convert.inference.grading.whole_leaves import with_whole_leaves
from convert.inference.grading.zeros import (
    idle_as_in_other_layers,
    made_as_in_other_layers,
    without_ties_at_zeros,
)
from convert.inference.isolated.found import Allowance, found_by_outputs
from convert.inference.models import Inputs, Models, Runs
from convert.inference.one_form import rows_in_form
from convert.inference.records import Records
from convert.inference.requirements import require_own_state, require_same_inputs
from convert.inference.rounding import rounded_where, tolerance
from convert.inference.search import Search
from convert.inference.segment.segments import Solution
from convert.inference.tested import DRAWS, Tested, further, largest_error, tested
from convert.numerics.magnitude import relative_error
from convert.numerics.precision import jax_on_the_cpu
from convert.programs.fingerprint import EXACT
from convert.programs.program import REFUSALS, Program

if TYPE_CHECKING:
    import torch

Array = np.ndarray[Any, np.dtype[Any]]
APART = 1000  # seeds, so that the proof has weights and inputs of its own
SIZES = (1.0, 0.5, 1.0)  # of the weights of each attempt: large ones may saturate what tells columns apart
MOST_OTHERS = 4000  # tensors in place of those that the outputs tell apart


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
    require_own_state(module)
    own_sizes = shapes_by_name(shapes)
    sizes = {name: (*shape, 2) if name in complex_leaves else shape for name, shape in own_sizes.items()}

    def side(parameters: Arrays, given: Arrays) -> Arrays:
        return require_outputs_by_name(function(parameters, given), "the JAX function")

    def run_by_name(net: torch.nn.Module, given: Arrays) -> Arrays:
        return outputs_by_name(run(net, given))

    attempts: list[Derivation] = []
    refuted: Callable[[Sequence[Tensor]], float] | None = None
    allowance = Allowance()
    for attempt, size in enumerate(SIZES):
        with jax_on_the_cpu(), few_threads(module), deep_calls():
            runs = Runs(side, Draws(own_sizes, complex_leaves, size))
            models = Models(runs, module, run_by_name, inputs, masks, allowance)
            found, again, refuting = _derived(models, sizes, complex_leaves, seed + attempt * (DRAWS + 1))
            if refuted is not None and (found.proof is None or refuted(found.tensors) > found.proof.allowed):
                break  # the difference is no chance, also where these weights hide it
        attempts.append(found)
        ties = [[{tie.columns for tie in tensor.ties} for tensor in made.tensors] for made in attempts]
        differ = any(difference.shown for difference in found.differences)
        told = found.proof and ties[-1:] == ties[-2:-1]  # no weights tell columns apart that the inputs make equal
        # What saturated gates hide is found wrong by chance; two draws of weights that end so are no chance.
        by_chance = refuting is not None and found.proof is None and attempt == 0
        refuted = refuting if by_chance else refuted
        if not by_chance and (not again or told or differ):  # a difference is corrected first
            break
    best = min(attempts, key=_is_open)
    others = [made for made in attempts if made is not best and made.proof is not None]
    return replace(best, tensors=told_by_others(best.tensors, [made.tensors for made in others]))


def _is_open(found: Derivation) -> tuple[bool, int, int]:
    """Return how much a derivation leaves open: the less, the better."""
    grades = [tensor.grade for tensor in found.tensors]
    return found.proof is None, grades.count(Grade.OPEN), grades.count(Grade.TIED)


def _derived(
    models: Models, shapes: Shapes, complex_leaves: Collection[str], seed: int
) -> tuple[Derivation, bool, Callable[[Sequence[Tensor]], float] | None]:
    """Derive with the weights and inputs of one seed.

    Also return whether others may tell more columns apart; and, where fresh ones refuted a way that led to the outputs, what other
    tensors' error is with them.
    """
    way = searched(models, seed)
    both, search, solved = way.records, way.search, way.solved
    ended = None if solved else where_it_ended(search)
    if not solved:
        resume(search)
    rivals = others(search)
    found = _tensors(both, search, solved, rivals.same)
    if solved:
        found = numbered_as_recorded(found, search.in_record)
        found = made_as_in_other_layers(found, both.as_run, shapes)
        found = idle_as_in_other_layers(found, both.as_run, shapes)
        found = without_ties_at_zeros(found, both.source, both.target)
        if (search.met_nothing or both.as_run.path_taken) and not both.learned:
            found = found_by_others(found, lambda run, known: models.search_again(seed + APART + run, known))
    again = any(tensor.ties for tensor in found)
    seen = Tested(None, found, both.source)
    refuting: Callable[[Sequence[Tensor]], float] | None = None
    if solved and all(tensor.grade is not Grade.OPEN for tensor in found):
        seen = tested(models, both, found, seed)
        again, ended = seen.again, seen.ended
        if ended is not None and not seen.hidden:
            refuting = partial(largest_error, models, both, seed)
        if ended is not None:
            seen = replace(seen, tensors=_tensors(both, search, False, []))
    differences: tuple[Difference, ...] = ()
    if ended is not None:
        seen, differences = _with_the_difference(models, both, search, rivals.undecided, seen, ended, seed)
        solved = solved or not differences
    found = seen.tensors
    by_outputs = {t.name for t in found if any(part.evidence.by == BY_OUTPUTS for part in t.parts)}
    used = {leaf for tensor in found for part in tensor.parts for leaf in (part.leaf, *part.leaves)}
    if not solved or any(tensor.grade is Grade.OPEN for tensor in found):
        used.update(*(value.leaves for value in both.source.outputs.values()))
    made = Derivation(
        found,
        shapes,
        tuple(name for name in shapes if name not in used),
        (*(fact for fact in facts(search) if by_outputs.isdisjoint(fact.tensors)), *seen.facts),
        differences,
        seen.proof,
        search.tried,
        (*_notes(both.source, both.target), *seen.notes),
        {name: value.array for name, value in both.source.parameters.items()},
        proof.whole_numbers(models.module),
        frozenset(complex_leaves),
        frozenset(name for name, value in both.as_run.parameters.items() if value.complex),
    )
    grades = {tensor.grade for tensor in found}
    return made, (search.met_nothing and Grade.OPEN in grades) or (again and Grade.TIED in grades), refuting


def _tensors(both: Records, search: Search, solved: bool, same: Sequence[Any]) -> tuple[Tensor, ...]:
    """Return the tensors of a search, with those that it leaves out: scales of weight norms that the source lacks, and buffers of conditions."""
    found = with_row_lengths(tensors(search, _tied_names(both), solved, same), both.as_run, both.source)
    found = with_whole_leaves(found, {name: value.array.shape for name, value in both.source.parameters.items()})
    return with_own_buffers(found, both.as_run, both.target)


def _tied_names(both: Records) -> dict[str, tuple[str, ...]]:
    """Return the names of the target's parameters -> the other names that they have."""
    tied = both.target.tied
    return {name: tuple(k for k, first in tied.items() if first == name) for name in both.target.parameters}


def _all_derived(models: Models, seed: int, as_run: Program) -> tuple[tuple[Tensor, ...], Program] | None:
    """Return the tensors of a record of the module, and the record in the source's form.

    None where the search finds no way to the outputs, or leaves a tensor open.
    """
    both = models.records_of(as_run, seed)
    search = both.search()
    if not search.solve():
        return None
    found = numbered_as_recorded(_tensors(both, search, True, others(search).same), search.in_record)
    shapes = {name: value.array.shape for name, value in both.source.parameters.items()}
    found = made_as_in_other_layers(found, both.as_run, shapes)
    found = without_ties_at_zeros(found, both.source, both.target)
    return (found, both.target) if all(t.unread or t.grade is not Grade.OPEN for t in found) else None


def _with_the_difference(
    models: Models,
    both: Records,
    search: Search,
    undecided: Sequence[tuple[int, Solution]],
    seen: Tested,
    ended: Difference,
    seed: int,
) -> tuple[Tested, tuple[Difference, ...]]:
    """Grade what stands in front of a difference, and explain it.

    The difference may be none: where other tensors make the programs equal, these are returned, without a difference.

    Args:
        models: the two.
        both: their records.
        search: where it ended.
        undecided: what the alternatives left open.
        seen: what fresh weights and inputs have shown, and the tensors.
        ended: the difference.
        seed: of the records.
    """
    drawn = {k: models.all_given(k) for k in further(seed)}
    require_followed(models.module, models.run, both.as_run, list(drawn.values()))
    given = {k: whole_rows(x, models.masks) for k, x in drawn.items()}
    same = models.further(both, seen.tensors, given)
    allowed = tolerance(both.source, both.target)
    found = graded_up_to_the_difference(search, seen.tensors, undecided, same, allowed, repeated=bool(both.learned))
    by_guess = _as_equal(models, both, search, found, seed) if seen.ended is None else None
    if by_guess is not None and by_guess.ended is None:
        return by_guess, ()
    if by_guess is not None and by_guess.hidden and by_guess.ended is not None:
        seen, ended = by_guess, by_guess.ended
    by_order = None if seen.hidden else _in_another_order(models, both, search, found, seed)
    if by_order is not None:
        return by_order, ()
    by_outputs, note = (None, "") if seen.hidden else _by_outputs(models, both, search, found, seed)
    if by_outputs is not None:
        return by_outputs, ()

    def guessed(tensors: Sequence[Tensor], source: Program) -> GuessedRun | ConvertError:
        of_target = both.target.buffers, both.learned_of_target
        try:
            made = run_with_guesses(tensors, *of_target, models.module, models.run, source)
        except ConvertError as error:
            return error
        return replace(made, program=rows_in_form(made.program, models.runs.forms))

    guess = guessed(found, seen.shown_by)
    shown = explained(ended, found, guess, seen.shown_by, hidden=seen.hidden)
    if shown.made_up_by:
        others = with_other_weights(found, shown.made_up_by)
        by_others = None if others is None else _as_equal(models, both, search, others, seed)
        if by_others is not None and by_others.ended is None:
            return by_others, ()
        other = next((program for program in (*same, both.source) if program is not seen.shown_by), seen.shown_by)
        again = explained(ended, found, guessed(found, other), other)
        if not are_the_same(shown.made_up_by, again.made_up_by):  # no number would do for all weights and inputs
            shown = explained(ended, found, guess, seen.shown_by, as_they_are=True)
    all_found = all(tensor.unread or tensor.grade is not Grade.OPEN for tensor in found)
    if not ((shown.shown and all_found) or shown.made_up_by or seen.hidden):
        guess = guess if seen.shown_by is both.source else guessed(found, both.source)
        derive = partial(_all_derived, models, seed)
        right = of_corrected(both.source, both.as_run, guess, same, derive) if isinstance(guess, GuessedRun) else None
        if right is not None:
            found = with_those_behind(found, right)
            shown = explained(ended, found, guessed(found, seen.shown_by), seen.shown_by)
            shown = replace(shown, shown=not shown.made_up_by)
    notes = (*seen.notes, note) if note and not shown.shown else seen.notes
    return replace(seen, tensors=not_reached(found, both.target, ended.site.index), notes=notes), (shown,)


def _as_equal(models: Models, both: Records, search: Search, tensors: Sequence[Tensor], seed: int) -> Tested | None:
    """Return what fresh weights and inputs show of tensors of a search with which the outputs are equal; None if they are not."""
    whole = of_equal_programs(numbered_as_recorded(tensors, search.in_record), both.source, both.as_run)
    return None if whole is None else tested(models, both, whole, seed)


def _in_another_order(
    models: Models, both: Records, search: Search, tensors: Sequence[Tensor], seed: int
) -> Tested | None:
    """Return what fresh weights and inputs show of tensors with the columns that the module splits in another order; None if none is right."""
    weights = proof.weights(tensors, both.source)
    given = {name: value.array for name, value in both.source.inputs.items()}
    if any(np.isnan(array).any() for array in weights.values()):
        return None
    known = {name: weights[name] for name in both.as_run.parameters}
    for places, made in runs_in_other_orders(both.as_run, known, given):
        pairs = [(made.outputs[name].array, of.array) for name, of in both.source.outputs.items()]
        if all(one.shape == two.shape and relative_error(one, two) <= EXACT for one, two in pairs):
            shown = _as_equal(models, both, search, reordered_tensors(tensors, places), seed)
            if shown is not None and shown.ended is None:
                return shown
    return None


def _by_outputs(
    models: Models, both: Records, search: Search, tensors: Sequence[Tensor], seed: int
) -> tuple[Tested | None, str]:
    """Return what fresh weights and inputs show of tensors that the outputs alone tell apart; None if the programs are not equal so.

    The text says what is not decided, where the search for them had to end.
    """
    guesses = numbered_as_recorded(tensors, search.in_record)
    as_run = models.runs.as_run(seed, whole_rows(models.all_given(seed), models.masks))
    try:
        found = found_by_outputs(guesses, both.source, as_run, both.as_run, models.allowance)
        if found.tensors is None:
            return None, found.note
        whole = of_equal_programs(found.tensors, both.source, both.as_run, most=MOST_OTHERS)
        shown = None if whole is None else tested(models, both, whole, seed)
        if whole is not None and shown is not None:
            shown = replace(shown, facts=facts_by_outputs(whole, as_run, both.as_run))
    except REFUSALS:
        if both.as_run.path_taken:  # with other weights the module takes another path, and the record does not fit
            return None, ""
        raise
    return (None if shown is None or shown.ended is not None else shown), ""


def _notes(source: Program, target: Program) -> tuple[str, ...]:
    zeros = [name for name, value in source.inputs.items() if value.array.size and not value.array.any()]
    notes = [f"the input {name} has nothing but zeros, which show no parameter; give other numbers" for name in zeros]
    for side, program in (("JAX function", source), ("PyTorch module", target)):
        if program.path_taken:
            notes.append(
                f"what the {side} runs depends on values at {program.path_taken} (a branch, a loop, a check such as those of torch.distributions, elements picked by a mask), and was seen "
                "for these inputs alone; if others can lead to other code, run again with such inputs"
            )
        if program.opaque:
            notes.append(f"operations of the {side} that were not looked into: {', '.join(program.opaque)}")
        elif (where := rounded_where(program)) is not None:
            notes.append(
                f"numbers of the {side} at {where} were rounded to float32 before it ran; a difference below 1e-6 is not seen"
            )
    return (*notes, *whole_numbers.notes(source))
