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
from convert.inference.derivation import BY_OUTPUTS, Arithmetic, Evidence, Grade, Part, Tensor
from convert.inference.grading import proof
from convert.inference.isolated.one_by_one import EQUAL, MOST_RUNS, OneByOne
from convert.inference.isolated.pieces import Pieces, Use
from convert.inference.isolated.places import HIDDEN, OTHER
from convert.inference.meetings.contracted import contracted_axes
from convert.inference.meetings.sites import Meeting, meetings
from convert.inference.rounding import tolerance
from convert.programs.program import Program
from convert.programs.reruns import Reruns

Array = np.ndarray[Any, np.dtype[Any]]
ONE = 0.1  # the number in every parameter that is not known; in wide layers it is less
IN_FRONT = (Grade.IN_FRONT, Grade.TIED)
SAME = (Arithmetic.SAME, 1.0)
RAN_OUT = (
    "the search by the outputs alone ended after {runs} runs of both programs; its best try found {most} of {all} tensors: "
    "whether the programs are equal is not decided; a smaller pair, such as one layer of each kind, needs fewer"
)
TOO_MANY = "the search by the outputs alone was not tried: it is for at most {most} tensors, and {all} are open"
MOST_TENSORS = 700  # one call in another for each; Python allows 1,000


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
            they are only tried before others. What is computed from leaves is taken as it is at first, then only in front of the
            difference; what the module has itself, always.
        source: the record in the form that these parts belong to.
        source_as_run, target: the records as they ran, with the same inputs.
        allowance: of runs; where all tensors are not found, those that were needed are taken from it.
    """
    sites = _Sites(source_as_run, target)
    leaves = sites.numbers
    sought = sites.in_order([one for one in tensors if _is_sought(one, target)])
    if not sought or allowance.left <= 0:
        return FoundByOutputs(None, allowance.note if sought else "")
    if len(sought) > MOST_TENSORS:
        return FoundByOutputs(None, TOO_MANY.format(most=MOST_TENSORS, all=len(sought)))
    guessed = [one.name for one in sought if (_guess(one, leaves) != HIDDEN).all()]
    in_front = [one.name for one in sought if one.name in guessed and one.grade in IN_FRONT]
    doubted = sites.in_order([one for one in tensors if _is_sought(one, target, trusted=False)])
    attempts = [(sought, guessed), (doubted, in_front), (doubted, [])]
    most, runs, ran_out = 0, 0.0, False
    for k, (those, kept) in enumerate(attempts):
        if (those, kept) in attempts[:k]:
            continue
        search = _search(those, kept, tensors, sites, source, allowance.left - runs)
        if search is None:
            continue
        if search.solve():
            by_name = {one.name: search.of[one.name] for one in those}
            return FoundByOutputs(
                tuple(_made(one, by_name[one.name], leaves, sites) if one.name in by_name else one for one in tensors)
            )
        most, runs, ran_out = max(most, search.most), runs + search.runs, ran_out or search.ran_out
        if runs >= allowance.left:
            break
    if ran_out:
        allowance.left, allowance.note = 0, RAN_OUT.format(runs=round(runs), most=most, all=len(sought))
        return FoundByOutputs(None, allowance.note)
    allowance.left -= runs
    return FoundByOutputs()


def _search(
    sought: Sequence[Tensor],
    kept: Sequence[str],
    tensors: Sequence[Tensor],
    sites: _Sites,
    source: Program,
    most_runs: float,
) -> OneByOne | None:
    """Return the search for some tensors, with those of them that are kept as guessed; None where with one number everywhere an output is not a number."""
    source_as_run, target, leaves = sites.source, sites.target, sites.numbers
    names = {one.name for one in sought}
    known = {k for one in tensors if one.name not in names for part in one.parts for k in (part.leaf, *part.leaves)}
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
    outputs = list(source_as_run.outputs)
    try:
        sides = Reruns(source_as_run, own, given, outputs), Reruns(target, state, given, outputs)
    except ConvertError:
        return None
    uses = {name: sites.of_leaf(name) for name in hidden} | {one.name: sites.of_tensor(one.name) for one in sought}
    guesses = {one.name: _guess(one, leaves) for one in sought}
    allowed = max(EQUAL, tolerance(source_as_run, target))
    return OneByOne(*sides, hidden, guesses, values, uses, kept, allowed=allowed, most_runs=most_runs)


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


def _is_sought(tensor: Tensor, target: Program, *, trusted: bool = True) -> bool:
    """Whether a tensor may be made of elements of leaves; of one that is computed, as far as that is not trusted where the programs may differ."""
    if tensor.unread or tensor.name in target.buffers or target.parameters[tensor.name].array.dtype.kind != "f":
        return False
    if not trusted and tensor.grade not in IN_FRONT:
        return True
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
    """Where both programs use their parameters.

    Attributes:
        source, target: the two.
        numbers: name of a leaf -> the numbers of its elements.
    """

    def __init__(self, source: Program, target: Program) -> None:
        self.source, self.target = source, target
        self.numbers = {name: value.elements[0] for name, value in source.parameters.items()}
        self._pieces = Pieces(target)
        self._leaves, self._tensors = _first_meetings(source), _first_meetings(target)

    def in_order(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors in the order in which the target uses them."""
        return sorted(tensors, key=lambda one: _index(self._tensors, one.name))

    def leaves_in_order(self) -> list[str]:
        """Return the names of the leaves in the order in which the source uses them."""
        return sorted(self.source.parameters, key=lambda name: _index(self._leaves, name))

    def evidence(self, leaf: str, tensor: str) -> Evidence:
        """Return the evidence for a part of a leaf."""
        met, own = self._leaves.get(leaf), self._tensors[tensor]
        return Evidence(own.role, None if met is None else met.site("source"), own.site("target"), "", BY_OUTPUTS)

    def of_leaf(self, name: str) -> Use:
        """Return how the source uses a leaf."""
        return _use(self.source, self._leaves.get(name))

    def of_tensor(self, name: str) -> Use:
        """Return how the target uses a tensor, with the pieces that it takes of what its layer gives."""
        met = self._tensors.get(name)
        return Use() if met is None else replace(_use(self.target, met), pieces=self._pieces.of(met))

    def contracted(self, tensor: str, positions: Array, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the axes of a leaf that the target sums over.

        Args:
            tensor: its name.
            positions: for each element of it the position in the leaf; `HIDDEN` for those that come from another leaf.
            shape: of the leaf.
        """
        index = np.unravel_index(np.maximum(positions, 0), shape)
        axes = set()
        for along in contracted_axes(self.target, self._tensors[tensor], tensor):
            inside = np.minimum(*(np.delete(positions, k, along) for k in (0, -1))) != HIDDEN
            axes |= {k for k, at in enumerate(index) if np.diff(at, axis=along)[inside].any()}
        return tuple(sorted(axes))


def _index(found: Mapping[str, Meeting], name: str) -> float:
    return found[name].index if name in found else math.inf


def _use(program: Program, met: Meeting | None) -> Use:
    if met is None:
        return Use()
    return Use(met.index / len(program.operations), (met.operation.where, met.operation.name, met.side))


def _first_meetings(program: Program) -> dict[str, Meeting]:
    found: dict[str, Meeting] = {}
    for meeting in meetings(program):
        for name in meeting.weight.leaves:
            found.setdefault(name, meeting)
    return found


def _made(
    tensor: Tensor,
    numbers: Array,
    leaves: Mapping[str, Array],
    sites: _Sites,
) -> Tensor:
    """Return a tensor with the leaves of its elements; the parts that the search found, if they are the same."""
    way = _way(tensor) or SAME
    if np.array_equal(numbers, _guess(tensor, leaves)):
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
