"""One feature times a vector is a layer of one input, and columns of a matrix that takes several features side by side."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import pytest
import torch

from convert.inference.derivation import Grade
from support.inferred import UNPROVEN, derive, floats, grades, rules

WIDTH = 6
REST = {"b": (WIDTH,), "o": (WIDTH, 3), "ob": (3,)}


class Layer(torch.nn.Module):
    """`Linear(1, WIDTH)` for each number, or a vector that it is multiplied by."""

    def __init__(self, plain: bool) -> None:
        super().__init__()
        self.layer = None if plain else torch.nn.Linear(1, WIDTH)
        self.scale, self.shift = (torch.nn.Parameter(torch.zeros(WIDTH)) if plain else None for _ in range(2))
        self.output = torch.nn.Linear(WIDTH, 3)

    def forward(self, x: Any) -> Any:
        x = x[..., None]
        return self.output(torch.tanh(x * self.scale + self.shift if self.layer is None else self.layer(x)))


@pytest.mark.parametrize(
    ("plain", "shape", "expected"),
    [
        (False, (WIDTH,), "linear: layer"),
        pytest.param(False, (1, WIDTH), "- einsum: ...D,DC->...C", marks=pytest.mark.slow),
        (True, (1, WIDTH), "parameter: {name: scale, axes: D}"),
    ],
)
def test_a_number_times_a_vector(plain: bool, shape: tuple[int, ...], expected: str) -> None:
    def function(w: Any, x: Any) -> Any:
        x = x[..., None]
        return jnp.tanh((x @ w["w"] if plain else x * w["w"]) + w["b"]) @ w["o"] + w["ob"]

    module = Layer(plain)
    found = derive(function, module, {"w": shape, **REST}, floats(5, 4))
    assert grades(found) == {Grade.DERIVED}
    assert expected in "\n".join(rules(found, module))


class Joined(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.output = torch.nn.Linear(2, WIDTH), torch.nn.Linear(WIDTH, 3)

    def forward(self, x: Any) -> Any:
        return self.output(torch.tanh(self.layer(torch.cat([x[..., :1], x[..., 1:]], -1))))


@pytest.mark.parametrize("exchanged", [False, True])
def test_two_numbers_times_a_vector_each(exchanged: bool) -> None:
    def function(w: Any, x: Any) -> Any:
        one, two = x[..., :1], x[..., 1:]
        return jnp.tanh(one * w["w"] + (one if exchanged else two) * w["v"] + w["b"]) @ w["o"] + w["ob"]

    found = derive(function, Joined(), {"w": (WIDTH,), "v": (WIDTH,), **REST}, floats(5, 2))
    assert grades(found) <= UNPROVEN if exchanged else grades(found) == {Grade.DERIVED}
