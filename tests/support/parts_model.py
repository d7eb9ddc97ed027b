"""A model of several parts for ``--reference support.parts_model:reference``, as plain functions: types of tokens, a time, fused halves, a decay, a last norm.

Methods of the PyTorch side are what the fault catalogue replaces.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn

from convert.references.protocol import Reference
from support.memory_source import MemorySource
from support.small_models import BASE, Norm, normed

WIDTH, INNER, WAVES, TOKENS, OUT, BATCH, STEPS = 8, 6, 4, 11, 5, 2, 7
RULES = """
model: parts
title: a small model
targets:
  torch: {loads: parts_model.Parts}
rules:
- {from: "{tokens,types}", axes: VD, embedding: "{tokens,types}"}
- {einsum: "...T,TD->...D", from: time, linear: time}
- {einsum: "...D,DI->...I", from: into, linear: into}
- {einsum: "...E,EF->...F", from: inner, linear: inner}
- {einsum: "...E,ED->...D", from: out, linear: out}
- {einsum: "...D,DG->...G", from: gate, linear: gate}
- {from: norm, multiplies_by: scale, epsilon: 1e-6, axes: D, rms_norm: norm}
- {einsum: "...D,DO->...O", from: head, linear: head}
"""
SHAPES = {
    "tokens": (TOKENS, WIDTH),
    "types": (TOKENS, WIDTH),
    "time": (2 * WAVES, WIDTH),
    "into": (WIDTH, 2 * INNER),
    "inner": (INNER, INNER),
    "out": (INNER, WIDTH),
    "gate": (WIDTH, WIDTH),
    "norm": (WIDTH,),
    "head": (WIDTH, OUT),
}


def apply(weights: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The JAX model."""
    angles = inputs["t"][:, None] * jnp.exp(-jnp.log(BASE) * jnp.arange(WAVES) / WAVES)
    time = jnp.concatenate((jnp.sin(angles), jnp.cos(angles)), -1) @ weights["time"]
    x = weights["tokens"][inputs["tokens"]] + weights["types"][inputs["types"]] + time[:, None]
    u, z = jnp.split(x @ weights["into"], 2, -1)
    x = x + (jnp.tanh(u @ weights["inner"]) * jax.nn.silu(z)) @ weights["out"]
    rate = -jax.nn.softplus(x @ weights["gate"])
    x = jnp.exp(rate) * x + jnp.sqrt(1 - jnp.exp(2 * rate)) * jnp.tanh(x)
    return {"y": normed(x, weights["norm"]).mean(1) @ weights["head"]}


class Parts(nn.Module):
    base, divisor = BASE, float(WAVES)

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.types = nn.Embedding(TOKENS, WIDTH), nn.Embedding(TOKENS, WIDTH)
        sizes = {"time": (2 * WAVES, WIDTH), "into": (WIDTH, 2 * INNER), "inner": (INNER, INNER), "out": (INNER, WIDTH)}
        for name, (given, made) in {**sizes, "gate": (WIDTH, WIDTH), "head": (WIDTH, OUT)}.items():
            self.add_module(name, nn.Linear(given, made, bias=False))
        self.norm = Norm(WIDTH)

    def forward(self, tokens: torch.Tensor, types: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        x = self.embedded(tokens, types) + self.time(self.waves(t))[:, None]
        u, z = self.halves(self.into(x))
        x = x + self.out(torch.tanh(self.inner(u)) * nn.functional.silu(z))
        rate = -nn.functional.softplus(self.gate(x))
        x = rate.exp() * x + self.rest(rate) * torch.tanh(x)
        return torch.as_tensor(self.head(self.pooled(x)))

    def embedded(self, tokens: torch.Tensor, types: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.tokens(tokens) + self.types(types))

    def waves(self, t: torch.Tensor) -> torch.Tensor:
        angles = t[:, None] * torch.exp(-np.log(self.base) * torch.arange(WAVES, dtype=t.dtype) / self.divisor)
        return torch.cat((angles.sin(), angles.cos()), -1)

    def halves(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.chunk(2, -1)

    def rest(self, rate: torch.Tensor) -> torch.Tensor:
        return torch.sqrt(1 - torch.exp(2 * rate))

    def pooled(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.norm(x).mean(1))


def source() -> MemorySource:
    """A checkpoint with random weights."""
    rng = np.random.default_rng(1)
    return MemorySource({leaf: rng.normal(0.2, 0.5, shape).astype(np.float32) for leaf, shape in SHAPES.items()})


def load(state: Mapping[str, torch.Tensor]) -> nn.Module:
    """Build the PyTorch side."""
    module = Parts()
    module.load_state_dict(dict(state), strict=True, assign=True)
    return module.requires_grad_(False).eval()


def draw(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    tokens, types = (rng.integers(0, TOKENS, (BATCH, STEPS)) for _ in range(2))
    return {"tokens": tokens, "types": types, "t": rng.uniform(0, 9, BATCH).astype(np.float32)}


def reference(plan: Any) -> Reference:
    return Reference(
        inputs=draw,
        build=lambda state: load(state),
        run=lambda module, inputs: {"y": module(**inputs)},
        outputs=("y",),
        reduction=WIDTH,
        depth=4,
        jax=apply,
    )
