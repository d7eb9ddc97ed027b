"""A small decoder for ``--reference support.small_decoder:reference``: attention with RoPE and a window, dropout, and a batch norm.

`SAID` changes what the reference does, so that a test can plant a mistake in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn

from convert.references.protocol import Reference
from support.memory_source import MemorySource

VOCABULARY, WIDTH, HEADS, LAYERS, WINDOW, STEPS = 13, 8, 2, 2, 4, 7
HEAD = WIDTH // HEADS
RULES = """
model: small-decoder
title: a small decoder
axes:
  V: {is: vocabulary}
  D: {is: width}
  N: {is: heads}
  H: {is: width of a head}
  C: {is: keys and values}
targets:
  torch: {loads: small_decoder.Decoder}
rules:
- from: embed
  axes: VD
  embedding: embed
- from: blocks_{i}/norm
  axes: D
  multiplies_by: scale
  epsilon: 1e-6
  rms_norm: blocks.{i}.norm
- einsum: ...D,DNH->...NH
  from: blocks_{i}/q
  linear: blocks.{i}.q
- einsum: ...D,DCNH->...CNH
  from: blocks_{i}/kv
  linear: blocks.{i}.{k,v}
- einsum: ...NH,NHD->...D
  from: blocks_{i}/o/kernel
  bias: blocks_{i}/o/bias
  linear: blocks.{i}.o
- from: last/scale
  bias: last/bias
  mean: last/mean
  var: last/var
  multiplies_by: scale
  epsilon: 1e-5
  axes: D
  batch_norm: last
- einsum: ...D,DV->...V
  from: head
  linear: head
"""
SAID: dict[str, Any] = {}


def source(seed: int = 0) -> MemorySource:
    """A checkpoint with random weights."""
    rng = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {"embed": (VOCABULARY, WIDTH), "head": (WIDTH, VOCABULARY)}
    for i in range(LAYERS):
        shapes |= {
            f"blocks_{i}/norm": (WIDTH,),
            f"blocks_{i}/q": (WIDTH, HEADS, HEAD),
            f"blocks_{i}/kv": (WIDTH, 2, HEADS, HEAD),
            f"blocks_{i}/o/kernel": (HEADS, HEAD, WIDTH),
            f"blocks_{i}/o/bias": (WIDTH,),
        }
    shapes |= {f"last/{name}": (WIDTH,) for name in ("scale", "bias", "mean", "var")}
    leaves = {name: rng.normal(0.1, 0.6, shape).astype(np.float32) for name, shape in shapes.items()}
    leaves["last/var"] = np.abs(leaves["last/var"]) + 0.5
    return MemorySource(leaves)


class Block(nn.Module):
    """Attention with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH, eps=1e-6)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.o = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        q, k, v = (layer(y).unflatten(-1, (HEADS, HEAD)) for layer in (self.q, self.k, self.v))
        q, k = self.turned(q), self.turned(k)
        far = torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])[None]
        scores = torch.einsum("btnh,bsnh->bnts", q, k) / HEAD**0.5
        near = (far >= 0) if SAID.get("target") == "no window" else (far >= 0) & (far < WINDOW)
        p = torch.softmax(scores.masked_fill(~near, -1e30), -1)
        return x + self.drop(self.o(torch.einsum("bnts,bsnh->btnh", p, v).flatten(2)))

    @staticmethod
    def turned(x: torch.Tensor) -> torch.Tensor:
        """Rotate the pairs (2k, 2k + 1), as the JAX side."""
        angles = torch.tensor(_angles(x.shape[1]), dtype=x.dtype)[:, None, :]
        if SAID.get("target") == "half-split pairs":
            one, two = x.chunk(2, dim=-1)
            return torch.cat((one * angles.cos() - two * angles.sin(), two * angles.cos() + one * angles.sin()), -1)
        one, two = x[..., 0::2], x[..., 1::2]
        turned = (one * angles.cos() - two * angles.sin(), two * angles.cos() + one * angles.sin())
        return torch.stack(turned, dim=-1).reshape(x.shape)


