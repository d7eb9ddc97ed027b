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
        "linear: {module: b, axes: ED..}",
        "from: patch\n  activation: tanh\n  linear: a",
        "linear: {module: c, axes: DCNH}",
        "parameter: {name: gamma, axes: ...D}",
        "parameter: {name: codes.weight, axes: DE}",
    ):
        assert said in written, written


@pytest.mark.slow
def test_other_patches_are_a_difference() -> None:
    found = derive(function, Model(rolled=1), SHAPES, IMAGE)
    assert not found.complete and found.differences
