"""Layers of one function that the two programs store in other shapes: the rules that are written for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import torch

from convert.inference.derivation import Grade
from support.inferred import derive, floats, layer_norm, rules

D, T, LAYERS = 6, 5, 2


class Model(torch.nn.Module):
    """Scales and shifts from lists of layers (FiLM), rows of unequal parts, a layer along the positions, gates of the channels."""

    def __init__(self) -> None:
        super().__init__()
        linear = torch.nn.Linear
        self.gamma = torch.nn.ModuleList([linear(D, D) for _ in range(LAYERS)])
        self.beta = torch.nn.ModuleList([linear(D, D) for _ in range(LAYERS)])
        self.along = torch.nn.Conv1d(T, T, 1)
        self.gate = linear(D, D)
        self.out = linear(D, 1 + D)

    def forward(self, x: Any) -> Any:
        mean = x.mean(1)
        for gamma, beta in zip(self.gamma, self.beta, strict=True):
            x = torch.tanh(x * gamma(mean)[:, None] + beta(mean)[:, None])
        x = torch.relu(self.along(x))
        x = x * torch.sigmoid(self.gate(x.mean(1)))[:, None]
        y = self.out(x)
        return torch.sigmoid(y[..., :1]) * torch.tanh(y[..., 1:])


SHAPES = {
    **{
        f"film_{k}/{leaf}": shape for k in range(LAYERS) for leaf, shape in (("kernel", (D, 2 * D)), ("bias", (2 * D,)))
    },
    "along": (T, T),
    "along_bias": (T, 1),
    "gate/kernel": (1, D, D),
    "gate/bias": (D,),
    "density/kernel": (D, 1),
    "density/bias": (1,),
    "feature/kernel": (D, D),
    "feature/bias": (D,),
}


def function(w: Mapping[str, Any], x: Any) -> Any:
    mean = x.mean(1)
    for k in range(LAYERS):
        gamma, beta = jnp.split((mean @ w[f"film_{k}/kernel"] + w[f"film_{k}/bias"])[:, None], 2, -1)
        x = jnp.tanh(x * gamma + beta)
    x = jax.nn.relu(jnp.einsum("bsd,st->btd", x, w["along"]) + w["along_bias"])
    numbers = ("NWC", "WIO", "NWC")
    pooled = x.mean(1, keepdims=True)
    gate = jax.lax.conv_general_dilated(pooled, w["gate/kernel"], (1,), "VALID", dimension_numbers=numbers)
    x = x * jax.nn.sigmoid(gate + w["gate/bias"])
    density, feature = (x @ w[f"{name}/kernel"] + w[f"{name}/bias"] for name in ("density", "feature"))
    return jax.nn.sigmoid(density) * jnp.tanh(feature)


def test_layers_in_other_shapes_have_rules() -> None:
    found = derive(function, Model(), SHAPES, floats(4, T, D))
    assert found.proof is not None, found.differences
    assert {tensor.grade for tensor in found.tensors} == {Grade.DERIVED}
    written = rules(found, Model())
    assert any("linear: '{gamma,beta}.{i}'" in rule.replace('"', "'") for rule in written), written
    assert any('part: "1 of 2"' in rule and "density/kernel" in rule for rule in written)
    assert any('part: "2 of 2"' in rule and "feature/kernel" in rule for rule in written)
    assert any("along_bias" in rule and "parameter:" in rule for rule in written)
    assert any("gate/kernel" in rule and "linear: gate" in rule for rule in written)


class Stacks(torch.nn.Module):
    """Blocks of different depths, each with a norm at its end: the number of the norm goes with that of the block, as in MobileViT."""

    def __init__(self) -> None:
        super().__init__()
        for depth in (2, 3):
            layers = [torch.nn.Linear(D, D) for _ in range(depth)]
            setattr(self, f"block_{depth}", torch.nn.Sequential(*layers, torch.nn.LayerNorm(D, 1e-6)))

    def forward(self, x: Any) -> Any:
        return self.block_3(self.block_2(x).sin())


def test_two_numbers_that_go_with_each_other_are_not_combined() -> None:
    def function(w: Any, x: Any) -> Any:
        for k, depth in enumerate((2, 3)):
            x = jnp.sin(x) if k else x
            for i in range(depth):
                x = x @ w[f"vit_{k}/l_{i}/kernel"] + w[f"vit_{k}/l_{i}/bias"]
            x = layer_norm(x, w[f"vit_{k}/ln/scale"], w[f"vit_{k}/ln/bias"])
        return x

    each = [(k, i) for k, depth in enumerate((2, 3)) for i in range(depth)]
    shapes: dict[str, tuple[int, ...]] = {f"vit_{k}/l_{i}/kernel": (D, D) for k, i in each}
    shapes |= {f"vit_{k}/l_{i}/bias": (D,) for k, i in each}
    shapes |= {f"vit_{k}/ln/{of}": (D,) for k in range(2) for of in ("scale", "bias")}
    module = Stacks()
    written = "\n".join(rules(derive(function, module, shapes, floats(3, T, D)), module))
    assert "layer_norm: block_2.2" in written and "layer_norm: block_3.3" in written
