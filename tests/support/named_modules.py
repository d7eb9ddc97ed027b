"""One small model in linen, nnx and Equinox, and in PyTorch; the references return the outputs alone.

Two blocks of attention with groups of key heads and a gated MLP, with LayerScales and a class token; at the end the output is put
beside the embedded input. Projections are square, so that no shape shows a transposed one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx
from flax.traverse_util import unflatten_dict

from convert.references.protocol import Reference
from support.memory_source import MemorySource

WIDTH, HEADS, GROUPS, HEAD, OUTPUTS, LAYERS, STEPS = 12, 4, 2, 3, 5, 3, 6
LINEAR = {"embed": (WIDTH, WIDTH), "merge": (2 * WIDTH, WIDTH), "head": (WIDTH, OUTPUTS)}
OF_BLOCK = {
    "q": (WIDTH, WIDTH),
    "k": (WIDTH, GROUPS * HEAD),
    "v": (WIDTH, GROUPS * HEAD),
    "out": (WIDTH, WIDTH),
    "gate": (WIDTH, WIDTH),
    "up": (WIDTH, WIDTH),
    "down": (WIDTH, WIDTH),
}
NORMS = ("attention_norm", "mlp_norm")
LIBRARIES = {
    "linen": ("blocks_{i}", "kernel", "scale"),
    "nnx": ("blocks/{i}", "kernel", "scale"),
    "equinox": ("blocks/{i}", "weight", "weight"),
}


def rules(library: str) -> str:
    """The rules for the tree of a library."""
    block, weight, scale = LIBRARIES[library]

    def linear(path: str, letters: str, module: str) -> str:
        stored = letters[::-1] if library == "equinox" else letters
        return f"- einsum: ...{letters[0]},{stored}->...{letters[1]}\n  from: {path}/{weight}\n  linear: {module}"

    lines = [
        *(linear(name, letters, name) for name, letters in (("embed", "DW"), ("merge", "TD"), ("head", "DC"))),
        *(
            linear(f"{block}/{name}", letters, f"blocks.{{i}}.{name}")
            for name, letters in (
                ("q", "DE"),
                ("k", "DM"),
                ("v", "DM"),
                ("out", "ED"),
                ("gate", "DF"),
                ("up", "DF"),
                ("down", "FD"),
            )
        ),
        *(
            f"- from: {path}/{scale}\n  multiplies_by: scale\n  epsilon: 1e-6\n  axes: D\n  rms_norm: {module}"
            for path, module in (*((f"{block}/{n}", f"blocks.{{i}}.{n}") for n in NORMS), ("norm", "norm"))
        ),
        f"- from: {block}/{{scale_1,scale_2}}\n  axes: D\n  parameter: blocks.{{i}}.{{scale_1,scale_2}}",
        "- from: token\n  axes: D\n  parameter: token",
    ]
    return (
        f"""
model: {library}-modules
title: a small model in {library}
axes:
  i: {{is: layers}}
  D: {{is: width}}
  W: {{is: embedded width, equals: D}}
  E: {{is: all query heads}}
  M: {{is: all key heads}}
  F: {{is: width of the MLP}}
  T: {{is: both widths side by side}}
  C: {{is: outputs}}
targets:
  torch: {{loads: named_modules.Model}}
