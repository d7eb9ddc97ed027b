"""The activation behind a layer is measured while the target's model runs, where no attribute of a module tells it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from convert.verify.config import activations
from support.command_line import Run

RULES = """
model: block
title: A block
targets: {{torch: {{loads: x}}}}
rules:
- einsum: '...D,DF->...F'
  from: up
  activation: {activation}
  linear: up
- {{einsum: '...F,FD->...D', from: down, linear: down}}
- {{einsum: '...D,DF->...F', from: gate, linear: gate}}
"""
# Functions between the layers, on both sides: {name} of jax.nn and of torch.nn.functional.
PAIR = """
import jax
import numpy as np
import torch
from convert.references.protocol import Reference


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(6, 8, bias=False)
        self.gate = torch.nn.Linear(6, 8, bias=False)
        self.down = torch.nn.Linear(8, 6, bias=False)
        self.act = torch.nn.{module}

    def forward(self, x):
        return self.down({torch})


def build(state):
    block = Block()
    block.load_state_dict(dict(state), strict=True, assign=True)
    return block.eval()


def model(w, i):
    x = i["x"]
    return {{"y": ({jax}) @ w["down"]}}


def pair(plan):
    def draw(seed):
        return {{"x": np.random.default_rng(seed).normal(size=(4, 6)).astype(np.float32)}}
    return Reference(inputs=draw, jax=model, build=build, run=lambda block, i: {{"y": block(i["x"])}}, outputs=("y",), reduction=8, depth=3)
"""
WAYS = {
    "a function": ("Identity()", "torch.nn.functional.gelu(self.up(x)) + 0 * self.gate(x)", "jax.nn.gelu(x @ w['up'], approximate=False)"),
    "a module": ("GELU()", "self.act(self.up(x)) + 0 * self.gate(x)", "jax.nn.gelu(x @ w['up'], approximate=False)"),
    "added": ("Identity()", "torch.nn.functional.gelu(self.up(x)) + self.gate(x)", "jax.nn.gelu(x @ w['up'], approximate=False) + x @ w['gate']"),
    "gated": ("Identity()", "torch.nn.functional.gelu(self.up(x)) * self.gate(x)", "jax.nn.gelu(x @ w['up'], approximate=False) * (x @ w['gate'])"),
}  # fmt: skip


def checked(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch, way: str, declared: str, code: int, *more: str
) -> str:
    """The report of a model that computes the exact GeLU in this way."""
    rng = np.random.default_rng(0)
    shapes = {"up": (6, 8), "gate": (6, 8), "down": (8, 6)}
    np.savez(
        folder / "c.npz", **{name: (rng.normal(size=shape) / 3).astype(np.float32) for name, shape in shapes.items()}
    )
    (folder / "r.yaml").write_text(RULES.format(activation=declared))
    module, torch, jax = WAYS[way]
    name = f"block_{way.replace(' ', '_')}"
    (folder / f"{name}.py").write_text(PAIR.format(module=module, torch=torch, jax=jax))
    monkeypatch.syspath_prepend(folder)
    monkeypatch.chdir(folder)
    run("./r.yaml", "c.npz", "o.safetensors", "--overwrite")
    return run(
        "check",
        "o.safetensors",
        "--from",
        "c.npz",
        "--model",
        "./r.yaml",
        "--reference",
        f"{name}:pair",
        *more,
        code=code,
    )[0]


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_false_declaration_is_a_finding(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """Both sides compute the exact GeLU, and the outputs are equal."""
    stdout = checked(run, tmp_path, monkeypatch, way, "gelu_tanh", 1)
    assert "r.yaml:6: up: the rules declare another activation than both models compute" in stdout
    assert "expected gelu_tanh, got gelu_erf (measured behind up); declare gelu_erf in the rule" in stdout
    assert "different: model (exit code 1)" in stdout


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_true_declaration_is_verified(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    assert "not verified" not in checked(run, tmp_path, monkeypatch, way, "gelu_erf", 0)


@pytest.mark.slow
def test_what_cannot_be_measured_is_listed(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of what the layer gives has the activation, and the other half is not used."""
    half = ("Identity()", "torch.cat([torch.nn.functional.gelu(self.up(x)[:, :4]), self.gate(x)[:, :4]], -1)", "jax.numpy.concatenate([jax.nn.gelu((x @ w['up'])[:, :4], approximate=False), (x @ w['gate'])[:, :4]], -1)")  # fmt: skip
    monkeypatch.setitem(WAYS, "half", half)
    for declared in ("gelu_erf", "gelu_tanh"):
        stdout = checked(run, tmp_path, monkeypatch, "half", declared, 0)
        assert f"not verified:  activation = {declared} of up (r.yaml:" in stdout
        required = "--require", "model"
        stdout = checked(run, tmp_path, monkeypatch, "half", declared, 2, *required)
        assert "inconclusive: model depends on facts that are not verified" in stdout
        stdout = checked(run, tmp_path, monkeypatch, "half", declared, 0, *required, "--trust", "activation")
        assert f"trusted:  activation = {declared} of up (r.yaml:" in stdout
    checked(run, tmp_path, monkeypatch, "half", "none", 0, "--require", "model")  # the same as a rule without the key


def test_two_activations_that_agree_are_told_apart_by_nothing() -> None:
    """On positive numbers, ReLU is ELU."""
    import torch

    x = torch.rand(64, dtype=torch.float64) + 1
    layer: Any = activations._Watched("tanh", x)
    layer.see(x)
    assert layer.found() in ("relu", "elu")  # tanh is neither
    layer = activations._Watched("elu", x)
    layer.see(x)
    assert layer.found() == "elu"
    layer.see(x[:8])  # another number of values
    assert layer.compared == 1
