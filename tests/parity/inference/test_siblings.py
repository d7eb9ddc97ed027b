"""Layers that are met by the same data are told apart before a norm: a wrong one is refuted at the norm, not behind it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from torch import nn
from torch.nn import functional

from convert.inference.derivation import Grade
from support.inferred import WIDTH, derive, layer_norm, sources

D = WIDTH
BLOCKS = range(3)
LEAVES = {"s": (D,), "o": (D,), "u": (D, D), "v": (D,), "keep": (D, D), "kept": (D,), "pass": (D, D), "passed": (D,)}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D, eps=1e-6)
        self.up, self.on, self.out = (nn.Linear(D, D) for _ in range(3))

    def forward(self, x: Any) -> Any:
        y = torch.tanh(self.up(self.norm(x)))
        return x + self.on(y), self.out(y)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in BLOCKS)

    def forward(self, x: Any) -> Any:
        total = 0
        for block in self.blocks:
            x, out = block(x)
            total = total + out
        return x + torch.sin(total)


def function(w: Any, x: Any) -> Any:
    total = 0
    for k in BLOCKS:
        y = jnp.tanh(layer_norm(x, w[f"{k}/s"], w[f"{k}/o"]) @ w[f"{k}/u"] + w[f"{k}/v"])
        total = total + (y @ w[f"{k}/keep"] + w[f"{k}/kept"])
        x = x + (y @ w[f"{k}/pass"] + w[f"{k}/passed"])
    return x + jnp.sin(total)


def test_two_layers_of_the_same_data_before_a_norm() -> None:
    """The biases that make up the total are added to one sum: which is which changes nothing."""
    shapes = {f"{k}/{name}": shape for k in BLOCKS for name, shape in LEAVES.items()}
    found = derive(function, Model(), shapes)
    assert found.complete
    assert {t.name for t in found.tensors if t.grade is not Grade.DERIVED} == {f"blocks.{k}.out.bias" for k in BLOCKS}
    assert sources(found)["blocks.1.on.weight"] == "1/pass"


class Cropped(nn.Module):
    """A bias is added to more than the source has, and cut: what it gives is no value of the source."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv1d(D, D, 3, padding=2), nn.Linear(D, D)

    def forward(self, x: Any) -> Any:
        y = functional.pad(self.a(x.transpose(1, 2)), (-1, -1))
        return self.b(y.transpose(1, 2))


def test_a_bias_that_the_strict_search_takes_for_none_is_found_without_it() -> None:
    def cropped(w: Any, x: Any) -> Any:
        y = jax.lax.conv_general_dilated(x, w["k"], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")) + w["c"]
        return y @ w["m"] + w["n"]

    found = derive(cropped, Cropped(), {"k": (3, D, D), "c": (D,), "m": (D, D), "n": (D,)})
    assert found.complete, found.differences
    assert sources(found) == {"a.weight": "k", "a.bias": "c", "b.weight": "m", "b.bias": "n"}


class Audio(nn.Module):
    """Gated residual convolutions with skips: each block's filter, gate, skip and way on; a norm for all skips."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.GroupNorm(4, D) for _ in range(3))
        self.wide = nn.ModuleList(nn.Conv1d(D, D, 3, padding=1) for _ in range(4))
        self.flat = nn.ModuleList(nn.Conv1d(D, D, 1) for _ in range(5))

    def forward(self, x: Any) -> Any:
        x, total = x.transpose(1, 2), 0
        for k in range(2):
            y = self.norms[k](x)
            h = torch.tanh(self.wide[2 * k](y)) * torch.sigmoid(self.wide[2 * k + 1](y))
            total, x = total + self.flat[2 * k](h), x + self.flat[2 * k + 1](h)
        return (x + self.flat[4](self.norms[2](total).relu())).transpose(1, 2)


@pytest.mark.slow
def test_an_audio_net_is_derived() -> None:
    def convolved(x: Any, kernel: Any, bias: Any) -> Any:
        return jax.lax.conv_general_dilated(x, kernel, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")) + bias

    def normed(x: Any, scale: Any, bias: Any) -> Any:
        y = x.reshape(*x.shape[:2], 4, D // 4)
        y = y - y.mean((1, 3), keepdims=True)
        y = y / jnp.sqrt((y * y).mean((1, 3), keepdims=True) + 1e-5)
        return y.reshape(x.shape) * scale + bias

    def audio(w: Any, x: Any) -> Any:
        total = 0
        for k in "01":
            y = normed(x, w[f"{k}s"], w[f"{k}t"])
            gate = jax.nn.sigmoid(convolved(y, w[f"{k}g"], w[f"{k}gb"]))
            h = jnp.tanh(convolved(y, w[f"{k}f"], w[f"{k}fb"])) * gate
            total = total + convolved(h, w[f"{k}k"], w[f"{k}kb"])
            x = x + convolved(h, w[f"{k}r"], w[f"{k}rb"])
        return x + convolved(jax.nn.relu(normed(total, w["s"], w["t"])), w["h"], w["hb"])

    shapes = {f"{k}{name}": (3 if name in "fg" else 1, D, D) for k in "01" for name in "fgkr"} | {"h": (1, D, D)}
    shapes |= {f"{name}b": (D,) for name in shapes} | {f"{k}{name}": (D,) for k in ("0", "1", "") for name in "st"}
    found = derive(audio, Audio(), shapes)
    assert found.complete
    others = {tensor.name: tensor.grade for tensor in found.tensors if tensor.grade is not Grade.DERIVED}
    assert others.keys() <= {f"flat.{k}.bias" for k in (0, 2, 3, 4)}, (
        "two of them are added to one sum, and two to another"
    )
    assert set(others.values()) <= {Grade.INTERCHANGEABLE}
