"""What was derived: where each tensor of the target comes from, with the evidence. The search fills it, the rule writer reads it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import isclose, isfinite
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
BY_OUTPUTS = "the outputs, with one number in every other parameter"  # `Evidence.by`


class Arithmetic(StrEnum):
    """How an element of the target is computed from an element of the source, before the factor."""

    SAME = "same"
    ONE_PLUS = "1+source"
    MINUS_ONE = "source-1"
    CONSTANT = "constant"
    """The source has no such parameter: zeros of a bias, ones of a scale. `Part.factor` is the number."""
    OWN = "own"
    """The source has no such parameter: the numbers of a buffer that the module computes itself, such as a table of sines."""
    COMPUTED = "computed"
    """From several elements, by the operations of the source: a normalised kernel, a product of two leaves."""


class Role(StrEnum):
    """What a parameter does where data meets it."""

    PRODUCT = "product"
    CONVOLUTION = "convolution"
    SCALE = "scale"
    SHIFT = "shift"
    LOOKUP = "lookup"
    OTHER = "other"


class Grade(StrEnum):
    """How sure a tensor's origin is; the values never mix."""

    DERIVED = "derived"
    """Every other candidate was refuted."""
    INTERCHANGEABLE = "interchangeable"
    """Other candidates give the same outputs, and this was shown for each of them."""
    TIED = "tied"
    """The inputs have equal columns, so that they cannot tell the elements apart."""
    IN_FRONT = "derived up to the mismatch"
    """The programs differ, but not in front of a value that is computed with the tensor: it is the source's in each draw, and no other candidate makes it so."""
    BEHIND = "found behind the mismatch"
    """With values of the source's in place of those that differ, what is computed with the tensor is the source's in each draw. No output was reached, but where the difference could be corrected."""
    OPEN = "open"
    """Nothing fitted, or the programs differ before anything shows whether it fits."""


@dataclass(frozen=True)
class Site:
    """The operation in which data meets a parameter.

    Attributes:
        program: ``source`` or ``target``.
        index: of the operation in `Program.operations`.
        operation: its name, as in `Operation.name`.
        where: ``file.py:line``, and `module`: the path of the module that ran; empty where unknown.
        settings: what the operation was given, such as dimension numbers, as text or JSON values.
        operand: position of the parameter's operand in the operation; None where the site is no meeting of both.
    """

    program: str
    index: int
    operation: str
    where: str = ""
    module: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    operand: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the site as JSON values."""
        settings = {
            name: str(x) if isinstance(x, float) and not isfinite(x) else x for name, x in self.settings.items()
        }
        return vars(self) | {"settings": settings}


@dataclass(frozen=True)
class Evidence:
    """Why a part is believed.

    Attributes:
        role: what the parameter does.
        source: where the source uses it; None where the source has no such parameter.
        target: where the target uses it.
        shared: the value that both programs have there: ``input x``, or the operation of the source that computes it.
        by: how elements were paired, such as ``columns`` or ``rows taken by the same indices``.
        tried: how many candidates were tried at this site of the target.
        refuted: (where, count): the operation of the target at which candidates of this site gave no value of the source.
    """

    role: Role
    source: Site | None
    target: Site
    shared: str
    by: str
    tried: int = 1
    refuted: tuple[tuple[str, int], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the evidence as JSON values."""
        return {
            "role": self.role.value,
            "source": None if self.source is None else self.source.to_dict(),
            "target": self.target.to_dict(),
            "shared": self.shared,
            "by": self.by,
            "tried": self.tried,
            "refuted": [list(item) for item in self.refuted],
        }


@dataclass(frozen=True, eq=False)
class LowRank:
    """A matrix [in, out] that is the product of two leaves, times a number; it may be added to a third leaf.

    Attributes:
        left, right: name of the leaf, and the positions of its elements: [in, rank] and [rank, out].
        scale: what the product is multiplied by.
        base: the third leaf, and the positions of its elements, [in, out].
    """

    left: tuple[str, Array]
    right: tuple[str, Array]
    scale: float = 1.0
    base: tuple[str, Array] | None = None

    @property
    def leaves(self) -> tuple[str, ...]:
        """Names of the leaves."""
        return tuple(sorted({leaf for leaf, _ in filter(None, (self.left, self.right, self.base))}))

    def value(self, leaves: Mapping[str, Array]) -> Array:
        """Return the matrix, from leaves by name."""
        left, right = (np.ravel(leaves[name])[at] for name, at in (self.left, self.right))
        made: Array = self.scale * left @ right
        return made if self.base is None else made + np.ravel(leaves[self.base[0]])[self.base[1]]


