"""What pairs of models of users bring: modules that take or return several tensors, outputs that prove nothing."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.command_line import Run

RULES = """\
model: mine
title: a model of my own
targets: {torch: {loads: "my_pair:Model"}}
rules:
- einsum: ...D,DE->...E
  from: "{stem,head}/kernel"
  linear: "{stem,block.head}"
"""
REFERENCE = """\
import jax.numpy as jnp
import numpy as np
import torch

from convert.references.protocol import Reference


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(5, 5, bias=False)

    FORWARD


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.block = torch.nn.Linear(5, 5, bias=False), Block()

    def forward(self, x):
        CALL


def apply(weights, inputs):
    stem = inputs["x"] @ weights["stem/kernel"]
    y = stem @ weights["head/kernel"]
    return {"stem": stem, "block": y, "y": y}


def build(state):
    module = Model()
    module.load_state_dict(dict(state), strict=True, assign=True)
    return module.eval()


def reference(plan):
    return Reference(
        inputs=lambda seed: {"x": np.random.default_rng(seed).normal(size=(2, 5)).astype(np.float32)},
        jax=apply,
        build=build,
        run=lambda module, inputs: {"y": module(inputs["x"])},
        outputs=("y",),
        reduction=5,
        depth=2,
    )
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    kernels = {"stem/kernel": rng.standard_normal((5, 5)), "head/kernel": rng.standard_normal((5, 5))}
    np.savez("ckpt.npz", **{name: kernel.astype(np.float32) for name, kernel in kernels.items()})  # type: ignore[arg-type]
    Path("rules.yaml").write_text(RULES)
    yield tmp_path
    sys.modules.pop("my_pair", None)


@pytest.mark.parametrize(
    ("forward", "call"),
    [
        ("def forward(self, x, scale): return self.head(x * scale)", "return self.block(self.stem(x), 1.5)"),
        ("def forward(self, x): return self.head(1.5 * x), x", "return self.block(self.stem(x))[0]"),
        ("def forward(self, x): return self.head(x.data_of * 1.5)", "x = self.stem(x); x.data_of = x; return self.block(x)"),
    ],
    ids=["a second argument", "two results", "an attribute"],
)  # fmt: skip
def test_the_report_is_complete(forward: str, call: str, folder: Path, run: Run) -> None:
    Path("my_pair.py").write_text(REFERENCE.replace("FORWARD", forward).replace("CALL", call))
    levels = checked(run, code=1)
    assert levels["weights"]["verdict"] == "passed" and levels["model"]["verdict"] == "failed"
    assert levels["model"]["diagnosis"]["boundary"] in ("block", "y")


@pytest.mark.parametrize(("factor", "verdict", "code"), [("1", "passed", 0), ("0", "inconclusive", 2)])
def test_constant_outputs_prove_nothing(factor: str, verdict: str, code: int, folder: Path, run: Run) -> None:
    """An output mask or a dead activation on both sides hides every fault."""
    model = REFERENCE.replace("FORWARD", f"def forward(self, x): return {factor} * self.head(x)")
    model = model.replace("CALL", "return self.block(self.stem(x))").replace("y = stem", f"y = {factor} * stem")
    Path("my_pair.py").write_text(model)
    level = checked(run, code=code)["model"]
    assert level["verdict"] == verdict and ("all numbers of the outputs are the same" in level["reason"]) == bool(code)


def test_what_the_rules_say_of_the_target_is_a_note(folder: Path, run: Run) -> None:
    """As `convert infer` writes where the two programs differ."""
    Path("rules.yaml").write_text(RULES.replace('Model"}', 'Model", differs: [it rounds]}'))
    _, said = run("./rules.yaml", "ckpt.npz", "out.safetensors")
    assert "note: it rounds" in said
    out, said = run("plan", "./rules.yaml", "ckpt.npz")
    assert "note: it rounds" in out + said


@pytest.mark.slow
def test_a_leaf_that_the_jax_model_is_not_given_is_named_with_the_nearest(folder: Path, run: Run) -> None:
    model = REFERENCE.replace("FORWARD", "def forward(self, x): return self.head(x)")
    model = model.replace("CALL", "return self.block(self.stem(x))").replace(
        'weights["head/kernel"]', 'weights["head/kernal"]'
    )
    Path("my_pair.py").write_text(model)
    said = checked(run, code=2)["model"]["reason"]
    assert "expected the name of a leaf that the code is given (head/kernel, stem/kernel), got 'head/kernal'" in said
    _, said = run("infer", "ckpt.npz", "mine.yaml", "--reference", "my_pair:reference", code=2)
    assert (
        "expected the name of a leaf that the code is given (head/kernel, stem/kernel) or of an input (x), got 'head/kernal'"
        in said
    )


def checked(run: Run, code: int) -> dict[str, Any]:
    """Convert and check; the levels by name."""
    run("./rules.yaml", "ckpt.npz", "out.safetensors")
    pair = ("--model", "./rules.yaml", "--reference", "my_pair:reference")
    out, _ = run(
        "check", "out.safetensors", "--from", "ckpt.npz", *pair, "--level", "weights,model", "--json", code=code
    )
    return {level["level"]: level for level in json.loads(out)["levels"]}
