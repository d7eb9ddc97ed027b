"""Small models, of which a fault is named in a second: a gated layer, a bag of tokens with places, a recurrence with decay."""

# fmt: off

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.nn import functional as f

from support.inferred import floats, layer_norm, rms_norm, tokens
from support.planted import SQUARE, D, Faulty, Pair

T, V = 6, 11


# ---- a gated layer


def _gated(w: Any, x: Any) -> Any:
    y = rms_norm(x, w["s"], 1e-3)
    x = x + (jax.nn.silu(y @ w["g"]) * (y @ w["u"])) @ w["d"]
    return jnp.tanh(layer_norm(x, w["t"], w["b"], 1e-5)) @ w["h"]


class Gated(Faulty):
    """A gated layer between two norms."""

    def __init__(self, fault: str) -> None:
        super().__init__(fault, 4, bias=False, norms=1)
        self.s = torch.nn.Parameter(torch.randn(D))
        self.n[0].eps = 1e-2 if self.has("epsilon of the last norm") else 1e-5

    def forward(self, x: Any) -> Any:
        c = x - x.mean(-1, keepdim=True) if self.has("centred") else x
        squares = c.abs() if self.has("no squares") else c.pow(2)
        size = squares.sum(-1, keepdim=True) if self.has("sum") else squares.mean(-1, keepdim=True)
        size = size + (1e-6 if self.has("epsilon") else 1e-3)  # shows: no norm
        y = c / size if self.has("no root") else c * size.rsqrt()  # shows: sum
        y = x if self.has("no norm") else y * self.s
        g, u = self.m[0](y), self.m[1](x if self.has("other half of x") else y)
        if self.has("gelu"):
            g = f.gelu(g)
        elif self.has("relu"):
            g = f.relu(g)
        elif self.has("sigmoid"):
            g = g.sigmoid()
        elif not self.has("no activation"):
            g = f.silu(g)  # shows: one half
        if self.has("added"):
            z = g + u
        elif self.has("squared"):
            z = g * u * u
        else:
            z = g if self.has("one half") else g * u  # shows: sigmoid, no activation
        z = self.m[2](z)  # shows: no activation, one half
        if self.has("residual"):
            x = z
        elif self.has("residual of norm"):
            x = y + z
        elif self.has("residual twice"):
            x = x + x + z
        else:
            x = x + z
        x = x if self.has("no last norm") else self.n[0](x)  # shows: residual, residual of norm, residual twice, epsilon of the last norm
        if self.has("sine"):
            x = x.sin()
        elif not self.has("no tanh"):
            x = x.tanh()  # shows: no last norm
        return self.m[3](x)  # shows: no last norm, no tanh


GATED: dict[str, tuple[int, ...]] = dict.fromkeys("gudh", SQUARE) | dict.fromkeys("stb", (D,))
GATED_FAULTS = (
    "epsilon", "epsilon of the last norm", "centred", "no squares", "sum", "no root", "no norm", "other half of x", "gelu",
    "relu", "sigmoid", "no activation", "added", "squared", "one half", "residual", "residual of norm", "residual twice",
    "no last norm", "sine", "no tanh",
)


# ---- a bag of tokens with places

