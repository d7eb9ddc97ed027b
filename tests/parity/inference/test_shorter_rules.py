"""One rule says what a person would say in one: alike parts of a layer, alike norms; an index does not match leaves of other rules."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import torch
from torch import nn

from support.inferred import WIDTH, derive, rms_norm, rules

D = WIDTH


def _linear() -> nn.Linear:
    return nn.Linear(D, D, bias=False)


class Attends(nn.Module):
    """Two products of one value, one of them behind a `tanh`; the last one has another kind of result."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.v_proj, self.out_proj = _linear(), _linear(), nn.Linear(D, D)

    def forward(self, x: Any) -> Any:
        return self.out_proj(torch.tanh(self.q_proj(x)) * self.v_proj(x))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn, self.encoder_attn = Attends(), Attends()

    def forward(self, x: Any) -> Any:
        return x + self.encoder_attn(self.self_attn(x))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.layer_norm = nn.ModuleList(Layer() for _ in range(2)), nn.RMSNorm(D, 1e-6)

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return self.layer_norm(x)


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = Stack(), Stack()

    def forward(self, x: Any) -> Any:
        return self.decoder(self.encoder(x))


def test_alike_parts_of_a_layer_and_alike_norms_are_one_rule() -> None:
    places = {"0/self": "0/SelfAttention", "1/encoder": "1/EncDecAttention"}
    shapes: dict[str, tuple[int, ...]] = {}
    for stack in ("encoder", "decoder"):
        shapes[f"{stack}/norm/scale"] = (D,)
        for i in range(2):
            for place in places.values():
                shapes |= {f"{stack}/{i}/{place}/{part}/kernel": (D, D) for part in "qvo"}
                shapes[f"{stack}/{i}/{place}/o/bias"] = (D,)

    def function(w: Any, x: Any) -> Any:
        for stack in ("encoder", "decoder"):
            for i in range(2):
                y = x
                for place in places.values():
                    at = f"{stack}/{i}/{place}"
                    y = jnp.tanh(y @ w[f"{at}/q/kernel"]) * (y @ w[f"{at}/v/kernel"])
                    y = y @ w[f"{at}/o/kernel"] + w[f"{at}/o/bias"]
                x = x + y
            x = rms_norm(x, w[f"{stack}/norm/scale"])
        return x

    module = Both()
    written = rules(derive(function, module, shapes), module)
    alike = "{0/SelfAttention,1/EncDecAttention}"
    for stack, i in (("encoder", "i"), ("decoder", "j")):
        at, to = f"{stack}/{{{i}}}/{alike}", f"{stack}.layers.{{{i}}}.{{self,encoder}}_attn"
        assert any(f"from: {at}/o/kernel\n  bias: {at}/o/bias\n  linear: {to}.out_proj" in rule for rule in written)
    assert any("{encoder,decoder}/norm/scale" in rule and "{encoder,decoder}.layer_norm" in rule for rule in written)


class Named(nn.Module):
    """As Keras numbers layers: the leaf of the head is the third of the same name."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(_linear() for _ in range(2)), nn.Linear(D, 3, bias=False)

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = nn.functional.silu(layer(x))
        return self.head(x)


def test_an_index_does_not_match_the_leaf_of_another_rule() -> None:
    shapes = {"dense_0": (D, D), "dense_1": (D, D), "dense_2": (D, 3)}

    def function(w: Any, x: Any) -> Any:
        for k in range(2):
            x = x @ w[f"dense_{k}"]
            x = x / (1 + jnp.exp(-x))
        return x @ w["dense_2"]

    module = Named()
    written = rules(derive(function, module, shapes), module)
    assert any("from: dense_{0,1}\n" in rule and "linear: layers.{0,1}" in rule for rule in written)
