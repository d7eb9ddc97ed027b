"""Where the tensors of a rule go: the target layer, its constants, and the indices of its name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from convert.core.path_pattern import Pattern, parse_pattern


@dataclass(frozen=True)
class Tied:
    """A second name of an embedding's table in the target's state_dict.

    Attributes:
        word: what the table is there: ``linear`` (a head), ``embedding``, or ``parameter``.
        path: the module, or the whole tensor name of a parameter.
    """

    word: str
    path: Pattern

    @property
    def tensor(self) -> Pattern:
        """The tensor's full name."""
        return self.path if self.word == "parameter" else parse_pattern(f"{self.path.text}.weight")


@dataclass(frozen=True)
class TargetLayer:
    """Where a rule's tensors go.

    Attributes:
        path: the module (``layers.{i}.norm``), or the whole tensor name for kinds with one tensor and no module.
        names: role (``weight``, ``bias``) -> name of the parameter within the module, where it is not the role.
        multiplies_by: for norms, the factor that the target's code applies: ``weight`` or ``1+weight``.
        computes: the equation or dimension numbers of the target's code, where it is not PyTorch's own layer.
        part: (k, n) when these rows are the k-th of n parts of the tensor, counted from 1; other rules make the others.
        rope: how the target's code pairs the features that RoPE turns, where the target says so.
        flattened: the order in which the target's code flattens the axes of a map, where the target says so.
        parametrization: how the target keeps a normalised weight's two tensors, where it does.
        packed_in: the torch.nn.MultiheadAttention that it is a projection of, where the rule is an `attention`.
        tied: of an embedding, where else the target has the same table.
        has: which of weight and bias the target's norm has, where the target says so.
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
    has: str | None = None


@dataclass(frozen=True)
class Constant:
    """A tensor of the target's module that no leaf holds, as the source does nothing with it.

    Attributes:
        role: of the tensor: ``weight``, ``bias``, or its own name.
        value: of all its elements.
        said: what it is and why, for a plan.
        dtype: of a single number; empty: it has the shape and the dtype of the tensors beside it.
    """

    role: str
    value: float
    said: str
    dtype: str = ""


@dataclass(frozen=True)
class Numbering:
    """How an index of the target follows from several of the source, as the digits of a number follow each other.

    Attributes:
        order: names of the source's indices, the slowest first; the last one counts through first.
        counts: how many values each of them has in the tree, the first (slowest) one left out; filled in when a rule is
            settled for a tree.
        offset: how many values come before, in another place.
        period: how many values the last index has by what the rules declare; None: as many as the tree shows.
    """

    order: tuple[str, ...]
    counts: tuple[int, ...] = ()
    offset: int = 0
    period: int | None = None

    def value(self, indices: Mapping[str, int]) -> int:
        """The target's index."""
        first, *rest = self.order
        number = indices[first]
        for name, count in zip(rest, self.counts, strict=True):
            number = number * count + indices[name]
        return number + self.offset


@dataclass(frozen=True)
class Sinusoids:
    """A table of sines and cosines by position.

    Attributes:
        first: the largest factor of a position (upstream calls it the shortest timescale); step: logarithm of the factor between two.
        interleaved: whether each sine lies beside its cosine, and not all sines before all cosines.
    """

    first: float
    step: float
    interleaved: bool
