"""Elements that meet nothing but zeros: the values of a decoder that starts from zeros, in its first layer; columns behind a mask.

No inputs and weights give an output that shows such an element. It is made as in the other layers, if what is known of its
layer is made as there; or as the other elements of its tensor.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import numpy as np

from convert.inference.derivation import Arithmetic, Grade, Part, Tensor
from convert.inference.forms.hidden.always_zero import always_zero, met_by_parameters, zeros_of
from convert.inference.forms.hidden.shown import hidden_parameters
from convert.inference.grading.ties import elements_of
from convert.programs.program import Program

Array = np.ndarray[Any, np.dtype[Any]]
NUMBER = re.compile(r"[0-9]+")


def made_as_in_other_layers(
    tensors: Sequence[Tensor], target: Program, leaves: Mapping[str, Sequence[int]]
) -> tuple[Tensor, ...]:
    """Return the tensors; elements that meet nothing but zeros are interchangeable, where another layer says what they are made of.

    Args:
        target: its record as it ran.
        leaves: shapes of the source's leaves by name.
    """
    whole = {tensor.name: tensor for tensor in tensors if _size(tensor) == _known(tensor) and not tensor.guessed}
    lacking = {one.name for one in tensors if one.name not in whole and not one.guessed and not one.unread}
    if not lacking:
        return tuple(tensors)
    used = {part.leaf for tensor in tensors for part in tensor.parts}
    unseen = met_by_parameters(target, always_zero(target)).zeros_alone
    found = []
    for tensor in tensors:
        if tensor.name in lacking and unseen[_lacking(tensor, target)].all():
            found.append(next(_continued(tensor, whole, used, leaves), tensor))
        else:
            found.append(tensor)
    return tuple(found)


def idle_as_in_other_layers(
    tensors: Sequence[Tensor], target: Program, leaves: Mapping[str, Sequence[int]]
) -> tuple[Tensor, ...]:
    """Return the tensors; one of which no output takes an element, as of a norm behind the last layer, is made as in another layer, or is its leaf as it is stored.

    Any number fits it, so that what was found for it says nothing.

    Args:
        target: its record as it ran.
        leaves: shapes of the source's leaves by name.
    """
    if target.path_taken:  # an expert to which no row was sent is shown by others
        return tuple(tensors)
    hidden = {name: bool(of.size and of.all()) for name, of in hidden_parameters(target).items()}
    modules = {_module(name): True for name in hidden.keys() - target.buffers}
    for name in hidden.keys() - target.buffers:
        modules[_module(name)] &= hidden[name]
    idle = {name for name in hidden if modules.get(_module(name))}  # with the statistics of a norm, which are buffers
    shown = [tensor for tensor in tensors if tensor.name not in idle]
    whole = {tensor.name: tensor for tensor in shown if tensor.parts and _size(tensor) == _known(tensor)}
    used = {part.leaf for tensor in shown for part in tensor.parts}

    def made(tensor: Tensor) -> Tensor:
        nothing = replace(tensor, parts=(), alternatives={}, ties=(), guessed=False, unseen=0, unread=False)
        as_others = _continued(nothing, whole, used, leaves, anywhere=True)
        stored = _as_stored(nothing, tensor.parts)
        return next(as_others, None) or stored or _of_left_leaves(nothing, whole, used, leaves) or tensor

    return tuple(made(tensor) if tensor.name in idle else tensor for tensor in tensors)


def _of_left_leaves(
    tensor: Tensor, whole: Mapping[str, Tensor], used: set[str], leaves: Mapping[str, Sequence[int]]
) -> Tensor | None:
    """Return a tensor that is made as that of another layer, of the one leaf for each that is left and has the same name but for numbers."""
    for name, other in whole.items():
        if other.shape != tensor.shape or NUMBER.sub("#", name) != NUMBER.sub("#", tensor.name):
            continue
        parts = []
        for part in other.parts:
            of_name = [x for x in leaves if NUMBER.sub("#", x) == NUMBER.sub("#", part.leaf) and x not in used]
            if len(of_name) == 1 and leaves[of_name[0]] == leaves[part.leaf]:
                parts.append(replace(part, leaf=of_name[0]))
        if parts and len(parts) == len(other.parts):
            return _unshown(tensor, parts, _size(tensor))
    return None


def _as_stored(tensor: Tensor, parts: Sequence[Part]) -> Tensor | None:
    """Return a tensor with the elements of the leaves of some parts as they are stored; None where leaves make none, or not all."""
    if not all(part.leaf and part.arithmetic is not Arithmetic.COMPUTED for part in parts):
        return None
    if sum(len(part.elements) for part in parts) < _size(tensor):
        return None
    stored = [replace(part, arithmetic=Arithmetic.SAME, factor=1.0, number=0.0) for part in parts]
    return _unshown(tensor, stored, _size(tensor))


def _unshown(tensor: Tensor, parts: Sequence[Part], unseen: int) -> Tensor:
    """Return a tensor of these parts; no output shows `unseen` of its elements."""
    return replace(tensor, parts=tuple(parts), grade=Grade.INTERCHANGEABLE, unseen=unseen, candidates=())


def without_ties_at_zeros(tensors: Sequence[Tensor], source: Program, target: Program) -> tuple[Tensor, ...]:
    """Return the tensors; ties of columns that are zero for any inputs, in both programs, make them interchangeable.

    No output shows the elements that meet such columns, as those behind a mask; they are made as the others of their tensor.

    Args:
        source, target: the records in which the ties were found.
    """
    if not any(tensor.ties for tensor in tensors):
        return tuple(tensors)
    of_source, of_target = (met_by_parameters(x, always_zero(x)).zeros_alone for x in (source, target))
    found = []
    for tensor in tensors:
        shown = []
        hidden = np.zeros(0, int)
        for tie in tensor.ties:
            numbers = np.concatenate([np.zeros(0, int), *elements_of(target, tie)])
            elements = numbers - target.first_element[tensor.name]
            theirs = _numbers_of(tensor, elements, source)
            hides = bool(theirs.size) and bool(of_source[theirs].all())
            if hides and of_target[numbers].all() and _is_regular(tensor, elements):
                hidden = np.union1d(hidden, elements)
            else:
                shown.append(tie)
        if len(shown) < len(tensor.ties):
            grade = Grade.INTERCHANGEABLE if tensor.grade is Grade.TIED and not shown else tensor.grade
            tensor = replace(tensor, ties=tuple(shown), grade=grade, unseen=tensor.unseen + len(hidden))
        found.append(tensor)
    return tuple(found)


def without_hidden_elements(tensors: Sequence[Tensor], runs: Iterator[Program]) -> tuple[Tensor, ...]:
    """Return the tensors; those with elements that no output shows, with any inputs and weights, are interchangeable.

    They are the elements that meet nothing but zeros, and those whose results are multiplied by zeros, as the rows that RealNVP masks.

    Args:
        tensors: with which the outputs are equal.
        runs: of the target. What meets zeros in each of them, as those of a unit behind a ReLU, may be shown by other inputs.
    """
    first = next(runs)
    met = met_by_parameters(first, always_zero(first))
    unseen, unmet = met.zeros_alone, ~met.at_all
    hidden = hidden_parameters(first)
    if any(of.any() for of in hidden.values()):
        seen = np.any([met_by_parameters(run, zeros_of(run)).numbers for run in (first, *runs)], 0)
        seen |= unmet & (not first.path_taken)  # an expert to which no row was sent is shown by others
        unseen |= seen & np.concatenate([hidden[name].ravel() for name in first.parameters])
    found = []
    for tensor in tensors:
        start = first.first_element[tensor.name]
        of = slice(start, start + _size(tensor))
        count, most = int(unseen[of].sum()), int((unseen | unmet)[of].sum())
        if (
            tensor.unseen > most and tensor.name not in first.buffers
        ):  # one leaf gave them and others, and a sum of parameters takes them as well
            tensor = replace(tensor, unseen=most)
        if count and tensor.grade is Grade.DERIVED and not tensor.unseen:
            tensor = replace(tensor, grade=Grade.INTERCHANGEABLE, unseen=count)
        found.append(tensor)
    return tuple(found)


def _numbers_of(tensor: Tensor, elements: Array, source: Program) -> Array:
    """Return the numbers of the source's elements that some elements of a tensor are; none if they are anything else."""
    made = [(part, np.isin(part.elements, elements)) for part in tensor.parts]
    if any(here.any() and not part.leaf for part, here in made):
        return np.zeros(0, int)
    of_leaves = [source.first_element[part.leaf] + part.positions[here] for part, here in made if here.any()]
    numbers: Array = np.concatenate([np.zeros(0, int), *of_leaves])
    return numbers if len(numbers) == len(elements) else np.zeros(0, int)


