"""Changes of all values of a tensor: each is named, and the name is not given to another change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from convert.verify.weights.corruption.find import find_corruption

Array = np.ndarray[Any, np.dtype[Any]]
WANT = np.random.default_rng(0).standard_normal((24, 40)).astype(np.float32)
SQUARE = WANT[:, :24].copy()


def cut(x: Array) -> Array:
    return (x.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def quantized(x: Array, axis: int | None = None) -> Array:
    scale = np.abs(x).max(axis=axis, keepdims=axis is not None) / 127
    return (np.round(x / scale) * scale).astype(np.float32)


def tail(x: Array) -> Array:
    made = x.copy()
    made.reshape(-1)[-55:] = 0
    return made


CHANGES: dict[str, tuple[str, Callable[[Array], Array]]] = {
    "byte-swapped": ("bytes swapped", lambda x: x.byteswap()),
    "bfloat16": ("rounded", lambda x: x.astype(ml_dtypes.bfloat16).astype(np.float32)),
    "float16": ("rounded", lambda x: x.astype(np.float16).astype(np.float32)),
    "cut off": ("truncated", cut),
    "ones": ("all ones", np.ones_like),
    "another constant": ("all values equal", lambda x: np.full_like(x, 0.5)),
    "clipped": ("clipped", lambda x: np.clip(x, -1, 1)),
    "tail": ("tail zeroed", tail),
    "softplus": ("softplus applied", lambda x: np.logaddexp(x, 0).astype(np.float32)),
    "exp": ("exp applied", lambda x: np.exp(x).astype(np.float32)),
    "softplus and a scale": (
        "softplus applied and multiplied",
        lambda x: (np.logaddexp(x, 0) * 0.51).astype(np.float32),
    ),
    "abs": ("abs applied", np.abs),
    "half twice": ("one half twice", lambda x: np.concatenate([x[:12], x[:12]])),
    "a head twice": ("rows repeated", lambda x: np.concatenate([x[:8], x[:8], x[16:]])),
    "reshape": ("reshaped, not permuted", lambda x: np.ascontiguousarray(x.T).reshape(x.shape)),
    "8 bits": ("quantized", quantized),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_named(change: str) -> None:
    name, make = CHANGES[change]
    found = find_corruption(make(WANT), WANT)
    assert found is not None and found.name == name


@pytest.mark.parametrize("name", ["log", "sqrt"])
def test_a_function_that_is_missing(name: str) -> None:
    """The source's values are the logarithm, or the root, of those of the file."""
    want = np.abs(WANT) + 1
    found = find_corruption({"log": np.exp, "sqrt": np.square}[name](want).astype(np.float32), want)
    assert found is not None and found.name in (f"{name} missing", {"log": "exp", "sqrt": "square"}[name] + " applied")


def test_transposed_and_scaled() -> None:
    found = find_corruption((SQUARE.T * np.float32(0.125)).copy(), SQUARE)
    assert found is not None and found.name == "transposed and multiplied" and found.description.endswith("0.125")


def test_eight_bits_for_each_row() -> None:
    want = np.random.default_rng(1).standard_normal((4, 4000)).astype(np.float32) * np.array(
        [[1], [10], [100], [1000]], np.float32
    )
    found = find_corruption(quantized(want, 1), want)
    assert found is not None and found.name == "quantized" and "axis 0" in found.description


OTHERS: dict[str, tuple[str | None, Array]] = {
    "another tensor": (None, np.random.default_rng(2).standard_normal(WANT.shape).astype(np.float32)),
    "noise": (None, WANT + np.float32(0.01) * np.random.default_rng(3).standard_normal(WANT.shape).astype(np.float32)),
    "scaled": ("multiplied by a number", WANT * np.float32(3)),
    "permuted": ("rows in another order", WANT[np.random.default_rng(4).permutation(24)]),
}


@pytest.mark.parametrize("other", OTHERS)
def test_another_change_keeps_its_name(other: str) -> None:
    name, got = OTHERS[other]
    found = find_corruption(got, WANT)
    assert (found.name if found else None) == name


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64", "float8_e4m3fn", "int32", "int8", "uint8", "bool"])
def test_every_dtype_is_looked_at(dtype: str) -> None:
    """No search fails, and rows that occur twice are found in each dtype."""
    made = np.random.default_rng(5).standard_normal((6, 300)) * 50
    want = made > 0 if dtype == "bool" else np.clip(made, 0 if dtype == "uint8" else -99, 99).astype(dtype)
    twice = find_corruption(np.concatenate([want[:3], want[:3]]), want)
    assert twice is not None and twice.name == "one half twice"
    find_corruption(want[::-1, ::-1].copy(), want)


def test_a_change_of_some_indices_only_is_named_with_its_place() -> None:
    made = WANT.copy()
    made[8:16] = cut(WANT[8:16])
    found = find_corruption(made, WANT)
    assert found is not None and found.name == "truncated"
    assert found.description.startswith("in the indices 8 to 15 of axis 0: ")


def test_eight_bits_for_each_short_row() -> None:
    found = find_corruption(quantized(SQUARE, 1), SQUARE)
    assert found is not None and found.name == "quantized" and "axis 0" in found.description


def test_a_bfloat16_tensor_with_other_values_is_no_multiple() -> None:
    """The bound of bfloat16 is as wide as the change, and a factor near 1 explains none of it."""
    want = WANT.astype(ml_dtypes.bfloat16)
    made = want.copy()
    made[::2, ::3] *= ml_dtypes.bfloat16(1.01)
    found = find_corruption(made, want)
    assert found is None or found.name != "multiplied by a number"
