"""A gated unit, `conv(x) + conv(g)`, with two biases in JAX and one in PyTorch: `infer`, `convert` and `check` end with 0."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from support.command_line import Run

pytest.importorskip("jax")
pytest.importorskip("torch")

PAIR = """
import jax
import jax.numpy as jnp
import numpy as np
import torch

from convert import Reference


def conv(x, kernel, bias):
    return jax.lax.conv_general_dilated(x, kernel, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")) + bias


def forward(p, inputs):
    y = conv(inputs["x"], p["x/kernel"], p["x/bias"]) + conv(inputs["g"], p["g/kernel"], p["g/bias"])
    return {"y": jnp.tanh(y) @ p["o/kernel"] + p["o/bias"]}


class Unit(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.cx, self.cg = torch.nn.Conv1d(5, 6, 3, padding=1), torch.nn.Conv1d(4, 6, 3, padding=1, bias=False)
        self.o = torch.nn.Linear(6, 2)

    def forward(self, x, g):
        return self.o(torch.tanh(self.cx(x.mT) + self.cg(g.mT)).mT)


class Joined(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.c, self.o = torch.nn.Conv1d(9, 6, 3, padding=1), torch.nn.Linear(6, 2)

    def forward(self, x, g):
        return self.o(torch.tanh(self.c(torch.cat([x, g], -1).mT)).mT)


def inputs(seed):
    rng = np.random.default_rng(seed)
    return {"x": rng.normal(size=(3, 9, 5)), "g": rng.normal(size=(3, 9, 4))}


def reference(make):
    def build(weights):
        module = make()
        module.load_state_dict(weights, strict=True)
        return module.eval()

    def run(module, given):
        return {"y": module(**given)}

    return Reference(inputs=inputs, jax=forward, build=build, run=run, outputs=("y",), reduction=64, depth=2)


def unit(plan):
    return reference(Unit)


def joined(plan):
    return reference(Joined)
"""
SHAPES = {"x/kernel": (3, 5, 6), "x/bias": (6,), "g/kernel": (3, 4, 6), "g/bias": (6,), "o/kernel": (6, 2), "o/bias": (2,)}  # fmt: skip


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, np.ndarray]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "gated_pair", raising=False)
    Path("gated_pair.py").write_text(PAIR)
    rng = np.random.default_rng(0)
    leaves = {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}
    np.savez("ckpt.npz", **leaves)
    return leaves


@pytest.mark.slow
@pytest.mark.parametrize(("pair", "bias"), [("unit", "cx.bias"), ("joined", "c.bias")])
def test_two_biases_become_one(run: Run, stored: dict[str, np.ndarray], pair: str, bias: str) -> None:
    from safetensors.numpy import load_file, save_file

    reference = ("--reference", f"gated_pair:{pair}")
    run("infer", "ckpt.npz", "mine.yaml", *reference)
    assert "x/bias + g/bias" in Path("mine.yaml").read_text()
    run("mine.yaml", "ckpt.npz", "out.safetensors")
    tensors = load_file("out.safetensors")
    assert np.array_equal(tensors[bias], stored["x/bias"] + stored["g/bias"])
    check = ("--from", "ckpt.npz", "--model", "mine.yaml", *reference)
    said, _ = run("check", "out.safetensors", *check)
    assert said.count("  passed  ") == 4

    save_file({**tensors, bias: stored["x/bias"]}, "out.safetensors", {"format": "pt"})  # planted
    said, _ = run("check", "out.safetensors", *check, code=1)
    assert (
        f"{bias}: leaf of a sum left out: expected the sum (from x/bias + g/bias), got the sum without g/bias" in said
    )
