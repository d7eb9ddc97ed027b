"""Find by the outputs alone the leaves of all tensors, where the search ended in front of the outputs.

The two programs may have no value in common, and still compute the same: products in another order, sums in other brackets, a layer that
makes what several others use. Their outputs are equal with any weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from convert.core.errors import ConvertError
from convert.inference.candidates.candidate import COMPUTE
from convert.inference.derivation import Arithmetic, Evidence, Grade, Part, Tensor
from convert.inference.grading import proof
from convert.inference.isolated.one_by_one import EQUAL, MOST_RUNS, OneByOne
from convert.inference.isolated.pieces import Piece, Pieces
from convert.inference.isolated.places import HIDDEN, OTHER
from convert.inference.meetings.contracted import contracted_axes
from convert.inference.meetings.sites import Meeting, meetings
from convert.inference.rounding import tolerance
from convert.programs.program import Program
from convert.programs.reruns import Reruns

Array = np.ndarray[Any, np.dtype[Any]]
ONE = 0.1  # the number in every parameter that is not known; in wide layers it is less
BY = "the outputs, with one number in every other parameter"
IN_FRONT = (Grade.IN_FRONT, Grade.TIED)
SAME = (Arithmetic.SAME, 1.0)
RAN_OUT = (
    "the search by the outputs alone ended after {runs} runs of both programs, its limit, with at most {most} of {all} tensors "
    "found at once: whether the programs are equal is not decided; a smaller pair, such as one layer of each kind, needs fewer"
)


@dataclass
class Allowance:
    """How many runs of both programs are left, for all weights and inputs with which a pair is searched; a search that finds all takes none.

    Attributes:
        left: so many.
        note: what was not decided where none are left.
    """

    left: float = MOST_RUNS
    note: str = ""


@dataclass(frozen=True, eq=False)
class FoundByOutputs:
    """What the outputs alone show.

    Attributes:
        tensors: with the leaf of each; None where that is not found.
        note: what is not decided, as no more runs were left; empty where that is not the reason.
    """

    tensors: tuple[Tensor, ...] | None = None
    note: str = ""


def found_by_outputs(
    tensors: Sequence[Tensor], source: Program, source_as_run: Program, target: Program, allowance: Allowance
) -> FoundByOutputs:
    """Find the leaf of each tensor.

    Args:
        tensors: with the parts that the search found: first all of them are kept, then those in front of the difference, then none, and
            they are only tried before others. What is computed from leaves, or what the module has itself, is taken as it is.
        source: the record in the form that these parts belong to.
        source_as_run, target: the records as they ran, with the same inputs.
        allowance: of runs; where all tensors are not found, those that were needed are taken from it.
    """
    sites = _Sites(source_as_run, target)
    sought = sites.in_order([one for one in tensors if _is_sought(one, target)])
    if not sought or allowance.left <= 0:
        return FoundByOutputs(None, allowance.note if sought else "")
    leaves = {name: value.elements[0] for name, value in source_as_run.parameters.items()}
    known = {leaf for one in tensors if one not in sought for part in one.parts for leaf in (part.leaf, *part.leaves)}
    hidden = {name: leaves[name] for name in sites.leaves_in_order() if name not in known}
    own = {name: value.array for name, value in source_as_run.parameters.items()}
    ways = {one.name: _way(one) or SAME for one in sought}
    values = _Values(np.concatenate([array.ravel() for array in own.values()]), _one(hidden), ways)
    weights = proof.weights(tensors, source)
    state = {
        name: np.where(np.isnan(weights[name]), value.array, weights[name]) if name in weights else value.array
        for name, value in target.parameters.items()
    }
    state |= {one.name: values(one.name, np.full(one.shape, HIDDEN)) for one in sought}
    own |= {name: values(name, np.full(numbers.shape, HIDDEN)) for name, numbers in hidden.items()}
    given = {name: value.array for name, value in source_as_run.inputs.items()}
    names = list(source_as_run.outputs)
    guesses = {one.name: _guess(one, leaves) for one in sought}
    guessed = [one for one in sought if (guesses[one.name] != HIDDEN).all()]
    try:
        sides = Reruns(source_as_run, own, given, names), Reruns(target, state, given, names)
    except ConvertError:  # with one number everywhere an output is not a number
        return FoundByOutputs()
    pieces = {one.name: sites.pieces(one.name) for one in sought}
    all_of_them = frozenset(one.name for one in guessed)
    in_front = frozenset(one.name for one in guessed if one.grade in IN_FRONT)
    allowed = max(EQUAL, tolerance(source_as_run, target))
    most = 0
    for kept in dict.fromkeys((all_of_them, in_front, frozenset[str]())):
        search = OneByOne(*sides, hidden, guesses, values, pieces, kept, allowed=allowed, most_runs=allowance.left)
        if search.solve():
            made = (
                _made(one, search.of[one.name], guesses[one.name], leaves, ways[one.name], sites)
                if one.name in guesses
                else one
                for one in tensors
            )
            return FoundByOutputs(tuple(made))
        most = max(most, search.most)
        if search.ran_out:
            allowance.left, allowance.note = 0, RAN_OUT.format(runs=MOST_RUNS, most=most, all=len(sought))
            return FoundByOutputs(None, allowance.note)
    allowance.left -= search.runs
    return FoundByOutputs()


@dataclass(frozen=True, eq=False)
class _Values:
    """The elements of leaves and tensors, of the numbers that they have."""

    theta: Array
    one: float
    ways: Mapping[str, tuple[Arithmetic, float]]

    def __call__(self, name: str, numbers: Array) -> Array:
        arithmetic, factor = self.ways.get(name, SAME)
        elements = np.where(numbers < 0, self.one * (1 + (numbers == OTHER)), self.theta[numbers])
        return factor * COMPUTE[arithmetic](elements)


def _is_sought(tensor: Tensor, target: Program) -> bool:
    if tensor.unread or tensor.name in target.buffers or target.parameters[tensor.name].array.dtype.kind != "f":
        return False
    covers = sum(len(part.elements) for part in tensor.parts) == int(np.prod(tensor.shape))
    return not covers or _way(tensor) is not None


def _way(tensor: Tensor) -> tuple[Arithmetic, float] | None:
    """Return how all elements of a tensor are computed from those of leaves; None where they are not, or not all in one way."""
    plain = all(part.leaf and not part.number for part in tensor.parts)
    ways = {(part.arithmetic, part.factor) for part in tensor.parts}
    return ways.pop() if plain and len(ways) == 1 else None


def _guess(tensor: Tensor, leaves: Mapping[str, Array]) -> Array:
    numbers = np.full(int(np.prod(tensor.shape)), HIDDEN)
    if _way(tensor) is not None:
        for part in tensor.parts:
            numbers[part.elements] = leaves[part.leaf].ravel()[part.positions]
    return numbers.reshape(tensor.shape)


def _one(leaves: Mapping[str, Array]) -> float:
    """Return the number: so small that values keep their size where many are added up."""
    return min(ONE, 1 / max((max(numbers.shape, default=1) for numbers in leaves.values()), default=1))


class _Sites:
    """Where both programs use their parameters."""

    def __init__(self, source: Program, target: Program) -> None:
        self._source, self._target = source, target
        self._pieces = Pieces(target)
        self._leaves, self._tensors = _first_meetings(source), _first_meetings(target)

    def in_order(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors in the order in which the target uses them."""
        return sorted(tensors, key=lambda one: _index(self._tensors, one.name))

    def leaves_in_order(self) -> list[str]:
        """Return the names of the leaves in the order in which the source uses them."""
        return sorted(self._source.parameters, key=lambda name: _index(self._leaves, name))

    def evidence(self, leaf: str, tensor: str) -> Evidence:
        """Return the evidence for a part of a leaf."""
        met, own = self._leaves.get(leaf), self._tensors[tensor]
        return Evidence(own.role, None if met is None else met.site("source"), own.site("target"), "", BY)

    def pieces(self, tensor: str) -> frozenset[Piece]:
        """Return the pieces that the target takes of what the layer of a tensor gives."""
        return self._pieces.of(self._tensors[tensor]) if tensor in self._tensors else frozenset()

    def contracted(self, tensor: str, positions: Array, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the axes of a leaf that the target sums over.

        Args:
            tensor: its name.
            positions: for each element of it the position in the leaf; `HIDDEN` for those that come from another leaf.
            shape: of the leaf.
        """
        index = np.unravel_index(np.maximum(positions, 0), shape)
        axes = set()
        for along in contracted_axes(self._target, self._tensors[tensor], tensor):
            inside = np.minimum(*(np.delete(positions, k, along) for k in (0, -1))) != HIDDEN
            axes |= {k for k, at in enumerate(index) if np.diff(at, axis=along)[inside].any()}
        return tuple(sorted(axes))


def _index(found: Mapping[str, Meeting], name: str) -> float:
    return found[name].index if name in found else math.inf


def _first_meetings(program: Program) -> dict[str, Meeting]:
    found: dict[str, Meeting] = {}
    for meeting in meetings(program):
        for name in meeting.weight.leaves:
            found.setdefault(name, meeting)
    return found


def _made(
    tensor: Tensor,
    numbers: Array,
    guess: Array,
    leaves: Mapping[str, Array],
    way: tuple[Arithmetic, float],
    sites: _Sites,
) -> Tensor:
    """Return a tensor with the leaves of its elements; the parts that the search found, if they are the same."""
    if np.array_equal(numbers, guess):
        return replace(tensor, grade=Grade.BEHIND, candidates=(), ties=(), guessed=True)
    flat = numbers.ravel()
    parts = []
    for leaf, own in leaves.items():
        elements = np.flatnonzero(np.isin(flat, own))
        if len(elements):
            positions = np.where(np.isin(numbers, own), numbers - own.min(), HIDDEN)
            summed = sites.contracted(tensor.name, positions, own.shape)
            of_leaf = positions.ravel()[elements]
            parts.append(Part(elements, leaf, of_leaf, way[0], sites.evidence(leaf, tensor.name), way[1], summed))
    in_order = tuple(sorted(parts, key=lambda part: int(part.elements[0])))
    return replace(
        tensor,
        grade=Grade.BEHIND,
        parts=in_order,
        alternatives={},
        ties=(),
        candidates=(),
        guessed=True,
        not_reached=False,
    )
