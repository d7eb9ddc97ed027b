"""A model of complex numbers from the checkpoint to the check: rules, a file with complex tensors, and faults in them."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from convert.writing.written import open_written
from support.command_line import Run

pytest.importorskip("jax")
pytest.importorskip("torch")

MODEL = """
import numpy as np
import torch

from convert import Reference
from support import complex_models as m


def inputs(seed):
    return {"x": m.complex_inputs(seed)["x"].astype(np.complex64)}


def build(weights, out=lambda y: y):
    module = m.Dense(out)
    module.load_state_dict(weights, strict=True)
    return module.eval()


def reference(plan, build=build):
    return Reference(
        inputs=inputs,
        jax=lambda w, given: {"y": m.dense(w, given["x"])},
        build=build,
        run=lambda module, given: {"y": module(given["x"])},
        outputs=("y",),
        reduction=m.D,
        depth=2,
    )


def conjugate(plan):
    return reference(plan, lambda weights: build(weights, torch.conj_physical))
"""


@pytest.mark.slow
def test_a_complex_checkpoint_is_converted_and_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(monkeypatch, capsys)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "complex_pair", raising=False)
    (tmp_path / "complex_pair.py").write_text(MODEL)
    rng = np.random.default_rng(0)
    leaves = {name: rng.normal(size=(8, 8)) + 1j * rng.normal(size=(8, 8)) for name in ("k1", "k2")}
    leaves["b1"] = rng.normal(size=8) + 1j * rng.normal(size=8)
    np.savez("ckpt.npz", **{name: x.astype(np.complex64) for name, x in leaves.items()})

    _, said = run("infer", "ckpt.npz", "mine.yaml", "--reference", "complex_pair:reference")
    assert "3 tensors (3 derived) of 3 leaves" in said
    run("mine.yaml", "ckpt.npz", "out.safetensors")
    made = load_file("out.safetensors")
    np.testing.assert_array_equal(made["a.weight"].numpy(), leaves["k1"].T.astype(np.complex64))

    check = ("--from", "ckpt.npz", "--model", "./mine.yaml", "--reference")
    out, _ = run("check", "out.safetensors", *check, "complex_pair:reference")
    assert "model     passed" in out and "layers    skipped" in out and "the weights are complex" in out
    out, _ = run("check", "out.safetensors", *check, "complex_pair:conjugate", code=1)
    assert "changes the sign" in out

    metadata = open_written(Path("out.safetensors")).metadata
    wrong = {**made, "a.weight": made["a.weight"].conj_physical()}
    save_file(wrong, "wrong.safetensors", metadata=metadata)
    out, _ = run("check", "wrong.safetensors", *check, "complex_pair:reference", code=1)
    assert "a.weight: in index 1 of axis 2: all values are multiplied by -1" in " ".join(out.split())
    assert "model     FAILED" in out


SPECTRAL = """
import torch

from convert import Reference
from support import complex_models as m
import numpy as np


def inputs(seed):
    return {"x": np.random.default_rng(seed).normal(size=(2, m.POINTS, 2)).astype(np.float32)}


def reference(plan, spectrum=lambda f: f):
    def build(weights):
        module = m.FNO("complex", spectrum)
        module.load_state_dict(weights, strict=True)
        return module.eval()

    return Reference(
        inputs=inputs,
        jax=lambda w, given: {"y": m.fno("two")(w, given["x"])},
        build=build,
        run=lambda module, given: {"y": module(given["x"])},
        outputs=("y",),
        reduction=m.CHANNELS,
        depth=2,
    )


def conjugate(plan):
    return reference(plan, torch.conj_physical)
"""


@pytest.mark.slow
def test_real_and_imaginary_parts_in_two_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from support import complex_models as m

    run = Run(monkeypatch, capsys)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "spectral_pair", raising=False)
    (tmp_path / "spectral_pair.py").write_text(SPECTRAL)
    rng = np.random.default_rng(0)
    leaves = {name: rng.normal(size=shape).astype(np.float32) for name, shape in m.fno_shapes("two").items()}
    np.savez("ckpt.npz", **leaves)

    run("infer", "ckpt.npz", "mine.yaml", "--reference", "spectral_pair:reference")
    assert 'from: "re + 1j * im"' in Path("mine.yaml").read_text()
    run("mine.yaml", "ckpt.npz", "out.safetensors")
    made = load_file("out.safetensors")
    np.testing.assert_array_equal(made["conv.weights1"].numpy(), leaves["re"] + 1j * leaves["im"])

    check = ("--from", "ckpt.npz", "--model", "./mine.yaml", "--reference")
    out, _ = run("check", "out.safetensors", *check, "spectral_pair:reference")
    assert "weights   passed" in out and "model     passed" in out
    run("check", "out.safetensors", *check, "spectral_pair:conjugate", code=1)
    metadata = open_written(Path("out.safetensors")).metadata
    wrong = {**made, "conv.weights1": made["conv.weights1"].conj_physical()}
    save_file(wrong, "wrong.safetensors", metadata=metadata)
    out, _ = run("check", "wrong.safetensors", *check, "spectral_pair:reference", code=1)
    assert "imaginary parts subtracted" in " ".join(out.split())
