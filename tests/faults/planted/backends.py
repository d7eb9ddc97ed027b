"""Faults of backends, in the model of tests/support/conv_norm.py (conv -> permute -> LayerNorm -> head): the weights are right."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from faults.expected import Fault
from faults.plants import InBackend
from support import conv_norm

CONV_NORM = "conv-norm"
Inputs = Mapping[str, Any]


def _finished(module: Any, normed: torch.Tensor) -> dict[str, torch.Tensor]:
    normed = normed * module.norm.weight + module.norm.bias
    return {"y": module.head(normed), "norm": normed}


def unbiased(module: Any, inputs: Inputs) -> dict[str, torch.Tensor]:
    """A fused LayerNorm whose variance is divided by one less."""
    x = module.conv(inputs["x"].permute(0, 2, 1)).permute(0, 2, 1)
    return _finished(module, (x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.var(-1, keepdim=True) + module.norm.eps))


def narrow(module: Any, inputs: Inputs) -> dict[str, torch.Tensor]:
    """A matrix product in bfloat16 where float32 was asked for, as TF32 and its like do silently."""
    x = module.conv(inputs["x"].permute(0, 2, 1)).permute(0, 2, 1)
    normed = module.norm(x)
    y = torch.nn.functional.linear(normed.bfloat16(), module.head.weight.bfloat16()).to(normed.dtype) + module.head.bias
    return {"y": y, "norm": normed}


def turned(module: Any, inputs: Inputs) -> dict[str, torch.Tensor]:
    """A convolution that turns its kernel round."""
    weight = module.conv.weight.view(conv_norm.WIDTH, conv_norm.KERNEL, conv_norm.INPUTS).permute(0, 2, 1).flip(-1)
    conv = torch.nn.functional.conv1d(inputs["x"].permute(0, 2, 1), weight, module.conv.bias, padding=1)
    normed = module.norm(conv.permute(0, 2, 1))
    return {"y": module.head(normed), "norm": normed, "conv": conv}


def fault(name: str, backend: Any, at: str) -> Fault:
    return Fault(name, CONV_NORM, "torch", InBackend(backend), "backends", at, "a backend")


BACKENDS: tuple[Fault, ...] = (
    fault("fused kernel: LayerNorm along the axis of before the permutation (Burn)", conv_norm.fused, "fused"),
    fault("fused kernel: unbiased variance", unbiased, "unbiased"),
    fault("kernel that multiplies in bfloat16", narrow, "narrow"),
    fault("kernel that turns a convolution round", turned, "turned"),
)
