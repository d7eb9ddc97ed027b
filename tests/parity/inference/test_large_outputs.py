"""Outputs that grow with many products of weights: with smaller weights, what is added to them shows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

from convert.inference.draws import Draws
from convert.inference.models import LARGE, Runs
from support.inferred import derive, floats

WIDTH, LAYERS = 8, 5
SHAPES = {f"w{k}": (WIDTH, WIDTH) for k in range(LAYERS)} | {"b": (WIDTH,)}


def _grows(w: Mapping[str, Any], x: Any) -> Any:
    for k in range(LAYERS):
        x = x * (x @ w[f"w{k}"])
    return x + w["b"]


class Grows(nn.Module):
    """`fault`: whether some elements get the bias in another order."""

    def __init__(self, fault: bool) -> None:
        super().__init__()
        self.fault = fault
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
        self.bias = nn.Parameter(torch.zeros(2, WIDTH // 2))

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = x * layer(x)
        bias = self.bias.flatten()
        return torch.where(x > 0, x + bias, x + bias.flip(0)) if self.fault else x + bias


def _inputs(seed: int) -> dict[str, Any]:
    return {"x": 4 * floats(3, WIDTH)(seed)["x"]}


def test_the_weights_are_smaller_where_the_outputs_are_large() -> None:
    given = _inputs(0)
    full = _grows(Draws(SHAPES).run(0, lambda weights: weights), given["x"])
    assert np.abs(full).max() > LARGE
    runs = Runs(lambda w, x: {"y": _grows(w, x["x"])}, Draws(SHAPES))
    assert np.abs(runs.program(0, given).outputs["y"].array).max() < LARGE
    assert runs.program(1, _inputs(1)).parameters["b"].array.std() < 0.6 * 0.8, "those that follow have the same size"


def test_a_number_that_stands_for_a_mask_makes_no_weights_smaller() -> None:
    draws = Draws({"w": (4, 4)})
    runs = Runs(lambda w, x: {"y": jnp.where(x["x"] > 0, x["x"] @ w["w"], -1e30)}, draws)
    runs.program(0, floats(3, 4)(0))
    assert draws.size == 1.0


@pytest.mark.parametrize("fault", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_what_is_added_to_a_large_output_shows(fault: bool) -> None:
    found = derive(_grows, Grows(fault), SHAPES, _inputs)
    assert found.complete is not fault, (found.differences, found.notes)
