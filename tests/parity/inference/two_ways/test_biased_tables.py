"""A bias that one program adds to the rows of a table, and the other has in the table: a layer of one-hot rows against an embedding."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

from convert.inference.derivation import Grade
from support.inferred import derive, grades, rules

ROWS, D = 10, 8
SHAPES = {"t": (ROWS, D), "b": (D,), "c": (ROWS, D), "o": (D, D)}


def _inputs(seed: int) -> dict[str, Any]:
    return {"x": np.random.default_rng(seed).permutation(ROWS)[None].repeat(3, 0)}


def _source(*, one_hot: bool) -> Any:
    def function(w: Any, x: Any) -> Any:
        rows = jax.nn.one_hot(x, ROWS) @ w["t"] if one_hot else w["t"][x]
        return jnp.tanh(w["c"][x[:, ::-1]] + (rows + w["b"])) @ w["o"]

    return function


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.t, self.c = (nn.Embedding(ROWS, D) for _ in range(2))
        self.o = nn.Linear(D, D, bias=False)

    def forward(self, x: Any) -> Any:
        return self.o(torch.tanh(self.t(x) + self.c(x.flip(1))))


@pytest.mark.parametrize("one_hot", [False, True])
def test_the_table_holds_the_bias(one_hot: bool) -> None:
    """It was called a certain difference of equal programs."""
    module = Embedded()
    made = derive(_source(one_hot=one_hot), module, SHAPES, _inputs)
    assert made.complete and grades(made) == {Grade.DERIVED}
    assert "- from: t + b\n  axes: DC + C\n  parameter: t.weight" in rules(made, module)


def test_another_function_beside_it_is_no_equal_program() -> None:
    def source(w: Any, x: Any) -> Any:
        return jnp.tanh(jnp.abs(w["c"][x[:, ::-1]]) + (w["t"][x] + w["b"])) @ w["o"]

    assert not derive(source, Embedded(), SHAPES, _inputs).complete


def test_a_bias_that_both_programs_have_is_the_bias() -> None:
    class Biased(Embedded):
        def __init__(self) -> None:
            super().__init__()
            self.b = nn.Parameter(torch.randn(D))

        def forward(self, x: Any) -> Any:
            return self.o(torch.tanh(self.b + self.t(x) + self.c(x.flip(1))))

    made = derive(_source(one_hot=False), Biased(), SHAPES, _inputs)
    assert made.complete and grades(made) == {Grade.DERIVED}
