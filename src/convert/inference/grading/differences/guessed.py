"""Weights that were guessed where the programs seemed to differ, and with which they compute the same.

One of the two may write a sum or a product in another way, so that no value behind it is shared; each tensor is found all the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np

from convert.core.errors import ConvertError
from convert.inference.derivation import Arithmetic, Grade, Part, Tensor
from convert.inference.grading import proof
from convert.programs.fingerprint import EXACT
from convert.programs.program import Program
from convert.programs.rerun import fits
from convert.programs.reruns import Reruns, equal

Array = np.ndarray[Any, np.dtype[Any]]
MOST = 400  # ways to make other tensors


def of_equal_programs(
    tensors: Sequence[Tensor], source: Program, target: Program, most: int = MOST
) -> tuple[Tensor, ...] | None:
    """Return the tensors with the grades that they have if the programs are equal; None if the outputs differ.

    For each tensor that was guessed, the others in its place are tried: those of another tensor, and other orders of its leaf's axes.

    Args:
        target: the record of a run, with any weights.
        most: so many others are tried; None is returned where there are more.
    """
    given = {name: value.array for name, value in source.inputs.items()}
    weights = proof.weights(tensors, source)
    state = {name: weights[name] for name in target.parameters}
    if not fits(target, given) or any(np.isnan(array).any() for array in weights.values()):
        return None

    try:
        side = Reruns(target, state, given, list(source.outputs))
    except ConvertError:  # not a number
        return None
    want = [value.array for value in source.outputs.values()]
    if not equal(side.outputs, want, EXACT):
        return None
    guessed = [tensor for tensor in tensors if tensor.grade is not Grade.IN_FRONT]
    others = list(_others(guessed, source))
    if len(others) > most:
        return None
    alternatives: dict[str, dict[int, tuple[Part, ...]]] = {}
    first = 1 + max((way for tensor in tensors for way in tensor.alternatives), default=-1)
    for way, changed in enumerate(others, first):
        made = proof.weights(changed, source)
        other = not any(np.array_equal(made[tensor.name], weights[tensor.name]) for tensor in changed)
        changes = {name: array for name, array in made.items() if name in state}
        if other and equal(side.changed(changes), want, EXACT):
            for tensor in changed:
                alternatives.setdefault(tensor.name, {})[way] = tensor.parts
    return tuple(_graded(tensor, alternatives.get(tensor.name, {})) for tensor in tensors)


def _others(tensors: Sequence[Tensor], source: Program) -> Iterator[tuple[Tensor, ...]]:
    """Yield tensors that are made of something else: two of each other's parts, or one of its leaf in another order."""
    for one, two in itertools.combinations(tensors, 2):
        if one.shape == two.shape:
            yield replace(one, parts=two.parts), replace(two, parts=one.parts)
    for tensor in tensors:
        for order in _orders(tensor, source):
            yield (replace(tensor, parts=(replace(tensor.parts[0], positions=order),)),)


def _orders(tensor: Tensor, source: Program) -> Iterator[Array]:
    """Yield the positions of a tensor that is made of a whole leaf, for each order of the leaf's axes."""
    if len(tensor.parts) != 1 or not tensor.parts[0].leaf or tensor.parts[0].arithmetic is Arithmetic.COMPUTED:
        return
    shape = source.parameters[tensor.parts[0].leaf].array.shape
    if prod(shape) != len(tensor.parts[0].elements):
        return
    numbers = np.arange(prod(shape)).reshape(shape).squeeze()
    for order in itertools.permutations(range(numbers.ndim)):
        yield numbers.transpose(order).ravel()


def _graded(tensor: Tensor, alternatives: Mapping[int, tuple[Part, ...]]) -> Tensor:
    alternatives = {**tensor.alternatives, **alternatives}
    grade = Grade.TIED if tensor.ties else Grade.INTERCHANGEABLE if alternatives else Grade.DERIVED
    return replace(tensor, grade=grade, alternatives=alternatives, candidates=(), guessed=False)
