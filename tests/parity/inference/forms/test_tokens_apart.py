"""One program keeps the class token apart from the others in every layer, as TimeSformer's; the other joins them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from torch import nn
from torch.nn import functional

from convert.inference.derivation import Grade
from support.inferred import derive, floats, grades, layer_norm

D, H, F, TOKENS, LAYERS = 12, 3, 20, 5, 2


def _linear(w: Mapping[str, Any], name: str, x: Any) -> Any:
    return x @ w[name] + w[f"{name}.b"]


def _normed(w: Mapping[str, Any], name: str, x: Any) -> Any:
    return layer_norm(x, w[name], w[f"{name}.b"], 1e-5)


def _attended(w: Mapping[str, Any], layer: str, x: Any) -> Any:
    q, k, v = (_linear(w, layer + name, x).reshape(*x.shape[:-1], H, -1).swapaxes(-2, -3) for name in "qkv")
    y = jax.nn.softmax(q @ k.swapaxes(-1, -2) / (D // H) ** 0.5, -1) @ v
    return _linear(w, f"{layer}o", y.swapaxes(-2, -3).reshape(x.shape))


def _mlp(w: Mapping[str, Any], layer: str, x: Any, approximate: bool = False) -> Any:
    inner = jax.nn.gelu(_linear(w, f"{layer}m1", _normed(w, f"{layer}n2", x)), approximate=approximate)
    return x + _linear(w, f"{layer}m2", inner)


def apart(w: Mapping[str, Any], x: Any, approximate: bool = False) -> Any:
    """`approximate`: the GELU of the class token, not that of the others."""
    tokens = _linear(w, "embed", x) + w["pos"][1:]
    cls = jnp.broadcast_to(w["cls"] + w["pos"][0], (len(x), D))
    for i in range(LAYERS):
        layer = f"{i}."
        both = [_normed(w, f"{layer}n1", cls)[:, None], _normed(w, f"{layer}n1", tokens)]
        y = _attended(w, layer, jnp.concatenate(both, 1))
        cls, tokens = cls + y[:, 0], tokens + y[:, 1:]
        cls, tokens = _mlp(w, layer, cls, approximate), _mlp(w, layer, tokens)
    return _linear(w, "head", _normed(w, "norm", cls))


def joined(w: Mapping[str, Any], x: Any) -> Any:
    cls = jnp.broadcast_to(w["cls"], (len(x), 1, D))
    x = jnp.concatenate([cls, _linear(w, "embed", x)], 1) + w["pos"]
    for i in range(LAYERS):
        x = x + _attended(w, f"{i}.", _normed(w, f"{i}.n1", x))
        x = _mlp(w, f"{i}.", x)
    return _linear(w, "head", _normed(w, "norm", x)[:, 0])


class Block(nn.Module):
    def __init__(self, apart: bool) -> None:
        super().__init__()
        self.apart, self.qkv, self.proj = apart, nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.norm1, self.norm2, self.fc1, self.fc2 = nn.LayerNorm(D), nn.LayerNorm(D), nn.Linear(D, F), nn.Linear(F, D)

    def _mlp(self, x: Any) -> Any:
        return x + self.fc2(functional.gelu(self.fc1(self.norm2(x))))

    def _attend(self, x: Any) -> Any:
        q, k, v = self.qkv(x).reshape(*x.shape[:2], 3, H, -1).permute(2, 0, 3, 1, 4)
        y = torch.softmax(q @ k.transpose(-1, -2) * (D // H) ** -0.5, -1) @ v
        return self.proj(y.transpose(1, 2).reshape(x.shape))

    def forward(self, x: Any) -> Any:
        if not self.apart:
            return self._mlp(x + self._attend(self.norm1(x)))
        cls, tokens = x
        y = self._attend(torch.cat([self.norm1(cls), self.norm1(tokens)], 1))
        return self._mlp(cls + y[:, :1]), self._mlp(tokens + y[:, 1:])


class Transformer(nn.Module):
    def __init__(self, apart: bool) -> None:
        super().__init__()
        self.apart, self.embed, self.head, self.norm = apart, nn.Linear(D, D), nn.Linear(D, 7), nn.LayerNorm(D)
        self.cls, self.pos = nn.Parameter(torch.zeros(1, 1, D)), nn.Parameter(torch.zeros(1, 1 + TOKENS, D))
        self.blocks = nn.ModuleList(Block(apart) for _ in range(LAYERS))

    def forward(self, x: Any) -> Any:
        x = torch.cat([self.cls.expand(len(x), -1, -1), self.embed(x)], 1) + self.pos
        if self.apart:
            x = x[:, :1], x[:, 1:]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[0] if self.apart else x)[:, 0])


def _shapes() -> dict[str, tuple[int, ...]]:
    kernels = {"embed": (D, D), "head": (D, 7)}
    scales = ["norm"]
    for i in range(LAYERS):
        kernels |= {f"{i}.{name}": (D, D) for name in "qkvo"} | {f"{i}.m1": (D, F), f"{i}.m2": (F, D)}
        scales += [f"{i}.n1", f"{i}.n2"]
    sizes = {**kernels, **dict.fromkeys(scales, (D,))}
    biases = {f"{name}.b": shape[-1:] for name, shape in sizes.items()}
    return {**sizes, **biases, "cls": (D,), "pos": (1 + TOKENS, D)}


@pytest.mark.slow
@pytest.mark.parametrize(("function", "target"), [(apart, False), (joined, True)])
def test_a_class_token_that_is_apart_in_all_layers(function: Any, target: bool):
    found = derive(function, Transformer(target), _shapes(), floats(2, TOKENS, D))
    assert found.complete, found.differences
    assert grades(found) == {Grade.DERIVED, Grade.INTERCHANGEABLE}


@pytest.mark.slow
def test_another_activation_of_the_class_token_alone_is_a_difference():
    found = derive(lambda w, x: apart(w, x, True), Transformer(False), _shapes(), floats(2, TOKENS, D))
    assert not found.complete
    assert "gelu" in found.differences[0].problem