rules:
"""
        + "\n".join(lines)
        + "\n"
    )


def source(library: str) -> MemorySource:
    """A checkpoint with random weights."""
    rng = np.random.default_rng(3)
    block, weight, scale = LIBRARIES[library]
    blocks = [block.format(i=i) for i in range(LAYERS)]
    shapes = LINEAR | {f"{b}/{n}": s for b in blocks for n, s in OF_BLOCK.items()}
    arrays = {
        f"{name}/{weight}": rng.normal(0, 0.4, shape[::-1] if library == "equinox" else shape)
        for name, shape in shapes.items()
    }
    arrays |= {
        f"{name}/{scale}": rng.normal(1, 0.3, WIDTH) for name in ("norm", *(f"{b}/{n}" for b in blocks for n in NORMS))
    }
    arrays |= {
        name: rng.normal(0.5, 0.3, WIDTH) for name in ("token", *(f"{b}/scale_{k}" for b in blocks for k in (1, 2)))
    }
    return MemorySource({name: x.astype(np.float32) for name, x in arrays.items()})


# ---- JAX


def forward(model: Any, x: jax.Array, each: Callable[[Any], Any] = lambda layer: layer) -> jax.Array:
    """Run the model of any of the three libraries; `each` maps a layer over the leading axes."""
    h = embedded = each(model.embed)(x)
    token = jnp.broadcast_to(model.token, (*h.shape[:1], 1, WIDTH))
    h = jnp.concatenate([token, h], axis=1)
    for block in model.blocks:
        y = each(block.attention_norm)(h)
        q, k, v = (each(layer)(y).reshape(*y.shape[:2], -1, HEAD) for layer in (block.q, block.k, block.v))
        k, v = (jnp.repeat(z, HEADS // GROUPS, axis=2) for z in (k, v))
        scores = jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", q, k) / HEAD**0.5)
        mixed = jnp.einsum("bnts,bsnh->btnh", scores, v).reshape(y.shape)
        h = h + block.scale_1 * each(block.out)(mixed)
        y = each(block.mlp_norm)(h)
        h = h + block.scale_2 * each(block.down)(jax.nn.silu(each(block.gate)(y)) * each(block.up)(y))
    h = jnp.concatenate([h[:, 1:], embedded], axis=-1)
    return each(model.head)(each(model.norm)(each(model.merge)(h)))


class LinenBlock(nn.Module):
    def setup(self) -> None:
        for name, (_, size) in OF_BLOCK.items():
            setattr(self, name, nn.Dense(size, use_bias=False))
        self.attention_norm, self.mlp_norm = nn.RMSNorm(), nn.RMSNorm()
        self.scale_1, self.scale_2 = (
            self.param(name, nn.initializers.ones, (WIDTH,)) for name in ("scale_1", "scale_2")
        )


class LinenModel(nn.Module):
    def setup(self) -> None:
        for name, (_, size) in LINEAR.items():
            setattr(self, name, nn.Dense(size, use_bias=False))
        self.blocks = [LinenBlock() for _ in range(LAYERS)]
        self.norm = nn.RMSNorm()
        self.token = self.param("token", nn.initializers.ones, (WIDTH,))

    def __call__(self, x: jax.Array) -> jax.Array:
        return forward(self, x)


class NnxBlock(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        for name, (given, size) in OF_BLOCK.items():
            setattr(self, name, nnx.Linear(given, size, use_bias=False, rngs=rngs))
        self.attention_norm, self.mlp_norm = nnx.RMSNorm(WIDTH, rngs=rngs), nnx.RMSNorm(WIDTH, rngs=rngs)
        self.scale_1, self.scale_2 = nnx.Param(jnp.ones(WIDTH)), nnx.Param(jnp.ones(WIDTH))


class NnxModel(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        for name, (given, size) in LINEAR.items():
            setattr(self, name, nnx.Linear(given, size, use_bias=False, rngs=rngs))
        self.blocks = nnx.List([NnxBlock(rngs) for _ in range(LAYERS)])
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.token = nnx.Param(jnp.ones(WIDTH))

    def __call__(self, x: jax.Array) -> jax.Array:
        return forward(self, x)


class EquinoxBlock(eqx.Module):
    q: eqx.nn.Linear
    k: eqx.nn.Linear
    v: eqx.nn.Linear
    out: eqx.nn.Linear
    gate: eqx.nn.Linear
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    attention_norm: eqx.nn.RMSNorm
    mlp_norm: eqx.nn.RMSNorm
    scale_1: jax.Array
    scale_2: jax.Array

    def __init__(self, weights: Mapping[str, Any], path: str) -> None:
        for name, (given, size) in OF_BLOCK.items():
            setattr(self, name, equinox_linear(given, size, weights[f"{path}/{name}/weight"]))
        self.attention_norm, self.mlp_norm = (equinox_norm(weights[f"{path}/{name}/weight"]) for name in NORMS)
        self.scale_1, self.scale_2 = weights[f"{path}/scale_1"], weights[f"{path}/scale_2"]


class EquinoxModel(eqx.Module):
    embed: eqx.nn.Linear
    merge: eqx.nn.Linear
    head: eqx.nn.Linear
    blocks: list[EquinoxBlock]
    norm: eqx.nn.RMSNorm
    token: jax.Array

    def __init__(self, weights: Mapping[str, Any]) -> None:
        for name, (given, size) in LINEAR.items():
            setattr(self, name, equinox_linear(given, size, weights[f"{name}/weight"]))
        self.blocks = [EquinoxBlock(weights, f"blocks/{i}") for i in range(LAYERS)]
        self.norm, self.token = equinox_norm(weights["norm/weight"]), weights["token"]

    def __call__(self, x: jax.Array) -> jax.Array:
        return forward(self, x, lambda layer: jax.vmap(jax.vmap(layer)))


def equinox_linear(given: int, size: int, weight: Any) -> eqx.nn.Linear:
    made = eqx.nn.Linear(given, size, use_bias=False, key=jax.random.key(0))
    return eqx.tree_at(lambda layer: layer.weight, made, weight)


def equinox_norm(weight: Any) -> eqx.nn.RMSNorm:
    return eqx.tree_at(lambda norm: norm.weight, eqx.nn.RMSNorm(WIDTH, eps=1e-6, use_bias=False), weight)


def apply(library: str, weights: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The JAX model; it returns its output alone."""
    x = inputs["x"]
    if library == "linen":
        return {"y": LinenModel().apply({"params": unflatten_dict(dict(weights), sep="/")}, x)}
    if library == "equinox":
        return {"y": EquinoxModel(weights)(x)}
    graph, state = nnx.split(nnx.eval_shape(lambda: NnxModel(nnx.Rngs(0))))
    params = {tuple(int(k) if k.isdigit() else k for k in name.split("/")): value for name, value in weights.items()}
    nnx.replace_by_pure_dict(state, unflatten_dict(params))
    return {"y": nnx.merge(graph, state)(x)}


