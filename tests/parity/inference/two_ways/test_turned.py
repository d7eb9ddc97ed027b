"""A layer's results that the programs split into two axes in another order: its rows are reordered, and no difference is claimed."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import pytest
import torch

from convert.inference.derivation import Grade
from support.inferred import WIDTH, derive, floats, grades, rules

A, B = 3, 8
LEAVES = {"w": (WIDTH, WIDTH), "b": (WIDTH,), "v": (WIDTH, A * B), "c": (A * B,)}


class Net(torch.nn.Module):
    def __init__(self, behind: bool) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, A * B)
        self.c = torch.nn.Linear(B, 2, bias=False) if behind else None

    def forward(self, x: Any) -> Any:
        y = self.b(torch.tanh(self.a(x))).view(-1, B, A).transpose(1, 2)
        return y if self.c is None else self.c(torch.tanh(y))


def _function(behind: bool, reverse: bool = False) -> Any:
    def function(w: Any, x: Any) -> Any:
        y = (jnp.tanh(x @ w["w"] + w["b"]) @ w["v"] + w["c"]).reshape(-1, A, B)
        y = y[::-1] if reverse else y
        return jnp.tanh(y) @ w["d"] if behind else y

    return function


def test_the_output_of_a_layer() -> None:
    module = Net(behind=False)
    found = derive(_function(False), module, LEAVES, floats(5, WIDTH))
    assert grades(found) == {Grade.DERIVED}
    assert any('linear: {module: b, axes: "(N H)D"}' in rule for rule in rules(found, module))


@pytest.mark.slow
def test_with_a_layer_behind_it_no_difference_is_claimed() -> None:
    found = derive(_function(True), Net(behind=True), {**LEAVES, "d": (B, 2)}, floats(5, WIDTH))
    assert not any(difference.shown for difference in found.differences)


@pytest.mark.slow
def test_rows_of_the_data_in_another_order_are_a_difference() -> None:
    found = derive(_function(False, reverse=True), Net(behind=False), LEAVES, floats(5, WIDTH))
    assert any(difference.shown for difference in found.differences)
