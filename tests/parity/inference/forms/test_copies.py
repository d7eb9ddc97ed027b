"""One leaf that the target keeps several times: a layer that is applied again, a table whose numbers a head has, taps of a kernel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from torch import nn
from torch.nn.functional import silu

from support.inferred import WIDTH, derive, floats, rules, tokens

D, ENTRIES = WIDTH, 11


class Layers(nn.Module):
    """A layer for each step, where the source applies one again."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(D, D) for _ in range(3))

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


def test_a_layer_that_the_source_applies_again():
    def function(w: Mapping[str, Any], x: Any) -> Any:
        return jax.lax.scan(lambda c, _: (c + jnp.tanh(c @ w["w"] + w["b"]), None), x, None, length=3)[0]

    module = Layers()
    (written,) = rules(derive(function, module, {"w": (D, D), "b": (D,)}), module)
    assert written.endswith("linear: [layers.0, layers.1, layers.2]")


class Words(nn.Module):
    """A table, and a head of its own."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.table, self.mix, self.head = nn.Embedding(ENTRIES, D), nn.Linear(D, D), nn.Linear(D, ENTRIES, bias=bias)

    def forward(self, x: Any) -> Any:
        return self.head(torch.tanh(self.mix(self.table(x))))


@pytest.mark.parametrize("bias", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_head_with_the_numbers_of_the_table(bias: bool):
    def function(w: Mapping[str, Any], x: Any) -> Any:
        y = jnp.tanh(w["table"][x] @ w["mix"] + w["mb"]) @ w["table"].T
        return y + w["hb"] if bias else y

    module = Words(bias)
    shapes = {"table": (ENTRIES, D), "mix": (D, D), "mb": (D,), **({"hb": (ENTRIES,)} if bias else {})}
    written = rules(derive(function, module, shapes, tokens(ENTRIES, 4, 9)), module)
    assert written[0].endswith("embedding: {module: table, tied: head}")
    assert any(rule.endswith("from: hb\n  parameter: head.bias") for rule in written) == bias


class Causal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c, self.o = nn.Conv1d(D, D, 4, groups=D, padding=3), nn.Linear(D, 3)

    def forward(self, x: Any) -> Any:
        return self.o(silu(self.c(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)))


@pytest.mark.parametrize("way", ["kernel", pytest.param("taps", marks=pytest.mark.slow), "leaves"])
def test_a_kernel_of_each_channel(way: str):
    """A convolution by groups, with a kernel that has no axis for its one input channel; or a product for each tap."""

    def function(w: Mapping[str, Any], x: Any) -> Any:
        count, padded = x.shape[1], jnp.pad(x, ((0, 0), (3, 0), (0, 0)))
        if way == "kernel":
            numbers = ("NWC", "WIO", "NWC")
            kernel = w["k"][:, None]
            y = jax.lax.conv_general_dilated(
                padded, kernel, (1,), "VALID", dimension_numbers=numbers, feature_group_count=D
            )
        else:
            y = sum(padded[:, k : k + count] * (w["k"][k] if way == "taps" else w[f"k{k}"]) for k in range(4))
        return jax.nn.silu(y + w["b"]) @ w["o"] + w["ob"]

    own = {f"k{k}": (D,) for k in range(4)} if way == "leaves" else {"k": (4, D)}
    module = Causal()
    written = rules(derive(function, module, {**own, "b": (D,), "o": (D, 3), "ob": (3,)}), module)
    expected = 'axes: D\n  parameter: {name: c.weight, axes: "D.(1 + 1 + 1 + 1)"}' if way == "leaves" else "conv: c"
    assert any(expected in rule for rule in written), written


class Modulated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.s, self.o = nn.Parameter(torch.zeros(D)), nn.Linear(D, 3)

    def forward(self, x: Any) -> Any:
        return self.o(torch.tanh(x) * (1 + self.s))


def test_a_scale_that_lacks_its_one():
    """The target adds it: the rule of the parameter subtracts it from the leaf."""
    module = Modulated()
    found = derive(
        lambda w, x: jnp.tanh(x) * w["s"] @ w["o"] + w["b"],
        module,
        {"s": (D,), "o": (D, 3), "b": (3,)},
        floats(3, 7, D),
    )
    assert any(rule.startswith('- from: "s - 1"\n') for rule in rules(found, module))