# ---- PyTorch


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name, (given, size) in OF_BLOCK.items():
            setattr(self, name, torch.nn.Linear(given, size, bias=False))
        self.attention_norm, self.mlp_norm = (torch.nn.RMSNorm(WIDTH, eps=1e-6) for _ in NORMS)
        self.scale_1, self.scale_2 = (torch.nn.Parameter(torch.ones(WIDTH)) for _ in range(2))

    @staticmethod
    def grouped(x: torch.Tensor) -> torch.Tensor:
        return x.repeat_interleave(HEADS // GROUPS, dim=2)

    @staticmethod
    def scored(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return torch.einsum("btnh,bsnh->bnts", q, k) / HEAD**0.5

    @staticmethod
    def joined(x: torch.Tensor) -> torch.Tensor:
        return x.flatten(2)

    def attend(self, y: torch.Tensor) -> torch.Tensor:
        q, k, v = (layer(y).unflatten(-1, (-1, HEAD)) for layer in (self.q, self.k, self.v))
        mixed = torch.einsum("bnts,bsnh->btnh", self.scored(q, self.grouped(k)).softmax(-1), self.grouped(v))
        return self.out(self.joined(mixed))

    @staticmethod
    def gated(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(gate) * up

    def scales(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.scale_1, self.scale_2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, two = self.scales()
        x = x + one * self.attend(self.attention_norm(x))
        y = self.mlp_norm(x)
        return x + two * self.down(self.gated(self.gate(y), self.up(y)))


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name, (given, size) in LINEAR.items():
            setattr(self, name, torch.nn.Linear(given, size, bias=False))
        self.blocks = torch.nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = torch.nn.RMSNorm(WIDTH, eps=1e-6)
        self.token = torch.nn.Parameter(torch.ones(WIDTH))

    def with_token(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.token.expand(len(x), 1, -1), x], dim=1)

    @staticmethod
    def without_token(x: torch.Tensor) -> torch.Tensor:
        return x[:, 1:]

    @staticmethod
    def merged(x: torch.Tensor, skip: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, skip], dim=-1)

    def stack(self) -> list[torch.nn.Module]:
        return list(self.blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = skip = self.embed(x)
        h = self.with_token(h)
        for block in self.stack():
            h = block(h)
        return self.head(self.norm(self.merge(self.merged(self.without_token(h), skip))))


def load(state: Mapping[str, torch.Tensor]) -> torch.nn.Module:
    """Build the PyTorch side."""
    module = Model()
    module.load_state_dict(dict(state), strict=True, assign=True)
    return module.requires_grad_(False).eval()


def reference(library: str, plan: Any) -> Reference:
    return Reference(
        inputs=lambda seed: {"x": np.random.default_rng(seed).normal(0, 1, (2, STEPS, WIDTH)).astype(np.float32)},
        build=lambda state: load(state),
        run=lambda module, inputs: {"y": module(inputs["x"])},
        outputs=("y",),
        reduction=2 * WIDTH,
        depth=LAYERS,
        jax=partial(apply, library),
    )


def linen(plan: Any) -> Reference:
    return reference("linen", plan)


def in_nnx(plan: Any) -> Reference:
    return reference("nnx", plan)


def equinox(plan: Any) -> Reference:
    return reference("equinox", plan)
