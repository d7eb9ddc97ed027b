"""Transformers: a layer with a norm in front of each part, a decoder with rotated pairs and gates, an encoder with a norm behind."""

# fmt: off

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.nn import functional as f

from support.inferred import floats, layer_norm, rms_norm, tokens
from support.planted import SQUARE, D, Faulty, H, N, Pair

T, V = 6, 9
CAUSAL = np.tri(T, dtype=bool)


def _heads(x: Any) -> Any:
    return x.reshape(*x.shape[:-1], N, H)


def attend(q: Any, k: Any, v: Any, mask: Any = None, cap: float = 0.0) -> Any:
    logits = jnp.einsum("btnh,bsnh->bnts", _heads(q), _heads(k)) / np.sqrt(H)
    logits = cap * jnp.tanh(logits / cap) if cap else logits
    logits = logits if mask is None else jnp.where(mask, logits, -1e30)
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(logits), _heads(v)).reshape(q.shape)


# ---- a layer with a norm in front of each part


def _block(w: Any, x: Any) -> Any:
    y = layer_norm(x, w["s"], w["t"])
    z = attend(y @ w["q"] + w["qb"], y @ w["k"] + w["kb"], y @ w["v"] + w["vb"], CAUSAL)
    x = x + z @ w["o"] + w["ob"]
    y = jax.nn.gelu(layer_norm(x, w["u"], w["z"]) @ w["i"] + w["ib"], approximate=True)
    return x + y @ w["j"] + w["jb"]


class Block(Faulty):
    """A layer with a norm in front of each part."""

    def __init__(self, fault: str) -> None:
        super().__init__(fault, 6, norms=2)
        if self.has("epsilon"):
            self.n[0].eps = 1e-5
        if self.has("bias"):
            self.m[4] = torch.nn.Linear(D, D, bias=False)

    def forward(self, x: Any) -> Any:
        y = self.n[0](x)  # shows: epsilon
        given = x if self.has("queries") else y
        q, k, v = (self.m[i](given if i == 0 else y).unflatten(-1, (N, H)).transpose(1, 2) for i in range(3))  # shows: queries
        v = k if self.has("values") else v
        k = k.flip(1) if self.has("heads") else k
        scale = 1.0 if self.has("scale") else D**-0.5 if self.has("width") else H**-0.5
        p = q @ k.transpose(-1, -2) * scale  # shows: heads, scale, width
        mask = torch.as_tensor(CAUSAL)
        mask = mask.tril(-1) | torch.eye(T, dtype=torch.bool) & (torch.arange(T) == 0) if self.has("strict") else mask
        mask = mask.triu(-2) if self.has("window") else mask
        p = p if self.has("mask") else p.masked_fill(~mask, -1e30)  # shows: strict, window, scale
        p = p.softmax(-2 if self.has("axis") else -1)
        z = (p @ v).transpose(1, 2).flatten(-2)  # shows: values, mask
        z = self.m[3](z)  # shows: residual
        x = z if self.has("residual") else y + z if self.has("residual of norm") else x + z
        y = x if self.has("norm") else self.n[1](x)  # shows: residual
        y = self.m[4](y)  # shows: bias, norm
        if self.has("gelu"):
            y = f.gelu(y)  # shows: gelu
        elif self.has("relu"):
            y = f.relu(y)  # shows: relu
        elif not self.has("no activation"):
            y = f.gelu(y, approximate="tanh")  # shows: bias
        y = self.m[5](y)  # shows: no activation, last residual
        return 2 * x + y if self.has("factor") else y if self.has("last residual") else x + y


BLOCK: dict[str, tuple[int, ...]] = dict.fromkeys("qkvoij", SQUARE) | dict.fromkeys(
    ("s", "t", "u", "z", "qb", "kb", "vb", "ob", "ib", "jb"), (D,)
)
BLOCK_FAULTS = (
    "epsilon", "bias", "queries", "values", "heads", "scale", "width", "strict", "window", "mask", "axis", "residual",
    "residual of norm", "norm", "gelu", "relu", "no activation", "factor", "last residual",
)


# ---- a decoder with rotated pairs and gates

