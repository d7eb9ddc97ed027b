"""A layer that is met by the same data as another is told apart before scales and shifts are tried by what they give."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import torch

from convert.inference.derivation import Grade
from support.inferred import WIDTH, derive, grades, layer_norm

D = WIDTH
BLOCKS = range(3)
LEAVES = {"s": (D,), "o": (D,), "u": (D, D), "v": (D,), "keep": (D, D), "kept": (D,), "pass": (D, D), "passed": (D,)}


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(D, eps=1e-6)
        self.up, self.on, self.out = (torch.nn.Linear(D, D) for _ in range(3))

    def forward(self, x: Any) -> Any:
        y = torch.tanh(self.up(self.norm(x)))
        return x + self.on(y), self.out(y)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block() for _ in BLOCKS)

    def forward(self, x: Any) -> Any:
        total = 0
        for block in self.blocks:
            x, out = block(x)
            total = total + out
        return x + torch.sin(total)


def function(w: Any, x: Any) -> Any:
    total = 0
    for k in BLOCKS:
        y = jnp.tanh(layer_norm(x, w[f"{k}/s"], w[f"{k}/o"]) @ w[f"{k}/u"] + w[f"{k}/v"])
        total = total + (y @ w[f"{k}/keep"] + w[f"{k}/kept"])
        x = x + (y @ w[f"{k}/pass"] + w[f"{k}/passed"])
    return x + jnp.sin(total)


def test_two_layers_of_the_same_data_before_a_norm() -> None:
    shapes = {f"{k}/{name}": shape for k in BLOCKS for name, shape in LEAVES.items()}
    found = derive(function, Model(), shapes)
    assert found.complete and grades(found) == {Grade.DERIVED}
