"""An axis that a kernel spans whole is one of channels: LSTNet convolves windows of all series, and another program has the series as channels."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import torch

from support.inferred import derive, floats, rules

TAPS, SERIES, WIDTH = 3, 5, 4
SERIES_GIVEN = floats(2, 9, SERIES)


def function(w: Any, x: Any) -> Any:
    y = jax.lax.conv_general_dilated(x, w["kernel"], (1,), "VALID", dimension_numbers=("NWC", "WIO", "NWC"))
    return jnp.tanh(y + w["bias"])


def on_images(w: Any, x: Any) -> Any:
    numbers = ("NHWC", "HWIO", "NHWC")
    return jnp.tanh(jax.lax.conv_general_dilated(x[..., None], w["kernel"], (1, 1), "VALID", dimension_numbers=numbers))


class OnImages(torch.nn.Module):
    def __init__(self, turned: bool = False) -> None:
        super().__init__()
        self.turned = turned
        self.conv = torch.nn.Conv2d(1, WIDTH, (TAPS, SERIES))

    def forward(self, x: Any) -> Any:
        x = x.flip(1) if self.turned else x
        return torch.tanh(self.conv(x[:, None])).squeeze(3).transpose(1, 2)


class OnSeries(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv1d(SERIES, WIDTH, TAPS, bias=False)

    def forward(self, x: Any) -> Any:
        return torch.tanh(self.conv(x.transpose(1, 2))).transpose(1, 2)[:, :, None]


SHAPES = {"kernel": (TAPS, SERIES, WIDTH), "bias": (WIDTH,)}


def test_series_are_channels_in_the_source() -> None:
    module = OnImages()
    found = derive(function, module, SHAPES, SERIES_GIVEN)
    assert rules(found, module) == [
        "- from: kernel\n  axes: PQD\n  parameter: {name: conv.weight, axes: D.PQ}",
        "- from: bias\n  parameter: conv.bias",
    ]


def test_series_are_channels_in_the_target() -> None:
    module = OnSeries()
    found = derive(on_images, module, {"kernel": (TAPS, SERIES, 1, WIDTH)}, SERIES_GIVEN)
    (rule,) = rules(found, module)
    assert rule == "- from: kernel\n  axes: PC.D\n  parameter: {name: conv.weight, axes: DCP}"


def test_series_turned_round_are_a_difference() -> None:
    found = derive(function, OnImages(turned=True), SHAPES, SERIES_GIVEN)
    assert not found.complete and found.differences


class OfAll(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(1, WIDTH, (9, SERIES), bias=False)

    def forward(self, x: Any) -> Any:
        return torch.tanh(self.conv(x[:, None])).flatten(1)


def test_a_kernel_that_spans_all_is_a_matrix() -> None:
    module = OfAll()
    found = derive(lambda w, x: jnp.tanh(x.reshape(2, -1) @ w["k"]), module, {"k": (9 * SERIES, WIDTH)}, SERIES_GIVEN)
    (rule,) = rules(found, module)
    assert 'einsum: "...(P Q),(P Q)D->...D"' in rule and "linear: {module: conv, axes: D.PQ}" in rule