FREQUENCIES = 100.0 ** (-np.arange(H // 2) / (H // 2))


def _turned(x: Any) -> Any:
    angles = np.arange(T)[:, None, None] * FREQUENCIES
    one, two = jnp.split(_heads(x), 2, -1)
    sin, cos = np.sin(angles), np.cos(angles)
    return jnp.concatenate([one * cos - two * sin, two * cos + one * sin], -1).reshape(x.shape)


def _decoder(w: Any, x: Any) -> Any:
    x = w["e"][x] * np.sqrt(D)
    y = rms_norm(x, w["a"])
    z = attend(_turned(y @ w["q"]), _turned(y @ w["k"]), y @ w["v"], CAUSAL, cap=5.0)
    x = x + rms_norm(z @ w["o"], w["b"])
    y = rms_norm(x, w["c"])
    x = x + (jax.nn.silu(y @ w["g"]) * (y @ w["u"])) @ w["d"]
    return 3 * jnp.tanh(rms_norm(x, w["z"]) @ w["e"].T / 3)


class Decoder(Faulty):
    """A decoder with rotated pairs and gates."""

    def __init__(self, fault: str) -> None:
        super().__init__(fault, 7, bias=False)
        self.w = torch.nn.ParameterList(torch.randn(D) for _ in range(4))
        self.e = torch.nn.Embedding(V, D)

    def norm(self, x: Any, k: int) -> Any:
        if self.has("epsilon outside") and k == 0:
            return x / (x.pow(2).mean(-1, keepdim=True).sqrt() + 1e-6) * self.w[k]  # shows: epsilon outside
        if self.has("sum") and k == 2:
            return x * (x.pow(2).sum(-1, keepdim=True) + 1e-6).rsqrt() * self.w[k]  # shows: sum
        if self.has("centred") and k == 2:
            x = x - x.mean(-1, keepdim=True)  # shows: centred
        return x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * self.w[k]  # shows: centred, norm behind, embedding scale

    def turn(self, x: Any, key: bool) -> Any:
        base = 10000.0 if self.has("base") else 100.0  # shows: base
        frequencies = base ** (-torch.arange(H // 2, dtype=torch.float64) / (H // 2))  # shows: base
        at = torch.arange(T)[:, None] + (1 if self.has("shifted") and key else 0)  # shows: shifted
        angles = (at * frequencies)[:, None]  # shows: base, shifted
        one, two = x.chunk(2, -1)
        sin, cos = angles.sin() * (-1 if self.has("sign") and key else 1), angles.cos()  # shows: base, shifted
        return torch.cat([one * cos - two * sin, two * cos + one * sin], -1)  # shows: sign, base, shifted, values turned

    def forward(self, x: Any) -> Any:
        x = self.e(x) * (1 if self.has("embedding scale") else D**0.5)
        y = x if self.has("no norm") else self.norm(x, 0)  # shows: embedding scale
        q, k, v = (self.m[i](y).unflatten(-1, (N, H)) for i in range(3))  # shows: no norm, embedding scale
        q = self.turn(q, False)
        k = k if self.has("keys not turned") else self.turn(k, True)
        v = self.turn(v, True) if self.has("values turned") else v
        p = torch.einsum("btnh,bsnh->bnts", q, k) / H**0.5  # shows: keys not turned, sign, base, shifted
        p = (
            p
            if self.has("no cap")
            else (50 if self.has("other cap") else 5) * (p / (50 if self.has("other cap") else 5)).tanh()
        )
        p = p.masked_fill(~torch.as_tensor(CAUSAL), -1e30).softmax(-1)  # shows: no cap
        p = p / 2 if self.has("halved") else p
        z = self.m[3](torch.einsum("bnts,bsnh->btnh", p, v).flatten(-2))  # shows: values turned, halved
        x = (
            self.norm(x + z, 1)
            if self.has("norm behind")
            else x + (z if self.has("no second norm") else self.norm(z, 1))  # shows: embedding scale
        )
        y = self.norm(x, 2)  # shows: no second norm
        g, u = self.m[4](y), self.m[5](x if self.has("gate of x") else y)
        if self.has("gelu gate"):
            y = f.gelu(g) * u  # shows: gelu gate
        elif self.has("no gate"):
            y = f.silu(g) + u  # shows: no gate
        elif self.has("sigmoid gate"):
            y = g.sigmoid() * u  # shows: sigmoid gate
        else:
            y = f.silu(g) * u
        x = x + self.m[6](y)  # shows: no gate, gelu gate, sigmoid gate
        y = (x if self.has("no last norm") else self.norm(x, 3)) @ self.e.weight.T  # shows: no last norm, no last cap
        return y if self.has("no last cap") else 3 * (y / 3).tanh()


DECODER: dict[str, tuple[int, ...]] = dict.fromkeys("qkvogud", SQUARE) | dict.fromkeys("abcz", (D,)) | {"e": (V, D)}
DECODER_FAULTS = (
    "epsilon outside", "sum", "centred", "base", "shifted", "sign", "embedding scale", "no norm", "keys not turned",
    "values turned", "no cap", "other cap", "halved", "norm behind", "no second norm", "gate of x", "gelu gate", "no gate",
    "sigmoid gate", "no last norm", "no last cap",
)


# ---- an encoder with a norm behind each part, and a second sequence


def _encoder(w: Any, x: Any) -> Any:
    x = layer_norm(w["e"][x] + w["p"][:T] + w["y"][0], w["s0"], w["t0"], 1e-3)
    z = attend(x @ w["q"] + w["qb"], x @ w["k"] + w["kb"], x @ w["v"] + w["vb"])
    x = layer_norm(x + z @ w["o"] + w["ob"], w["s1"], w["t1"], 1e-3)
    z = jax.nn.gelu(x @ w["i"] + w["ib"], approximate=False) @ w["j"] + w["jb"]
    memory = layer_norm(x + z, w["s2"], w["t2"], 1e-3)
    z = attend(jnp.tanh(x) @ w["q2"], memory @ w["k2"], memory @ w["v2"])
    return jnp.tanh((x + z).mean(1) @ w["pool"] + w["poolb"]) @ w["head"]


class Encoder(Faulty):
    """An encoder with a norm behind each part, cross-attention and a pooled output."""

    def __init__(self, fault: str) -> None:
        super().__init__(fault, 6, norms=3)
        self.c = torch.nn.ModuleList(torch.nn.Linear(D, D, bias=False) for _ in range(4))
        self.pool = torch.nn.Linear(D, D)
        self.e, self.p, self.y = torch.nn.Embedding(V, D), torch.nn.Embedding(T + 2, D), torch.nn.Embedding(2, D)
        for norm in self.n:
            norm.eps = 1e-5 if self.has("epsilon") else 1e-3

    def attend(self, q: Any, k: Any, v: Any, cross: bool) -> Any:
        q, k, v = (x.unflatten(-1, (N, H)).transpose(1, 2) for x in (q, k, v))
        p = q @ k.transpose(-1, -2) / H**0.5
        if self.has("causal") and not cross:
            p = p.masked_fill(~torch.as_tensor(CAUSAL), -1e30)  # shows: causal
        if self.has("causal cross") and cross:
            p = p.masked_fill(~torch.as_tensor(CAUSAL), -1e30)  # shows: causal cross
        p = p.sigmoid() if self.has("sigmoid") else p.softmax(-1)  # shows: causal, causal cross
        return (p @ v).transpose(1, 2).flatten(-2)  # shows: causal, causal cross, sigmoid, reversed

    def forward(self, x: Any) -> Any:
        at = self.p(torch.arange(T) // 2 if self.has("positions in pairs") else torch.arange(T))
        e = self.e(x)
        x = e + at if self.has("no type") else e + at + self.y(torch.zeros(T, dtype=torch.long))  # shows: positions in pairs
        x = e + self.y(torch.zeros(T, dtype=torch.long)) if self.has("no positions") else x
        x = x if self.has("no first norm") else self.n[0](x)  # shows: epsilon, no type, no positions
        z = self.attend(self.m[0](x), self.m[1](x), self.m[2](x), cross=False)  # shows: no first norm
        z = self.m[3](z)
        x = x + self.n[1](z) if self.has("norm inside") else self.n[1](x if self.has("residual only") else x + z)
        z = self.m[4](x)  # shows: norm inside, residual only
        z = f.gelu(z, approximate="tanh") if self.has("gelu") else z.relu() if self.has("relu") else f.gelu(z)
        z = self.m[5](z)  # shows: relu
        memory = x + z if self.has("memory not normed") else self.n[2](z if self.has("no residual") else x + z)
        memory = memory.flip(1) if self.has("reversed") else memory
        y = x if self.has("no tanh") else x.tanh()
        k, v = (
            self.c[1](x if self.has("keys of x") else memory),  # shows: memory not normed
            self.c[2](x if self.has("values of x") else memory),
        )  # shows: memory not normed, no residual
        x = x + self.attend(self.c[0](y), k, v, cross=True)  # shows: no tanh
        if self.has("first token"):
            x = x[:, 0]  # shows: first token
        elif self.has("maximum"):
            x = x.amax(1)  # shows: maximum
        else:
            x = x.sum(1) if self.has("sum") else x.mean(1)
        x = self.pool(x)  # shows: first token, maximum, sum
        return self.c[3](x if self.has("no last tanh") else x.tanh())


ENCODER: dict[str, tuple[int, ...]] = (
    dict.fromkeys(("q", "k", "v", "o", "i", "j", "q2", "k2", "v2", "pool", "head"), SQUARE)
    | dict.fromkeys(("qb", "kb", "vb", "ob", "ib", "jb", "poolb", "s0", "t0", "s1", "t1", "s2", "t2"), (D,))
    | {"e": (V, D), "p": (T + 2, D), "y": (2, D)}
)
ENCODER_FAULTS = (
    "epsilon", "causal", "causal cross", "sigmoid", "positions in pairs", "no type", "no positions", "no first norm", "norm inside",
    "residual only", "gelu", "relu", "memory not normed", "no residual", "no tanh", "keys of x", "values of x",
    "first token", "maximum", "sum", "no last tanh",
)

PAIRS = {
    "block": Pair(_block, BLOCK, Block, floats(2, T, D), BLOCK_FAULTS),
    "decoder": Pair(_decoder, DECODER, Decoder, tokens(V, 3, T), DECODER_FAULTS),
    "encoder": Pair(_encoder, ENCODER, Encoder, tokens(V, 4, T), ENCODER_FAULTS),
}
