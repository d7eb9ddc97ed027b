"""A model with norms that lack a scale or a bias, heads under a weight norm and a depthwise kernel: every level, live and recorded,
for torch and for Burn; what is written of nothing is compared as everything else."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from convert.core.safetensors_header import read_header
from support.command_line import Run

RULES = """\
model: bare
title: a model with bare norms
root: params
targets: {torch: {loads: Model of my_bare.py}}
rules:
- einsum: ...D,DNH->...NH
  from: heads/kernel
  bias: heads/bias
  weight_norm: heads/scale
  linear: heads
- multiplies_by: 1
  bias: bn/bias
  mean: bn/mean
  var: bn/var
  epsilon: 1e-5
  axes: E
  batch_norm: bn
- from: gn/scale
  multiplies_by: scale
  epsilon: 1e-5
  num_groups: 3
  axes: E
  group_norm: gn
- dimension_numbers: NWC,WCO->NWC
  axes: PEM
  from: conv/kernel
  padding: VALID
  conv: conv
"""
MODEL = """\
import jax
import jax.numpy as jnp
import numpy as np
import torch

from convert.references.protocol import Reference


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.heads, self.bn, self.gn = torch.nn.Linear(5, 6), torch.nn.BatchNorm1d(6), torch.nn.GroupNorm(3, 6)
        self.conv = torch.nn.Conv1d(6, 12, 2, groups=6, bias=False)

    def forward(self, x):
        y = self.bn(self.heads(x).transpose(1, 2))
        return self.conv(self.gn(y))


def jax_side(w, inputs):
    k = w["heads/kernel"]
    k = k * jax.lax.rsqrt((k * k).sum((0, 1)) + 1e-12) * w["heads/scale"]
    y = (jnp.einsum("btd,dnh->btnh", inputs["x"], k) + w["heads/bias"]).reshape(2, 4, 6)
    bn = (y - w["bn/mean"]) * jax.lax.rsqrt(w["bn/var"] + 1e-5) + w["bn/bias"]
    apart = bn.reshape(2, 4, 3, 2)
    apart = apart - apart.mean((1, 3), keepdims=True)
    gn = (apart * jax.lax.rsqrt((apart * apart).mean((1, 3), keepdims=True) + 1e-5)).reshape(2, 4, 6) * w["gn/scale"]
    kernel = w["conv/kernel"].reshape(2, 1, 12)
    out = jax.lax.conv_general_dilated(gn, kernel, [1], "VALID", dimension_numbers=("NWC", "WIO", "NWC"), feature_group_count=6)
    first = lambda y: jnp.moveaxis(y, -1, 1)
    return {"heads": y, "bn": first(bn), "gn": first(gn), "conv": first(out), "y": first(out)}


def build(state):
    module = Model()
    module.load_state_dict(dict(state), strict=True, assign=True)
    return module.eval()


def reference(plan):
    return Reference(
        inputs=lambda seed: {"x": np.random.default_rng(seed).normal(size=(2, 4, 5)).astype(np.float32)},
        jax=jax_side,
        build=build,
        run=lambda module, inputs: {"y": module(inputs["x"])},
        outputs=("y",),
        reduction=6,
        depth=4,
    )
"""
OWN = ("--model", "./rules.yaml", "--reference", "my_bare:reference")
SHAPES = {"heads/kernel": (5, 2, 3), "heads/bias": (2, 3), "heads/scale": (3,), "bn/bias": (6,), "bn/mean": (6,), "bn/var": (6,), "gn/scale": (6,), "conv/kernel": (2, 6, 2)}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    np.savez("ckpt.npz", **{f"params/{k}": (np.abs(rng.normal(size=s)) + 0.3).astype(np.float32) for k, s in SHAPES.items()})  # fmt: skip
    Path("rules.yaml").write_text(RULES)
    Path("my_bare.py").write_text(MODEL)
    yield tmp_path
    sys.modules.pop("my_bare", None)


def spoil(name: str) -> None:
    metadata, _ = read_header(Path("out.safetensors"))
    tensors = load_file("out.safetensors")
    tensors[name] = tensors[name] + np.float32(0.5) * (np.arange(6) > 2)
    save_file(tensors, "out.safetensors", metadata=dict(metadata))


def report(run: Run, *more: object, code: int) -> dict[str, dict[str, object]]:
    out, _ = run("check", "out.safetensors", *more, "--json", code=code)
    return {level["level"]: level for level in json.loads(out)["levels"]}


@pytest.mark.slow
def test_all_levels_live_and_recorded(folder: Path, run: Run) -> None:
    run("./rules.yaml", "ckpt.npz", "out.safetensors")
    live = report(run, *OWN, "--from", "ckpt.npz", "--require", "model", code=0)
    assert {level["verdict"] for level in live.values()} == {"passed"}
    assert max(measure["float64"]["relative"] for measure in live["model"]["measures"]) < 1e-12  # type: ignore[attr-defined]
    run("record", "./rules.yaml", "ckpt.npz", "r.safetensors", "--reference", "my_bare:reference")
    recorded = report(run, *OWN, "--recorded", "r.safetensors", code=0)
    assert recorded["weights"]["verdict"] == recorded["model"]["verdict"] == "passed"
    for name, diagnosis in (("bn.weight", "scale that the source does not multiply by"), ("gn.bias", "bias that the source does not add")):  # fmt: skip
        run("./rules.yaml", "ckpt.npz", "out.safetensors", "--overwrite")
        spoil(name)
        for more in (("--from", "ckpt.npz"), ("--recorded", "r.safetensors")):
            wrong = report(run, *OWN, *more, "--level", "weights,model", code=1)
            assert wrong["weights"]["verdict"] == wrong["model"]["verdict"] == "failed"
            assert [(f["path"], f["data"]["diagnosis"]) for f in wrong["weights"]["findings"]] == [(name, diagnosis)]  # type: ignore[attr-defined]


@pytest.mark.slow
def test_for_burn(folder: Path, run: Run) -> None:
    run("./rules.yaml", "ckpt.npz", "out.safetensors", "--to", "burn")
    burn = ("--model", "./rules.yaml", "--to", "burn", "--from", "ckpt.npz", "--level", "coverage,weights,layers")
    assert {level["verdict"] for level in report(run, *burn, code=0).values()} == {"passed"}
    assert {"bn.gamma", "bn.beta", "gn.gamma", "gn.beta"} <= load_file("out.safetensors").keys()
    spoil("bn.gamma")
    wrong = report(run, *burn, code=1)
    assert wrong["weights"]["verdict"] == wrong["layers"]["verdict"] == "failed"


def test_a_constant_that_is_not_in_the_file(folder: Path, run: Run) -> None:
    run("./rules.yaml", "ckpt.npz", "out.safetensors")
    metadata, _ = read_header(Path("out.safetensors"))
    tensors = load_file("out.safetensors")
    del tensors["gn.bias"]
    save_file(tensors, "out.safetensors", metadata=dict(metadata))
    level = report(run, "--model", "./rules.yaml", "--from", "ckpt.npz", "--level", "coverage", code=1)["coverage"]
    said = [finding["text"] for finding in level["findings"]]  # type: ignore[attr-defined]
    assert "gn.bias: expected float32[6] (from zeros: the source adds nothing, and the target has a bias), got no such tensor" in said[0]  # fmt: skip