def _is_regular(tensor: Tensor, hidden: Array) -> bool:
    """Whether elements that nothing shows lie in their leaf as the others do: with the same steps along the axes of the tensor."""
    if len(tensor.parts) != 1 or len(tensor.parts[0].elements) != _size(tensor):
        return False
    part = tensor.parts[0]
    places = part.positions[np.argsort(part.elements)].reshape(tensor.shape)
    if not set(range(_size(tensor))) - set(hidden.tolist()):
        return False
    return all(len(np.unique(np.diff(places, axis=axis))) <= 1 for axis in range(places.ndim))


def _size(tensor: Tensor) -> int:
    return int(np.prod(tensor.shape))


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def _known(tensor: Tensor) -> int:
    return sum(len(part.elements) for part in tensor.parts)


def _lacking(tensor: Tensor, target: Program) -> Array:
    """Return the numbers of the elements that no part makes."""
    lacking = np.ones(_size(tensor), bool)
    for part in tensor.parts:
        lacking[part.elements] = False
    return target.first_element[tensor.name] + np.flatnonzero(lacking)


def _continued(
    tensor: Tensor,
    whole: Mapping[str, Tensor],
    used: set[str],
    leaves: Mapping[str, Sequence[int]],
    *,
    anywhere: bool = False,
) -> Iterator[Tensor]:
    """Yield the tensor, made as each of the other layers is; what is known of it must be made so.

    Args:
        anywhere: whether other lists of modules tell how the leaves of two layers are called, too.
    """
    own = {part.elements.tobytes(): part for part in tensor.parts}
    for number in NUMBER.finditer(tensor.name):
        before, behind = tensor.name[: number.start()], tensor.name[number.end() :]
        for name, other in whole.items():
            index = NUMBER.match(name, len(before)) if name.startswith(before) else None
            if index is None or name[index.end() :] != behind or other.shape != tensor.shape:
                continue
            layers = (before + index[0] + ".", before + number[0] + ".")
            pairs = [*_pairs(tensor, other, whole, layers)]
            pairs += _pairs_of_lists(whole, index[0], number[0]) if anywhere else ()
            step = _Step.between(pairs, leaves)
            parts = [step.made(part, leaves) for part in other.parts]
            lacking = [part for part in parts if part is not None and part.elements.tobytes() not in own]
            if None in parts or any(part.leaf in used and part.leaf not in step.stacked for part in lacking):
                continue
            if all(_same(own[part.elements.tobytes()], part) for part in parts if part and part not in lacking):
                made = sorted([*tensor.parts, *lacking], key=lambda part: int(part.elements.min()))
                unseen = _size(tensor) - _known(tensor)
                yield _unshown(tensor, made, unseen)


