"""What the target computes where the search went no further, and what the source computes instead."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from convert.core.errors import ConvertError
from convert.inference.derivation import Difference, Grade, Tensor
from convert.inference.forms.as_data import parameters_as_data
from convert.inference.grading import proof
from convert.inference.grading.choices import unlike_choices_as_outputs
from convert.inference.grading.differences.excluded import is_only_explanation
from convert.inference.grading.differences.other_weights import other_weights
from convert.inference.meetings.sites import site_of
from convert.inference.recorded import recorded
from convert.inference.search import Search
from convert.layers.activations import NUMPY_ACTIVATIONS
from convert.numerics.magnitude import relative_error
from convert.programs.divergence.search import diverge
from convert.programs.divergence.wording import named
from convert.programs.fingerprint import EXACT
from convert.programs.program import Program

if TYPE_CHECKING:
    import torch

Array = np.ndarray[Any, np.dtype[Any]]
Run = Callable[[Any, Mapping[str, Any]], Mapping[str, Any]]
SHARE = 1e-3  # of the error that may be left when the operation is replaced
FINEST = 1e-9
SMALL = 100  # so much smaller than the error is what counts as equal, where the error is near to `FINEST`
DIGITS = 1e-12  # relative: what rounding leaves of float64


@dataclass(frozen=True, eq=False)
class GuessedRun:
    """A run of the target with the weights that were guessed.

    Attributes:
        program: its record.
        known: names of these weights.
        lacking: those of which nothing is known.
    """

    program: Program
    known: Collection[str]
    lacking: Collection[str]


def where_it_ended(search: Search) -> Difference:
    """Return the operation of the target at which every candidate was refuted."""
    at, operations = search.failure.index, search.target.operations
    in_record = search.in_record[at] if at < len(search.in_record) else at
    site = site_of("target", in_record, operations[min(at, len(operations) - 1)])
    return Difference(site, search.failure.problem, shown=False)


def _not_a_number(ended: Difference, error: ConvertError) -> Difference:
    """Return where a search ended, with the words that the target gives NaN there with the weights that were found."""
    finding = error.findings[0]
    if finding.code != "output-not-a-number":
        return ended
    at = f" ({finding.path})" if finding.path else ""
    problem = (
        f"with the weights that were found, the target gives NaN, and the JAX model does not: {finding.problem}{at}"
    )
    return replace(ended, problem=problem, brief="")


def not_reached(tensors: Sequence[Tensor], target: Program, index: int) -> tuple[Tensor, ...]:
    """Return the tensors; without candidates those that the target first reads behind an operation, where nothing was found for them.

    Args:
        index: of the operation at which the search ended.
    """
    in_front: set[str] = set()
    for operation in target.operations[: index + 1]:
        in_front.update(*(operand.leaves for operand in operation.operands if operand.of_parameters))
    return tuple(
        replace(tensor, candidates=(), not_reached=True)
        if tensor.grade is Grade.OPEN
        and not tensor.unread
        and in_front.isdisjoint((tensor.name, *tensor.also))
        and (not tensor.parts or tensor.is_constant)
        else tensor
        for tensor in tensors
    )


def explained(
    ended: Difference,
    tensors: Sequence[Tensor],
    guessed: GuessedRun | ConvertError,
    source: Program,
    *,
    hidden: bool = False,
    as_they_are: bool = False,
) -> Difference:
    """Return the difference named by the first operation that departs, if weights were guessed for the whole target.

    The source's values are put into the run with the guessed weights until the output is the source's.

    Args:
        tensors: with the grades that hold although the programs differ: an open one may be guessed wrongly.
        guessed: the run with what was guessed for them, or why it has no outputs, as where they are NaN.
        source: with the weights of that run.
        hidden: whether the outputs agree, and the numbers differ that a choice is made by.
        as_they_are: whether other multiples of the weights do not make up for the difference.
    """
    if isinstance(guessed, ConvertError):
        return _not_a_number(ended, guessed)
    target, lacking = guessed.program, guessed.lacking
    if hidden:
        source, target = unlike_choices_as_outputs(source, target, EXACT)
    for name, value in source.outputs.items():
        want = value.array
        if hidden and (name not in target.outputs or target.outputs[name].array.shape != want.shape):
            continue
        if target.outputs[name].array.shape != want.shape:
            ended = replace(ended, shown=True)  # it says both shapes, which no weights change
            continue

        def error(got: Array, want: Array = want) -> float:
            return relative_error(got, want)

        before = error(target.outputs[name].array)
        share = max(min(FINEST, before / SMALL), DIGITS, SHARE * min(1.0, before))
        doubtful = {t.name for t in tensors if t.grade is Grade.OPEN and t.name in guessed.known}
        found = diverge(source, target, name, error, share, min(share, EXACT), lacking)
        if found is None or not (found.proven or found.entry):
            continue
        said = named(found, source, target, NUMPY_ACTIVATIONS, lacking=lacking, doubtful=doubtful)
        first = found.repairs[0] if found.repairs else None
        at = found.entry
        if first is not None and (at is None or first.index <= target.operations.index(at)):  # as the words say it
            # Behind the last operation, where the source goes on.
            at = first.target[-1] if first.target else target.operations[min(first.index, len(target.operations) - 1)]
        if at is not None:
            fixed = ended.shown or hidden or as_they_are
            others = () if fixed else other_weights(found, source, target, name)
            shown = ended.shown or (not others and is_only_explanation(found, source, target, name, tensors, error))
            site = site_of("target", target.operations.index(at), at)
            more = infinite_alone(name, target.outputs[name].array, want)
            if hidden:
                more, before = f"; the outputs show it only where {name} chooses otherwise", np.inf
            brief = said.brief and said.brief + more
            far = before if np.isfinite(before) else None
            return Difference(site, said.problem + more, far, brief, shown, others)
    return ended


def run_with_guesses(
    tensors: Sequence[Tensor],
    buffers: Collection[str],
    learned: Sequence[str],
    module: torch.nn.Module,
    run: Run,
    source: Program,
) -> GuessedRun:
    """Return a run of the target with the weights that were guessed.

    Args:
        buffers: of the target; those for which no leaf was guessed keep the module's own numbers.
        learned: parameters of the target that are data.
        source: the run whose weights and inputs it has.

    Raises:
        ConvertError: it gives NaN: with these weights the target's code shows nothing.
    """
    guessed = [t for t in tensors if t.name not in buffers or any(part.leaf or part.leaves for part in t.parts)]
    weights = proof.weights(guessed, source)
    state = {name: x for name, x in weights.items() if not np.isnan(x).any()}
    target = recorded(module, run, {name: value.given for name, value in source.inputs.items()}, state)
    return GuessedRun(parameters_as_data(target, learned), state.keys(), weights.keys() - state.keys())


def infinite_alone(name: str, got: Array, want: Array) -> str:
    """Say where an output is infinite in one model alone, as a clause; empty where it is in neither."""
    for who, one, other in (("the target", got, want), ("the JAX model", want, got)):
        places = np.argwhere(np.isinf(one) & np.isfinite(other)).tolist()
        if places:
            more = f" and {len(places) - 1} more elements" if len(places) > 1 else ""
            return f"; the output {name} has {one[tuple(places[0])]} at {places[0]}{more} in {who} alone"
    return ""
