"""A scale, or the scale and bias of a norm, that the target lacks may be in the weights of the layer beside it: the programs may be equal."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import pytest
import torch
from torch.nn import functional

from support.inferred import WIDTH, derive, layer_norm

D = WIDTH
SHAPES = {"w": (D, D), "c": (D,), "s": (D,), "b": (D,), "o": (D, 3)}


class Plain(torch.nn.Module):
    def __init__(self, normed: bool = False) -> None:
        super().__init__()
        self.l, self.o, self.normed = torch.nn.Linear(D, D), torch.nn.Linear(D, 3, bias=False), normed

    def forward(self, x: Any) -> Any:
        x = functional.layer_norm(x, (D,), eps=1e-6) if self.normed else x
        return self.o(torch.tanh(self.l(x)))


FOLDED = {
    "behind": (lambda w, x: jnp.tanh((x @ w["w"] + w["c"]) * w["s"] + w["b"]) @ w["o"], False),
    "in front": (lambda w, x: jnp.tanh(layer_norm(x, w["s"], w["b"]) @ w["w"] + w["c"]) @ w["o"], True),
    "in front of the last": (lambda w, x: jnp.tanh(x @ w["w"] + w["c"]) * w["s"] @ w["o"], False),
}


@pytest.mark.parametrize("case", FOLDED)
def test_what_a_layer_may_hold_is_undecided(case: str) -> None:
    function, normed = FOLDED[case]
    found = derive(function, Plain(normed), SHAPES)
    (difference,) = found.differences
    assert not found.complete and not difference.shown
    assert "multiplies by s" in difference.brief and difference.brief.endswith("the target does not")


def test_what_no_layer_may_hold_is_a_difference() -> None:
    found = derive(lambda w, x: (jnp.tanh(x @ w["w"] + w["c"]) * jnp.tanh(w["s"] * x)) @ w["o"], Plain(), SHAPES)
    (difference,) = found.differences
    assert difference.shown and "in front of o" in difference.brief
