"""Changes of single values, of numbers per index, and tensors with values of others: each is named, and noise is not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from convert.core.findings import Finding
from convert.layers.step_tensor import expected
from convert.planning.planner import make_plan
from convert.verify.weights.corruption.find import find_corruption
from convert.verify.weights.other_values import NEAR, UNRELATED
from convert.writing.written import open_written
from support.memory_source import MemorySource, rule_file
from support.weights_level import check_weights

Array = np.ndarray[Any, np.dtype[Any]]
Change = Callable[[Array], Array | None]
RANDOM = np.random.default_rng(0)
WANT = RANDOM.standard_normal((24, 40)).astype(np.float32)
SQUARE = WANT[:, :24].copy()


def set_at(at: Any, value: Callable[[Array], Any]) -> Change:
    def change(x: Array) -> None:
        x[at] = value(x)

    return change


def two_of_four(x: Array) -> Array:
    fours = x.reshape(-1, 4)
    return np.where(np.argsort(np.argsort(np.abs(fours), 1), 1) >= 2, fours, 0).reshape(x.shape)


def sparse(x: Array) -> Array:
    return np.where(np.random.default_rng(1).random(x.shape) < 0.3, 0, x)


def signs(x: Array) -> Array:
    return np.where(np.random.default_rng(1).random(x.shape) < 0.3, -x, x)


def exchange(x: Array) -> None:
    x[0, 1], x[5, 7] = x[5, 7], x[0, 1]


def rank_4(x: Array) -> Array:
    u, s, v = np.linalg.svd(x, full_matrices=False)
    return (u[:, :4] * s[:4]) @ v[:4]


NORMS = np.linspace(0.5, 2, 24, dtype=np.float32)[:, None]
CHANGES: dict[str, tuple[str, str, Array, Change]] = {
    "both axes reversed": ("axes reversed", "along the axes 0 and 1", WANT, lambda x: x[::-1, ::-1]),
    "turned by a quarter": ("rotated", "in the order 1, 0", SQUARE, np.rot90),
    "mirrored at the other diagonal": ("rotated", "reversed along 0 and 1", SQUARE, lambda x: x[::-1, ::-1].T),
    "the upper triangle": ("a triangle zeroed", "below the diagonal", SQUARE, np.triu),
    "small values": ("small values zeroed", "the 68 smallest values", WANT, lambda x: np.where(np.abs(x) < 0.1, 0, x)),
    "two of four": ("values zeroed", "2 of each 4", WANT, two_of_four),
    "single zeros": ("values zeroed", "at single places", WANT, sparse),
    "signs": ("signs changed", "have the other sign", WANT, signs),
    "two values": ("two values exchanged", "[0, 1] and [5, 7]", WANT, exchange),
    "all values": ("values in another order", "none is new", WANT, lambda x: RANDOM.permutation(x.reshape(-1)).reshape(x.shape)),
    "rolled in the file": ("values in another order", "moved forward by 3", WANT, lambda x: np.roll(x, 3)),
    "a number": ("a number added", "0.5 is added", WANT, lambda x: x + np.float32(0.5)),
    "the identity": ("identity added", "the identity is added", SQUARE, lambda x: x + np.eye(24, dtype=np.float32)),
    "a factor for each row": ("multiplied by numbers", "axis 0", WANT, lambda x: x * NORMS),
    "a number for each row": ("numbers added", "axis 0", WANT, lambda x: x + NORMS),
    "the mean of each row": ("mean subtracted", "axis 0", WANT, lambda x: x - x.mean(1, keepdims=True)),
    "rows of length 1": ("normalised", "norm 1", WANT, lambda x: x / np.linalg.norm(x, axis=1, keepdims=True)),
    "normalised as a whole": ("scaled and shifted", "is added", WANT + 1, lambda x: (x - x.mean()) / x.std()),
    "made symmetric": ("made symmetric", "its transpose", SQUARE, lambda x: (x + x.T) / 2),
    "a low-rank pair": ("a change of low rank", "rank 2", WANT, lambda x: x + RANDOM.standard_normal((24, 2)) @ RANDOM.standard_normal((2, 40))),
    "four directions": ("reduced to a low rank", "rank 4", WANT, rank_4),
    "shifted rows": ("rows shifted", "moved forward by 1 from row 4 on", WANT, lambda x: np.concatenate([x[:3], x[3:4], x[3:-1]])),
    "an offset": ("rows shifted", "moved forward by 2 from row 2 on", WANT, lambda x: np.concatenate([0 * x[:2], x[:-2]])),
    "values for keys": ("rows repeated", "16 to 23 along axis 0 hold the rows 8 to 15", WANT, lambda x: np.concatenate([x[:16], x[8:16]])),
    "words swapped": ("halves of values swapped", "two halves", WANT, lambda x: x.view(np.uint16).reshape(24, 40, 2)[..., ::-1].copy().view(np.float32)[..., 0]),
    "float16 read as bfloat16": ("bits of another type", "written as float16", WANT, lambda x: x.astype(np.float16).view(ml_dtypes.bfloat16)),
    "bfloat16 read as float16": ("bits of another type", "written as bfloat16", WANT, lambda x: x.astype(ml_dtypes.bfloat16).view(np.float16)),
    "one row": ("one row changed", "only index 7", WANT, set_at(7, lambda x: x.mean(0))),
    "signs of some columns": ("multiplied by a number", "0, 2, 4", WANT, set_at(np.s_[:, ::2], lambda x: -x[:, ::2])),
    "zeros in a row": ("values zeroed", "14 of 960 values", WANT, set_at(np.s_[3, ::3], lambda x: 0)),
}  # fmt: skip


def changed(x: Array, change: Change) -> Array:
    copy = x.copy()
    made = change(copy)
    return np.ascontiguousarray(copy if made is None else made).astype(x.dtype)


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_named(name: str) -> None:
    diagnosis, text, want, change = CHANGES[name]
    found = find_corruption(changed(want, change), want)
    assert found is not None and found.name == diagnosis and text in found.description


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("size", [1e-3, 1e-2, 0.1])
def test_noise_has_no_name(dtype: str, size: float) -> None:
    """In bfloat16, a number for each index explains small changes as well as the truth does."""
    noise = 1 + size * np.random.default_rng(3).standard_normal(WANT.shape)
    kind = np.dtype(getattr(ml_dtypes, dtype, None) or dtype)
    found = find_corruption((WANT * noise).astype(kind), WANT.astype(kind))
    assert found is None


# ---- with the values of other tensors

W = {f"w_{i}": RANDOM.standard_normal((12, 8)).astype(np.float32) for i in range(3)}
LEAVES = W | {f"v_{i}": RANDOM.standard_normal((8, 12)).astype(np.float32) for i in range(3)}
LEAVES |= {f"u_{i}": RANDOM.standard_normal((4, 24)).astype(np.float32) for i in range(3)}
LEAVES |= {f"s_{i}": (1 + RANDOM.random(12)).astype(np.float32) for i in range(3)}
RULES = """
- parameter: layers.{i}.w
  from: w_{i}
