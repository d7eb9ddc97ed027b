"""A scale, or the scale and bias of a norm, that the target lacks may be in the weights of the layer beside it: the programs may be equal."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from torch.nn import functional

from convert.inference.derivation import Grade
from support.inferred import WIDTH, derive, layer_norm, tokens

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


FIELDS, EACH, ROWS = 3, 4, 8
COLUMNS = FIELDS * EACH
OF_FIELDS = {"tables": (FIELDS, ROWS, EACH), "c": (COLUMNS, COLUMNS), "d": (COLUMNS, COLUMNS), "o": (2 * COLUMNS, 5)}


class Crossed(torch.nn.Module):
    """A cross layer beside a deep one; the tables of the fields are joined in an order."""

    def __init__(self, order: slice) -> None:
        super().__init__()
        self.tables = torch.nn.ModuleList(torch.nn.Embedding(ROWS, EACH) for _ in range(FIELDS))
        self.c, self.d = (torch.nn.Linear(COLUMNS, COLUMNS, bias=False) for _ in "cd")
        self.o, self.order = torch.nn.Linear(2 * COLUMNS, 5, bias=False), order

    def forward(self, x: Any) -> Any:
        x0 = torch.cat([self.tables[k](x[:, k]) for k in range(FIELDS)[self.order]], 1)
        return torch.tanh(self.o(torch.cat([x0 * self.c(x0) + x0, torch.relu(self.d(x0))], 1)))


def crossed(w: Any, x: Any) -> Any:
    x0 = jnp.concatenate([w["tables"][k][x[:, k]] for k in range(FIELDS)], -1)
    return jnp.tanh(jnp.concatenate([x0 * (x0 @ w["c"]) + x0, jax.nn.relu(x0 @ w["d"])], -1) @ w["o"])


def test_columns_in_another_order_that_the_layers_behind_take() -> None:
    """The weights of all layers in that order make up for it: it was called a certain difference of equal programs."""
    found = derive(crossed, Crossed(slice(None, None, -1)), OF_FIELDS, tokens(ROWS, 12, FIELDS))
    assert found.complete
    assert found.tensor("c.weight").grade is found.tensor("tables.0.weight").grade is Grade.DERIVED
    rows = tuple(len(part.elements) for part in found.tensor("c.weight").parts)
    assert rows == (EACH * COLUMNS,) * FIELDS  # the rows of each field


@pytest.mark.slow
def test_columns_in_another_order_are_no_certain_difference_where_the_programs_differ_elsewhere() -> None:
    def source(w: Any, x: Any) -> Any:
        x0 = jnp.concatenate([w["tables"][k][x[:, k]] for k in range(FIELDS)], -1)
        return jnp.tanh(jnp.concatenate([x0 * (x0 @ w["c"]) + x0, jax.nn.leaky_relu(x0 @ w["d"])], -1) @ w["o"])

    found = derive(source, Crossed(slice(None, None, -1)), OF_FIELDS, tokens(ROWS, 12, FIELDS))
    assert found.differences and not any(one.shown for one in found.differences)
