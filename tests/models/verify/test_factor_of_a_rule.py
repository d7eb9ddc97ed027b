"""A factor that a rule declares and the JAX code does not have: the rule is named, not the code between two layers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import flax.linen
import numpy as np
import pytest
import torch
from torch import nn

import convert
from convert.references.protocol import Reference
from convert.verify.run import check

ROWS, WIDTH = 7, 8
RULES = """model: table
title: a table that is no module of the JAX side
targets:
  torch: {loads: a module of the test}
rules:
- from: table
  axes: VD
  embedding: table
- {einsum: "...D,DF->...F", from: mix/kernel, bias: mix/bias, linear: mix}
- {einsum: "...F,FO->...O", from: head/kernel, bias: head/bias, linear: head}
"""
SHAPES = {"table": (ROWS, WIDTH), "mix/kernel": (WIDTH, 6), "mix/bias": (6,), "head/kernel": (6, 5), "head/bias": (5,)}


class Flax(flax.linen.Module):
    @flax.linen.compact
    def __call__(self, x: Any) -> Any:
        return flax.linen.Dense(5, name="head")(flax.linen.tanh(flax.linen.Dense(6, name="mix")(x)))


class Torch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.mix, self.head = nn.Embedding(ROWS, WIDTH), nn.Linear(WIDTH, 6), nn.Linear(6, 5)

    def forward(self, tokens: torch.Tensor) -> Any:
        return self.head(self.mix(self.table(tokens)).tanh())


def pair(plan: Any) -> Reference:
    def jax_side(w: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
        params = {name: {leaf: w[f"{name}/{leaf}"] for leaf in ("kernel", "bias")} for name in ("mix", "head")}
        return {"y": Flax().apply({"params": params}, w["table"][inputs["tokens"]])}

    def build(state: Mapping[str, torch.Tensor]) -> nn.Module:
        module = Torch()
        module.load_state_dict(dict(state), strict=True, assign=True)
        return module.eval()

    return Reference(
        inputs=lambda seed: {"tokens": np.random.default_rng(seed).integers(0, ROWS, (3, 5))},
        jax=jax_side,
        build=build,
        run=lambda module, inputs: {"y": module(inputs["tokens"])},
        outputs=("y",),
        reduction=WIDTH,
        depth=2,
    )


@pytest.mark.slow
def test_the_rule_is_named(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    leaves: dict[str, Any] = {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}
    np.savez(tmp_path / "ckpt.npz", **leaves)
    rules, out = tmp_path / "rules.yaml", tmp_path / "out.safetensors"
    rules.write_text(RULES.replace("  axes: VD\n", "  axes: VD\n  prescaled_by: sqrt(D)\n"))
    convert.convert(str(rules), tmp_path / "ckpt.npz", out)
    report = check(out, tmp_path / "ckpt.npz", model=str(rules), reference=f"{__name__}:pair", levels=("model",))
    diagnosis = report.levels[-1].diagnosis
    assert diagnosis is not None
    assert diagnosis["name"] == "weight rescaled although the source does not prescale it", diagnosis
    assert diagnosis["rule"].endswith("rules.yaml:6") and "table.weight" in diagnosis["problem"], diagnosis