- parameter: layers.{i}.v
  from: v_{i}
- parameter: layers.{i}.u
  from: u_{i}
- parameter: layers.{i}.s
  from: s_{i}
"""
ONE = "layers.1.w"
OTHERS: dict[str, tuple[str, str, Callable[[dict[str, Array]], Array]]] = {
    "rows from 5 on": ("partly of another layer", "from value 40 of 96 on", lambda t: np.concatenate([t[ONE][:5], t["layers.0.w"][5:]])),
    "three columns": ("partly of another layer", "the indices 2 to 4 of axis 1", lambda t: np.concatenate([t[ONE][:, :2], t["layers.2.w"][:, 2:5], t[ONE][:, 5:]], 1)),
    "the sum": ("another tensor added", "the values of layers.2.w are added", lambda t: t[ONE] + t["layers.2.w"]),
    "the difference": ("another tensor added", "subtracted", lambda t: t[ONE] - t["layers.2.w"]),
    "the mean": ("mixed with another tensor", "the mean", lambda t: (t[ONE] + t["layers.0.w"]) / 2),
    "a tenth": ("mixed with another tensor", "0.1 of it", lambda t: np.float32(0.9) * t[ONE] + np.float32(0.1) * t["layers.0.w"]),
    "another kind, transposed": ("of another tensor, transposed", "layers.2.v", lambda t: t["layers.2.v"].T),
    "another shape": ("of another tensor, of another shape", "layers.2.u, [4, 24]", lambda t: t["layers.2.u"].reshape(12, 8)),
    "times a scale": ("a scale folded in", "by layers.1.s", lambda t: t[ONE] * t["layers.1.s"][:, None]),
    "divided by a scale": ("a scale folded in", "1 / layers.1.s", lambda t: t[ONE] / t["layers.1.s"][:, None]),
    "times 1 + scale": ("a scale folded in", "1 + layers.1.s", lambda t: t[ONE] * (1 + t["layers.1.s"][:, None])),
    "the mean of all layers": ("mixed with another tensor", "the mean of the 3 tensors", lambda t: (t["layers.0.w"] + t[ONE] + t["layers.2.w"]) / 3),
    "stale rows": (NEAR, "in the indices 3 to 11 of axis 0", lambda t: np.concatenate([t[ONE][:3], t[ONE][3:] * (1 + 1e-3 * RANDOM.standard_normal((9, 8)))])),
    "unrelated rows": (UNRELATED, "in the indices 3 to 11 of axis 0", lambda t: np.concatenate([t[ONE][:3], np.random.default_rng(9).standard_normal((9, 8))])),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_values_of_another_tensor(name: str, tmp_path: Path) -> None:
    diagnosis, text, make = OTHERS[name]
    plan = make_plan(rule_file(RULES), MemorySource(LEAVES))
    tensors = {step.name: np.ascontiguousarray(expected(step, plan.source)) for step in plan.steps}
    tensors[ONE] = np.ascontiguousarray(make(tensors).astype(np.float32))
    save_file(tensors, tmp_path / "out.safetensors")
    finding: Finding
    (finding,) = check_weights(plan, open_written(tmp_path / "out.safetensors")).findings
    assert finding.data["diagnosis"] == diagnosis and text in finding.problem
    assert finding.path == ONE
