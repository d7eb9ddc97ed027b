"""Kernels that data multiplies, a learned constant that data convolves, exponentials of weights, and layers with more than their class has."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.nn.functional import conv2d

from support.inferred import derive, floats, rules, sources

D = 4


class Modulated(torch.nn.Module):
    """A learned constant, and a convolution with a kernel of its own for each row of the batch."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.const = torch.nn.Parameter(torch.zeros(channels, 5, 5))
        self.weight = torch.nn.Parameter(torch.zeros(channels, channels, 3, 3))
        self.style = torch.nn.Linear(channels, channels)

    def forward(self, x: Any) -> Any:
        w = self.weight * self.style(x)[:, None, :, None, None]
        w = w * (w.square().sum((2, 3, 4), keepdim=True) + 1e-8).rsqrt()
        start = self.const[None].repeat(len(x), 1, 1, 1).reshape(1, -1, 5, 5)
        return conv2d(start, w.flatten(0, 1), padding=1, groups=len(x)).reshape(len(x), -1, 5, 5)


def modulated(w: Any, x: Any) -> Any:
    kernel = w["kernel"] * (x @ w["s/w"] + w["s/b"])[:, None, None, :, None]
    kernel = kernel / jnp.sqrt((kernel**2).sum((1, 2, 3), keepdims=True) + 1e-8)
    start = jnp.broadcast_to(w["const"], (len(x), *w["const"].shape))

    def one(x: Any, kernel: Any) -> Any:
        return jax.lax.conv_general_dilated(
            x[None], kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )[0]

    return jax.vmap(one)(start, kernel).transpose(0, 3, 1, 2)


@pytest.mark.parametrize("channels", [D, 8])
def test_a_modulated_convolution(channels: int):
    """One number of the style meets all elements of a channel: of eight channels, more than are moved one by one."""
    c = channels
    shapes = {"const": (5, 5, c), "kernel": (3, 3, c, c), "s/w": (c, c), "s/b": (c,)}
    module = Modulated(c)
    found = derive(modulated, module, shapes, floats(3, c))
    assert sources(found) == {"const": "const", "weight": "kernel", "style.weight": "s/w", "style.bias": "s/b"}
    assert found.complete and any("parameter: {name: weight" in rule for rule in rules(found, module))


class Scaled(torch.nn.Conv2d):
    """A convolution with more than its class has, as the last one of a step of Glow."""

    def __init__(self) -> None:
        super().__init__(D, D, 3, padding=1)
        self.logs = torch.nn.Parameter(torch.zeros(D, 1, 1))

    def forward(self, x: Any) -> Any:
        return super().forward(x) * torch.exp(3 * self.logs)


def test_a_convolution_with_a_parameter_of_its_own_and_weights_that_must_be_small():
    """Of the usual size of the weights, the exponential of an exponential is infinite."""

    def function(w, x):
        x = jax.lax.conv_general_dilated(x, w["k"], (1, 1), "SAME", dimension_numbers=("NCHW", "HWIO", "NCHW"))
        y = (x + w["b"][:, None, None]) * jnp.exp(3 * w["s"][:, None, None])
        return jnp.exp(jnp.exp(y))

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.c = Scaled()

        def forward(self, x: Any) -> Any:
            return torch.exp(torch.exp(self.c(x)))

    module = Net()
    shapes = {"k": (3, 3, D, D), "b": (D,), "s": (D,)}
    found = derive(function, module, shapes, lambda seed: {"x": np.random.default_rng(seed).normal(size=(2, D, 5, 5))})
    assert found.complete, found.differences
    assert sorted(rule.splitlines()[-1].split(":")[0].strip() for rule in rules(found, module)) == ["conv", "parameter"]


def test_a_matrix_that_the_code_makes_a_convolution_of():
    class Mixed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(D, D))

        def forward(self, x: Any) -> Any:
            return conv2d(x, self.weight[:, :, None, None]) + torch.slogdet(self.weight)[1]

    module = Mixed()
    found = derive(
        lambda w, x: jnp.einsum("nchw,co->nohw", x, w["m"]) + jnp.linalg.slogdet(w["m"])[1],
        torch.nn.Sequential(module),
        {"m": (D, D)},
        floats(2, D, 3, 3),
    )
    assert found.complete and sources(found) == {"0.weight": "m"}
    assert "linear" in "".join(rules(found, torch.nn.Sequential(module)))


class OfTheModel(torch.nn.Module):
    """A matrix of the model itself, as CLIP's projections; one slope of a PReLU; a table of sines that takes no gradient."""

    def __init__(self, table: Any) -> None:
        super().__init__()
        self.proj = torch.nn.Parameter(torch.zeros(D, D))
        self.act = torch.nn.PReLU()
        self.table = torch.nn.Parameter(torch.as_tensor(table)[None], requires_grad=False)

    def forward(self, x: Any) -> Any:
        return self.act((x + self.table) @ self.proj)


def test_parameters_of_the_model_itself():
    table = np.sin(np.arange(3)[:, None] * [1.0, 0.3, 0.07, 0.01])

    def function(w, x):
        y = (x + table) @ w["proj"]
        return jnp.where(y >= 0, y, w["slope"] * y)

    module = OfTheModel(table)
    found = derive(function, module, {"proj": (D, D), "slope": ()}, floats(2, 3, D))
    written = "\n".join(rules(found, module))
    assert "parameter: proj" in written and "parameter: {name: act.weight, axes: .}" in written
    assert "constant: table" in written and sources(found)["table"] != "proj"
    other = derive(function, OfTheModel(2 * table), {"proj": (D, D), "slope": ()}, floats(2, 3, D))
    assert other.differences and not other.complete
