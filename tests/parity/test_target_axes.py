"""A flax model saved by Orbax, and a PyTorch model that keeps the same parameters with other axes: 1x1 convolutions, (1, T, D), (1, D, 1, 1)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from convert.planning.plan import Plan
from convert.planning.planner import make_plan
from convert.verify.layers.level import check_layers
from convert.writing.execute import execute
from convert.writing.written import open_written
from support.memory_source import rule_file
from support.saved_network import assert_levels_pass, plan_saved, write
from support.weights_level import check_weights

B, S, C, D, N, H = 2, 6, 3, 8, 2, 4
HEAD = f"model: axes\ntitle: axes\ntargets: {{torch: {{loads: Torch}}}}\nroot: params\naxes: {{N: {{is: heads, equals: {N}}}, K: {{is: q k v, equals: 3}}}}\n"
RULES = """
- einsum: "...C,CD->...D"
  from: stem/kernel
  bias: stem/bias
  linear: {module: stem, axes: "DC.."}
- from: gamma
  axes: D
  parameter: {name: gamma, axes: ".D.."}
- from: position
  axes: STD
  parameter: {name: position, axes: ".DST"}
- dimension_numbers: NHWC,HWIO->NHWC
  axes: PQDE
  from: mix/kernel
  bias: mix/bias
  padding: VALID
  conv: {module: mix, axes: ED}
- einsum: "...D,D(N K H)->...(N K H)"
  from: qkv/kernel
  bias: qkv/bias
  linear: {module: qkv, axes: "(K N H)D.."}
"""


class Flax(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        gamma = self.param("gamma", nn.initializers.normal(), (D,))
        position = self.param("position", nn.initializers.normal(), (S, S, D))
        y = nn.Dense(D, name="stem")(x) * gamma + position
        y = y + nn.Conv(D, (1, 1), padding="VALID", name="mix")(y)
        qkv = nn.Dense(3 * N * H, name="qkv")(y).reshape(*y.shape[:3], N, 3, H)
        return (qkv[..., 0, :] * qkv[..., 1, :] + qkv[..., 2, :]).reshape(*y.shape[:3], -1)


class Torch(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = torch.nn.Conv2d(C, D, 1)
        self.gamma = torch.nn.Parameter(torch.zeros(1, D, 1, 1))
        self.position = torch.nn.Parameter(torch.zeros(1, D, S, S))
        self.mix = torch.nn.Linear(D, D)
        self.qkv = torch.nn.Conv2d(D, 3 * N * H, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.stem(x) * self.gamma + self.position
        y = y + self.mix(y.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        q, k, v = self.qkv(y).chunk(3, dim=1)
        return q * k + v


@pytest.fixture(scope="module")
def variables() -> Any:
    made = Flax().init(jax.random.key(0), jnp.zeros((B, S, S, C)))
    return jax.tree.map(lambda x: jax.random.normal(jax.random.key(x.size), x.shape) * 0.3, made)


@pytest.fixture(scope="module")
def plan(variables: Any, tmp_path_factory: pytest.TempPathFactory) -> Plan:
    return plan_saved(variables, RULES, HEAD, tmp_path_factory.mktemp("axes"))


@pytest.fixture
def written(plan: Plan, tmp_path: Path) -> Path:
    return write(plan, tmp_path / "out.safetensors")


@pytest.mark.slow
def test_both_models_compute_the_same(variables: Any, written: Path) -> None:
    module = Torch()
    module.load_state_dict(load_file(written), strict=True)
    x = np.random.default_rng(0).standard_normal((B, S, S, C)).astype(np.float32)
    want = np.asarray(Flax().apply(variables, x))
    got = module(torch.from_numpy(x).permute(0, 3, 1, 2)).detach().permute(0, 2, 3, 1).numpy()
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_the_levels_pass(plan: Plan, written: Path) -> None:
    assert_levels_pass(plan, written)


@pytest.mark.parametrize(
    ("tensor", "change", "named"),
    [
        ("mix.weight", lambda x: x.T, "input and output channels exchanged"),
        ("qkv.weight", lambda x: x.reshape(3, N, H, D).transpose(1, 0, 2, 3).reshape(x.shape), "axes of a head swapped"),
        ("qkv.bias", lambda x: x.reshape(3, N, H).transpose(1, 0, 2).reshape(x.shape), "axes of a head swapped"),
        ("position", lambda x: x.swapaxes(2, 3), "axes permuted"),
    ],
)  # fmt: skip
def test_a_wrong_order_is_named(plan: Plan, written: Path, tensor: str, change: Any, named: str) -> None:
    tensors = {name: x.numpy() for name, x in load_file(written).items()}
    tensors[tensor] = np.ascontiguousarray(change(tensors[tensor]))
    save_file({name: torch.tensor(x) for name, x in tensors.items()}, written)
    weights, layers = check_weights(plan, open_written(written)), check_layers(plan, open_written(written))
    assert (weights.findings[0].path, named in str(weights.findings[0])) == (tensor, True), weights.findings
    assert tensor == "position" or layers.findings[0].path == tensor


def test_a_plan_with_other_operations_differs_from_the_layers(plan: Plan, tmp_path: Path) -> None:
    """The layers level uses none of the plan's permutations: a file of rules with another order fails it."""
    wrong = rule_file(RULES.replace("(K N H)D..", "(N K H)D.."), HEAD)
    path = tmp_path / "wrong.safetensors"
    list(execute(make_plan(wrong, plan.checkpoint), path))
    level = check_layers(plan, open_written(path))
    assert {finding.path for finding in level.findings} == {"qkv.weight", "qkv.bias"}