WAVES = np.arange(T)[:, None] / 50.0 ** (np.arange(D // 2) / (D // 2))
TABLE = np.concatenate([np.sin(WAVES), np.cos(WAVES)], -1)


def _bag(w: Any, x: Any) -> Any:
    y = w["e"][x] * 3 + TABLE
    y = jax.nn.relu(y @ w["a"] + w["ab"]) @ w["b"] + w["bb"]
    return jax.nn.log_softmax(y.mean(1) @ w["h"] / 2)


class Bag(Faulty):
    """A bag of tokens with places."""

    def __init__(self, fault: str) -> None:
        super().__init__(fault, 2)
        self.e, self.h = torch.nn.Embedding(V, D), torch.nn.Linear(D, D, bias=False)

    def table(self) -> Any:
        at = torch.arange(T, dtype=torch.float64)[:, None] + (1 if self.has("first is one") else 0)
        waves = at / (100.0 if self.has("base") else 50.0) ** (torch.arange(D // 2) / (D // 2))
        if self.has("cosines first"):
            return torch.cat([waves.cos(), waves.sin()], -1)
        if self.has("in turns"):
            return torch.stack([waves.sin(), waves.cos()], -1).flatten(-2)
        return torch.cat([waves.sin(), waves.cos()], -1)

    def forward(self, x: Any) -> Any:
        y = self.e(x)
        if self.has("scale of both"):
            y = (y + self.table()) * 3
        elif self.has("no places"):
            y = y * 3
        elif self.has("no scale"):
            y = y + self.table()
        else:
            y = y * (4 if self.has("other scale") else 3) + self.table()  # shows: first is one, base, cosines first, in turns
        y = self.m[0](y)  # shows: no places, scale of both
        y = y.clip(0, 1) if self.has("bounded") else f.leaky_relu(y) if self.has("leaky") else f.silu(y) if self.has("silu") else f.relu(y)
        y = self.m[1](y)
        if self.has("maximum"):
            y = y.amax(1)
        elif self.has("last"):
            y = y[:, -1]
        elif self.has("channels"):
            y = y[:, :, :T].mean(2)
        else:
            y = y.mean(1)
        y = self.h(f.pad(y, (0, D - T)) if self.has("channels") else y)  # shows: last
        y = y if self.has("temperature") else y / 2  # shows: no softmax
        return y.softmax(-1) if self.has("no logarithm") else y if self.has("no softmax") else y.log_softmax(0 if self.has("axis") else -1)  # shows: temperature


BAG: dict[str, tuple[int, ...]] = dict.fromkeys("abh", SQUARE) | dict.fromkeys(("ab", "bb"), (D,)) | {"e": (V, D)}
BAG_FAULTS = (
    "first is one", "base", "cosines first", "in turns", "scale of both", "no places", "no scale", "other scale", "bounded",
    "leaky", "silu", "maximum", "last", "temperature", "no logarithm", "no softmax", "axis",
)


# ---- a recurrence with decay


def _decay(w: Any, x: Any) -> Any:
    y = jnp.tanh(x @ w["a"] + w["ab"])
    keep = jax.nn.sigmoid(w["k"])
    h = jnp.zeros((len(x), D))
    found = []
    for t in range(x.shape[1]):
        h = keep * h + (1 - keep) * (y[:, t] @ w["b"])
        found.append(h)
    z = jnp.stack(found, 1) * jax.nn.gelu(x @ w["g"], approximate=True)
    return (z + x) @ w["o"]


class Decay(Faulty):
    """A recurrence with decay, and a gate."""

    def __init__(self, fault: str) -> None:
        super().__init__(fault, 1)
        self.b, self.g, self.o = (torch.nn.Linear(D, D, bias=False) for _ in range(3))
        self.k = torch.nn.Parameter(torch.randn(D))

    def forward(self, x: Any) -> Any:
        y = self.m[0](x)
        y = y.sin() if self.has("sine") else y if self.has("no tanh") else y.tanh()
        keep = (-self.k.exp()).exp() if self.has("exponential") else self.k.sigmoid()
        new = 1 if self.has("all of the new") else (1 - keep.pow(2)).sqrt() if self.has("root") else 1 - keep
        h = torch.ones(len(x), D) if self.has("ones") else torch.zeros(len(x), D)
        found = []
        for t in range(4):
            u = self.b(y[:, t])  # shows: no tanh
            before = h
            h = keep * h + new * u  # shows: exponential, all of the new, root, ones
            found.append(before if self.has("step before") else h)
        z = torch.stack(found[::-1] if self.has("reversed") else found, 1)
        z = z.cumsum(1) if self.has("summed") else z  # shows: reversed, step before
        g = self.g(y if self.has("gate of y") else x)  # shows: no gate
        g = f.gelu(g) if self.has("erf") else f.silu(g) if self.has("silu") else g if self.has("linear gate") else f.gelu(g, approximate="tanh")
        z = z if self.has("no gate") else z + g if self.has("added gate") else z * g  # shows: reversed
        return self.o(z if self.has("residual") else z + x)


DECAY: dict[str, tuple[int, ...]] = dict.fromkeys("abgo", SQUARE) | dict.fromkeys(("ab", "k"), (D,))
DECAY_FAULTS = (
    "sine", "no tanh", "step before", "reversed", "summed", "gate of y", "erf", "silu", "linear gate", "no gate",
    "added gate", "residual", "all of the new", "root", "exponential", "ones",
)

PAIRS = {
    "gated": Pair(_gated, GATED, Gated, floats(3, 5, D), GATED_FAULTS),
    "bag": Pair(_bag, BAG, Bag, tokens(V, 7, T), BAG_FAULTS),
    "decay": Pair(_decay, DECAY, Decay, floats(5, 4, D), DECAY_FAULTS),
}
