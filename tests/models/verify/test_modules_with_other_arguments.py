"""A module that takes more than one tensor, or returns more, does not end the search for a mistake."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

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
    run("./rules.yaml", "ckpt.npz", "out.safetensors")
    out, err = run("check", "out.safetensors", "--from", "ckpt.npz", "--model", "./rules.yaml", "--reference", "my_pair:reference", "--level", "weights,model", "--json", code=1)  # fmt: skip
    levels = {level["level"]: level for level in json.loads(out)["levels"]}
    assert levels["weights"]["verdict"] == "passed" and levels["model"]["verdict"] == "failed"
    assert levels["model"]["diagnosis"]["boundary"] in ("block", "y") and "internal" not in err
