"""Roundings that the rules do not make: each is named by its mode, and a correct or unrelated tensor is not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from convert.planning.planner import make_plan
from convert.verify.weights.corruption.find import find_corruption
from convert.verify.weights.corruption.value_changes import find_value_change
from convert.writing.written import open_written
from support.memory_source import MemorySource, rule_file
from support.weights_level import check_weights

Array = np.ndarray[Any, np.dtype[Any]]
Change = Callable[[Array], Array]
EXACT = np.random.default_rng(0).standard_normal((32, 64)).astype(np.float32)
NARROW = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


def cut(x: Array, bits: int = 16) -> Array:
    """Towards zero; the last bits of each value are zeros."""
    return (x.view(np.uint32) & np.uint32((0xFFFFFFFF << bits) & 0xFFFFFFFF)).view(np.float32)


def away(x: Array) -> Array:
    return (cut(x).view(np.uint32) + np.uint32(1 << 16)).view(np.float32)


def at_random(x: Array) -> Array:
    up = np.random.default_rng(1).integers(0, 1 << 16, x.shape).astype(np.uint32)
    return cut((x.view(np.uint32) + up).view(np.float32))


def in_bits(x: Array, largest: int, group: int | None = None) -> Array:
    rows = x.reshape(-1, group or x.size)
    scale = np.abs(rows).max(axis=1, keepdims=True) / largest
    return (np.round(rows / scale) * scale).reshape(x.shape).astype(np.float32)


def from_lowest(x: Array) -> Array:
    scale = (x.max() - x.min()) / 255
    return (np.round((x - x.min()) / scale) * scale + x.min()).astype(np.float32)


TABLE = np.sort(np.concatenate([[-1.0, 0.0, 1.0], np.linspace(-0.8, 0.83, 13) ** 3]))


def from_table(x: Array) -> Array:
    """Sixteen sizes that are no grid, with a scale for each eight values."""
    groups = x.reshape(-1, 8)
    scale = np.abs(groups).max(axis=1, keepdims=True)
    nearest = np.abs((groups / scale)[..., None] - TABLE).argmin(axis=-1)
    return (TABLE[nearest] * scale).reshape(x.shape).astype(np.float32)


def in_float8(x: Array, axis: int | None = None) -> Array:
    scale = np.abs(x).max(axis=axis, keepdims=axis is not None) / 448
    return (x / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * scale


MODES: dict[str, tuple[str, str, Change]] = {
    "towards zero": ("truncated", "towards zero", cut),
    "away from zero": ("not rounded to the nearest", "away from zero", away),
    "down": ("not rounded to the nearest", "rounded down", lambda x: np.where(x < 0, away(x), cut(x))),
    "up": ("not rounded to the nearest", "rounded up", lambda x: np.where(x < 0, cut(x), away(x))),
    "at random": ("not rounded to the nearest", "at random", at_random),
    "8 bits": ("quantized", "8 bits", lambda x: in_bits(x, 127)),
    "8 bits for each row": ("quantized", "index of axis 0: 8 bits", lambda x: in_bits(x, 127, 64)),
    "4 bits for each group": ("quantized", "each 16 values along axis 1: 4 bits", lambda x: in_bits(x, 7, 16)),
    "float8 with a scale": ("quantized", "float8_e4m3fn, with a scale for the tensor", in_float8),
    "float8 for each row": ("quantized", "index of axis 0: 8 bits", lambda x: in_float8(x, 1)),
    "a table of sixteen sizes": ("quantized", "as of a table, with a scale for each 8 values", from_table),
    "digits after the point": (
        "rounded",
        "4 digits after the decimal point",
        lambda x: np.round(x.astype(float), 4).astype(np.float32),
    ),
    "decimal digits": (
        "rounded",
        "3 decimal digits",
        lambda x: np.vectorize(lambda v: float(f"{v:.2e}"))(x).astype(np.float32),
    ),
    "8 bits from the lowest": ("quantized", "8 bits", from_lowest),
}


COARSE = (
    "8 bits for each row",
    "4 bits for each group",
    "8 bits from the lowest",
    "a table of sixteen sizes",
    "digits after the point",
    "decimal digits",
)  # as bfloat16, for so few values


@pytest.mark.parametrize(
    ("mode", "stored"),
    [
        (mode, stored)
        for mode in MODES
        for stored in ("float32", "bfloat16")
        if stored == "float32" or mode not in COARSE
    ],
)
def test_a_mode_is_named(mode: str, stored: str) -> None:
    """In a float32 file, and in a bfloat16 file of a float32 checkpoint."""
    name, text, make = MODES[mode]
    dtype = np.dtype(NARROW.get(stored, stored))
    want, got = EXACT.astype(dtype), make(EXACT).astype(dtype)
    found = find_value_change(got, want, EXACT if stored == "bfloat16" else want)
    assert found is not None and found[0] == name and text in found[1]


@pytest.mark.parametrize(("dtype", "through"), [("bfloat16", np.float16), ("float16", ml_dtypes.float8_e4m3fn)])
def test_through_another_narrow_type(dtype: str, through: Any) -> None:
    want, got = EXACT.astype(NARROW[dtype]), EXACT.astype(through).astype(NARROW[dtype])
    found = find_value_change(got, want, EXACT)
    assert found is not None and found[0] == "rounded" and np.dtype(through).name in found[1]


def test_cut_off_to_float16() -> None:
    want = EXACT.astype(np.float16)
    over = np.abs(want.astype(np.float32)) > np.abs(EXACT)
    found = find_value_change(np.where(over, np.nextafter(want, np.float16(0)), want), want, EXACT)
    assert found is not None and found[0] == "truncated" and "float16" in found[1]


def test_cut_off_to_tf32() -> None:
    found = find_corruption(cut(EXACT, 13), EXACT)
    assert found is not None and found.name == "truncated" and "TF32" in found.description


def test_small_values_in_bfloat16_are_no_tanh() -> None:
    """The hyperbolic tangent of a small number is the number, as far as bfloat16 can tell."""
    exact = EXACT / 64
    found = find_value_change(cut(exact).astype(ml_dtypes.bfloat16), exact.astype(ml_dtypes.bfloat16), exact)
    assert found is not None and found[0] == "truncated"
    noise = (exact * (1 + 0.01 * EXACT)).astype(ml_dtypes.bfloat16)
    assert find_value_change(noise, exact.astype(ml_dtypes.bfloat16), exact) is None


@pytest.mark.parametrize("name", ["tanh", "exp", "softplus"])
def test_a_function_in_bfloat16_keeps_its_name(name: str) -> None:
    functions = {"tanh": np.tanh, "exp": np.exp, "softplus": lambda x: np.logaddexp(x, 0)}
    got = functions[name](EXACT).astype(ml_dtypes.bfloat16)
    found = find_value_change(got, EXACT.astype(ml_dtypes.bfloat16), EXACT)
    assert found is not None and found[0] == f"{name} applied"


def test_one_value_is_the_exponential() -> None:
    """A temperature that a model stores as its logarithm."""
    want = np.array([2.3], np.float32)
    found = find_corruption(np.exp(want), want)
    assert found is not None and found.name == "exp applied"


def test_the_level_reads_the_values_before_the_cast(tmp_path: Path) -> None:
    plan = make_plan(rule_file("- parameter: p\n  from: p"), MemorySource({"p": EXACT}), dtype="bfloat16")
    out = tmp_path / "out.safetensors"
    save_file({"p": cut(EXACT).astype(ml_dtypes.bfloat16)}, out)
    (finding,) = check_weights(plan, open_written(out)).findings
    assert finding.data["diagnosis"] == "truncated"
