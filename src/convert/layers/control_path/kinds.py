"""The kinds of control path: the coefficients that diffrax keeps, as torchcde stores them.

Within the interval that starts at the knot t_i, with f = t - t_i, diffrax's cubic path is ``a + f (b + f (c + f d))`` from four
arrays, ``coeffs = (d, c, b, a)``; torchcde's ``CubicSpline`` takes one, ``cat([a, b, 2c, 3d], -1)``, because the derivative
``b + f (2c + f 3d)`` is what a CDE is solved with. A linear path is its knots on both sides.

Source: diffrax 0.7.2 `_global_interpolation.py`, torchcde 0.2.5 `interpolation_cubic.py` and `interpolation_linear.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from convert.core.fields import Key, Record, Scalar
from convert.core.ops import Op, apply
from convert.core.path_pattern import Pattern
from convert.core.value_ops import Multiply
from convert.layers.base import CompileContext, CompiledRule, Matched, PlanView, Step
from convert.layers.control_path.compile import compile_paths
from convert.layers.control_path.declaration import TIMES, PathDeclaration, parse_below, parse_data
from convert.layers.control_path.mistakes import buffer_mistakes, coefficient_mistakes
from convert.layers.control_path.probe import probe_path
from convert.layers.mistake import Mistake
from convert.layers.probe import Probe
from convert.layers.shared_keys import PATTERN
from convert.layers.target import TargetLayer

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class DataPath(PathDeclaration):
    """A piecewise polynomial path through data: the base of both kinds."""

    guide: ClassVar[str] = "neural-cdes"

    def compile(
        self, context: CompileContext, matched: Matched, layer: TargetLayer, variant: str | None
    ) -> CompiledRule:
        return CompiledRule(tuple(compile_paths(context, self, matched, layer)))

    def probe_group(
        self, leaves: Mapping[str, Array], tensors: Mapping[str, Array], *, device: str, rng: np.random.Generator
    ) -> Probe:
        series = {role: self.series(leaves[role]) for role in self.DEFAULT if role != TIMES}
        return probe_path(series, tensors, self.knot_times(leaves), cubic=self.PIECES, device=device)

    def random_leaf(self, role: str, leaf: Array, rng: np.random.Generator) -> Array:
        return leaf if role == TIMES else super().random_leaf(role, leaf, rng)

    def series(self, leaf: Array) -> Array:
        """The coefficients as (batch, time, channels)."""
        moved = apply(self.movement(leaf.shape), leaf)
        return moved.reshape(-1, *moved.shape[-2:])

    def knot_times(self, leaves: Mapping[str, Array]) -> Array:
        """The times of the knots; 0, 1, 2, ... where the source has none, as torchcde then takes them."""
        if TIMES in leaves:
            return leaves[TIMES]
        leaf = leaves[next(iter(self.DEFAULT))]
        count = leaf.shape[self.order(leaf.ndim)[0].index("T")]
        return np.arange(count + self.PIECES, dtype=leaf.dtype)

    def mistakes(self, step: Step, plan: PlanView) -> Iterator[Mistake]:
        return buffer_mistakes(step, plan.source)


_TARGET = Record(
    {
        "module": Key(PATTERN, "Name of a torchcde module that is part of the model; its buffers are written."),
        "coeffs": Key(PATTERN, "Name of the one tensor that the constructor of the torchcde module takes."),
        "times": Key(PATTERN, "Name of the tensor of times that belongs to `coeffs`. Default: no such tensor."),
    },
    "a target",
)
_DATA = Key(
    Scalar(str, "the axes of a path's data such as NTC", parse_data),
    "Meaning of each axis of a leaf: T for time, C for channels, other letters for batch axes. Default: time and channels are last.",
)


def _leaves(*roles: str) -> Key:
    path = Scalar(str, "a path below `from`, or from the top of the tree with a slash in front", parse_below)
    return Key(
        Record({role: Key(path, f"Path of {role}.") for role in roles}, "`leaves`"),
        "Paths of the leaves below `from`, by their names in diffrax. Default: diffrax's names.",
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
    kind_name: ClassVar[str] = "cubic_spline"
    doc: ClassVar[str] = "torchcde.CubicSpline, from diffrax.CubicInterpolation: cat[a, b, 2c, 3d] of (d, c, b, a)."
    keys: ClassVar[Mapping[str, Key]] = {"data": _DATA, "leaves": _leaves("d", "c", "b", "a", TIMES)}
    target: ClassVar[Record] = _TARGET

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> CubicSpline:
        return cls(values.get("data"), values.get("leaves", {}))

    def tensors(self, module: str, buffers: bool) -> Mapping[str, tuple[str, ...]]:
        if buffers:
            return {f"{module}.{buffer}": (role,) for role, buffer in self.ORDER.items()}
        return {module: tuple(self.ORDER)}

    def arithmetic(self, role: str) -> tuple[Op, ...]:
        return (Multiply(self.FACTORS[role]),) if role in self.FACTORS else ()

    def mistakes(self, step: Step, plan: PlanView) -> Iterator[Mistake]:
        if step.role == "coeffs":
            yield from coefficient_mistakes(step, plan.source, tuple(self.ORDER))
        yield from super().mistakes(step, plan)


@dataclass(frozen=True)
class LinearInterpolation(DataPath):
    """``diffrax.LinearInterpolation`` to what ``torchcde.LinearInterpolation`` takes."""

    DEFAULT: ClassVar[Mapping[str, str]] = {"knots": "ys", TIMES: "ts"}
    PIECES: ClassVar[bool] = False
    source: ClassVar[str] = "diffrax.LinearInterpolation"
    module: ClassVar[str] = "torchcde.LinearInterpolation"
    kind_name: ClassVar[str] = "linear_interpolation"
    doc: ClassVar[str] = "Knots of a torchcde.LinearInterpolation, from diffrax.LinearInterpolation."
    keys: ClassVar[Mapping[str, Key]] = {"data": _DATA, "leaves": _leaves("knots", TIMES)}
    target: ClassVar[Record] = _TARGET

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> LinearInterpolation:
        return cls(values.get("data"), values.get("leaves", {}))

    def tensors(self, module: str, buffers: bool) -> Mapping[str, tuple[str, ...]]:
        return {module: ("knots",)}

    def check_target(self, layer: TargetLayer, source: Pattern) -> None:
        if layer.computes.buffers:
            raise ValueError(
                "torchcde.LinearInterpolation keeps its slopes, (x[i+1] - x[i]) / (t[i+1] - t[i]), in a buffer `_derivs` that no "
                "leaf holds; write its knots, with `{coeffs: NAME, times: NAME}`, and build "
                "torchcde.LinearInterpolation(coeffs, times) from them"
            )
