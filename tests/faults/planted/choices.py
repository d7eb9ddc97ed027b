"""Faults in front of a choice, which change none of the choices: the outputs are equal, and the numbers that are chosen by differ."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from faults.expected import Fault
from faults.planted.small import CONSTANT, fault
from support.choice_models import Quantised, Stepped

EXTRA = "operation that the JAX model lacks"


def farther(module: Quantised, z: torch.Tensor) -> torch.Tensor:
    return Quantised.distances(module, z) + 0.005 * (module.codes**2).sum(-1)


def with_epsilon(module: Stepped, x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-3) > module.limit


def tanh(module: Any, x: torch.Tensor) -> torch.Tensor:
    return functional.gelu(x, approximate="tanh")


def more_balanced(module: Any, scores: torch.Tensor) -> torch.Tensor:
    return (scores + 1.02 * module.balance).topk(2, -1).indices


CHOICE_FAULTS: tuple[Fault, ...] = (
    fault("distance to a codebook half a percent off", "quantised", EXTRA, "argmin", distances=farther),
    fault("another epsilon in front of a codebook", "quantised", CONSTANT, "argmin", epsilon=1e-3),
    fault("epsilon of 1e-6 in front of a codebook", "quantised", CONSTANT, "argmin", epsilon=1e-6),
    fault("GELU by tanh in front of a codebook", "quantised", "gelu_tanh for gelu_erf", "argmin", active=tanh),
    fault("another scale of whole numbers", "stepped", CONSTANT, "round", levels=3.01),
    fault("another epsilon in front of whole numbers", "stepped", CONSTANT, "round", epsilon=1e-3),
    fault("another epsilon in front of a limit", "stepped", CONSTANT, "gt", opened=with_epsilon),
    fault("another limit", "stepped", CONSTANT, "gt", limit=0.2501),
    fault("balance of the experts times 1.02", "experts", EXTRA, "topk", chosen=more_balanced),
)
