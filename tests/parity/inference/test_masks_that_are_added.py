"""A mask that one program adds to the scores, and the other chooses by, is no difference; one behind it is named where it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.nn import functional

from convert.inference.derivation import Derivation
from convert.inference.infer import infer
from support.inferred import WIDTH

D = WIDTH
LAYERS = range(2)
SHAPES = {f"{layer}/{name}": (D, D) for layer in LAYERS for name in ("q", "k", "v", "up", "down")}


def function(w: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    x = given["x"]
    for layer in LAYERS:
        q, k, v = (x @ w[f"{layer}/{part}"] for part in "qkv")
        scores = jnp.where(given["seen"][:, None, :] > 0, q @ k.mT / np.sqrt(D), -jnp.inf)
        x = x + jax.nn.softmax(scores, -1) @ v
        x = x + jax.nn.gelu(x @ w[f"{layer}/up"], approximate=False) @ w[f"{layer}/down"]
    return {"y": x}


class Added(torch.nn.Module):
    """Attention as transformers' BERT masks it, with one mask for all layers, and a feed-forward block with a GELU."""

    def __init__(self, approximate: str, *, late: int = 0) -> None:
        super().__init__()
        self.m = torch.nn.ModuleList(torch.nn.Linear(D, D, bias=False) for _ in SHAPES)
        self.approximate, self.late = approximate, late

    def forward(self, x: Any, seen: Any) -> Any:
        mask = (1.0 - seen[:, None, :].roll(self.late, -1)) * torch.finfo(x.dtype).min
        for layer in LAYERS:
            *qkv, up, down = self.m[5 * layer : 5 * layer + 5]
            q, k, v = (m(x) for m in qkv)
            x = x + ((q @ k.mT / D**0.5) + mask).softmax(-1) @ v
            x = x + down(functional.gelu(up(x), approximate=self.approximate))
        return x


def inputs(seed: int) -> dict[str, Any]:
    seen = np.ones((3, 7))
    seen[1, 4:] = 0
    return {"x": np.random.default_rng(seed).normal(size=(3, 7, D)), "seen": seen}


def derived(module: torch.nn.Module) -> Derivation:
    return infer(function, module.eval(), lambda m, given: {"y": m(given["x"], given["seen"])}, inputs, SHAPES)


def test_an_added_mask_is_no_difference() -> None:
    assert derived(Added("none")).complete


@pytest.mark.slow
def test_a_function_behind_an_added_mask_is_named_at_its_line() -> None:
    (difference,) = derived(Added("tanh")).differences
    assert difference.shown and "gelu_tanh" in difference.brief and "gelu_erf" in difference.brief
    assert "mask" not in difference.brief and "e+308" not in difference.problem


@pytest.mark.slow
def test_an_added_mask_that_hides_other_positions_is_named() -> None:
    found = derived(Added("none", late=1))
    (difference,) = found.differences
    assert not found.complete and "position" in difference.problem + difference.brief, difference
