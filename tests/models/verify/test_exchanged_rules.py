"""Rules that give two modules or parameters each other's leaves are named, with outputs alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

import convert
from convert.references.protocol import Reference
from convert.verify.report.report import LevelReport
from convert.verify.run import check

WIDTH = 6
RULES = """
model: pairs
title: pairs of equal modules
axes: {D: {is: width}, E: {is: width again, equals: D}}
targets:
  torch: {loads: test_exchanged_rules.Model}
rules:
- einsum: ...D,DE->...E
  from: own/{up,down}
  linear: own.{up,down}
- einsum: ...D,DE->...E
  from: cross/{up,down}
  linear: cross.{up,down}
- from: "{start,slope}"
  axes: D
  parameter: "{start,slope}"
- from: "{before,after}"
  multiplies_by: scale
  epsilon: 1e-5
  axes: D
  rms_norm: "{before,after}"
- cell: haiku.LSTM
  from: "{ahead,back}"
  inputs: D
  hidden: E
  lstm: "{ahead,back}"
"""


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x) + state))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own, self.cross = Pair(), Pair()
        self.before, self.after = nn.RMSNorm(WIDTH, eps=1e-5), nn.RMSNorm(WIDTH, eps=1e-5)
        self.start, self.slope = (nn.Parameter(torch.zeros(WIDTH)) for _ in range(2))
        self.ahead, self.back = (nn.LSTM(WIDTH, WIDTH, batch_first=True) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.after(self.own(self.before(x), self.start))
        x = x + self.cross(x, self.start) * self.slope
        return self.ahead(x)[0] + 2 * self.back(x)[0]


def _norm(x: Any, scale: Any) -> Any:
    return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * scale


def _lstm(x: Any, w: Any, b: Any) -> Any:
    h = c = jnp.zeros_like(x[:, 0])
    steps = []
    for t in range(x.shape[1]):
        i, g, f, o = jnp.split(jnp.concatenate([x[:, t], h], -1) @ w + b, 4, -1)
        sigmoid = lambda z: 1 / (1 + jnp.exp(-z))  # noqa: E731 - a name for a formula
        c = sigmoid(f + 1) * c + sigmoid(i) * jnp.tanh(g)
        h = sigmoid(o) * jnp.tanh(c)
        steps.append(h)
    return jnp.stack(steps, 1)


def _jax(w: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
    x = inputs["x"].astype(w["start"].dtype)
    y = jnp.tanh(_norm(x, w["before"]) @ w["own/up"] + w["start"]) @ w["own/down"]
    x = x + _norm(y, w["after"])
    x = x + jnp.tanh(x @ w["cross/up"] + w["start"]) @ w["cross/down"] * w["slope"]
    ahead, back = (_lstm(x, w[f"{name}/linear/w"], w[f"{name}/linear/b"]) for name in ("ahead", "back"))
    return {"y": ahead + 2 * back}


def _build(state: Mapping[str, torch.Tensor]) -> nn.Module:
    module = Model()
    module.load_state_dict(dict(state), strict=True, assign=True)
    return module.eval()


def reference(plan: Any) -> Reference:
    return Reference(
        inputs=lambda seed: {"x": np.random.default_rng(seed).normal(size=(2, 5, WIDTH)).astype(np.float32)},
        jax=_jax,
        build=_build,
        run=lambda module, inputs: {"y": module(inputs["x"])},
        outputs=("y",),
        reduction=4 * WIDTH,
        depth=8,
    )


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(0)
    names = {f"{pair}/{name}": (WIDTH, WIDTH) for pair in ("own", "cross") for name in ("up", "down")}
    names |= dict.fromkeys(("start", "slope", "before", "after"), (WIDTH,))
    for name in ("ahead", "back"):
        names |= {f"{name}/linear/w": (2 * WIDTH, 4 * WIDTH), f"{name}/linear/b": (4 * WIDTH,)}
    path = tmp_path_factory.mktemp("pairs") / "ckpt.npz"
    np.savez(path, **{name: rng.normal(0.2, 0.6, shape).astype(np.float32) for name, shape in names.items()})
    return path


CASES = {
    "two rules": (("from: own/", "from: CROSS/"), ("from: cross/", "from: own/"), "own has the weights of cross"),
    "loose parameters": (
        ('parameter: "{start,slope}"', 'parameter: "{slope,start}"'),
        "slope has the weights of start",
    ),
    "norms": (('rms_norm: "{before,after}"', 'rms_norm: "{after,before}"'), "after has the weights of before"),
    "cells": (('lstm: "{ahead,back}"', 'lstm: "{back,ahead}"'), "back has the weights of ahead"),
}


def _model_level(rules: str, checkpoint: Path, folder: Path) -> LevelReport:
    """Convert by the rules, and compare the models."""
    given, out = folder / "rules.yaml", folder / "out.safetensors"
    given.write_text(rules)
    convert.convert(str(given), checkpoint, out)
    levels = ("coverage", "weights", "model")
    report = check(out, checkpoint, model=str(given), reference=f"{__name__}:reference", levels=levels)
    (level,) = (level for level in report.levels if level.level == "model")
    return level


@pytest.mark.slow
@pytest.mark.parametrize("case", ["right", *CASES])
def test_exchanged_leaves_are_named(case: str, checkpoint: Path, tmp_path: Path) -> None:
    *edits, said = CASES.get(case, ("",))
    rules = RULES
    for old, new in edits:
        assert old in rules
        rules = rules.replace(old, new)
    rules = rules.replace("CROSS", "cross")
    level = _model_level(rules, checkpoint, tmp_path)
    if case == "right":
        assert not level.findings
        return
    assert level.diagnosis is not None
    assert level.diagnosis["name"] == "modules exchanged", level.diagnosis
    names = said.split(" has the weights of ")
    assert (
        said in level.diagnosis["problem"] or " has the weights of ".join(reversed(names)) in level.diagnosis["problem"]
    )
    lines = [k for k, line in enumerate(rules.splitlines(), 1) if line.startswith("- ")]
    assert any(f"rules.yaml:{k}" in level.diagnosis["problem"] for k in lines)


@pytest.mark.slow
def test_a_small_error_is_no_exchange(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No mistake leaves the error as it was."""
    forward = Model.forward
    monkeypatch.setattr(Model, "forward", lambda self, x: forward(self, x) * (1 + 3e-11))
    level = _model_level(RULES, checkpoint, tmp_path)
    assert level.diagnosis is not None
    assert level.diagnosis["name"] == "operation that the JAX model lacks", level.diagnosis
