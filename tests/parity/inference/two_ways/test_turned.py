"""A layer's results that the programs split into two axes in another order: its rows are reordered, and no difference is claimed."""

from __future__ import annotations

from typing import Any

import jax
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


C, OUT, MIDDLE, IN = 8, 4, 3, 5  # features that matrices are computed of, and their axes
MADE = {"m": (C, OUT * IN), "n": (OUT * IN,), "o": (OUT, 2)}


class Made(torch.nn.Module):
    """A matrix for each row, computed by a layer, with its axes in the other order than the function has them; ``fault``: planted."""

    def __init__(self, way: str, fault: str = "") -> None:
        super().__init__()
        self.way, self.fault = way, fault
        self.m, self.o = torch.nn.Linear(C, OUT * IN), torch.nn.Linear(OUT, 2, bias=False)

    def forward(self, x: Any) -> Any:
        h, matrix = x[:, C:], self.m(x[:, :C]).view(-1, IN, OUT)
        h = h.flip(0) if self.fault == "rows" else h
        matrix = matrix.softmax(1) if self.fault == "axis" else matrix.tanh()
        y = (matrix * h.unsqueeze(2)).sum(1) if self.way == "sum" else (h.unsqueeze(1) @ matrix).squeeze(1)
        return self.o(torch.tanh(y))


def _made(w: Any, x: Any, of: Any = jnp.tanh) -> Any:
    matrix = of((x[:, :C] @ w["m"] + w["n"]).reshape(-1, OUT, IN))
    return jnp.tanh(jnp.einsum("boi,bi->bo", matrix, x[:, C:])) @ w["o"]


@pytest.mark.parametrize("way", ["product", "sum"])
def test_a_matrix_for_each_row_is_multiplied_from_the_other_side(way: str) -> None:
    module = Made(way)
    found = derive(_made, module, MADE, floats(6, C + IN))
    assert grades(found) == {Grade.DERIVED}
    assert any('linear: {module: m, axes: "(N H)D"}' in rule for rule in rules(found, module))


@pytest.mark.parametrize("fault", ["rows", pytest.param("axis", marks=pytest.mark.slow)])
def test_a_fault_beside_such_a_matrix_is_a_difference(fault: str) -> None:
    function = _made if fault == "rows" else lambda w, x: _made(w, x, lambda matrix: jax.nn.softmax(matrix, 1))
    found = derive(function, Made("product", fault), MADE, floats(6, C + IN))
    assert [difference.shown for difference in found.differences] == [True]


class OfThree(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.m, self.o = torch.nn.Linear(C, OUT * MIDDLE * IN), torch.nn.Linear(OUT, 2, bias=False)

    def forward(self, x: Any) -> Any:
        made = self.m(x[:, :C]).view(-1, IN, MIDDLE, OUT)
        return self.o(torch.tanh(torch.einsum("bimo,bi,bm->bo", made, x[:, C:-MIDDLE], x[:, -MIDDLE:])))


@pytest.mark.slow
def test_three_axes_in_another_order_are_no_difference() -> None:
    """No order of three axes is found; as the layer's rows can have it, none is claimed to differ."""

    def function(w: Any, x: Any) -> Any:
        made = (x[:, :C] @ w["m"] + w["n"]).reshape(-1, OUT, MIDDLE, IN)
        return jnp.tanh(jnp.einsum("bomi,bi,bm->bo", made, x[:, C:-MIDDLE], x[:, -MIDDLE:])) @ w["o"]

    shapes = {"m": (C, OUT * MIDDLE * IN), "n": (OUT * MIDDLE * IN,), "o": (OUT, 2)}
    found = derive(function, OfThree(), shapes, floats(6, C + IN + MIDDLE))
    assert not any(difference.shown for difference in found.differences)
