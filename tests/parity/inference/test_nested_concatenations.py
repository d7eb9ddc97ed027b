"""Two leaves against one matrix whose inputs or outputs the target has in another order, also one between the parts of the other."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from torch import nn

from support.inferred import UNPROVEN, derive, floats, grades, rules

C, E = 6, 7
Widths = tuple[int, int, int]


class Inputs(nn.Module):
    """A matrix for three values side by side, in some order."""

    def __init__(self, widths: Widths, order: str) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(C, width, bias=False) for width in widths)
        self.last, self.order = nn.Linear(sum(widths), E, bias=False), order

    def forward(self, x: Any) -> Any:
        values = {"a": self.a(x).tanh(), "b": self.b(x).relu(), "c": self.c(x).sigmoid()}
        return self.last(torch.cat([values[name] for name in self.order], -1)).tanh()


def of_inputs(w: Any, x: Any, function: Any = jax.nn.relu) -> Any:
    a, b, c = jnp.tanh(x @ w["a"]), function(x @ w["b"]), jax.nn.sigmoid(x @ w["c"])
    return jnp.tanh(jnp.concatenate([a, b], -1) @ w["ab"] + c @ w["rest"])


CASES = [
    ("turned, as wide", (4, 4, 8), "cba", ["from: rest", "axes: F(E + E), part: 1 of 2", "concatenated: {E: G + C}"]),
    ("turned", (4, 3, 5), "cba", ["axes: G(F + K), part: 1 of 2", "concatenated: {K: E + C}, part: 2 of 2"]),
    ("one in between", (4, 3, 5), "bca", ["axes: (C + E)G\n  part: 1 of 2", "axes: G(E + F + C), part: 3 of 3"]),
]


def shapes_of(widths: Widths) -> dict[str, tuple[int, ...]]:
    a, b, c = widths
    return {"a": (C, a), "b": (C, b), "c": (C, c), "ab": (a + b, E), "rest": (c, E)}


@pytest.mark.parametrize(("widths", "order", "said"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_inputs_of_two_leaves_in_another_order(widths: Widths, order: str, said: list[str]) -> None:
    module = Inputs(widths, order)
    found = derive(of_inputs, module, shapes_of(widths), floats(9, C))
    written = "\n".join(rules(found, module)).replace('"', "")
    assert all(text in written for text in said), written


@pytest.mark.slow
def test_another_function_of_one_value_is_a_difference() -> None:
    found = derive(lambda w, x: of_inputs(w, x, jnp.abs), Inputs((4, 4, 8), "cba"), shapes_of((4, 4, 8)), floats(9, C))
    assert not found.complete
    assert grades(found) & UNPROVEN


class Outputs(nn.Module):
    """A matrix that gives three values, in some order."""

    def __init__(self, widths: Widths, order: str) -> None:
        super().__init__()
        self.layer, self.order = nn.Linear(C, sum(widths)), order
        self.widths = dict(zip("abc", widths, strict=True))

    def forward(self, x: Any) -> Any:
        parts = self.layer(x).split([self.widths[name] for name in self.order], -1)
        values = dict(zip(self.order, parts, strict=True))
        return torch.cat([values["a"].tanh(), values["b"].relu(), values["c"].sigmoid()], -1)


def test_outputs_of_one_leaf_between_which_those_of_another_stand() -> None:
    def function(w: Any, x: Any) -> Any:
        a, b = jnp.split(x @ w["ab"] + w["b1"], [4], -1)
        return jnp.concatenate([jnp.tanh(a), jax.nn.relu(b), jax.nn.sigmoid(x @ w["rest"] + w["b2"])], -1)

    module = Outputs((4, 3, 5), "bca")
    shapes = {"ab": (C, 7), "b1": (7,), "rest": (C, 5), "b2": (5,)}
    written = rules(derive(function, module, shapes, floats(9, C)), module)
    assert [("from: ab\n" in rule, rule.rpartition("part: ")[2]) for rule in written] == [
        (True, '"1 of 3"}'),
        (False, '"2 of 3"}'),
        (True, '"3 of 3"}'),
    ]


class Convolved(nn.Module):
    """A convolution that gives two values of other widths."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv1d(C, 7, 3, padding=1)

    def forward(self, x: Any) -> Any:
        a, b = self.layer(x.transpose(1, 2)).transpose(1, 2).split([4, 3], -1)
        return torch.cat([a.tanh(), b.sigmoid()], -1)


def test_kernels_of_other_widths_are_one_convolution() -> None:
    def function(w: Any, x: Any) -> Any:
        numbers = ("NWC", "WIO", "NWC")
        a, b = (
            jax.lax.conv_general_dilated(x, w[name], (1,), "SAME", dimension_numbers=numbers) + w[f"{name}/bias"]
            for name in ("a", "b")
        )
        return jnp.concatenate([jnp.tanh(a), jax.nn.sigmoid(b)], -1)

    module = Convolved()
    shapes = {"a": (3, C, 4), "a/bias": (4,), "b": (3, C, 3), "b/bias": (3,)}
    written = rules(derive(function, module, shapes, floats(2, 9, C)), module)
    assert 'parameter: {name: layer.weight, axes: DCP, part: "1 of 2"}' in written[0]


class Gates(nn.Module):
    """Two gates of two values side by side in one matrix, as of a recurrent cell, and a layer behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.gates, self.last = nn.Linear(C, 2 * E), nn.Linear(E, 3)

    def forward(self, x: Any) -> Any:
        a, b = self.gates(torch.cat([x[..., :4], x[..., 4:].sin()], -1)).chunk(2, -1)
        return self.last(a.tanh() * b.sigmoid())


def test_a_grid_of_leaves_is_one_rule() -> None:
    def function(w: Any, x: Any) -> Any:
        a, b = (x[..., :4] @ w[f"{gate}x"] + jnp.sin(x[..., 4:]) @ w[f"{gate}h"] + w[f"{gate}b"] for gate in "ab")
        return (jnp.tanh(a) * jax.nn.sigmoid(b)) @ w["last"] + w["bias"]

    shapes = {
        f"{gate}{leaf}": shape for gate in "ab" for leaf, shape in (("x", (4, E)), ("h", (C - 4, E)), ("b", (E,)))
    }
    found = derive(function, module := Gates(), {**shapes, "last": (E, 3), "bias": (3,)}, floats(9, C))
    first, _ = rules(found, module)
    assert '  from: ["{ax,bx}", "{ah,bh}"]\n  bias: "{ab,bb}"\n' in first and first.endswith("linear: gates")
