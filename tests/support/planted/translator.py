"""An encoder and a decoder between which a layer attends: one table of tokens, one of positions, keys and values in one kernel."""

# fmt: off

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch.nn import functional as f

from support.inferred import layer_norm, tokens
from support.planted import D, Faulty, H, N, Pair
from support.planted.attention import attend

S, T, V = 4, 6, 9  # the decoder reads more positions than the encoder


def _translator(w: Any, x: Any) -> Any:
    given, made = x[:, :S], x[:, S:]
    memory = w["e"][given] + w["p"][:S]
    memory = memory + jax.nn.gelu(memory @ w["i"] + w["ib"], approximate=False) @ w["j"] + w["jb"]
    memory = layer_norm(memory, w["s"], w["t"])
    k, v = jnp.split(memory @ w["kv"] + w["kvb"], 2, -1)
    y = w["e"][made] + w["p"][:T]
    y = y + attend(layer_norm(y, w["u"], w["z"]) @ w["q"] + w["qb"], k, v) @ w["o"] + w["ob"]
    return layer_norm(y, w["a"], w["b"]) @ w["e"].T


class Translator(Faulty):
    """An encoder and a decoder; keys and values are layers of their own."""

    def __init__(self, fault: str) -> None:
        super().__init__(fault, 6, norms=3)
        self.e, self.p = torch.nn.Embedding(V, D), torch.nn.Embedding(T + 2, D)

    def forward(self, x: Any) -> Any:
        given, made = x[:, :S], x[:, S:]
        start = 1 if self.has("positions from one on") else 0
        y = self.e(made) + self.p(torch.arange(T))  # shows: positions from one on
        e = self.e(given) + self.p(torch.arange(start, S + start))  # shows: positions from one on
        e = e + self.m[1](f.gelu(self.m[0](e)))
        memory = e if self.has("no norm of the encoder") else self.n[1](e) if self.has("norm of the decoder") else self.n[0](e)
        q, k, v = self.m[2](self.n[1](y)), self.m[3](memory), self.m[4](memory)  # shows: norm of the decoder, no norm of the encoder
        v = k if self.has("keys for values") else v
        q, k, v = (z.unflatten(-1, (N, H)).transpose(1, 2) for z in (q, k, v))
        p = q @ k.transpose(-1, -2)
        p = p if self.has("no scale") else p / H**0.5
        p = p.softmax(-2 if self.has("axis") else -1)  # shows: no scale
        z = (p @ v).transpose(1, 2).flatten(-2)  # shows: keys for values
        return self.n[2](y + self.m[5](z)) @ self.e.weight.T


SHAPES: dict[str, tuple[int, ...]] = (
    dict.fromkeys(("i", "j", "q", "o"), (D, D)) | {"kv": (D, 2 * D), "kvb": (2 * D,), "e": (V, D), "p": (T + 2, D)}
    | dict.fromkeys(("ib", "jb", "qb", "ob", "s", "t", "u", "z", "a", "b"), (D,))
)
FAULTS = ("positions from one on", "norm of the decoder", "no norm of the encoder", "keys for values", "no scale", "axis")
PAIRS = {"translator": Pair(_translator, SHAPES, Translator, tokens(V, 5, S + T), FAULTS)}
