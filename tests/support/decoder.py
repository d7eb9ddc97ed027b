"""A decoder as plain functions of JAX, without modules, and in PyTorch: faults in its code are found by its operations alone.

All widths are 12 or 4, so that few shapes tell. The PyTorch side is taken apart differently: it scales the queries, not the
scores, has SiLU as one operator, and multiplies by the weight of a norm last. `FAULTS` has other code for parts of it.
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

TOKENS, WIDTH, HEADS, GROUPS, HEAD, LAYERS, STEPS, WINDOW, CAP, BASE = 11, 12, 4, 2, 4, 2, 7, 3, 20.0, 10000.0
EPSILON = 1e-6
SQUARE = {
    "q": (WIDTH, HEADS * HEAD),
    "k": (WIDTH, GROUPS * HEAD),
    "v": (WIDTH, GROUPS * HEAD),
    "o": (HEADS * HEAD, WIDTH),
    "gate": (WIDTH, WIDTH),
    "up": (WIDTH, WIDTH),
    "down": (WIDTH, WIDTH),
}
RULES = """
model: decoder
title: a decoder of plain functions
axes:
  V: {is: tokens}
  D: {is: width}
  N: {is: query heads times their width}
  K: {is: key heads times their width}
  F: {is: hidden features}
targets:
  torch: {loads: decoder.Decoder}
rules:
- from: embed
  axes: VD
  embedding: embed
- einsum: ...D,DN->...N
  from: layer_{i}/q
  linear: layers.{i}.q
- einsum: ...D,DK->...K
  from: layer_{i}/{k,v}
  linear: layers.{i}.{k,v}
- einsum: ...N,ND->...D
  from: layer_{i}/o
  linear: layers.{i}.o
- einsum: ...D,DF->...F
  from: layer_{i}/{gate,up}
  linear: layers.{i}.{gate,up}
- einsum: ...F,FD->...D
  from: layer_{i}/down
  linear: layers.{i}.down
- from: layer_{i}/{norm_1,norm_2}
  multiplies_by: scale
  epsilon: 1e-6
  axes: D
  rms_norm: layers.{i}.{norm_1,norm_2}
- from: start
  axes: D
  parameter: start
- einsum: ...D,DV->...V
  from: head
  linear: head
"""


def source() -> MemorySource:
    """A checkpoint with random weights."""
    rng = np.random.default_rng(3)
    shapes = {"embed": (TOKENS, WIDTH), "head": (WIDTH, TOKENS), "start": (WIDTH,)}
    for i in range(LAYERS):
        shapes |= {f"layer_{i}/{name}": shape for name, shape in SQUARE.items()}
        shapes |= {f"layer_{i}/norm_{k}": (WIDTH,) for k in (1, 2)}
    return MemorySource({name: rng.normal(0.1, 0.5, shape).astype(np.float32) for name, shape in shapes.items()})


def state() -> dict[str, torch.Tensor]:
    """The weights as PyTorch's side has them."""
    made = {}
    for name, x in source().arrays.items():
        layer, _, own = name.rpartition("/")
        path = f"layers.{layer.removeprefix('layer_')}.{own}" if layer else name
        made[path if name == "start" else f"{path}.weight"] = x.T if x.ndim > 1 and name != "embed" else x
    return {name: torch.tensor(np.array(x, np.float64)) for name, x in made.items()}


# ---- JAX


def apply(weights: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
    x = weights["embed"][inputs["tokens"]] * WIDTH**0.5 + weights["start"]
    for i in range(LAYERS):
        own = {name.partition("/")[2]: value for name, value in weights.items() if name.startswith(f"layer_{i}/")}
        x = x + _attend(own, _normed(x, own["norm_1"]))
        h = _normed(x, own["norm_2"])
        x = x + (jax.nn.silu(h @ own["gate"]) * (h @ own["up"])) @ own["down"]
    return {"y": x.mean(1) @ weights["head"]}


def _normed(x: Any, scale: Any) -> Any:
    return x * (jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + EPSILON) * scale)