class Decoder(nn.Module):
    """The PyTorch side."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.last = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.last(x.mT).mT)


def _angles(steps: int) -> np.ndarray:
    """Angle of each position and pair."""
    return np.arange(steps)[:, None] * 10000.0 ** (-np.arange(HEAD // 2) / (HEAD // 2))


def load(state: Mapping[str, torch.Tensor]) -> nn.Module:
    """Build the PyTorch side, with the mistake that `SAID` names."""
    module = Decoder()
    after: Callable[[nn.Module, Mapping[str, torch.Tensor]], Any] | None = SAID.get("build")
    module.load_state_dict(dict(state), strict=True, assign=True)
    module.requires_grad_(False).eval()
    return (after(module, state) or module) if after is not None else module


def run(module: nn.Module, inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    change = SAID.get("outputs", lambda y: y)
    return {"logits": change(module(inputs["tokens"]))}


def apply(weights: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The JAX side."""
    found: dict[str, Any] = {}
    x = found["embed"] = weights["embed"][inputs["tokens"]]
    for i in range(LAYERS):
        here = {name.removeprefix(f"blocks_{i}/"): leaf for name, leaf in weights.items() if f"blocks_{i}/" in name}
        y = x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * here["norm"]
        q = found[f"blocks.{i}.q"] = jnp.einsum("btd,dnh->btnh", y, here["q"])
        k, v = jnp.moveaxis(jnp.einsum("btd,dcnh->btcnh", y, here["kv"]), 2, 0)
        found[f"blocks.{i}.q"] = q.reshape(*q.shape[:2], -1)
        q, k = _turned(q), _turned(k)
        far = jnp.arange(x.shape[1])[:, None] - jnp.arange(x.shape[1])[None]
        scores = jnp.einsum("btnh,bsnh->bnts", q, k) / HEAD**0.5
        scores = jnp.where((far >= 0) & (far < WINDOW), scores, -1e30)
        mixed = jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), v)
        o = jnp.einsum("btnh,nhd->btd", mixed, here["o/kernel"]) + here.get("o/bias", 0)
        found[f"blocks.{i}.norm"], found[f"blocks.{i}.o"] = y, o
        x = found[f"blocks.{i}"] = x + o
    last = {name: weights[f"last/{name}"] for name in ("scale", "bias", "mean", "var")}
    x = (x - last["mean"]) * jax.lax.rsqrt(last["var"] + 1e-5) * last["scale"] + last["bias"]
    found["last"] = jnp.moveaxis(x, 1, 2)  # the module of PyTorch has its channels first
    order = ["embed", *(f"blocks.{i}{name}" for i in range(LAYERS) for name in (".norm", ".q", ".o", "")), "last"]
    rename = SAID.get("names", {})
    boundaries = {name: found[rename.get(name, name)] for name in order} if SAID.get("boundaries", True) else {}
    return {**boundaries, "logits": SAID.get("outputs", lambda y: y)(x @ weights["head"])}


def _turned(x: Any) -> Any:
    """Rotate the pairs (2k, 2k + 1)."""
    angles = jnp.asarray(_angles(x.shape[1]), x.dtype)[:, None, :]
    one, two = x[..., 0::2], x[..., 1::2]
    turned = (one * jnp.cos(angles) - two * jnp.sin(angles), two * jnp.cos(angles) + one * jnp.sin(angles))
    return jnp.stack(turned, axis=-1).reshape(x.shape)


def draw(seed: int) -> dict[str, np.ndarray]:
    return {"tokens": np.random.default_rng(seed).integers(0, VOCABULARY, (3, STEPS))}


def reference(plan: Any) -> Reference:
    return Reference(
        inputs=SAID.get("inputs", draw),
        build=SAID.get("load", load),
        run=SAID.get("run", run),
        outputs=("logits",),
        logits=SAID.get("logits", ("logits",)),
        masks=SAID.get("masks", lambda inputs: {}),
        reduction=SAID.get("reduction", VOCABULARY),
        depth=SAID.get("depth", LAYERS),
        jax=SAID.get("jax", apply),
    )
