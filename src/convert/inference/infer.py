"""`infer`: from two programs to a derivation."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from convert.inference.derivation import Derivation, Difference, Grade, Proof, Tensor
from convert.inference.draws import Draws, Shapes, whole_rows
from convert.inference.facts import facts
from convert.inference.forms.as_data import (
    constants_as_data,
    learned_inputs,
    outputs_as_data,
    parameters_as_data,
    tables_as_data,
)
from convert.inference.forms.constant_parts import parts_apart
from convert.inference.forms.contractions import sums_as_products
from convert.inference.forms.kernels import kernels_opened
from convert.inference.forms.lookups import table_by_table
from convert.inference.forms.masks import visible_sums_first
from convert.inference.forms.offsets import field_by_field
from convert.inference.forms.sums import constants_last
from convert.inference.forms.used_parts import products_of_joined_rows, used_parts
from convert.inference.grading import proof, unshown, weak_proof
from convert.inference.grading.alternatives import others
from convert.inference.grading.differences import explained, where_it_ended
from convert.inference.grading.grades import tensors
from convert.inference.grading.in_front import graded_up_to_the_difference
from convert.inference.grading.lost import require_followed
from convert.inference.grading.proof import Masks
from convert.inference.grading.resumed import resume
from convert.inference.grading.ties import told_apart, told_by_others, told_by_some
from convert.inference.grading.unmet import found_by_others
from convert.inference.grading.zeros import made_as_in_other_layers
from convert.inference.meetings.sites import site_of
from convert.inference.recorded import PATHS, recorded
from convert.inference.requirements import require_outputs_of_both, require_same_again, require_same_inputs
from convert.inference.rounding import rounded_where, tolerance
from convert.inference.search import Search
from convert.inference.source import Source
from convert.programs.program import Program
from convert.programs.rerun import can_rerun, rerun
from convert.programs.run_checks import require_finite_products
from convert.references.user_reference import require_inputs

if TYPE_CHECKING:
    import torch

Array = np.ndarray[Any, np.dtype[Any]]
JaxFunction = Callable[[Mapping[str, Any], Mapping[str, Any]], Mapping[str, Any]]
Run = Callable[[Any, Mapping[str, Any]], Mapping[str, Any]]
DRAWS = 3
ATTEMPTS = 3


def infer(
    function: JaxFunction,
    module: torch.nn.Module,
    run: Run,
    inputs: Callable[[int], Mapping[str, Array]],
    shapes: Shapes,
    *,
    masks: Masks = lambda inputs: {},
    complex_leaves: Collection[str] = (),
    seed: int = 0,
) -> Derivation:
    """Derive which parameter of a JAX function becomes which of a PyTorch module.

    Both run with random weights. No name is compared.

    Args:
        function: (parameters, inputs) -> the outputs by name.
        module: computes the same, in eval mode, with any weights.
        run: (module, inputs as tensors) -> the outputs, by the same names.
        inputs: seed -> the inputs by name.
        shapes: of the function's parameters.
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
    attempts: list[Derivation] = []
    for attempt in range(ATTEMPTS):
        with few_threads(module):
            found, again = _derived(
                function, module, run, inputs, shapes, masks, complex_leaves, seed + attempt * (DRAWS + 1)
            )
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


