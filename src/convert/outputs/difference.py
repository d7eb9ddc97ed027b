"""Compare two sets of weights: names, shapes, dtypes and values, the worst first, in bounded memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from convert.core.tensor_spec import TensorSpec
from convert.loading.step_values import read_step
from convert.planning.plan import Plan
from convert.writing.transfer import default_jobs, require_unchanged

Array = np.ndarray[Any, np.dtype[Any]]
_BLOCK = 1 << 18  # elements that are compared at once


class Weights(Protocol):
    """Tensors by name; `Written` is one."""

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """Shape and dtype of every tensor."""

    @property
    def path(self) -> Path:
        """Where they come from, for messages."""

    def read(self, name: str) -> Array:
        """Read a tensor."""


class PlannedWeights:
    """The tensors that a plan makes of a checkpoint, without writing them."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._steps = {step.name: step for step in plan.steps}
        self.specs = {name: step.spec for name, step in self._steps.items()}
        self.path = plan.source.display_path

    def read(self, name: str) -> Array:
        """Read a tensor.

        Raises:
            CheckpointError: a leaf cannot be read, or the checkpoint was rewritten since it was opened.
            PlanError: a value does not fit the dtype of the tensor.
        """
        array = read_step(self._plan, self._steps[name])
        require_unchanged(self._plan.checkpoint)
        return array


@dataclass(frozen=True)
class TensorDifference:
    """How a tensor differs.

    Attributes:
        name: of the tensor.
        kinds: ``only in A``, ``only in B``, ``shape``, ``dtype`` or ``values``; dtype and values may both differ.
        a, b: shape and dtype on each side; empty where it is missing.
        count: elements that differ: in their bits, or in their values where the dtypes differ. 0 where values were not compared.
        max_abs: largest absolute error; infinite where one side is NaN, or infinite alone.
        relative: `max_abs` over the largest absolute value in B; 0 where only bits differ, as for -0.0 and 0.0.
        at: index of the largest error.
        value_a, value_b: the values there.
    """

    name: str
    kinds: tuple[str, ...]
    a: str
    b: str
    count: int = 0
    max_abs: float = 0.0
    relative: float = 0.0
    at: tuple[int, ...] = ()
    value_a: str = ""
    value_b: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for ``--json``, which knows no infinity."""
        finite = {key: getattr(self, key) if math.isfinite(getattr(self, key)) else None for key in _FIGURES}
        return {**asdict(self), **finite, "kinds": list(self.kinds), "at": list(self.at)}


_FIGURES = ("max_abs", "relative")


@dataclass(frozen=True)
class WeightsDifference:
    """How two sets of weights differ.

    Attributes:
        tensors: number of tensors of both sides together.
        equal: number of tensors that are the same, bit for bit.
        differing: the others, the worst first.
    """

    tensors: int
    equal: int
    differing: tuple[TensorDifference, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for ``--json``."""
        return {
            "tensors": self.tensors,
            "equal": self.equal,
            "differing": [tensor.to_dict() for tensor in self.differing],
        }


def compare_weights(a: Weights, b: Weights, jobs: int | None = None) -> WeightsDifference:
    """Compare two sets of weights, tensor by tensor. Memory: some blocks for each thread, and what `read` holds.

    Args:
        b: the reference of relative errors.
        jobs: threads; None is the number of processors.

    Raises:
        CheckpointError: a tensor cannot be read.
    """
    names = sorted(a.specs.keys() | b.specs.keys())
    with ThreadPoolExecutor(jobs or default_jobs()) as pool:
        found = [difference for difference in pool.map(lambda name: _compare(a, b, name), names) if difference]
    found.sort(key=_rank)
    return WeightsDifference(len(names), len(names) - len(found), tuple(found))


def _rank(found: TensorDifference) -> tuple[bool, float, str]:
    """Order differences: what no values can be compared for, then the largest relative error."""
    return "values" in found.kinds or found.kinds == ("dtype",), -found.relative, found.name


def _compare(a: Weights, b: Weights, name: str) -> TensorDifference | None:
    in_a, in_b = (side.specs.get(name) for side in (a, b))
    if in_a is None or in_b is None:
        return TensorDifference(name, ("only in B" if in_a is None else "only in A",), str(in_a or ""), str(in_b or ""))
    if in_a.shape != in_b.shape:
        return TensorDifference(name, ("shape",), str(in_a), str(in_b))
    dtype = () if in_a.dtype == in_b.dtype else ("dtype",)
    values = _values(a.read(name).reshape(-1), b.read(name).reshape(-1), same=not dtype)
    if values is None:
        return TensorDifference(name, dtype, str(in_a), str(in_b)) if dtype else None
    count, max_abs, largest, at, value_a, value_b = values
    relative = 0.0 if max_abs == 0 else max_abs / largest if largest else math.inf
    index = tuple(int(k) for k in np.unravel_index(at, in_a.shape))
    return TensorDifference(
        name, (*dtype, "values"), str(in_a), str(in_b), count, max_abs, relative, index, value_a, value_b
    )


def _values(a: Array, b: Array, *, same: bool) -> tuple[int, float, float, int, str, str] | None:
    """Return how many elements differ, the largest error, the largest value, and where the error is; None where all are equal."""
    count, max_abs, largest, at = 0, -1.0, 0.0, 0
    for start in range(0, a.size, _BLOCK):
        x, y = a[start : start + _BLOCK], b[start : start + _BLOCK]
        bits = f"u{x.itemsize}"
        different = x.view(bits) != y.view(bits) if same else None
        wide = np.complex128 if "c" in (x.dtype.kind, y.dtype.kind) else np.float64
        if different is not None and not different.any() and not count:
            largest = max(largest, _largest(y.astype(wide)))
            continue
        u, v = x.astype(wide), y.astype(wide)
        largest = max(largest, _largest(v))
        equal = (u == v) | (np.isnan(u) & np.isnan(v))
        with np.errstate(invalid="ignore", over="ignore"):
            error = np.where(equal, 0.0, np.abs(u - v))
        error = np.where(np.isnan(error), np.inf, error)
        different = ~equal if different is None else different
        count += int(np.count_nonzero(different))
        if different.any() and (worst := float(np.max(error, where=different, initial=-1.0))) > max_abs:
            max_abs, at = worst, start + int(np.argmax(np.where(different, error, -1.0)))
    if not count:
        return None
    return count, max_abs, largest, at, str(a[at]), str(b[at])


def _largest(values: Array) -> float:
    return float(np.max(np.abs(values), initial=0.0, where=np.isfinite(values)))
