"""What the kinds of path declare: which leaves a path has, and where its time axis is."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from convert.core.ops import Op, Permute, Reshape
from convert.core.path_pattern import Pattern, parse_pattern
from convert.layers.base import LayerKind
from convert.layers.target import TargetLayer

TIMES = "times"


def parse_data(text: str) -> str:
    """What each axis of a leaf is: T for time, C for channels, other letters for axes of a batch.

    Raises:
        ValueError: no T, a letter twice, or something else than letters.
    """
    letters = "".join(text.split())
    if not (letters.isascii() and letters.isalpha() and letters.isupper()) or len(set(letters)) < len(letters):
        raise ValueError(f"the axes of a path's data are different capital letters, such as NTC, not {text!r}")
    if "T" not in letters:
        raise ValueError(
            f"{text!r} has no T: one axis of a path's data is time (C is channels, any other letter a batch)"
        )
    return letters


def parse_below(text: str) -> str:
    parse_pattern(text)
    return text


@dataclass(frozen=True)
class PathTarget:
    """The form of a target.

    Attributes:
        buffers: whether the tensors are buffers of torchcde's module, and not the one tensor that its constructor takes.
        times: name of the tensor of times, where there is one of its own.
    """

    buffers: bool
    times: Pattern | None


@dataclass(frozen=True)
class PathDeclaration(LayerKind):
    """A piecewise polynomial path through data.

    Attributes:
        data: what each axis of a leaf is; None: time and channels are the last two, a leaf with one axis has time alone.
        leaves: role -> path below `from` (or from the top of the tree, with a slash in front).
    """

    data: str | None = None
    leaves: Mapping[str, str] = field(default_factory=dict)

    DEFAULT: ClassVar[Mapping[str, str]]  # role -> path below diffrax's object, in the order in which it keeps them
    PIECES: ClassVar[bool]  # whether a leaf has an element for each interval, and not for each knot
    source: ClassVar[str]
    module: ClassVar[str]

    @classmethod
    @abstractmethod
    def read(cls, values: Mapping[str, Any]) -> PathDeclaration:
        raise NotImplementedError

    @classmethod
    def layer(cls, values: Mapping[str, Any]) -> TargetLayer:
        if ("module" in values) == ("coeffs" in values):
            raise ValueError(
                "a path goes to a `module:`, or to `coeffs:` (one tensor) and `times:`; give one of the two"
            )
        if "module" in values and "times" in values:
            raise ValueError("the module keeps its times in its own buffer; leave `times:` out")
        return TargetLayer(values.get("module") or values["coeffs"], computes=PathTarget("module" in values, values.get("times")))  # fmt: skip

    def patterns(self, start: Pattern) -> dict[str, Pattern]:
        paths = {**self.DEFAULT, **self.leaves}
        return {
            role: parse_pattern(path if path.startswith("/") else f"{start.text}/{path}")
            for role, path in paths.items()
        }

    def order(self, rank: int) -> tuple[str, tuple[int, ...]]:
        """The letters of a leaf's axes, and the axes in the order of the target: batches, time, channels.

        Raises:
            ValueError: a leaf of this rank does not fit.
        """
        if self.data is None and rank == 1:
            letters = "T"
        elif self.data is None:
            batch = "NBMUVWXYZ"[: rank - 2]
            letters = batch + "TC"
        else:
            letters = self.data
        if rank != len(letters):
            raise ValueError(f"the rule gives its data the axes {' '.join(letters)}")
        return letters, tuple(sorted(range(rank), key=lambda k: {"T": 1, "C": 2}.get(letters[k], 0)))

    def movement(self, shape: tuple[int, ...]) -> tuple[Op, ...]:
        """From a leaf to (..., time, channels); data without channels has one."""
        letters, order = self.order(len(shape))
        ops: list[Op] = [Permute(order)] if order != tuple(range(len(order))) else []
        if "C" not in letters:
            ops.append(Reshape((*(shape[k] for k in order), 1)))
        return tuple(ops)

    @abstractmethod
    def tensors(self, module: str, buffers: bool) -> Mapping[str, tuple[str, ...]]:
        """Return the target's tensors but for the times: name -> roles of the leaves that are concatenated in it.

        Args:
            module: name of the target's module, or of its one tensor.
            buffers: whether each leaf becomes a buffer of the module.
        """

    def arithmetic(self, role: str) -> tuple[Op, ...]:
        """What the target multiplies the coefficients of this role by."""
        return ()

    def shared(self, role: str, shape: tuple[int, ...]) -> bool:
        return role == TIMES and len(shape) == 1

    @property
    def may_lack(self) -> frozenset[str]:
        return frozenset({TIMES})

    def facts(self, layer: TargetLayer) -> dict[str, Any]:
        return {"path": self.source}
