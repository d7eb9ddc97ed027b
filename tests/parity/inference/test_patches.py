"""A convolution of patches, or of one tap, is a product in the other program; a codebook is met by its squares first."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch

from support.inferred import derive, floats, rules

D = 4
SHAPES = {
    "patch": (2, 2, D, D),
    "mix": (D, D),
    "merge": (4 * D, D),
    "one": (1, 1, D, D),
    "gain": (D,),
    "book": (D, D),
}
IMAGE = floats(3, 8, 8, D)


def convolved(x: Any, kernel: Any) -> Any:
    numbers = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, kernel, kernel.shape[:2], "VALID", dimension_numbers=numbers)


def function(w: Any, x: Any) -> Any:
    x = jnp.tanh(convolved(x, w["patch"]))
    x = jnp.tanh(x @ w["mix"])
    x = x.reshape(3, 2, 2, 2, 2, D).transpose(0, 1, 3, 2, 4, 5).reshape(3, 2, 2, -1)
    x = jnp.tanh(convolved(jnp.tanh(x @ w["merge"]), w["one"]))
    size = jnp.sqrt((x * x).sum((1, 2), keepdims=True))
    x = x * (size / (size.mean(-1, keepdims=True) + 1e-6)) * w["gain"]
    return (x * x).sum(-1, keepdims=True) - 2 * x @ w["book"] + (w["book"] * w["book"]).sum(0)


class Model(torch.nn.Module):
    def __init__(self, rolled: int = 0) -> None:
        super().__init__()
        self.rolled = rolled
        self.a = torch.nn.Linear(4 * D, D, bias=False)
        self.b = torch.nn.Conv2d(D, D, 1, bias=False)
        self.c = torch.nn.Conv2d(D, D, 2, 2, bias=False)
        self.d = torch.nn.Linear(D, D, bias=False)
        self.gamma = torch.nn.Parameter(torch.ones(1, 1, 1, D))
        self.codes = torch.nn.Embedding(D, D)

    def forward(self, x: Any) -> Any:
        x = torch.nn.functional.unfold(x.permute(0, 3, 1, 2).roll(self.rolled, -1), 2, stride=2).transpose(1, 2)
        x = torch.tanh(self.a(x)).transpose(1, 2).unflatten(-1, (4, 4))
        x = torch.tanh(self.c(torch.tanh(self.b(x)))).permute(0, 2, 3, 1)
        x = torch.tanh(self.d(x))
        size = x.norm(dim=(1, 2), keepdim=True)
        x = self.gamma * (x * (size / (size.mean(-1, keepdim=True) + 1e-6)))
        codes = self.codes.weight
        return x.pow(2).sum(-1, keepdim=True) + codes.pow(2).sum(1) - 2 * (x @ codes.t())


def test_patches_are_products() -> None:
    module = Model()
    written = "\n".join(rules(derive(function, module, SHAPES, IMAGE), module))
    for said in (
        "linear: {module: b, axes: FD..}",
        "from: patch\n  activation: tanh\n  linear: a",
        "linear: {module: c, axes: FDPQ}",
        "parameter: {name: gamma, axes: ...D}",
        "parameter: {name: codes.weight, axes: DF}",
    ):
        assert said in written, written


@pytest.mark.slow
def test_other_patches_are_a_difference() -> None:
    found = derive(function, Model(rolled=1), SHAPES, IMAGE)
    assert not found.complete and found.differences


def added_up(frames: Any, hop: int) -> Any:
    """Frames [B, T, taps, C] at a distance of `hop`, added up where they overlap."""
    size = (frames.shape[1] - 1) * hop + frames.shape[2]
    places = hop * jnp.arange(frames.shape[1])[:, None] + jnp.arange(frames.shape[2])
    return jnp.zeros((len(frames), size, frames.shape[3])).at[:, places].add(frames)


class Transposed(torch.nn.Module):
    def __init__(self, hop: int) -> None:
        super().__init__()
        self.up = torch.nn.ConvTranspose1d(D, D, 4, hop, bias=False)

    def forward(self, x: Any) -> Any:
        return self.up(torch.tanh(x).mT).mT


@pytest.mark.parametrize("hop", [2, 4])
@pytest.mark.parametrize("channels_first", [False, True])
def test_a_transposed_convolution_is_a_product_whose_taps_are_added_up(hop: int, channels_first: bool) -> None:
    def function(w: Any, x: Any) -> Any:
        frames = (jnp.tanh(x) @ w["up"]).reshape(3, 8, 4, D)
        return added_up(frames.swapaxes(2, 3) if channels_first else frames, hop)

    module = Transposed(hop)
    written = rules(derive(function, module, {"up": (D, 4 * D)}, floats(3, 8, D)), module)
    axes = "D(C P)" if channels_first else "D(P C)"
    assert written == [f"- from: up\n  axes: {axes}\n  parameter: {{name: up.weight, axes: DCP}}"]


def test_taps_whose_mean_is_taken_are_a_difference() -> None:
    def function(w: Any, x: Any) -> Any:
        frames = (jnp.tanh(x) @ w["up"]).reshape(3, 8, 4, D)
        return added_up(frames, 2) / added_up(jnp.ones_like(frames), 2)

    found = derive(function, Transposed(2), {"up": (D, 4 * D)}, floats(3, 8, D))
    assert not found.complete and found.differences


def test_a_transposed_convolution_of_the_source_is_a_layer_for_each_place() -> None:
    class Fold(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = torch.nn.Linear(D, 4 * D, bias=False)

        def forward(self, x: Any) -> Any:
            taps = self.up(torch.tanh(x)).mT
            return torch.nn.functional.fold(taps, (1, 18), (1, 4), stride=(1, 2)).squeeze(2).mT

    def function(w: Any, x: Any) -> Any:
        numbers = ("NWC", "WOI", "NWC")
        return jax.lax.conv_transpose(
            jnp.tanh(x), w["up"], (2,), "VALID", dimension_numbers=numbers, transpose_kernel=True
        )

    found = derive(function, Fold(), {"up": (4, D, D)}, floats(3, 8, D))
    assert found.complete