def _pairs(
    tensor: Tensor, other: Tensor, whole: Mapping[str, Tensor], layers: tuple[str, str]
) -> Iterator[tuple[Part, Part]]:
    """Yield the parts of the other layer and of this one that make the same elements of the same tensor."""
    tensors = [(other, tensor)]
    for name, one in whole.items():
        if name.startswith(layers[0]) and (two := whole.get(layers[1] + name[len(layers[0]) :])) is not None:
            tensors.append((one, two))
    for one, two in tensors:
        for ours in two.parts:
            yield from ((theirs, ours) for theirs in one.parts if np.array_equal(theirs.elements, ours.elements))


def _pairs_of_lists(whole: Mapping[str, Tensor], one: str, two: str) -> Iterator[tuple[Part, Part]]:
    """Yield the parts that make the same elements of the same tensor for two numbers of a layer, in any list of modules."""
    for name, theirs in whole.items():
        ours = whole.get(re.sub(rf"(?<![0-9]){one}(?![0-9])", two, name, count=1))
        for part in ours.parts if ours is not None and ours is not theirs else ():
            yield from ((x, part) for x in theirs.parts if np.array_equal(x.elements, part.elements))


def _same(one: Part, two: Part) -> bool:
    return (one.leaf, one.arithmetic, one.factor) == (two.leaf, two.arithmetic, two.factor) and np.array_equal(
        one.positions, two.positions
    )


@dataclass
class _Step:
    """How a part of one layer becomes that of another: by a number in the leaf's name, or by the position in a leaf of all layers.

    Attributes:
        names: the leaf's name in front of the number, with it -> the same with the other layer's number.
        stacked: leaves that have both layers.
        shares: how far the layers lie apart, as shares of a leaf.
    """

    names: dict[str, str] = field(default_factory=dict)
    stacked: set[str] = field(default_factory=set)
    shares: set[Fraction] = field(default_factory=set)

    @staticmethod
    def between(pairs: Iterable[tuple[Part, Part]], leaves: Mapping[str, Sequence[int]]) -> _Step:
        """Return the step that the known parts of both layers have."""
        step = _Step()
        for one, two in pairs:
            if one.leaf not in leaves or two.leaf not in leaves:
                continue
            if one.leaf == two.leaf:
                step.stacked.add(one.leaf)
                step.shares.add(Fraction(int(two.positions[0] - one.positions[0]), int(np.prod(leaves[one.leaf]))))
                continue
            for a, b in zip(NUMBER.finditer(one.leaf), NUMBER.finditer(two.leaf), strict=False):
                if a[0] != b[0] and one.leaf[: a.start()] == two.leaf[: b.start()]:
                    step.names[one.leaf[: a.end()]] = two.leaf[: b.end()]
                    break
        return step

    def made(self, part: Part, leaves: Mapping[str, Sequence[int]]) -> Part | None:
        """Return the part of this layer; None if there is no such leaf."""
        for number in NUMBER.finditer(part.leaf):
            if (to := self.names.get(part.leaf[: number.end()])) is not None:
                leaf = to + part.leaf[number.end() :]
                there = leaf in leaves and leaves[leaf] == leaves[part.leaf]
                return replace(part, leaf=leaf) if there else None
        if len(self.shares) != 1 or part.leaf not in leaves:
            return None
        size = int(np.prod(leaves[part.leaf]))
        shift = next(iter(self.shares)) * size
        positions = part.positions + int(shift)
        if shift.denominator != 1 or positions.min() < 0 or positions.max() >= size:
            return None
        self.stacked.add(part.leaf)
        return replace(part, positions=positions)
