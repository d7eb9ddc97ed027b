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
from convert.inference.grading.zeros import idle_as_in_other_layers
from convert.programs.fingerprint import EXACT
from convert.programs.program import Program
from convert.programs.rerun import fits
from convert.programs.reruns import Outputs, Reruns, equal

Array = np.ndarray[Any, np.dtype[Any]]
MOST = 400  # ways to make other tensors
ABOUT = 1e-6  # relative: outputs that may be equal but for rounding
MOST_ELEMENTS = 4096  # of an output that are compared


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
    leaves = {name: value.array.shape for name, value in source.parameters.items()}
    tensors = idle_as_in_other_layers(tensors, target, leaves)
    idle = {tensor.name for tensor in tensors if tensor.unseen and tensor.grade is Grade.INTERCHANGEABLE}
    guessed = [tensor for tensor in tensors if tensor.grade is not Grade.IN_FRONT and tensor.name not in idle]
    pairs = _may_be_exchanged(guessed, state, target, given, list(source.outputs))
    others = list(_others(pairs, guessed, source))
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
    return tuple(
        tensor if tensor.name in idle else _graded(tensor, alternatives.get(tensor.name, {})) for tensor in tensors
    )


def _may_be_exchanged(
    tensors: Sequence[Tensor],
    state: Mapping[str, Array],
    target: Program,
    given: Mapping[str, Array],
    outputs: Sequence[str],
) -> list[tuple[Tensor, Tensor]]:
    """Return the pairs of tensors that may change places with any weights.

    All tensors of a shape are equal, then one of them has other elements: of two that may change places, the outputs are the same.
    So each tensor is tried once, and not each pair.
    """
    pairs: list[tuple[Tensor, Tensor]] = []
    for shape in dict.fromkeys(tensor.shape for tensor in tensors):
        group = [tensor for tensor in tensors if tensor.shape == shape]
        if len(group) < 2:
            continue
        try:
            side = Reruns(target, {**state, **{one.name: state[group[0].name] for one in group}}, given, outputs)
            made = [_some(side.changed({one.name: state[group[-1].name]})) for one in group]
        except ConvertError:  # not a number
            made = [None] * len(group)
        for (one, x), (two, y) in itertools.combinations(zip(group, made, strict=True), 2):
            if x is None or y is None or equal(x, y, ABOUT):
                pairs.append((one, two))
    return pairs


def _some(outputs: Outputs | None) -> Outputs | None:
    """Return some elements of each output: those of all tensors are kept at once."""
    return None if outputs is None else [x.ravel()[:: 1 + x.size // MOST_ELEMENTS] for x in outputs]


def _others(
    pairs: Sequence[tuple[Tensor, Tensor]], tensors: Sequence[Tensor], source: Program
) -> Iterator[tuple[Tensor, ...]]:
    """Yield tensors that are made of something else: two of each other's parts, or one of its leaf in another order."""
    for one, two in pairs:
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
