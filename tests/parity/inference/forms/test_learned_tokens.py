"""Learned tokens in front of the data, as the class token and the registers of DINOv2: a parameter for each, or one for all."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from torch import nn

from convert.inference.derivation import Grade
from support.inferred import UNPROVEN, derive, floats, grades, layer_norm, rules

WIDTH, ROWS = 16, 7
SHAPES = {"e": (WIDTH, WIDTH), "w": (WIDTH, WIDTH), "v": (WIDTH, WIDTH), "g": (WIDTH,), "b": (WIDTH,)}
OF_TOKENS = {"one": {"tokens": (3, WIDTH)}, "two": {"first": (WIDTH,), "registers": (1, 2, WIDTH)}}


def _source(leaves: str, scale: float = 1.0) -> Any:
    def function(w: Any, x: Any) -> Any:
        x = x @ w["e"]
        first = w["first"][None] if leaves == "two" else w["tokens"][:1]
        registers = w["registers"][0] if leaves == "two" else w["tokens"][1:]
        learned = [jnp.broadcast_to(of, (len(x), *of.shape)) for of in (first, scale * registers)]
        if leaves == "one" and scale == 1:
            learned = [jnp.broadcast_to(w["tokens"], (len(x), 3, WIDTH))]
        y = jnp.concatenate([*learned, x], 1)
        z = layer_norm(y, w["g"], w["b"])
        return y + jax.nn.softmax((z @ w["w"]) @ z.swapaxes(1, 2)) @ (z @ w["v"])

    return function


class Tokens(nn.Module):
    """Attention between learned tokens and data."""

    def __init__(self, parameters: str) -> None:
        super().__init__()
        self.parameters_of = parameters
        if parameters == "one":
            self.special = nn.Parameter(torch.randn(1, 3, WIDTH))
        else:
            self.cls_token = nn.Parameter(torch.randn(1, 1, WIDTH))
            self.register_tokens = nn.Parameter(torch.randn(2, WIDTH))
        self.embed, self.scores, self.values = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH, eps=1e-6)

    def forward(self, x: Any) -> Any:
        x = self.embed(x)
        if self.parameters_of == "one":
            learned = [self.special.expand(len(x), -1, -1)]
        else:
            learned = [self.cls_token.expand(len(x), -1, -1), self.register_tokens.expand(len(x), -1, -1)]
        y = torch.cat([*learned, x], 1)
        z = self.norm(y)
        return y + torch.softmax(self.scores(z) @ z.mT, -1) @ self.values(z)


@pytest.mark.parametrize("parameters", ["one", "two"])
@pytest.mark.parametrize("leaves", ["one", "two"])
def test_tokens_of_one_parameter_or_several(leaves: str, parameters: str) -> None:
    module = Tokens(parameters)
    made = derive(_source(leaves), module, SHAPES | OF_TOKENS[leaves], floats(4, ROWS, WIDTH))
    assert made.complete and grades(made) == {Grade.DERIVED}
    written = "\n".join(rules(made, module))
    assert ("1 of 2" in written) == ("2 of 2" in written) == (leaves != parameters), written


@pytest.mark.slow
@pytest.mark.parametrize("leaves", ["one", "two"])
def test_registers_of_another_size_are_a_difference(leaves: str) -> None:
    made = derive(_source(leaves, 1.1), Tokens("one"), SHAPES | OF_TOKENS[leaves], floats(4, ROWS, WIDTH))
    assert not made.complete and made.differences and UNPROVEN & grades(made)
