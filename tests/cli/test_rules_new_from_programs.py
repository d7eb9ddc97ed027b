"""`convert rules new --reference`: what two programs show is answered; the rest is a draft with its questions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from convert import parse_rules
from support.command_line import Run
from support.own_modules import work_with

pytest.importorskip("jax")
pytest.importorskip("torch")

MODELS = """
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn

from convert import Reference

D = 6


def forward(p, inputs):
    y = jnp.tanh(inputs["x"] @ p["mix/kernel"]) @ p["turn/kernel"]
    y = y / jnp.sqrt((y * y).mean(-1, keepdims=True) + 1e-5) * p["norm/scale"]
    return {"y": y @ p["head/kernel"] + p["head/bias"]}


class Net(nn.Module):
    def __init__(self, other=False):
        super().__init__()
        self.mix, self.turn, self.head = nn.Linear(D, D, bias=False), nn.Linear(D, D, bias=False), nn.Linear(D, D)
        self.norm, self.other = nn.RMSNorm(D, eps=1e-5), other

    def forward(self, x):
        y = self.mix(x).tanh()
        y = torch.linalg.solve(self.turn.weight, y.mT).mT if self.other else self.turn(y)
        return {"y": self.head(self.norm(y))}


def inputs(seed):
    return {"x": np.random.default_rng(seed).normal(size=(5, D))}


def reference(net):
    return Reference(inputs=inputs, jax=forward, build=lambda state: net(), run=lambda m, x: m(**x), outputs=("y",), reduction=D, depth=1)


def pair(plan):
    return reference(Net)


def other(plan):
    return reference(lambda: Net(other=True))
"""
LEAVES = {"mix/kernel": (6, 6), "turn/kernel": (6, 6), "norm/scale": (6,), "head/kernel": (6, 6), "head/bias": (6,)}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    work_with(tmp_path, monkeypatch, {"square_models": MODELS})
    rng = np.random.default_rng(0)
    leaves = {f"model/{name}": rng.normal(size=shape).astype(np.float32) for name, shape in LEAVES.items()}
    np.savez("ckpt.npz", **leaves, **{"opt/mu": np.zeros(3, np.float32)})
    return tmp_path


def new(run: Run, factory: str) -> tuple[str, str]:
    options = ("--root", "model", "--reference", f"square_models:{factory}")
    _, said = run("rules", "new", "ckpt.npz", "mine.yaml", *options)
    return Path("mine.yaml").read_text(), said


def test_what_the_programs_show_is_no_question(run: Run, folder: Path) -> None:
    run("rules", "new", "ckpt.npz", "draft.yaml", "--root", "model")
    assert len(parse_rules(Path("draft.yaml").read_text()).questions) > 5
    text, said = new(run, "pair")
    assert "5 rules for 6 leaves, 0 questions open" in said and "5 tensors (5 derived)" in said and "proven" in said
    assert "guess" not in text and "ask" not in text and text.count("    # derived: ") == 4
    assert "- drop: /opt/**\n" in text and "epsilon: 1e-5" in text and "model: mine\n" in text
    run("mine.yaml", "ckpt.npz", "mine.safetensors")
    run("infer", "ckpt.npz", "infer.yaml", "--root", "model", "--reference", "square_models:pair")
    run("infer.yaml", "ckpt.npz", "infer.safetensors")
    from safetensors.numpy import load_file

    mine, inferred = load_file("mine.safetensors"), load_file("infer.safetensors")
    assert mine.keys() == inferred.keys() and all((mine[name] == inferred[name]).all() for name in mine)


@pytest.mark.slow
def test_behind_a_difference_the_rules_are_a_draft(run: Run, folder: Path) -> None:
    """There `infer` writes its nearest guess: turn would be made of head/kernel."""
    text, said = new(run, "other")
    assert "undecided: square_models.py:" in said and "proven with" not in said  # the inverse of the leaf would fit
    assert len(parse_rules(text).rules) == 5
    assert "from: turn/kernel    # float32[6,6]\n  linear: turn" in text
    assert "einsum: &einsum ask    # question, for " in text
    assert "epsilon: 1e-05    # guess: that of the target" in text and "- drop: /opt/**\n" in text


def test_like_and_reference_are_one_too_many(run: Run, folder: Path) -> None:
    _, said = run(
        "rules", "new", "ckpt.npz", "--like", "square_models:Net", "--reference", "square_models:pair", code=2
    )
    assert "error[usage]: --like square_models:Net: expected --like or --reference" in said
