"""`convert diff`: what differs is found, measured against plain NumPy, and the worst comes first."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import convert
from convert.core.tensor_spec import TensorSpec
from convert.outputs import difference
from convert.outputs.difference import PlannedWeights, WeightsDifference, compare_weights
from convert.writing.written import open_written
from support.small_conversion import small_output, write_rules


@dataclass(frozen=True)
class Arrays:
    """Weights in memory."""

    arrays: Mapping[str, np.ndarray]
    path: Path = Path("memory")

    @property
    def specs(self) -> dict[str, TensorSpec]:
        return {name: TensorSpec(array.shape, array.dtype.name) for name, array in self.arrays.items()}

    def read(self, name: str) -> np.ndarray:
        return self.arrays[name]


def compare(a: Mapping[str, np.ndarray], b: Mapping[str, np.ndarray]) -> WeightsDifference:
    return compare_weights(Arrays(a), Arrays(b), jobs=1)


def test_equal_weights_are_equal() -> None:
    values = {"a": np.array([1.0, np.nan, -0.0, np.inf], np.float32), "b": np.zeros((0, 3)), "c": np.array(2, np.int64)}
    assert compare(values, {name: array.copy() for name, array in values.items()}) == WeightsDifference(3, 3, ())


def test_the_worst_comes_first_and_every_kind_is_named() -> None:
    one = np.ones((2, 3), np.float32)
    found = compare(
        {"gone": one, "shape": one, "small": one, "large": one, "dtype": one, "both": one, "same": one},
        {
            "new": one,
            "shape": one.T,
            "small": one * np.float32(1.001),
            "large": one * 2,
            "dtype": one.astype(ml_dtypes.bfloat16),
            "both": one.astype(np.float64) * 1.5,
            "same": one,
        },
    )
    assert [(tensor.name, *tensor.kinds) for tensor in found.differing] == [
        ("gone", "only in A"),
        ("new", "only in B"),
        ("shape", "shape"),
        ("large", "values"),
        ("both", "dtype", "values"),
        ("small", "values"),
        ("dtype", "dtype"),
    ]
    assert (found.tensors, found.equal) == (8, 1)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8", "complex64", "bool"])
@pytest.mark.parametrize("block", [1, 7, 1 << 18])
def test_the_figures_are_those_of_numpy(dtype: str, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(difference, "_BLOCK", block)
    random = np.random.default_rng(3)
    kind = np.dtype(getattr(ml_dtypes, dtype, None) or dtype)
    a, b = ((random.random((5, 6)) * 100).astype(kind) for _ in range(2))
    if dtype == "bool":
        a, b = a ^ (random.random((5, 6)) < 0.5), b
    wide = np.complex128 if kind.kind == "c" else np.float64
    error = np.abs(a.astype(wide) - b.astype(wide))
    (found,) = compare({"x": a}, {"x": b}).differing
    assert found.count == np.count_nonzero(a != b)
    assert found.max_abs == error.max() and error[found.at] == error.max()
    assert found.relative == error.max() / np.abs(b.astype(wide)).max()
    assert (found.value_a, found.value_b) == (str(a[found.at]), str(b[found.at]))


def test_one_bit_is_a_difference() -> None:
    a = np.arange(1000, dtype=np.float32)
    for index, bit in ((0, 31), (999, 0), (500, 12)):
        b = a.copy()
        b.view(np.uint32)[index] ^= np.uint32(1 << bit)
        (found,) = compare({"x": a}, {"x": b}).differing
        assert found.count == 1 and found.at == (index,)


def test_nan_and_infinity_on_one_side_are_infinite_errors() -> None:
    for other in (np.nan, np.inf):
        (found,) = compare({"x": np.array([1.0, other])}, {"x": np.array([1.0, 2.0])}).differing
        assert (found.max_abs, found.relative, found.at) == (np.inf, np.inf, (1,))
        assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["max_abs"] is None


def test_shards_a_file_and_the_checkpoint_itself_are_equal(tmp_path: Path) -> None:
    file, directory = small_output(tmp_path, "out.safetensors"), small_output(tmp_path, "out", max_shard_bytes=50)
    plan = convert.plan_conversion(str(write_rules(tmp_path)), tmp_path / "source-0.npz")
    planned = PlannedWeights(plan)
    for other in (open_written(directory), planned):
        assert compare_weights(open_written(file), other) == WeightsDifference(5, 5, ())
    changed = load_file(file)
    changed["layers.3.w"][2, 1] += 1
    save_file(changed, tmp_path / "changed.safetensors")
    (found,) = compare_weights(open_written(tmp_path / "changed.safetensors"), planned).differing
    assert (found.name, found.at, found.count) == ("layers.3.w", (2, 1), 1)