def _derived(
    function: JaxFunction,
    module: torch.nn.Module,
    run: Run,
    inputs: Callable[[int], Mapping[str, Array]],
    shapes: Shapes,
    masks: Masks,
    complex_leaves: Collection[str],
    seed: int,
) -> tuple[Derivation, bool]:
    """Derive with the weights and inputs of one seed; also return whether others may tell more columns apart."""
    runs = _Runs(function, Draws(shapes, complex_leaves))
    shapes = {name: (*shape, 2) if name in complex_leaves else tuple(shape) for name, shape in shapes.items()}
    given = whole_rows(require_inputs(inputs(seed)), masks)
    first = runs.program(seed, given)
    require_finite_products(first)
    as_run = recorded(module, run, given)
    require_same_again(module, run, as_run)
    target = _in_one_form(as_run, keep=False)
    if products_of_joined_rows(first) != products_of_joined_rows(target):
        runs.apart = True
        first, target = runs.program(seed, given), _in_one_form(as_run, keep=False, apart=True)
    target = tables_as_data(first, target)
    require_outputs_of_both(first, target)
    learned = learned_inputs(first, target)
    first, target = parameters_as_data(first, learned[0]), parameters_as_data(target, learned[1])

    search = Search(Source(outputs_as_data(first), repeated=bool(learned[0])), _in_search(target))
    solved = search.solve()
    differences: tuple[Difference, ...] = ()
    if not solved:
        differences = (where_it_ended(search),)
        resume(search)
    rivals = others(search)
    names = {name: tuple(k for k, first in target.tied.items() if first == name) for name in target.parameters}
    found = tensors(search, names, solved, rivals.same)
    if solved:
        found = made_as_in_other_layers(found, as_run, shapes)
        if search.met_nothing and not learned[0]:
            others_of = partial(_search_again, runs, module, run, inputs)
            found = found_by_others(found, [partial(others_of, seed + 1 + k) for k in range(PATHS)])
    evidence: Proof | None = None
    shown_by = first
    unseen: tuple[str, ...] = ()
    weak: tuple[str, ...] = ()
    again = any(t.ties for t in found)
    allowed = tolerance(first, target)
    further = range(seed + 1, seed + 1 + DRAWS)
    if solved and all(t.grade is not Grade.OPEN for t in found):
        drawn = [require_inputs(inputs(other)) for other in (seed, *further)]
        plain = [runs.program(other, x) for other, x in zip(further, drawn[1:], strict=True)]
        fresh = [parameters_as_data(run, learned[0]) for run in plain]
        again = any(told_by_some(tensor, first, fresh) for tensor in found)
        error, allowed = partial(proof.error, module, run, masks), tolerance(first, target)
        errors = [error(found, program) for program in fresh]
        evidence = Proof(DRAWS, max(errors), allowed, weak_proof.same_inputs(drawn))
        if evidence.error > allowed:
            problem = f"with fresh weights and inputs the outputs differ by {evidence.error:.1e}"
            end = target.operations[-1]
            ended = Difference(site_of("target", len(target.operations) - 1, end), problem, evidence.error)
            worst = fresh[errors.index(evidence.error)]
            differences, shown_by = (ended,), worst
            found, evidence = tensors(search, names, False, []), None
        else:
            weak = weak_proof.notes(plain, evidence.same_inputs)
            ran = [_target_run(target, found, first)]
            unseen = unshown.notes([first], ran, allowed)
            if unseen:  # most have nothing to show, and the first run says so
                ran += [_target_run(target, found, other) for other in fresh if can_rerun(target, _given(other))]
                unseen = unshown.notes([first, *fresh], ran, allowed)
        if evidence is not None and any(t.ties for t in found):
            outputs, slopes = partial(proof.outputs, module, run, masks), partial(proof.slopes, module, run, masks)
            found = told_apart(found, target, fresh, outputs, slopes)
    if differences:
        require_followed(module, run, as_run, [require_inputs(inputs(k)) for k in further])
        rows = [(k, whole_rows(require_inputs(inputs(k)), masks)) for k in further]
        same = [parameters_as_data(runs.program(k, x), learned[0]) for k, x in rows if can_rerun(target, x)]
        found = graded_up_to_the_difference(search, found, rivals.undecided, same, allowed, repeated=bool(learned[0]))
        differences = (explained(differences[0], found, target.buffers, module, run, shown_by),)
    used = {leaf for tensor in found for part in tensor.parts for leaf in (part.leaf, *part.leaves)}
    if not solved or any(tensor.grade is Grade.OPEN for tensor in found):
        used.update(*(value.leaves for value in first.outputs.values()))
    made = Derivation(
        found,
        shapes,
        tuple(name for name in shapes if name not in used),
        facts(search),
        differences,
        evidence,
        search.tried,
        (*_notes(first, target), *weak, *unseen),
        {name: value.array for name, value in first.parameters.items()},
        proof.whole_numbers(module),
        frozenset(complex_leaves),
        frozenset(name for name, value in as_run.parameters.items() if value.complex),
    )
    grades = {tensor.grade for tensor in found}
    return made, (search.met_nothing and Grade.OPEN in grades) or (again and Grade.TIED in grades)


