"""A model of one's own for ``--reference support.conv_norm:reference``: convolution, permute, LayerNorm, head; with its backends.

Burn's fused kernels once read the result of a permuted tensor by its old axes (tracel-ai/burn#3142, #3169): the weights were
right, the outputs were not. The backend ``fused`` here has that fault: it takes mean and variance along time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from torch import nn

from convert.references.protocol import Reference
from support.memory_source import MemorySource

WIDTH, KERNEL, INPUTS, OUTPUTS, STEPS = 12, 3, 4, 5, 16
EPSILON = 1e-6
RULES = f"""
model: conv-norm
title: convolution, LayerNorm, head
axes:
  K: {{is: kernel}}
  I: {{is: channels in}}
  O: {{is: channels}}
  P: {{is: outputs}}
targets:
  torch: {{loads: conv_norm.ConvNorm}}
rules:
- einsum: ...KI,KIO->...O
  from: conv/kernel
  bias: conv/bias
  linear: conv
- from: norm/scale
  bias: norm/bias
  multiplies_by: scale
  epsilon: {EPSILON}
  axes: O
  layer_norm: norm
- einsum: ...O,OP->...P
  from: head/kernel
  bias: head/bias
  linear: head
"""


def source(seed: int = 0) -> MemorySource:
    """A checkpoint with random weights."""
    rng = np.random.default_rng(seed)
    shapes = {
        "conv/kernel": (KERNEL, INPUTS, WIDTH),
        "conv/bias": (WIDTH,),
        "norm/scale": (WIDTH,),
        "norm/bias": (WIDTH,),
        "head/kernel": (WIDTH, OUTPUTS),
        "head/bias": (OUTPUTS,),
    }
    return MemorySource({name: rng.normal(0.5, 0.4, shape).astype(np.float32) for name, shape in shapes.items()})


class Conv(nn.Module):
    """A convolution over time whose weight is stored as that of a Linear on the unfolded window."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(WIDTH, KERNEL * INPUTS))
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight.view(WIDTH, KERNEL, INPUTS).permute(0, 2, 1)
        return nn.functional.conv1d(x, weight, self.bias, padding=KERNEL // 2)


class ConvNorm(nn.Module):
    """conv -> permute -> LayerNorm -> head."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = Conv()
        self.norm = nn.LayerNorm(WIDTH, eps=EPSILON)
        self.head = nn.Linear(WIDTH, OUTPUTS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.conv(x.permute(0, 2, 1)).permute(0, 2, 1)))


def build(state: Mapping[str, torch.Tensor]) -> nn.Module:
    module = ConvNorm()
    module.load_state_dict(dict(state), strict=True, assign=True)
    return module.requires_grad_(False).eval()


def run(module: nn.Module, inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {"y": module(inputs["x"])}


def fused(module: Any, inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """A kernel that does permute and LayerNorm in one, with the statistics along the axis that was last before."""
    x = module.conv(inputs["x"].permute(0, 2, 1))
    mean, variance = x.mean(-1, keepdim=True), x.var(-1, unbiased=False, keepdim=True)
    normed = ((x - mean) * torch.rsqrt(variance + module.norm.eps)).permute(0, 2, 1)
    normed = normed * module.norm.weight + module.norm.bias
    return {"y": module.head(normed), "norm": normed}


def unfused(module: Any, inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The same kernel without the fault."""
    x = module.conv(inputs["x"].permute(0, 2, 1)).permute(0, 2, 1)
    mean, variance = x.mean(-1, keepdim=True), x.var(-1, unbiased=False, keepdim=True)
    normed = (x - mean) * torch.rsqrt(variance + module.norm.eps) * module.norm.weight + module.norm.bias
    return {"y": module.head(normed), "norm": normed}


def missing(module: Any, inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """A backend that does not start."""
    raise OSError("no such runtime")


def apply(weights: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The JAX model, channels last."""
    from flax import linen

    x = inputs["x"]
    conv = linen.Conv(WIDTH, (KERNEL,), padding="SAME")
    conv_out = conv.apply({"params": {key: weights[f"conv/{key}"] for key in ("kernel", "bias")}}, x)
    norm = linen.LayerNorm(epsilon=EPSILON, use_fast_variance=False)
    normed = norm.apply({"params": {key: weights[f"norm/{key}"] for key in ("scale", "bias")}}, conv_out)
    y = jnp.einsum("...O,OP->...P", normed, weights["head/kernel"]) + weights["head/bias"]
    return {"conv": conv_out.swapaxes(1, 2), "norm": normed, "y": y}


def draw(seed: int) -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(seed).normal(0, 2, (2, STEPS, INPUTS)).astype(np.float32)}


def _reference(**backends: Any) -> Reference:
    return Reference(
        inputs=draw,
        build=build,
        run=run,
        outputs=("y",),
        reduction=WIDTH * KERNEL,
        depth=1,
        jax=apply,
        backends=backends,
    )


def reference(plan: Any) -> Reference:
    """Without further backends."""
    return _reference()


def with_wrong_kernel(plan: Any) -> Reference:
    """With a backend that has the fault, and one that has not."""
    return _reference(fused=fused, unfused=unfused)


def with_absent_runtime(plan: Any) -> Reference:
    """With a backend that cannot run."""
    return _reference(absent=missing)
