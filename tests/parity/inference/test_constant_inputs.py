"""Layers of constants, such as the coordinates of an image in four directions: their columns hold the same numbers in other orders."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from torch import nn

from convert.inference.derivation import Grade
from support.inferred import WIDTH, derive, floats, grades

SIDE = 5
GRID = np.stack(np.meshgrid(np.linspace(0, 1, SIDE), np.linspace(0, 1, SIDE), indexing="ij"), -1).reshape(-1, 2)
SHAPES = {"c": (WIDTH, WIDTH), "w": (4, WIDTH), "b": (WIDTH,), "o": (WIDTH, WIDTH)}


class Positions(nn.Module):
    """Adds a layer of the distances to the four sides, in an order."""

    def __init__(self, *order: int) -> None:
        super().__init__()
        self.c, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.positions, self.order = nn.Linear(4, WIDTH), list(order)

    def forward(self, x: Any) -> Any:
        grid = torch.tensor(np.concatenate([GRID, 1 - GRID], -1), dtype=x.dtype)[:, self.order]
        return self.o(torch.tanh(self.c(x) + self.positions(grid)))


def test_four_columns_of_the_same_numbers_in_another_order() -> None:
    def source(w: Any, x: Any) -> Any:
        return jnp.tanh(x @ w["c"] + np.concatenate([GRID, 1 - GRID], -1) @ w["w"] + w["b"]) @ w["o"]

    made = derive(source, Positions(3, 2, 1, 0), SHAPES, floats(2, len(GRID), WIDTH))
    assert made.complete and grades(made) == {Grade.DERIVED}
    columns = made.tensor("positions.weight").parts[0].positions.reshape(WIDTH, 4)[0] // WIDTH
    assert columns.tolist() == [3, 2, 1, 0]
