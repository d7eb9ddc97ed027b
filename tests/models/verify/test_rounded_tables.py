"""A table that NumPy rounded to float32 before the code ran is known only so far: check compares the rest, and says it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from convert.core.safetensors_header import read_header
from convert.verify.model import backend_runs, backends
from convert.verify.model.backend_runs import COMPILED
from support.command_line import Run

RULES = """\
model: grid
title: a model with positions of a grid
targets: {torch: {loads: Model of my_grid.py}}
rules:
- einsum: ...D,DF->...F
  from: a/w
  bias: a/b
  linear: a
- einsum: ...F,FC->...C
  from: b/w
  bias: b/b
  linear: b
"""
MODEL = """\
import jax.numpy as jnp
import numpy as np
import torch

from convert.references.protocol import Reference

TABLE = np.sin(np.arange(7)[:, None] / JAX_PERIOD ** (np.arange(6) / 6))
OTHER = np.sin(np.arange(7)[:, None] / TORCH_PERIOD ** (np.arange(6) / 6))


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(5, 6), torch.nn.Linear(6, 4)
        self.table = torch.from_numpy(OTHER.astype("TORCH_DTYPE"))

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)) + self.table.to(x.dtype))


def jax_side(w, inputs):
    table = TABLE.astype("JAX_DTYPE") if "JAX_DTYPE" == "float32" else TABLE
    return {"y": (jnp.tanh(inputs["x"] @ w["a/w"] + w["a/b"]) + table) @ w["b/w"] + w["b/b"]}


def build(state):
    module = Model()
    module.load_state_dict(dict(state), strict=True, assign=True)
    return module.eval()


def reference(plan):
    return Reference(
        inputs=lambda seed: {"x": np.random.default_rng(seed).normal(size=(2, 7, 5)).astype(np.float32)},
        jax=jax_side, build=build, run=lambda module, inputs: {"y": module(inputs["x"])}, outputs=("y",), reduction=6, depth=3,
    )
"""
RECORDING = "recording.safetensors"
Check = Callable[..., dict[str, Any]]


@pytest.fixture
def check(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> Iterator[Check]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    rng = np.random.default_rng(0)
    shapes = {"a/w": (5, 6), "a/b": (6,), "b/w": (6, 4), "b/b": (4,)}
    np.savez("ckpt.npz", **{name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()})  # type: ignore[arg-type]
    Path("grid.yaml").write_text(RULES)
    run("./grid.yaml", "ckpt.npz", "out.safetensors")

    def checked(
        jax: str,
        torch: str,
        torch_period: str = "100.0",
        code: int = 0,
        level: str = "model",
        recorded: bool = False,
    ) -> dict[str, Any]:
        values = {"JAX_DTYPE": jax, "TORCH_DTYPE": torch, "JAX_PERIOD": "100.0", "TORCH_PERIOD": torch_period}
        text = MODEL
        for name, value in values.items():
            text = text.replace(name, value)
        Path("my_grid.py").write_text(text)
        sys.modules.pop("my_grid", None)
        of_models = ("--reference", "my_grid:reference")
        source = ("--recorded", RECORDING) if recorded else ("--from", "ckpt.npz")
        if recorded:
            run("record", "./grid.yaml", "ckpt.npz", RECORDING, "--overwrite", *of_models)
        options = [*source, "--model", "./grid.yaml", *of_models, "--json"]
        options += ["--backends"] if level == "backends" else []
        printed, _ = run("check", "out.safetensors", *options, code=code)
        return next(found for found in json.loads(printed)["levels"] if found["level"] == level)

    yield checked
    sys.modules.pop("my_grid", None)


@pytest.mark.slow
@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize(("jax", "torch", "side"), [("float64", "float32", "PyTorch"), ("float32", "float64", "JAX")])
def test_a_table_rounded_on_one_side_is_compared_as_far_as_it_is_known(
    jax: str, torch: str, side: str, recorded: bool, check: Check
) -> None:
    level = check(jax, torch, recorded=recorded)
    (measure,) = level["measures"]
    assert 1e-9 < measure["float64"]["relative"] < measure["float64_tolerance"]["relative"] < 1e-6
    assert f"numbers of the {side} code were rounded before it ran" in measure["float64_tolerance"]["why"]
    assert any("constant float32[7, 6]" in note for note in level["notes"])


@pytest.mark.slow
@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize(("jax", "torch"), [("float64", "float32"), ("float64", "float64"), ("float32", "float64")])
def test_another_table_is_found_beside_the_rounding(jax: str, torch: str, recorded: bool, check: Check) -> None:
    assert check(jax, torch, "100.01", code=1, recorded=recorded)["verdict"] == "failed"


@pytest.mark.slow
@pytest.mark.parametrize("forged", [-1.0, "1e-9", [1.0], float("inf")])
def test_a_recording_whose_movement_is_no_number_is_damaged(forged: Any, check: Check, run: Run) -> None:
    check("float32", "float64", recorded=True)
    metadata, arrays = read_header(Path(RECORDING))[0], load_file(RECORDING)
    manifest = json.loads(metadata["recording"])
    assert 0 < manifest["moved"]["y"] < 1e-6
    manifest["moved"]["y"] = forged
    save_file(arrays, RECORDING, {"recording": json.dumps(manifest)})
    options = ("--recorded", RECORDING, "--model", "./grid.yaml", "--reference", "my_grid:reference")
    _, errors = run("check", "out.safetensors", *options, code=2)
    assert "'moved' in the manifest is not a map of relative changes" in errors


def test_exact_tables_are_compared_exactly(check: Check) -> None:
    assert check("float64", "float64")["measures"][0]["float64_tolerance"]["relative"] < 1e-12


# ---- between backends


@pytest.fixture
def without_compilers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out torch.compile, which takes a minute."""
    monkeypatch.setattr(
        backends, "torch_runs", lambda *args: (r for r in backend_runs.torch_runs(*args) if r.name != COMPILED)
    )


@pytest.mark.slow
@pytest.mark.usefixtures("without_compilers")
@pytest.mark.parametrize(("jax", "torch"), [("float64", "float32"), ("float32", "float64")])
def test_a_table_rounded_on_one_side_is_no_wrong_conversion_between_backends(
    jax: str, torch: str, check: Check
) -> None:
    assert check(jax, torch, level="backends")["verdict"] == "passed"


@pytest.mark.slow
@pytest.mark.usefixtures("without_compilers")
def test_another_table_is_a_wrong_conversion_between_backends(check: Check) -> None:
    (found,) = check("float64", "float32", "100.01", code=1, level="backends")["findings"]
    assert found["data"]["diagnosis"] == "wrong conversion"
