"""Small models whose outputs show what was chosen, and not the numbers that it was chosen by: a codebook, whole numbers, a limit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch import nn

from support.small_model import WIDTH, Small, Weights

CODES, EPSILON, LEVELS, LIMIT = 16, 1e-5, 3.0, 0.25


def _normed(x: Any) -> Any:
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + EPSILON)


def _quantised(w: Weights, inputs: Weights) -> dict[str, Any]:
    z = _normed(jax.nn.gelu(inputs["x"].astype(w["out"].dtype) @ w["into"], approximate=False)) * w["scale"]
    distances = (z * z).sum(-1, keepdims=True) + (w["codes"] ** 2).sum(-1) - 2 * z @ w["codes"].T
    code = w["codes"][distances.argmin(-1)]
    return {"y": (z + jax.lax.stop_gradient(code - z)) @ w["out"]}


class Quantised(nn.Module):
    """The straight-through estimator of a VQ-VAE: no number of the encoder reaches the outputs."""

    epsilon = EPSILON

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.scale, self.codes = nn.Parameter(torch.zeros(WIDTH)), nn.Parameter(torch.zeros(CODES, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = self.normed(self.active(self.into(x))) * self.scale
        code = self.codes[self.chosen(z)]
        return torch.as_tensor(self.out(z + (code - z).detach()))

    def active(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.gelu(x)

    def normed(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + self.epsilon)

    def chosen(self, z: torch.Tensor) -> torch.Tensor:
        return self.distances(z).argmin(-1)

    def distances(self, z: torch.Tensor) -> torch.Tensor:
        return (z * z).sum(-1, keepdim=True) + (self.codes**2).sum(-1) - 2 * z @ self.codes.T


def _stepped(w: Weights, inputs: Weights) -> dict[str, Any]:
    x = inputs["x"].astype(w["out"].dtype)
    whole = jnp.round(LEVELS * jnp.tanh(_normed(x @ w["into"])))
    open_ = _normed(x @ w["gate"]) > LIMIT
    return {"y": jnp.where(open_, whole, -1) @ w["out"]}


class Stepped(nn.Module):
    """Finite scalar quantisation, and a gate that is open or shut."""

    epsilon, levels, limit = EPSILON, LEVELS, LIMIT

    def __init__(self) -> None:
        super().__init__()
        self.into, self.gate, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        whole = self.whole(self.levels * torch.tanh(Quantised.normed(self, self.into(x))))
        return torch.as_tensor(self.out(torch.where(self.opened(self.gate(x)), whole, -1)))

    def whole(self, x: torch.Tensor) -> torch.Tensor:
        return x.round()

    def opened(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + EPSILON) > self.limit


RULES = '- {einsum: "...D,DE->...E", from: "{%s}", linear: "{%s}"}\n'
CHOICE_MODELS: Mapping[str, Small] = {
    "quantised": Small(
        RULES % ("into,out", "into,out") + "- {from: scale, axes: E, parameter: scale}\n- {from: codes, axes: CE, parameter: codes}\n",
        {"into": (WIDTH, WIDTH), "out": (WIDTH, WIDTH), "scale": (WIDTH,), "codes": (CODES, WIDTH)},
        _quantised,
        Quantised,
    ),
    "stepped": Small(
        RULES % ("into,gate,out", "into,gate,out"),
        dict.fromkeys(("into", "gate", "out"), (WIDTH, WIDTH)),
        _stepped,
        Stepped,
    ),
}  # fmt: skip
