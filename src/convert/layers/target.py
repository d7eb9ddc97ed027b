"""Where the tensors of a rule go: the target layer, its constants, and the indices of its name."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from convert.core.axis_groups import AxisGroup
from convert.core.path_pattern import Pattern, parse_pattern


@dataclass(frozen=True)
class Tied:
    """Another name of an embedding's table in the target's state_dict.

    Attributes:
        kind_name: what uses the table under that name: ``linear`` (a head), ``embedding`` or ``parameter``.
        path: path of the module; full tensor name of a parameter.
    """

    kind_name: str
    path: Pattern

    @property
    def tensor(self) -> Pattern:
        """Full name of the tensor."""
        return self.path if self.kind_name == "parameter" else parse_pattern(f"{self.path.text}.weight")


@dataclass(frozen=True)
class TargetLayer:
    """Where the tensors of a rule go.

    Attributes:
        path: path of the module (``layers.{i}.norm``); full tensor name for kinds without a module.
        names: role (``weight``, ``bias``) -> name of the parameter in the module, where it differs from the role.
        multiplies_by: of a norm: the factor that the target's code applies, ``weight`` or ``1+weight``.
        computes: equation or dimension numbers of the target's code, where it is no torch layer.
        part: (k, n): these rows are the k-th of n parts of the tensor, counted from 1; other rules make the other parts.
        rope: how the target's code pairs the features that RoPE rotates; None: the default.
        flattened: the order in which the target's code flattens the axes of a map; None: the default.
        parametrization: how the target stores a weight norm; None: the norm is folded into the weight.
        packed_in: the torch.nn.MultiheadAttention that this projection is part of, where the rule is an `attention`.
        tied: of an embedding: the other names of the table.
        axes: letters of each axis of the target's weight; none for an axis of size 1. None: as the kind of layer has them.
        rows: what the first axis is made of, where it has several parts, from several leaves or parts of one; or another axis.
        along: the axis along which leaves follow each other as a whole, or alternate; the last one is -1. None: `rows` are those of a matrix.
        piece: (k, n): of a layer that `of_part` gives: the k-th of n parts, counted from 0.
        has: which of weight and bias the target has, where it may have more than the source; None: the default.
        concatenated: letter of an axis -> its parts, in the order in which the target's code concatenates them.
        zeros_before: of a parameter: letter of an axis -> elements in front of it that the source lacks and that are zeros.
        padding: of a convolution: that of the module, for each spatial axis, where the code around it pads or cuts, too; empty: the default.
    """

    path: Pattern
    names: Mapping[str, str] = field(default_factory=dict)
    multiplies_by: str = "weight"
    computes: Any = None
    part: tuple[int, int] | None = None
    rope: str | None = None
    flattened: str | None = None
    parametrization: str | None = None
    packed_in: Pattern | None = None
    tied: tuple[Tied, ...] = ()
    axes: tuple[str, ...] | None = None
    has: str | None = None
    rows: AxisGroup | None = None
    along: int | None = None
    piece: tuple[int, int] | None = None
    concatenated: Mapping[str, AxisGroup] = field(default_factory=dict)
    zeros_before: Mapping[str, int] = field(default_factory=dict)
    padding: tuple[int, ...] = ()

    def of_part(self, k: int) -> TargetLayer:
        """Return the layer of one part: of the rows, of one element of the axes around the parts; of another axis, of all."""
        if self.rows is None or self.axes is None:
            return self
        if self.along is not None:
            at = self.along % len(self.axes)
            letters = (*self.axes[:at], self.rows.terms[k], *self.axes[at + 1 :])
            return replace(self, axes=letters, rows=None, along=None, piece=(k, len(self.rows.parts)))
        letters = (self.rows.parts[k] + self.rows.after, *self.axes[1:])
        return replace(self, axes=letters, rows=None, part=None, piece=(k, len(self.rows.parts)))


@dataclass(frozen=True)
class Constant:
    """A tensor of the target's module that no leaf holds, because the source has no such parameter.

    Attributes:
        role: ``weight``, ``bias``, or the name of the tensor.
        value: value of all its elements.
        reason: what it is and why, for the plan.
        dtype: dtype of a single number; empty: the tensor has shape and dtype of the layer's other tensors.
        per_row: whether it has one element for each row of the layer's weight, as a bias.
    """

    role: str
    value: float
    reason: str
    dtype: str = ""
    per_row: bool = False


@dataclass(frozen=True)
class Numbering:
    """How an index of the target is computed from several of the source, as a number from its digits.

    Attributes:
        order: names of the source's indices, the slowest first.
        counts: number of values of each index but the first, in this tree; empty until the tree is known.
        offset: number of values that come before.
        period: number of values of the last index that the rules declare; None: the tree has it.
        positions: which values of the last index the source has, in its order; a source with one of them need not have the index.
            Of a single index, only these values, counted in periods, are the rule's. Empty: all.
    """

    order: tuple[str, ...]
    counts: tuple[int, ...] = ()
    offset: int = 0
    period: int | None = None
    positions: tuple[int, ...] = ()

    def value(self, indices: Mapping[str, int]) -> int:
        """Return the index of the target."""
        first, *rest = self.order
        number = indices[first]
        for name, count in zip(rest, self.counts, strict=True):
            number = number * count + self._digit(name, indices)
        return number + self.offset

    def _digit(self, name: str, indices: Mapping[str, int]) -> int:
        own = self.positions if name == self.order[-1] else ()
        k = indices.get(name, 0) if own else indices[name]
        return own[k] if k < len(own) else k

    def holds(self, number: int) -> bool:
        """Whether the source has this value of the target's index, as far as its positions tell."""
        return not self.positions or self.period is None or (number - self.offset) % self.period in self.positions

    def may_hold(self, numbers: Collection[int], indices: Mapping[str, int]) -> bool:
        """Whether a leaf with these indices of the source may hold one of these values, as far as they tell."""
        if self.is_known(indices):
            return self.value(indices) in numbers
        return any(number >= self.offset and self.holds(number) for number in numbers)

    def is_known(self, indices: Collection[str]) -> bool:
        """Whether these indices of the source give that of the target."""
        needed = self.order[:-1] if len(self.positions) == 1 and len(self.order) > 1 else self.order
        return len(self.counts) == len(self.order) - 1 and all(name in indices for name in needed)


@dataclass(frozen=True)
class Sinusoids:
    """A table of sines and cosines by position.

    Attributes:
        first: the largest factor of a position (upstream: the shortest timescale).
        step: logarithm of the factor between two.
        interleaved: whether sines and cosines alternate; otherwise all sines come first.
        side: of a square of positions, whose columns come before its rows; 0: the positions are in one line. Rows of zeros come before
            those of the square where the tensor has more.
    """

    first: float
    step: float
    interleaved: bool
    side: int = 0


@dataclass(frozen=True)
class Numbers:
    """Numbers that a rule gives.

    Attributes:
        rows: nested tuples; their axes are the last ones of the tensor, and one of size 1 is repeated.
        triangle: instead of rows, the numbers below, on and above the diagonal of the last two axes.
    """

    rows: Any = ()
    triangle: tuple[float, float, float] | None = None