def _search_again(
    runs: _Runs,
    module: torch.nn.Module,
    run: Run,
    inputs: Callable[[int], Mapping[str, Array]],
    seed: int,
    known: Sequence[Tensor],
) -> Search:
    """Return a search with the weights and inputs of another seed, along the path that the module takes with what is known."""
    given = require_inputs(inputs(seed))
    source = runs.program(seed, given)
    state = {name: x for name, x in proof.weights(known, source).items() if not np.isnan(x).any()}
    target = _in_one_form(recorded(module, run, given, state), keep=False, apart=runs.apart)
    return Search(Source(outputs_as_data(source)), _in_search(target))


def _in_one_form(program: Program, *, keep: bool, apart: bool = False) -> Program:
    program = parts_apart(field_by_field(table_by_table(program)))
    return used_parts(constants_last(constants_as_data(sums_as_products(program, keep=keep))), keep=keep, apart=apart)


def _in_search(program: Program) -> Program:
    """Return the target as it is searched."""
    return visible_sums_first(outputs_as_data(program))


def _target_run(target: Program, tensors: Sequence[Tensor], source: Program) -> Program:
    """Return a run of the target with the weights and inputs of a run of the source."""
    weights = proof.weights(tensors, source)
    return rerun(target, {name: weights[name] for name in target.parameters}, _given(source))


def _given(program: Program) -> dict[str, Array]:
    return {name: value.array for name, value in program.inputs.items()}


class _Runs:
    """Runs of the source. It is recorded once for each shape of its inputs; further weights and inputs take the same operations.

    Attributes:
        apart: whether products of rows of several values are taken apart.
    """

    def __init__(self, function: JaxFunction, draws: Draws) -> None:
        self._function, self._draws = function, draws
        self._records: list[Program] = []
        self._infinite = False
        self.apart = False

    def program(self, seed: int, given: Mapping[str, Array]) -> Program:
        """Return a run with the weights of a seed, of a size with which the outputs are finite, if there is one."""
        first = found = self._run(seed, given)
        while not (self._infinite or _is_finite(found)):
            self._infinite = not self._draws.smaller()
            if self._infinite:  # as masked logits are with any weights
                self._draws.size = 1.0
                return first
            found = self._run(seed, given)
        return found

    def _run(self, seed: int, given: Mapping[str, Array]) -> Program:
        from convert.programs.record_jax import record_jax

        known = next((record for record in self._records if can_rerun(record, given)), None)
        if known is not None:
            made: Program = self._draws.run(seed, lambda weights: rerun(known, weights, given))
        else:
            twice = not self._records
            made = self._draws.run(seed, lambda weights: record_jax(self._function, weights, given, twice=twice))
            self._records.append(made)
        return _in_one_form(kernels_opened(made), keep=True, apart=self.apart)


def _is_finite(program: Program) -> bool:
    """Whether the outputs are finite."""
    return all(np.isfinite(value.array).all() for value in program.outputs.values() if value.array.dtype.kind == "f")


def _notes(source: Program, target: Program) -> tuple[str, ...]:
    zeros = [name for name, value in source.inputs.items() if value.array.size and not value.array.any()]
    notes = [f"the input {name} has nothing but zeros, which show no parameter; give other numbers" for name in zeros]
    for side, program in (("JAX function", source), ("PyTorch module", target)):
        if program.path_taken:
            notes.append(
                f"the {side} chose a branch or a number of iterations by its values; other paths were not seen"
            )
        if program.opaque:
            notes.append(f"operations of the {side} that were not looked into: {', '.join(program.opaque)}")
        elif (where := rounded_where(program)) is not None:
            notes.append(
                f"numbers of the {side} at {where} were rounded to float32 before it ran; a difference below 1e-6 is not seen"
            )
    return tuple(notes)
