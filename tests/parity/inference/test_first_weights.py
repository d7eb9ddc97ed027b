"""The weights that a module has before any are loaded say nothing: it may have been made with `torch.empty`."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from support.inferred import WIDTH, derive, sources

SHAPES = {"a": (WIDTH, WIDTH), "s": (WIDTH,), "t": (WIDTH,), "b": (WIDTH, WIDTH)}


class Decayed(torch.nn.Module):
    """Parameters that no initializer has filled, one under two names, and a buffer that the module computes."""

    def __init__(self, fill: float) -> None:
        super().__init__()
        self.a, self.b, self.scale, self.rate = (
            torch.nn.Parameter(torch.full(shape, fill)) for shape in [(WIDTH, WIDTH)] * 2 + [(WIDTH,)] * 2
        )
        self.c = torch.nn.Parameter(self.b.data)
        self.register_buffer("p", torch.arange(float(WIDTH)))

    def forward(self, x: Any) -> Any:
        x = torch.tanh((x + self.p) @ self.a) * self.scale
        return torch.tanh(x @ self.b * self.rate.log()) @ self.c


def decayed(w: Any, x: Any) -> Any:
    x = jnp.tanh((x + np.arange(WIDTH)) @ w["a"]) * w["s"]
    return jnp.tanh(x @ w["b"] * jnp.log(w["t"])) @ w["b"]


@pytest.mark.parametrize("fill", [float("nan"), float("inf"), 0.0])
def test_the_own_weights_of_the_module_do_not_matter(fill: float) -> None:
    module = Decayed(fill)
    found = derive(decayed, module, SHAPES)
    assert found.complete, (found.differences, found.proof)
    assert {name: x for name, x in sources(found).items() if name != "p"} == {
        "a": "a",
        "b": "b",
        "scale": "s",
        "rate": "t",
    }
    assert all(((x == fill) | x.isnan()).all() for x in module.parameters()), "it is left as it was"


@pytest.mark.slow
def test_a_difference_is_named_without_the_own_weights() -> None:
    found = derive(lambda w, x: jnp.tanh(decayed(w, x)), Decayed(float("nan")), SHAPES)
    assert "tanh" in found.differences[0].problem


def test_weights_computed_by_a_hook_are_copied() -> None:
    with pytest.warns(FutureWarning):  # the parametrization has another name; much code has the hook
        module = torch.nn.utils.weight_norm(torch.nn.Linear(WIDTH, WIDTH, bias=False))

    def function(w: Any, x: Any) -> Any:
        return x @ (w["v"] / jnp.linalg.norm(w["v"], axis=0) * w["g"])

    found = derive(function, module, {"v": (WIDTH, WIDTH), "g": (WIDTH,)})
    assert found.complete, (found.differences, found.proof)