@dataclass(frozen=True, eq=False)
class Part:
    """Some elements of a tensor of the target that come from one leaf in one way.

    Attributes:
        elements: their positions in the tensor, in C order.
        leaf: name of the source's leaf; empty for `Arithmetic.CONSTANT` and `OWN`, and for `COMPUTED`, where `leaves` has the names.
        positions: for each of `elements` the position in the leaf, in C order; for a computed part the position in the operand of
            `evidence.source`; empty for a constant and for the module's own numbers.
        arithmetic: how the element is computed.
        factor: what it is multiplied by, after `arithmetic`; the value of a constant.
        contracted: axes of the leaf that a product sums over (of a convolution: the input channels and the taps); of a computed part,
            of the operand.
        leaves: what a computed part is computed from.
        evidence: why it is believed.
        values: of a computed part, with the weights of `Derivation.weights`; or the module's own numbers.
        low_rank: of a part that is computed from a product of two leaves: `positions` are those in the matrix that it gives.
        terms: of a computed part that is a sum of leaves and `number`: each leaf, with the position in it for each of `elements`.
        number: that is added to each element before the factor, beside that of `arithmetic`, where a rule says it so.
        term_axes: of a sum of leaves that a rule says as one: for each axis of each leaf that of the sum, -1 for one of size 1; empty: all are the same.
        rows_of: of a computed part that is the length of each row of another tensor: its name.
    """

    elements: Array
    leaf: str
    positions: Array
    arithmetic: Arithmetic
    evidence: Evidence
    factor: float = 1.0
    contracted: tuple[int, ...] = ()
    leaves: tuple[str, ...] = ()
    values: Array | None = None
    low_rank: LowRank | None = None
    terms: tuple[tuple[str, Array], ...] = ()
    number: float = 0.0
    term_axes: tuple[tuple[int, ...], ...] = ()
    rows_of: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the part as JSON values; positions as [first, step, count]."""
        return {
            "elements": progressions(self.elements),
            "leaf": self.leaf,
            "positions": progressions(self.positions),
            "arithmetic": self.arithmetic.value,
            "factor": self.factor,
            "contracted": list(self.contracted),
            "leaves": list(self.leaves),
            "evidence": self.evidence.to_dict(),
        }


MORE_ROWS = "more rows"


@dataclass(frozen=True)
class Tie:
    """Columns of the data that are equal in all rows.

    Attributes:
        columns: their numbers along the axis that the parameter meets.
        site: where the target meets them.
        told_by: inputs that would tell them apart, `MORE_ROWS` of columns that the model makes zero; empty: none, as it is the models that make them equal.
    """

    columns: tuple[int, ...]
    site: Site
    told_by: str

    def to_dict(self) -> dict[str, Any]:
        """Return the tie as JSON values."""
        return {"columns": list(self.columns), "site": self.site.to_dict(), "told_by": self.told_by}


NOT_REACHED = "not reached: behind the place where the search ended"


@dataclass(frozen=True, eq=False)
class Tensor:
    """Where a tensor of the target comes from.

    Attributes:
        name: in the state_dict.
        shape: of the tensor.
        grade: how sure this is.
        parts: cover the tensor once, in the order of `elements`. Of an open tensor they are the nearest guess, or empty.
        alternatives: number of a way -> parts in place of some of `parts` (`Grade.INTERCHANGEABLE`). With those of all tensors that the
            way changes, such as the heads of a query, a key and a value in another order, the outputs are the same.
        ties: which columns the inputs cannot tell apart (`Grade.TIED`).
        candidates: leaves that may be the source, whole or one part of them, such as one layer of a stack (`Grade.OPEN`).
        also: further names of the same tensor in the state_dict.
        unseen: how many elements no operation of the run used, or only with zeros; they continue the pattern of the others, or of other layers.
        unread: whether no operation of the target reads the tensor.
        guessed: whether the source's values were given to the target in front of it, or its parts are the nearest guess.
        not_reached: whether the target reads it behind the place where the search ended, and nothing was found for it.
    """

    name: str
    shape: tuple[int, ...]
    grade: Grade
    parts: tuple[Part, ...] = ()
    alternatives: Mapping[int, tuple[Part, ...]] = field(default_factory=dict)
    ties: tuple[Tie, ...] = ()
    candidates: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    unseen: int = 0
    unread: bool = False
    guessed: bool = False
    not_reached: bool = False

    @property
    def lack(self) -> str:
        """Why a tensor has no parts, or none that is sure."""
        if self.not_reached:
            return NOT_REACHED
        if self.is_own:
            return "no output confirms the module's own numbers, as the programs differ"
        return "no operation of the target reads it" if self.unread else "nothing was found that fits"

    @property
    def nearest(self) -> tuple[str, ...]:
        """Leaves that its parts are made of: of an open tensor those of the nearest guess."""
        return tuple(dict.fromkeys(leaf for part in self.parts for leaf in (part.leaf, *part.leaves) if leaf))

    @property
    def is_own(self) -> bool:
        """Whether the module computes it itself."""
        return any(part.arithmetic is Arithmetic.OWN for part in self.parts)

    @property
    def is_constant(self) -> bool:
        """Whether the target has numbers in it that the source does without: zeros of a bias, ones of a scale."""
        return bool(self.parts) and all(part.arithmetic is Arithmetic.CONSTANT for part in self.parts)

    def to_dict(self) -> dict[str, Any]:
        """Return the tensor as JSON values."""
        return {
            "name": self.name,
            "shape": list(self.shape),
            "grade": self.grade.value,
            "parts": [part.to_dict() for part in self.parts],
            "alternatives": [
                {"way": way, "parts": [part.to_dict() for part in parts]} for way, parts in self.alternatives.items()
            ],
            "ties": [tie.to_dict() for tie in self.ties],
            "candidates": list(self.candidates),
            "also": list(self.also),
            "unseen": self.unseen,
            "unread": self.unread,
            "guessed": self.guessed,
            "not_reached": self.not_reached,
        }


@dataclass(frozen=True)
class Fact:
    """What a rule says beside sources and layouts.

    Attributes:
        name: ``epsilon`` (value: a number), ``activation`` (a name of `layers.activations`), ``multiplies_by`` (``scale`` or
            ``1+scale``: what the source multiplies by), ``weight`` (``weight`` or ``1+weight``: what the target multiplies by),
            ``padding`` (pairs of numbers, per spatial axis), ``strides``, ``dilation``, ``groups``, ``transposed``, ``rope``
            (``interleaved to half-split`` or the reverse), ``carries`` (a number: the target's tensor is the source times this),
            ``moments`` (``of each feature``: the epsilon is added to a variance over other axes than the features).
        value: a JSON value.
        tensors: of the target, that it belongs to.
        leaves: of the source, that it belongs to.
        site: where it was read.
    """

    name: str
    value: Any
    tensors: tuple[str, ...]
    leaves: tuple[str, ...]
    site: Site | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the fact as JSON values."""
        return {
            "name": self.name,
            "value": self.value,
            "tensors": list(self.tensors),
            "leaves": list(self.leaves),
            "site": None if self.site is None else self.site.to_dict(),
        }


@dataclass(frozen=True)
class OtherWeight:
    """Numbers of a parameter with which the target computes what the source does where their code differs.

    Attributes:
        name: of the parameter.
        factor: what it is multiplied by.
        number: what is added to each element then; None where that depends on another parameter.
        partly: whether only some elements have other numbers, as those of one gate.
    """

    name: str
    factor: float = 1.0
    number: float | None = 0.0
    partly: bool = False

    def __str__(self) -> str:
        name = f"a part of {self.name}" if self.partly else self.name
        times = "" if isclose(self.factor, 1.0) else f" times {self.factor:.7g}"
        if self.number is None:
            return f"{name}{times} plus other numbers"
        return f"{name}{times}" + (f" plus {self.number:.7g}" if self.number else "")


@dataclass(frozen=True)
class Difference:
    """An operation of the target that the source has no counterpart of.

    Attributes:
        site: the operation.
        problem: what the target computes there, and what the source computes instead, where it is known.
        error: the largest difference of the output, relative to its largest value, where it is known.
        brief: the same as `problem` in a few words, with the layer; empty where they are not known.
        shown: whether the programs differ there. Otherwise they may also compute the same in two ways, with weights that were not found.
        made_up_by: other numbers of parameters with which the programs compute the same all the same, where they were found.
    """

    site: Site
    problem: str
    error: float | None = None
    brief: str = ""
    shown: bool = True
    made_up_by: tuple[OtherWeight, ...] = ()

    @property
    def is_certain(self) -> bool:
        """Whether the code of the two says different things there. Otherwise they may be equal, and nothing has shown it."""
        return self.shown or bool(self.made_up_by)

    def to_dict(self) -> dict[str, Any]:
        """Return the difference as JSON values."""
        return vars(self) | {"site": self.site.to_dict(), "made_up_by": [vars(one) for one in self.made_up_by]}


@dataclass(frozen=True)
class Proof:
    """The unmodified module with weights that the derivation computes from fresh leaves, on fresh inputs.

    Attributes:
        draws: how many times.
        error: the largest difference of an output, relative to the largest value of that output.
        allowed: up to which error it proves: the rounding of float64, of numbers that a program has in float32, or of outputs that lose digits.
        same_inputs: whether the inputs ignore their seed, so that only the leaves are fresh.
        leaves: of the first of these draws.
        tensors: what the derivation makes of them; NaN where it makes nothing. A rule must make the same: numbers that it took from the
            leaves of the derivation, such as their signs, are others here.
    """

    draws: int
    error: float
    allowed: float
    same_inputs: bool = False
    leaves: Mapping[str, Array] = field(default_factory=dict, repr=False)
    tensors: Mapping[str, Array] = field(default_factory=dict, repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Return the proof as JSON values, without the numbers."""
        return {name: x for name, x in vars(self).items() if name not in ("leaves", "tensors")}


@dataclass(frozen=True, eq=False)
class Derivation:
    """The result of `infer`.

    Attributes:
        tensors: every tensor of the target's state_dict, tied ones once.
        leaves: every leaf of the source with its shape.
        dropped: leaves that the function computes nothing with, or nothing that the target keeps.
        facts: what was found beside weights.
        differences: where the programs differ; then nothing is `Grade.DERIVED` or `INTERCHANGEABLE`.
        proof: None where the programs differ or tensors are open.
        tried: candidates tried in all.
        notes: what limits the result: a branch taken by its values, opaque operations.
        weights: the random leaves that it was derived with.
        buffers: the integers and truth values that the module saves, such as indices and masks: it computes them itself.
        complex_leaves, complex_tensors: names of those that are complex. Their shapes and positions count the real and the
            imaginary parts along a further last axis.
    """

    tensors: tuple[Tensor, ...]
    leaves: Mapping[str, tuple[int, ...]]
    dropped: tuple[str, ...] = ()
    facts: tuple[Fact, ...] = ()
    differences: tuple[Difference, ...] = ()
    proof: Proof | None = None
    tried: int = 0
    notes: tuple[str, ...] = ()
    weights: Mapping[str, Array] = field(default_factory=dict, repr=False)
    buffers: Mapping[str, Array] = field(default_factory=dict, repr=False)
    complex_leaves: frozenset[str] = frozenset()
    complex_tensors: frozenset[str] = frozenset()

    @property
    def complete(self) -> bool:
        """Whether every tensor is derived or interchangeable, and the proof was given."""
        sure = {Grade.DERIVED, Grade.INTERCHANGEABLE}
        return not self.differences and self.proof is not None and all(t.grade in sure for t in self.tensors)

    def tensor(self, name: str) -> Tensor:
        """Return the tensor of this name.

        Raises:
            KeyError: there is none.
        """
        for tensor in self.tensors:
            if name in (tensor.name, *tensor.also):
                return tensor
        raise KeyError(name)

    def to_dict(self) -> dict[str, Any]:
        """Return the derivation as JSON values."""
        return {
            "tensors": [tensor.to_dict() for tensor in self.tensors],
            "leaves": {name: list(shape) for name, shape in self.leaves.items()},
            "dropped": list(self.dropped),
            "complex_leaves": sorted(self.complex_leaves),
            "complex_tensors": sorted(self.complex_tensors),
            "facts": [fact.to_dict() for fact in self.facts],
            "differences": [difference.to_dict() for difference in self.differences],
            "proof": None if self.proof is None else self.proof.to_dict(),
            "tried": self.tried,
            "notes": list(self.notes),
        }


def progressions(numbers: Array | Sequence[int]) -> list[list[int]]:
    """Return integers as [first, step, count], as few as a scan from the left finds."""
    numbers = np.asarray(numbers, np.int64).ravel()
    found: list[list[int]] = []
    at, steps = 0, np.diff(numbers)
    changes = np.flatnonzero(np.diff(steps)) + 1  # steps[k] differs from steps[k - 1]
    while at < len(numbers):
        if at == len(numbers) - 1:
            found.append([int(numbers[at]), 0, 1])
            break
        later = np.searchsorted(changes, at, side="right")
        end = int(changes[later]) if later < len(changes) else len(steps)
        found.append([int(numbers[at]), int(steps[at]), end - at + 1])
        at = end + 1
    return found
