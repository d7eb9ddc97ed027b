"""Scores of attention with RoPE for ``--reference support.rope_model:reference``: all heads in one axis, as in Llama's wq.

The JAX side is Meta's: wq is [D, N*H], and RoPE rotates the features (0, 1), (2, 3), ... of a head. The PyTorch side is that of
transformers, which rotates (0, H/2), (1, H/2 + 1), ...
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

INPUTS, HEADS, GROUPS, WIDTH, STEPS = 10, 6, 3, 8, 7
RULES = f"""
model: rope-model
title: scores of attention with RoPE
axes:
  D: {{is: model width}}
  N: {{is: query heads}}
  K: {{is: key heads}}
  H: {{is: width of a head, equals: {WIDTH}}}
  E: {{is: all query heads, equals: N*H}}
  M: {{is: all key heads, equals: K*H}}
targets:
  torch: {{loads: rope_model.Scores}}
rules:
- einsum: ...D,DE->...E
  from: wq/kernel
  bias: wq/bias
  rope: {{H: interleaved}}
  linear: q
- einsum: ...D,DM->...M
  from: wk/kernel
  rope: {{H: interleaved}}
  linear: k
"""
# of the features of a head in the order of the JAX side, those of the PyTorch side: 0, 2, 4, ..., 1, 3, 5, ...
HALVES = [*range(0, WIDTH, 2), *range(1, WIDTH, 2)]


def source(seed: int = 0) -> MemorySource:
    """A checkpoint with random weights."""
    rng = np.random.default_rng(seed)
    shapes = {
        "wq/kernel": (INPUTS, HEADS * WIDTH),
        "wq/bias": (HEADS * WIDTH,),
        "wk/kernel": (INPUTS, GROUPS * WIDTH),
    }
    return MemorySource({name: rng.normal(0.1, 0.4, shape).astype(np.float32) for name, shape in shapes.items()})


class Scores(nn.Module):
    """q, k -> RoPE -> scores."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(INPUTS, HEADS * WIDTH)
        self.k = nn.Linear(INPUTS, GROUPS * WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.turned(self.q(x).unflatten(-1, (HEADS, WIDTH)))
        k = self.turned(self.k(x).unflatten(-1, (GROUPS, WIDTH))).repeat_interleave(HEADS // GROUPS, dim=2)
        return torch.einsum("btnh,bsnh->bnts", q, k) / WIDTH**0.5

    @staticmethod
    def turned(x: torch.Tensor) -> torch.Tensor:
        """Rotate the pairs (k, k + H/2)."""
        angles = torch.tensor(_angles(), dtype=x.dtype)[:, None, :]
        one, two = x.chunk(2, dim=-1)
        return torch.cat((one * angles.cos() - two * angles.sin(), two * angles.cos() + one * angles.sin()), dim=-1)


def _angles() -> np.ndarray:
    """Angle of each position and pair."""
    return np.arange(STEPS)[:, None] * 10000.0 ** (-np.arange(WIDTH // 2) / (WIDTH // 2))


def load(state: Mapping[str, torch.Tensor]) -> nn.Module:
    """Build the PyTorch side."""
    module = Scores()
    module.load_state_dict(dict(state), strict=True, assign=True)
    return module.requires_grad_(False).eval()


def run(module: nn.Module, inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {"y": module(inputs["x"])}


def apply(weights: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The JAX model; its boundaries have the features of a head in the order of the PyTorch side."""
    x = inputs["x"]
    q = (x @ weights["wq/kernel"] + weights["wq/bias"]).reshape(*x.shape[:2], HEADS, WIDTH)
    k = (x @ weights["wk/kernel"]).reshape(*x.shape[:2], GROUPS, WIDTH)
    scores = jnp.einsum("btnh,bsnh->bnts", _turned(q), jnp.repeat(_turned(k), HEADS // GROUPS, axis=2)) / WIDTH**0.5
    flat = {name: y[..., jnp.array(HALVES)].reshape(*x.shape[:2], -1) for name, y in (("q", q), ("k", k))}
    return {**flat, "y": scores}


def _turned(x: Any) -> Any:
    """Rotate the pairs (2k, 2k + 1)."""
    angles = jnp.asarray(_angles(), x.dtype)[:, None, :]
    one, two = x[..., 0::2], x[..., 1::2]
    turned = (one * jnp.cos(angles) - two * jnp.sin(angles), two * jnp.cos(angles) + one * jnp.sin(angles))
    return jnp.stack(turned, axis=-1).reshape(x.shape)


def draw(seed: int) -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(seed).normal(0, 2, (2, STEPS, INPUTS)).astype(np.float32)}


def reference(plan: Any) -> Reference:
    return Reference(
        inputs=draw, build=lambda state: load(state), run=run, outputs=("y",), reduction=INPUTS, depth=2, jax=apply
    )
