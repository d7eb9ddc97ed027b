"""Search again with a difference corrected: if the programs are equal then, and every tensor is found, they differ there alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from convert.core.errors import ConvertError
from convert.inference.derivation import Grade, Tensor
from convert.inference.grading import proof
from convert.inference.grading.differences.changed import changed
from convert.inference.grading.differences.corrections import Correction, corrections
from convert.inference.grading.differences.explained import GuessedRun
from convert.inference.grading.differences.multiples import is_made_up
from convert.inference.grading.other_ways import in_ways, numbers_of_ways
from convert.inference.grading.reordered_ties import reordered
from convert.inference.grading.ties import told_apart
from convert.numerics.magnitude import relative_error
from convert.programs.divergence.graph import on_the_way
from convert.programs.divergence.knowledge import Knowledge
from convert.programs.divergence.shared_values import SharedValues
from convert.programs.fingerprint import EXACT
from convert.programs.program import Program
from convert.programs.rerun import can_rerun, rerun

Array = np.ndarray[Any, np.dtype[Any]]
MOST = 6  # corrected records that are searched
Derive = Callable[[Program], tuple[Sequence[Tensor], Program] | None]


def of_corrected(
    source: Program,
    target: Program,
    guessed: GuessedRun,
    fresh: Sequence[Program],
    derive: Derive,
) -> tuple[Tensor, ...] | None:
    """Return the tensors with which the programs are equal but for one difference; None if no correction makes them so.

    Args:
        target: the record of its run.
        guessed: its run with the weights that were guessed.
        fresh: runs of the source with other weights and inputs.
        derive: record of a target -> its tensors, and the record in the source's form; None where one of them is open.
    """
    given = _given(source)
    if not can_rerun(target, given) or not can_rerun(guessed.program, given):
        return None
    for correction, program in itertools.islice(_corrected(source, target, guessed), MOST):
        try:
            found = derive(program)
            if found is None:
                continue
            tensors, in_form = found
            if any(tensor.ties for tensor in tensors):
                tensors = _told_apart(tensors, in_form, program, fresh)
            alone = _differ_there_alone(tensors, target, program, fresh)
            if alone and not (correction.factor and is_made_up(tensors, target, fresh[0])):
                return tuple(tensors)
        except ConvertError:  # not a number
            continue
    return None


def _told_apart(
    tensors: Sequence[Tensor], target: Program, corrected: Program, fresh: Sequence[Program]
) -> Sequence[Tensor]:
    """Return the tensors with the columns that the first draw makes equal as further ones tell them apart."""
    if not all(can_rerun(program, _given(source)) for program in (target, corrected) for source in fresh):
        return tensors

    def run(found: Sequence[Tensor], source: Program) -> Program:
        weights = proof.weights(found, source)
        return rerun(target, {name: weights[name] for name in target.parameters}, _given(source))

    def outputs(state: Mapping[str, Array], source: Program) -> Array:
        made = rerun(corrected, {name: state[name] for name in corrected.parameters}, _given(source))
        return np.concatenate([made.outputs[name].array.ravel() for name in source.outputs])

    tensors = reordered(tensors, target, fresh, run, EXACT)
    return told_apart(tensors, target, fresh, outputs, lambda *_: None)


def with_those_behind(tensors: Sequence[Tensor], right: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the tensors, with what was found with a correction where they are not derived in front of the difference."""
    behind = {
        t.name: t if t.unread or t.ties else replace(t, grade=Grade.BEHIND, candidates=(), guessed=True) for t in right
    }
    return tuple(t if t.grade is Grade.IN_FRONT else behind[t.name] for t in tensors)


def _corrected(source: Program, target: Program, guessed: GuessedRun) -> Iterator[tuple[Correction, Program]]:
    """Yield corrections, and records of the target with them."""
    for name in source.outputs:
        way, own = on_the_way(source, name), on_the_way(guessed.program, name)
        known = Knowledge(way, own, name, SharedValues(way, EXACT), guessed.lacking)
        for correction in corrections(known):
            try:
                yield from ((correction, one) for one in changed(correction, guessed.program, target))
            except (ValueError, ConvertError):  # of another shape; not a number
                continue


def _differ_there_alone(
    tensors: Sequence[Tensor], target: Program, corrected: Program, fresh: Sequence[Program]
) -> bool:
    """Whether fresh weights and inputs show that the programs differ, with these tensors and with their alternatives, and do not when corrected."""
    if not fresh:
        return False
    differs = False
    for source in fresh:
        weights = proof.weights(tensors, source)
        if not all(can_rerun(program, _given(source)) for program in (target, corrected)):
            return False
        if _error(corrected, weights, source) > EXACT:
            return False
        differs = differs or all(
            _error(target, proof.weights(one, source), source) > EXACT for one in _each_way(tensors)
        )
    return differs


def _each_way(tensors: Sequence[Tensor]) -> Iterator[Sequence[Tensor]]:
    """Yield the tensors, and those of each other way."""
    yield tensors
    yield from (in_ways(tensors, [way]) for way in numbers_of_ways(tensors))


def _error(target: Program, weights: Mapping[str, Array], source: Program) -> float:
    made = rerun(target, {name: weights[name] for name in target.parameters}, _given(source))
    return max(relative_error(made.outputs[name].array, value.array) for name, value in source.outputs.items())


def _given(program: Program) -> dict[str, Array]:
    return {name: value.array for name, value in program.inputs.items()}
