"""A vision transformer: patches, a class token in front of them, a table of positions, a gated layer of one kernel, a limited output."""

# fmt: off

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch.nn import functional as f

from support.inferred import floats, layer_norm
from support.planted import SQUARE, D, Faulty, H, N, Pair
from support.planted.attention import attend

P, C = 2, 4  # size of a patch, channels
T = 17  # patches of an image of 8 x 8, and the class token


def _vision(w: Any, x: Any) -> Any:
    y = jax.lax.conv_general_dilated(x, w["e"], (P, P), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")) + w["eb"]
    y = y.reshape(len(x), -1, D)
    y = jnp.concatenate([jnp.broadcast_to(w["c"], (len(x), 1, D)), y], 1) + w["p"][:T]
    z = layer_norm(y, w["s0"], w["t0"])
    y = y + attend(z @ w["q"], z @ w["k"], z @ w["v"]) @ w["o"] + w["ob"]
    a, b = jnp.split(layer_norm(y, w["s1"], w["t1"]) @ w["i"] + w["ib"], 2, -1)
    y = y + (jax.nn.silu(a) * b) @ w["j"]
    z = layer_norm(y, w["s2"], w["t2"])[:, 0]
    return jnp.clip(z @ w["h"] / 2, -1, 1)


class Norm(Faulty):
    """LayerNorm with its epsilon behind the root, or without its shift."""

    def __init__(self, fault: str) -> None:
        super().__init__(fault)
        self.weight, self.bias = torch.nn.Parameter(torch.randn(D)), torch.nn.Parameter(torch.randn(D))

    def forward(self, x: Any) -> Any:
        x = x - x.mean(-1, keepdim=True)
        square = x.pow(2).mean(-1, keepdim=True)
        x = x / (square.sqrt() + 1e-6) if self.has("root") else x / (square + 1e-6).sqrt()
        return x * self.weight if self.has("no shift") else x * self.weight + self.bias


class Vision(Faulty):
    """A vision transformer of one layer."""

    def __init__(self, fault: str) -> None:
        super().__init__(fault, 4, bias=False)
        self.e = torch.nn.Conv2d(C, D, P, P + 2 if self.has("stride") else P)
        self.c, self.p = torch.nn.Parameter(torch.randn(1, 1, D)), torch.nn.Parameter(torch.randn(T + 1, D))
        self.ob = torch.nn.Parameter(torch.randn(D))
        self.i, self.j, self.h = torch.nn.Linear(D, 2 * D), torch.nn.Linear(D, D, bias=False), torch.nn.Linear(D, D, bias=False)
        self.l = torch.nn.ModuleList(Norm(fault if k == 1 else "") for k in range(3))

    def forward(self, x: Any) -> Any:
        y = self.e(x.permute(0, 3, 1, 2)).flatten(2).transpose(1, 2)  # shows: stride
        c = self.c.expand(len(x), 1, D)
        if self.has("class without place"):
            y = torch.cat([c, y + self.p[1:T]], 1)
        else:
            y = torch.cat([c, y], 1)
            y = y + self.p[:y.shape[1]]  # shows: class without place
        z = self.l[0](y)  # shows: class without place
        q, k, v = (self.m[n](y if self.has("values of y") and n == 2 else z).unflatten(-1, (N, H)).transpose(1, 2) for n in range(3))
        p = q @ k.transpose(-1, -2) / (D if self.has("width") else H) ** 0.5
        p = p.masked_fill(torch.arange(T) == 0, -1e30) if self.has("class hidden") else p
        p = p.softmax(-2 if self.has("axis") else -1)  # shows: class hidden, width
        z = self.m[3]((p @ v).transpose(1, 2).flatten(-2)) + self.ob
        y = y + y + z if self.has("twice") else y + z
        a, b = self.i(self.l[1](y)).chunk(2, -1)  # shows: no shift
        a = a + 0.5 if self.has("gate of half more") else a
        y = y + self.j(f.silu(a) * b)  # shows: gate of half more
        y = y if self.has("no last norm") else self.l[2](y)
        y = y.mean(1) if self.has("mean") else y[:, -1] if self.has("last") else y[:, 0]
        y = self.h(y)  # shows: no last norm
        y = y / (4 if self.has("temperature") else 2)
        bound = 2 if self.has("limit") else 1
        return y.clip(-bound, bound)  # shows: limit


SHAPES: dict[str, tuple[int, ...]] = dict.fromkeys("qkvojh", SQUARE) | {"e": (P, P, C, D), "c": (1, 1, D), "p": (T + 1, D)}
SHAPES |= {"i": (D, 2 * D), "ib": (2 * D,)} | dict.fromkeys(("eb", "ob", "s0", "t0", "s1", "t1", "s2", "t2"), (D,))
FAULTS = (
    "root", "no shift", "stride", "class without place", "values of y", "width", "class hidden", "axis", "twice", "gate of half more",
    "no last norm", "mean", "last", "temperature", "limit",
)
PAIRS = {"vision": Pair(_vision, SHAPES, Vision, floats(5, 8, 8, C), FAULTS)}
