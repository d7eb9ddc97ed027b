"""A ResNet of bottleneck blocks in flax, saved by Orbax, with one rule for each layer of a block; a PyTorch ResNet."""

from __future__ import annotations

from functools import partial
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
from convert.writing.written import open_written
from support.saved_network import assert_levels_pass, plan_saved, write
from support.weights_level import check_weights

WIDTH, STAGES, PATCH, SIZE = 4, (2, 1), 2, 8
HEAD = """model: resnet
title: ResNet
targets: {torch: {loads: Torch}}
axes:
  I: {is: channels in, varies: true}
  O: {is: channels out, varies: true}
"""
RULES = """
- dimension_numbers: NHWC,HWIO->NHWC
  axes: PQCD
  from: params/stem/kernel
  padding: VALID
  strides: $P
  conv: stem
- dimension_numbers: NHWC,HWIO->NHWC
  axes: RSIO
  from: params/Block_{i}/{Conv_0,Conv_2}/kernel
  padding: VALID
  conv: blocks.{i}.{conv1,conv3}
- dimension_numbers: NHWC,HWIO->NHWC
  axes: XYIO
  from: params/Block_{i}/Conv_1/kernel
  conv: blocks.{i}.conv2
- dimension_numbers: NHWC,HWIO->NHWC
  axes: RSIO
  from: params/Block_{i}/proj/kernel
  optional: true
  conv: blocks.{i}.proj
- from: params/Block_{i}/BatchNorm_{0,1,2}/scale
  bias: params/Block_{i}/BatchNorm_{0,1,2}/bias
  mean: batch_stats/Block_{i}/BatchNorm_{0,1,2}/mean
  var: batch_stats/Block_{i}/BatchNorm_{0,1,2}/var
  multiplies_by: scale
  epsilon: 1e-5
  axes: O
  batch_norm: blocks.{i}.{bn1,bn2,bn3}
- einsum: ...I,IO->...O
  from: params/head/kernel
  bias: params/head/bias
  linear: head
"""


class Block(nn.Module):
    width: int
    stride: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        norm = partial(nn.BatchNorm, use_running_average=True, epsilon=1e-5)
        y = nn.relu(norm()(nn.Conv(self.width, (1, 1), use_bias=False)(x)))
        pads = [(1, 1), (1, 1)]
        y = nn.relu(norm()(nn.Conv(self.width, (3, 3), strides=self.stride, padding=pads, use_bias=False)(y)))
        y = norm()(nn.Conv(2 * self.width, (1, 1), use_bias=False)(y))
        if x.shape != y.shape:
            x = nn.Conv(2 * self.width, (1, 1), strides=self.stride, use_bias=False, name="proj")(x)
        return nn.relu(x + y)


class Flax(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Conv(WIDTH, (PATCH, PATCH), strides=PATCH, padding="VALID", use_bias=False, name="stem")(x)
        k = 0
        for stage, count in enumerate(STAGES):
            for block in range(count):
                x = Block(WIDTH * 2**stage, 2 if stage and not block else 1, name=f"Block_{k}")(x)
                k += 1
        return nn.Dense(5, name="head")(x.mean((1, 2)))


class TorchBlock(torch.nn.Module):
    def __init__(self, inner: int, width: int, stride: int) -> None:
        super().__init__()
        conv, norm = torch.nn.Conv2d, torch.nn.BatchNorm2d
        self.conv1, self.bn1 = conv(inner, width, 1, bias=False), norm(width)
        self.conv2, self.bn2 = conv(width, width, 3, stride, 1, bias=False), norm(width)
        self.conv3, self.bn3 = conv(width, 2 * width, 1, bias=False), norm(2 * width)
        self.proj = conv(inner, 2 * width, 1, stride, bias=False) if inner != 2 * width or stride > 1 else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.bn1(self.conv1(x)).relu()
        y = self.bn3(self.conv3(self.bn2(self.conv2(y)).relu()))
        return ((x if self.proj is None else self.proj(x)) + y).relu()


class Torch(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = torch.nn.Conv2d(3, WIDTH, PATCH, PATCH, bias=False)
        blocks, inner = [], WIDTH
        for stage, count in enumerate(STAGES):
            for block in range(count):
                blocks.append(TorchBlock(inner, WIDTH * 2**stage, 2 if stage and not block else 1))
                inner = 2 * WIDTH * 2**stage
        self.blocks = torch.nn.ModuleList(blocks)
        self.head = torch.nn.Linear(inner, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


@pytest.fixture(scope="module")
def variables() -> Any:
    shapes = jax.eval_shape(Flax().init, jax.random.key(0), jnp.zeros((1, SIZE, SIZE, 3)))
    rng = np.random.default_rng(0)

    def draw(x: Any) -> np.ndarray:
        signs = rng.choice([-1, 1] if x.ndim > 1 else [1], x.shape)
        return (rng.uniform(0.2, 1, x.shape) * signs).astype(np.float32)

    return jax.tree.map(draw, shapes)


@pytest.fixture(scope="module")
def plan(variables: Any, tmp_path_factory: pytest.TempPathFactory) -> Plan:
    return plan_saved(variables, RULES, HEAD, tmp_path_factory.mktemp("resnet"))


@pytest.fixture
def written(plan: Plan, tmp_path: Path) -> Path:
    return write(plan, tmp_path / "out.safetensors")


def test_both_models_compute_the_same(variables: Any, written: Path) -> None:
    module = Torch().eval()
    missing, unexpected = module.load_state_dict(load_file(written), strict=False)
    assert (unexpected, {name.rpartition(".")[2] for name in missing} - {"num_batches_tracked"}) == ([], set())
    x = np.random.default_rng(1).standard_normal((2, SIZE, SIZE, 3)).astype(np.float32)
    want = np.asarray(jax.jit(Flax().apply)(variables, x))
    got = module(torch.from_numpy(x).permute(0, 3, 1, 2)).detach().numpy()
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-4 * np.abs(want).max())


@pytest.mark.slow
def test_the_levels_pass(plan: Plan, written: Path) -> None:
    assert_levels_pass(plan, written)


def test_a_kernel_of_another_block_and_an_exchanged_kernel_are_named(plan: Plan, written: Path) -> None:
    tensors = load_file(written)
    tensors["blocks.1.conv3.weight"] = tensors["blocks.0.conv3.weight"].clone()
    tensors["blocks.2.conv2.weight"] = tensors["blocks.2.conv2.weight"].swapaxes(0, 1).contiguous()
    save_file(tensors, written)
    findings = {finding.path: str(finding) for finding in check_weights(plan, open_written(written)).findings}
    assert findings.keys() == {"blocks.1.conv3.weight", "blocks.2.conv2.weight"}
    assert "of another layer" in findings["blocks.1.conv3.weight"]
    assert "input and output channels exchanged" in findings["blocks.2.conv2.weight"]
