"""`infer` derives what stands before and behind a map that JAX code flattens with the channels last, and PyTorch code with them first."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from torch.nn import functional

from convert.inference.derivation import Grade
from support.inferred import derive, floats, grades, layer_norm, rules

C, H, W = 4, 3, 5
N = C * H * W
NHWC = ("NHWC", "HWIO", "NHWC")


def conv(x: Any, kernel: Any, bias: Any) -> Any:
    return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=NHWC) + bias


def batch_norm(x: Any, w: Mapping[str, Any]) -> Any:
    return (x - w["m"]) / jnp.sqrt(w["v"] + 1e-5) * w["s"] + w["b"]


class Encoder(torch.nn.Module):
    def __init__(self, between: str) -> None:
        super().__init__()
        self.between = between
        self.c, self.d = torch.nn.Conv2d(2, C, 3, padding=1), torch.nn.Linear(N, 6)
        if between == "batch_norm":
            self.n = torch.nn.BatchNorm1d(N)
        elif between == "layer_norm":
            self.n = torch.nn.LayerNorm(N)
        elif between == "two":
            self.n = torch.nn.Linear(N, 6)

    def forward(self, x: Any) -> Any:
        x = self.c(x)
        x = torch.relu(x.flatten(1) if self.between in ("relu", "two") else self.n(x.flatten(1)))
        return self.d(x) + torch.tanh(self.n(x)) if self.between == "two" else self.d(x)


def encoder(between: str) -> Any:
    def function(w: Mapping[str, Any], x: Any) -> Any:
        x = conv(x.transpose(0, 2, 3, 1), w["c"], w["cb"]).reshape(len(x), -1)
        if between == "batch_norm":
            x = batch_norm(x, w)
        elif between == "layer_norm":
            x = layer_norm(x, w["s"], w["b"], 1e-5)
        x = jax.nn.relu(x)
        y = x @ w["d"] + w["db"]
        return y + jnp.tanh(x @ w["e"] + w["eb"]) if between == "two" else y

    return function


LEAVES = {"relu": "", "two": "", "batch_norm": "msvb", "layer_norm": "sb"}


@pytest.mark.parametrize(
    "between", [pytest.param(x, marks=[pytest.mark.slow] if x in ("relu", "layer_norm") else []) for x in LEAVES]
)
def test_what_reads_the_flattened_features(between: str):
    shapes = {"c": (3, 3, 2, C), "cb": (C,), "d": (N, 6), "db": (6,), **dict.fromkeys(LEAVES[between], (N,))}
    shapes |= {"e": (N, 6), "eb": (6,)} if between == "two" else {}
    module = Encoder(between)
    found = derive(encoder(between), module, shapes, floats(6, 2, H, W))
    written = [rule for rule in rules(found, module) if "conv:" not in rule]
    assert all("flattened: {E: XC}" in rule for rule in written)
    kinds = {"relu": ["linear: d"], "two": ["linear: d", "linear: n"]}.get(between, ["linear: d", f"{between}: n"])
    assert [rule.rsplit("\n  ", 1)[-1] for rule in written] == kinds


class Decoder(torch.nn.Module):
    def __init__(self, between: str, shape: tuple[int, int, int]) -> None:
        super().__init__()
        self.between, self.shape = between, shape
        c, size = shape[0], shape[0] * shape[1] * shape[2]
        self.d, self.c = torch.nn.Linear(7, size), torch.nn.ConvTranspose2d(c, 3, 4, 2, 1)
        if between == "batch_norm":
            self.n = torch.nn.BatchNorm1d(size)
        elif between == "of the map":
            self.n = torch.nn.BatchNorm2d(c)

    def forward(self, x: Any) -> Any:
        x = self.d(x)
        if self.between == "permuted":
            x = x.unflatten(1, (*self.shape[1:], self.shape[0])).permute(0, 3, 1, 2)
        else:
            x = (self.n(x) if self.between == "batch_norm" else x).unflatten(1, self.shape)
        return self.c(functional.silu(self.n(x) if self.between == "of the map" else x))


def decoder(between: str, shape: tuple[int, int, int]) -> Any:
    def function(w: Mapping[str, Any], x: Any) -> Any:
        x = x @ w["d"] + w["db"]
        x = batch_norm(x, w) if between == "batch_norm" else x
        if between == "channels first":
            x = x.reshape(-1, *shape).transpose(0, 2, 3, 1)
        else:
            x = x.reshape(-1, *shape[1:], shape[0])
        x = jax.nn.silu(batch_norm(x, w) if between == "of the map" else x)
        y = jax.lax.conv_transpose(x, w["c"], (2, 2), "SAME", dimension_numbers=NHWC) + w["cb"]
        return y.transpose(0, 3, 1, 2)

    return function


@pytest.mark.parametrize(
    "shape", [(C, H, W), *(pytest.param(x, marks=pytest.mark.slow) for x in ((4, 4, 4), (6, 2, 3)))]
)
@pytest.mark.parametrize(
    "between",
    [
        "",
        *(pytest.param(x, marks=pytest.mark.slow) for x in ("batch_norm", "of the map", "permuted", "channels first")),
    ],
)
def test_a_dense_layer_that_makes_a_map(between: str, shape: tuple[int, int, int]):
    """Every value up to the convolution has the same elements in both orders."""
    c, size = shape[0], shape[0] * shape[1] * shape[2]
    wide = {"batch_norm": size, "of the map": c}.get(between, 0)
    shapes = {"d": (7, size), "db": (size,), "c": (4, 4, c, 3), "cb": (3,), **{x: (wide,) for x in "msvb" if wide}}
    module = Decoder(between, shape)
    found = derive(decoder(between, shape), module, shapes, floats(6, 7))
    linear = next(rule for rule in rules(found, module) if "linear:" in rule)
    moved = between not in ("permuted", "channels first")
    assert bool(re.search(r'axes: "\((\w) (\w)\)\w"', linear)) == moved and ("linear: d" in linear) != moved


class OfTokens(torch.nn.Module):
    """Makes a map of tokens, as many as channels, behind a layer; the channels become the second axis."""

    def __init__(self, turned: bool) -> None:
        super().__init__()
        self.turned = turned
        self.d, self.f = torch.nn.Linear(16, 16, bias=False), torch.nn.Conv2d(32, 3, 1, bias=False)

    def forward(self, x: Any) -> Any:
        y = self.d(x.flatten(1, 2))
        y = (y.transpose(1, 2) if self.turned else y).reshape(len(x), -1, 4, 4)
        return self.f(torch.cat([x.movedim(-1, 1), y], 1)).movedim(1, -1)


@pytest.mark.parametrize("turned", [True, False])
def test_the_axis_of_tokens_is_no_axis_of_channels(turned: bool):
    """The layer in front keeps its order, though the last axis of what is made of it is as long."""

    def function(w: Mapping[str, Any], x: Any) -> Any:
        return jnp.concatenate([x, x @ w["d"]], -1) @ w["f"]

    module = OfTokens(turned)
    found = derive(function, module, {"d": (16, 16), "f": (32, 3)}, floats(2, 4, 4, 16))
    if not turned:  # a layer that forgets to turn them is another one
        assert not found.complete and found.differences and found.proof is None
        return
    assert grades(found) == {Grade.DERIVED}
    assert "linear: d" in rules(found, module)[0]


class Hidden(torch.nn.Module):
    """Two layers of one width, of which the second makes a map."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(7, 16, bias=False), torch.nn.Linear(16, 16, bias=False)
        self.c = torch.nn.Conv2d(4, 2, 3, padding=1, bias=False)

    def forward(self, x: Any) -> Any:
        return self.c(self.b(torch.tanh(self.a(x))).reshape(-1, 4, 2, 2))


def test_a_layer_in_front_of_the_one_that_makes_a_map_keeps_its_order():
    def function(w: Mapping[str, Any], x: Any) -> Any:
        y = (jnp.tanh(x @ w["a"]) @ w["b"]).reshape(-1, 2, 2, 4)
        return conv(y, w["c"], 0).transpose(0, 3, 1, 2)

    module = Hidden()
    found = derive(function, module, {"a": (7, 16), "b": (16, 16), "c": (3, 3, 4, 2)}, floats(6, 7))
    assert grades(found) == {Grade.DERIVED}
    first, second, _ = rules(found, module)
    assert "linear: a" in first and 'linear: {module: b, axes: "(N H)C"}' in second
