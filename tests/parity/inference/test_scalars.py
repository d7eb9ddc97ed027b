"""One number, with axes of size 1 in one program and without any in the other."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from torch import nn

from convert.inference.derivation import Grade
from support.inferred import WIDTH, derive, floats, grades, rules

D = WIDTH


class Scales(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(1)), nn.Parameter(torch.zeros(1, 1))
        self.factor = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Any) -> Any:
        return torch.tanh(x * self.scale) * self.factor + self.shift


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scales = nn.Linear(D, D), Scales()

    def forward(self, x: Any) -> Any:
        return self.scales(self.layer(x))


def test_a_number_with_other_axes_of_size_one() -> None:
    def function(w: Any, x: Any) -> Any:
        return jnp.tanh((x @ w["w"] + w["b"]) * w["s"]) * w["f"] + w["t"]

    shapes = {"w": (D, D), "b": (D,), "s": (), "f": (1,), "t": ()}
    written = rules(derive(function, Model(), shapes), Model())
    assert "- from: s\n  parameter: {name: scales.scale, axes: .}" in written, written
    assert "- from: f\n  axes: .\n  parameter: scales.factor" in written
    assert "- from: t\n  parameter: {name: scales.shift, axes: ..}" in written


class Noise(nn.Module):
    """Noise that is a buffer, times one number, as in StyleGAN."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.strength = nn.Linear(D, D, bias=False), nn.Parameter(torch.ones(()))
        self.register_buffer("noise", torch.randn(D))

    def forward(self, x: Any) -> Any:
        return self.layer(x) + self.strength * self.noise


def test_a_number_without_axes_multiplies_a_leaf() -> None:
    def function(w: Any, x: Any) -> Any:
        return x @ w["w"] + w["noise"] * w["s"]

    found = derive(function, Noise(), {"w": (D, D), "noise": (D,), "s": ()})
    assert grades(found) == {Grade.DERIVED}


class Normed(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*(m for _ in range(3) for m in (nn.Linear(D, D, bias=False), nn.BatchNorm1d(D))))


def test_variances_of_scanned_layers_are_positive() -> None:
    def function(w: Any, x: Any) -> Any:
        def step(x: Any, of: Any) -> Any:
            x = x @ of["w"]
            return (x - of["mean"]) * jax.lax.rsqrt(of["var"] + 1e-5) * of["scale"] + of["bias"], None

        return jax.lax.scan(step, x, w)[0]

    shapes = {"w": (3, D, D), **dict.fromkeys(("mean", "var", "scale", "bias"), (3, D))}
    found = derive(function, Normed().eval(), shapes, floats(5, D))
    assert grades(found) == {Grade.DERIVED}


class Logit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.layer = nn.Parameter(torch.ones(D)), nn.Linear(D, 1)

    def forward(self, x: Any) -> Any:
        return self.layer(torch.tanh(x * self.scale)).squeeze(-1)


@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_kernel_that_is_a_vector_and_its_bias(shape: tuple[int, ...]) -> None:
    def function(w: Any, x: Any) -> Any:
        return jnp.tanh(x * w["s"]) @ w["w"] + w["b"].reshape(())

    written = "\n".join(rules(derive(function, Logit(), {"s": (D,), "w": (D,), "b": shape}), Logit()))
    assert ("parameter: layer.bias" in written) == bool(shape) and "linear: layer" in written


class Gated(nn.Module):
    """Every second layer has two gates, each a number."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.ModuleList(nn.Linear(D, D, bias=False) for _ in range(4))
        for layer in self.layer[1::2]:
            layer.first, layer.second = nn.Parameter(torch.tensor(0.0)), nn.Parameter(torch.tensor(0.0))

    def forward(self, x: Any) -> Any:
        for plain, gated in zip(self.layer[::2], self.layer[1::2], strict=True):
            x = torch.tanh(plain(x))
            x = x + torch.tanh(gated.first) * torch.sin(gated(x)) + torch.tanh(gated.second)
        return x


def test_numbers_of_a_square_leaf_have_a_rule_each() -> None:
    """Both axes of the leaf are `(1 + 1)`: a rule took the same part of both, and wrote the other number."""

    def function(w: Any, x: Any) -> Any:
        for k in range(2):
            x = jnp.tanh(x @ w["u"][k])
            x = x + jnp.tanh(w["g"][k, 0]) * jnp.sin(x @ w["v"][k]) + jnp.tanh(w["g"][k, 1])
        return x

    module = Gated()
    found = derive(function, module, {"g": (2, 2), "u": (2, D, D), "v": (2, D, D)})
    of_gates = [rule for rule in rules(found, module) if "from: g" in rule]
    assert len(of_gates) == 4 and all("axes: (1 + 1)(1 + 1)" in rule for rule in of_gates)