def _attend(own: Mapping[str, Any], x: Any) -> Any:
    q, k, v = ((x @ own[name]).reshape(*x.shape[:2], -1, HEAD) for name in "qkv")
    k, v = (jnp.repeat(y, HEADS // GROUPS, axis=2) for y in (_turned(k), v))
    scores = jnp.einsum("btnh,bsnh->bnts", _turned(q), k) * HEAD**-0.5
    scores = CAP * jnp.tanh(scores / CAP)
    far = jnp.arange(STEPS)[:, None] - jnp.arange(STEPS)
    shares = jax.nn.softmax(jnp.where((far >= 0) & (far < WINDOW), scores, -1e30), axis=-1)
    return jnp.einsum("bnts,bsnh->btnh", shares, v).reshape(*x.shape[:2], -1) @ own["o"]


def _turned(x: Any) -> Any:
    angles = jnp.arange(STEPS)[:, None] / BASE ** (jnp.arange(0, HEAD, 2) / HEAD)
    sin, cos = jnp.sin(angles)[:, None], jnp.cos(angles)[:, None]
    one, two = jnp.split(x, 2, axis=-1)
    return jnp.concatenate((one * cos - two * sin, two * cos + one * sin), axis=-1)


# ---- PyTorch


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / ((x * x).mean(-1, keepdim=True) + EPSILON).sqrt() * self.weight


class Layer(nn.Module):
    """Attention and a gated MLP; the attributes are what `FAULTS` changes."""

    scale, cap, base, window, hidden = HEAD**-0.5, CAP, BASE, WINDOW, -1e30
    q: nn.Linear
    k: nn.Linear
    v: nn.Linear
    o: nn.Linear
    gate: nn.Linear
    up: nn.Linear
    down: nn.Linear

    def __init__(self) -> None:
        super().__init__()
        for name, (one, two) in SQUARE.items():
            setattr(self, name, nn.Linear(one, two, bias=False))
        self.norm_1, self.norm_2 = Norm(), Norm()
        self.drop = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.drop(self.attend(self.norm_1(x)))
        return x + self.mlp(self.norm_2(x))

    def mlp(self, h: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.down(self.gated(self.gate(h), self.up(h))))

    def gated(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return nn.functional.silu(gate) * up

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, HEAD)) for layer in (self.q, self.k, self.v))
        q, k, v = self.turned(q), self.repeated(self.turned(k)), self.repeated(v)
        scores = torch.einsum("btnh,bsnh->bnts", q * self.scale, k)
        mixed = torch.einsum("bnts,bsnh->btnh", self.shares(self.capped(scores)), v)
        return torch.as_tensor(self.o(mixed.flatten(2)))

    def capped(self, scores: torch.Tensor) -> torch.Tensor:
        return torch.tanh(scores / self.cap) * self.cap

    def repeated(self, x: torch.Tensor) -> torch.Tensor:
        return x.repeat_interleave(HEADS // GROUPS, dim=2)

    def shares(self, scores: torch.Tensor) -> torch.Tensor:
        steps = torch.arange(STEPS)
        far = steps[:, None] - steps
        seen = (far >= 0) & (far < self.window)
        return self.softmax(scores.masked_fill(~seen, self.hidden))

    def softmax(self, scores: torch.Tensor) -> torch.Tensor:
        return torch.softmax(scores, -1)

    def turned(self, x: torch.Tensor) -> torch.Tensor:
        angles = torch.arange(STEPS)[:, None] / self.base ** (torch.arange(0, HEAD, 2, dtype=x.dtype) / HEAD)
        sin, cos = angles.sin()[:, None], angles.cos()[:, None]
        one, two = x.chunk(2, -1)
        return torch.cat((one * cos - two * sin, two * cos + one * sin), -1)


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.start = nn.Parameter(torch.zeros(WIDTH))
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.begun(self.embed(tokens))
        for layer in self.layers:
            x = layer(x)
        return torch.as_tensor(self.head(self.pooled(x)))

    def begun(self, x: torch.Tensor) -> torch.Tensor:
        return x * WIDTH**0.5 + self.start

    def pooled(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(1)


def load(state: Mapping[str, torch.Tensor]) -> nn.Module:
    """Build the PyTorch side."""
    module = Decoder()
    module.load_state_dict(dict(state), strict=True, assign=True)
    return module.requires_grad_(False).eval()


def reference(plan: Any) -> Reference:
    return Reference(
        inputs=lambda seed: {"tokens": np.random.default_rng(seed).integers(0, TOKENS, (2, STEPS))},
        build=lambda state: load(state),
        run=lambda module, inputs: {"y": module(inputs["tokens"])},
        outputs=("y",),
        reduction=WIDTH,
        depth=LAYERS,
        jax=apply,
    )


# ---- faults in the code of PyTorch


def layers(**changed: Any) -> Callable[[Any], None]:
    """Other attributes of each layer; functions take the layer first."""

    def edit(module: Any) -> None:
        for layer in module.layers:
            for name, value in changed.items():
                setattr(layer, name, value.__get__(layer) if callable(value) else value)

    return edit


def model(**changed: Any) -> Callable[[Any], None]:
    """Other functions of the model."""

    def edit(module: Any) -> None:
        for name, value in changed.items():
            setattr(module, name, value.__get__(module))

    return edit


def norms(forward: Callable[[Any, Any], Any]) -> Callable[[Any], None]:
    """Another function of each norm."""

    def edit(module: Any) -> None:
        for norm in (m for m in module.modules() if isinstance(m, Norm)):
            norm.forward = forward.__get__(norm)  # type: ignore[method-assign]

    return edit


def _behind(layer: Any, x: torch.Tensor) -> torch.Tensor:
    x = layer.norm_1(x + layer.attend(x))
    return torch.as_tensor(layer.norm_2(x + layer.mlp(x)))


def _two(module: Any) -> None:
    layers(cap=25.0, window=4)(module)


FAULTS: dict[str, tuple[Callable[[Any], None], str]] = {  # what is wrong -> how, and the diagnosis
    "attention scale of the model's width": (layers(scale=WIDTH**-0.5), "another constant"),
    "soft cap of another size": (layers(cap=25.0), "tanh up to 25 for tanh up to 20 and another constant"),
    "RoPE of another base": (layers(base=500000.0), "another constant"),
    "window off by one": (layers(window=WINDOW + 1), "another mask"),
    "no window": (layers(window=STEPS), "another mask"),
    "key heads repeated in turns": (
        layers(repeated=lambda layer, x: x.repeat(1, 1, HEADS // GROUPS, 1)),
        "elements in another order",
    ),
    "scores of keys with queries": (
        layers(capped=lambda layer, scores: Layer.capped(layer, scores.transpose(-1, -2))),
        "axes exchanged",
    ),
    "GELU for SiLU": (
        layers(gated=lambda layer, gate, up: nn.functional.gelu(gate) * up),
        "gelu_erf for silu",
    ),
    "SiLU on the wrong factor": (
        layers(gated=lambda layer, gate, up: gate * nn.functional.silu(up)),
        "operands exchanged",
    ),
    "embedding scale missing": (model(begun=lambda module, x: x + module.start), "operation missing"),
    "start value missing": (model(begun=lambda module, x: x * WIDTH**0.5), "operation missing"),
    "start value scaled, too": (
        model(begun=lambda module, x: (x + module.start) * WIDTH**0.5),
        "operations in another order",
    ),
    "input of attention scaled": (
        layers(attend=lambda layer, x: Layer.attend(layer, x * 1.5)),
        "operation that the JAX model lacks",
    ),
    "the last state for the mean": (
        model(pooled=lambda module, x: x[:, -1]),
        "last element over axis 1 for mean over axis 1",
    ),
    "softmax over the queries": (
        layers(softmax=lambda layer, scores: torch.softmax(scores, -2)),
        "softmax over axis 2 for softmax over the last axis",
    ),
    "epsilon outside of the root": (
        norms(lambda norm, x: x / ((x * x).mean(-1, keepdim=True).sqrt() + EPSILON) * norm.weight),
        "epsilon outside the root",
    ),
    "norm behind the addition": (layers(forward=_behind), ""),
    "soft cap of another size, and window off by one": (_two, "tanh up to 25 for tanh up to 20 and another mask"),
}
