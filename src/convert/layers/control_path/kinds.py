"""Paths through data: the coefficients that diffrax keeps, for torchcde.

Within the interval that starts at the knot t_i, with f = t - t_i, diffrax's cubic path is ``a + f (b + f (c + f d))`` from four
arrays, ``coeffs = (d, c, b, a)``; torchcde's ``CubicSpline`` takes one, ``cat([a, b, 2c, 3d], -1)``, because the derivative
``b + f (2c + f 3d)`` is what a CDE is solved with. A linear path is its knots on both sides.

Source: diffrax 0.7.2 `_global_interpolation.py`, torchcde 0.2.5 `interpolation_cubic.py` and `interpolation_linear.py`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from convert.core.fields import Key, Record, Scalar
from convert.core.ops import Multiply, Op, Permute, Reshape
from convert.core.path_pattern import Pattern, parse_pattern
from convert.layers.base import LayerKind
from convert.layers.shared_keys import PATTERN
from convert.layers.target import TargetLayer

TIMES = "times"


def parse_data(text: str) -> str:
    """What each axis of a leaf is: T for time, C for channels, other letters for axes of a batch.

    Raises:
        ValueError: no T, a letter twice, or something else than letters.
    """
    letters = "".join(text.split())
    if not (letters.isascii() and letters.isalpha() and letters.isupper()) or len(set(letters)) < len(letters):
        raise ValueError(f"the axes of a path's data are capital letters, each once, such as NTC, not {text!r}")
    if "T" not in letters:
        raise ValueError(
            f"{text!r} has no T: one axis of a path's data is time (C is channels, any other letter a batch)"
        )
    return letters


def _parse_below(text: str) -> str:
    parse_pattern(text)
    return text


@dataclass(frozen=True)
class DataPath(LayerKind):
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
    def read(cls, values: Mapping[str, Any]) -> DataPath:
        raise NotImplementedError

    @classmethod
    def layer(cls, values: Mapping[str, Any]) -> TargetLayer:
        if ("module" in values) == ("coeffs" in values):
            raise ValueError(
                "a path goes to a `module:`, or to `coeffs:` (one tensor) and `times:`; give one of the two"
            )
        if "module" in values and "times" in values:
            raise ValueError("the module keeps its times in a buffer of its own; leave `times:` out")
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


@dataclass(frozen=True)
class PathTarget:
    """The form of a target.

    Attributes:
        buffers: whether the tensors are buffers of torchcde's module, and not the one tensor that its constructor takes.
        times: name of the tensor of times, where there is one of its own.
    """

    buffers: bool
    times: Pattern | None


_TARGET = Record(
    {
        "module": Key(PATTERN, "name of a torchcde module that is part of the model: its buffers"),
        "coeffs": Key(PATTERN, "name of one tensor: what the constructor of torchcde's module takes"),
        "times": Key(PATTERN, "name of the tensor of times that goes with `coeffs`"),
    },
    "a target",
)
_DATA = Key(
    Scalar(str, "the axes of a path's data such as NTC", parse_data),
    "what each axis of a leaf is: T time, C channels, other letters a batch (default: time and channels last)",
)


def _leaves(*roles: str) -> Key:
    path = Scalar(str, "a path below `from`, or from the top of the tree with a slash in front", _parse_below)
    return Key(
        Record({role: Key(path, f"path of {role}") for role in roles}, "`leaves`"),
        "where the leaves are below `from`, when they are not called as diffrax calls them",
    )


@dataclass(frozen=True)
class CubicSpline(DataPath):
    """``diffrax.CubicInterpolation`` to ``torchcde.CubicSpline``."""

    DEFAULT: ClassVar[Mapping[str, str]] = {
        "d": "coeffs/0",
        "c": "coeffs/1",
        "b": "coeffs/2",
        "a": "coeffs/3",
        TIMES: "ts",
    }
    PIECES: ClassVar[bool] = True
    ORDER: ClassVar[Mapping[str, str]] = {"a": "_a", "b": "_b", "c": "_two_c", "d": "_three_d"}  # torchcde's
    FACTORS: ClassVar[Mapping[str, float]] = {"c": 2.0, "d": 3.0}
    source: ClassVar[str] = "diffrax.CubicInterpolation"
    module: ClassVar[str] = "torchcde.CubicSpline"
    doc: ClassVar[str] = "torchcde.CubicSpline, from diffrax.CubicInterpolation: cat[a, b, 2c, 3d] of (d, c, b, a)"
    keys: ClassVar[Mapping[str, Key]] = {"data": _DATA, "leaves": _leaves("d", "c", "b", "a", TIMES)}
    target: ClassVar[Record] = _TARGET

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> CubicSpline:
        return cls(values.get("data"), values.get("leaves", {}))

    def arithmetic(self, role: str) -> tuple[Op, ...]:
        return (Multiply(self.FACTORS[role]),) if role in self.FACTORS else ()


@dataclass(frozen=True)
class LinearInterpolation(DataPath):
    """``diffrax.LinearInterpolation`` to what ``torchcde.LinearInterpolation`` takes."""

    DEFAULT: ClassVar[Mapping[str, str]] = {"knots": "ys", TIMES: "ts"}
    PIECES: ClassVar[bool] = False
    source: ClassVar[str] = "diffrax.LinearInterpolation"
    module: ClassVar[str] = "torchcde.LinearInterpolation"
    doc: ClassVar[str] = "the knots that torchcde.LinearInterpolation takes, from diffrax.LinearInterpolation"
    keys: ClassVar[Mapping[str, Key]] = {"data": _DATA, "leaves": _leaves("knots", TIMES)}
    target: ClassVar[Record] = _TARGET

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> LinearInterpolation:
        return cls(values.get("data"), values.get("leaves", {}))

    def check_target(self, layer: TargetLayer, source: Pattern) -> None:
        if layer.computes.buffers:
            raise ValueError(
                "torchcde.LinearInterpolation keeps its slopes, (x[i+1] - x[i]) / (t[i+1] - t[i]), in a buffer `_derivs` that no "
                "leaf holds; write its knots, with `{coeffs: NAME, times: NAME}`, and build "
                "torchcde.LinearInterpolation(coeffs, times) from them"
            )
