"""Tables whose rows one program splits behind the lookup, where the other has a table for each part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch

from support.inferred import derive, rules, sources, tokens

N, C = 7, 6


def gate(f: Any, g: Any) -> Any:
    return jnp.tanh(f) * jax.nn.sigmoid(g)


def joined(rows: Any, x: Any) -> Any:
    return rows.reshape(*x.shape, -1)


def two(w: Any, x: Any) -> Any:
    return gate(joined(w["f"][x], x), joined(w["g"][x], x))


def by_ones(w: Any, x: Any) -> Any:
    ones = jax.nn.one_hot(x, N)
    return gate(ones @ w["f"], ones @ w["g"])


def wide(w: Any, x: Any) -> Any:
    return gate(*jnp.split(w["t"][x], 2, -1))


def wide_by_ones(w: Any, x: Any) -> Any:
    return gate(*jnp.split(jax.nn.one_hot(x, N) @ w["t"], 2, -1))


def stacked(w: Any, x: Any) -> Any:
    rows = w["t"][x]
    return gate(rows[..., 0, :], rows[..., 1, :])


class Wide(torch.nn.Module):
    """One table, whose rows are split."""

    def __init__(self, split: Callable[[Any], Any]) -> None:
        super().__init__()
        self.e, self.split = torch.nn.Embedding(N, 2 * C), split

    def forward(self, x: Any) -> Any:
        a, b = self.split(self.e(x))
        return torch.tanh(a) * torch.sigmoid(b)


class Apart(torch.nn.Module):
    """A table for each part."""

    def __init__(self) -> None:
        super().__init__()
        self.g, self.f = torch.nn.Embedding(N, C), torch.nn.Embedding(N, C)

    def forward(self, x: Any) -> Any:
        return torch.tanh(self.f(x)) * torch.sigmoid(self.g(x))


def halves(rows: Any) -> Any:
    return rows.chunk(2, -1)


def exchanged(rows: Any) -> Any:
    return rows.chunk(2, -1)[::-1]


def in_turns(rows: Any) -> Any:
    return rows[..., ::2], rows[..., 1::2]


TWO, ONE = {"f": (N, C), "g": (N, C)}, {"t": (N, 2 * C)}


@pytest.mark.parametrize(
    ("function", "module", "shapes", "rule"),
    [
        (two, Wide(halves), TWO, '- from: "{f,g}"\n  axes: DC\n  parameter: {name: e.weight, axes: "D(C + C)"}'),
        (two, Wide(exchanged), TWO, '- from: "{g,f}"\n  axes: DC\n  parameter: {name: e.weight, axes: "D(C + C)"}'),
        (two, Wide(in_turns), TWO, '- from: "{f,g}"\n  axes: DC\n  parameter: {name: e.weight, axes: "D(C (1 + 1))"}'),
        (
            two,
            Wide(halves),
            {"f": (N, 3, 2), "g": (N, 3, 2)},
            '- from: "{f,g}"\n  axes: DCE\n  parameter: {name: e.weight, axes: "D(C E + C E)"}',
        ),
        (by_ones, Wide(exchanged), TWO, '- from: "{g,f}"\n  axes: DC\n  parameter: {name: e.weight, axes: "D(C + C)"}'),
        (wide, Apart(), ONE, '- from: t\n  axes: D(C + C)\n  parameter: "{f,g}.weight"'),
        (wide_by_ones, Apart(), ONE, '- from: t\n  axes: D(C + C)\n  parameter: "{f,g}.weight"'),
        (stacked, Apart(), {"t": (N, 2, C)}, '- from: t\n  stacked: {i: 1}\n  axes: VD\n  embedding: "{i:f,g}"'),
        (
            wide,
            Wide(exchanged),
            ONE,
            "- from: t\n  axes: VD\n  concatenated: {D: C + E}\n  embedding: {module: e, concatenated: {D: E + C}}",
        ),
        (
            wide,
            Wide(in_turns),
            ONE,
            '- from: t\n  axes: D(E C)\n  parameter: {name: e.weight, axes: "D(C E)"}',
        ),
    ],
    ids=[
        "halves",
        "exchanged",
        "in turns",
        "heads",
        "ones",
        "apart",
        "ones apart",
        "stacked",
        "order",
        "order in turns",
    ],
)
def test_the_columns_of_tables_are_found(function: Any, module: Any, shapes: Any, rule: str) -> None:
    assert rules(derive(function, module, shapes, tokens(N, 4, 9)), module) == [rule]


def test_tables_of_unequal_widths_have_a_rule_each() -> None:
    class Unequal(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.e = torch.nn.Embedding(N, C + 2)

        def forward(self, x: Any) -> Any:
            a, b = self.e(x).split([C, 2], -1)
            return torch.tanh(a) * torch.sigmoid(b).sum(-1, keepdim=True)

    def function(w: Any, x: Any) -> Any:
        return jnp.tanh(w["f"][x]) * jax.nn.sigmoid(w["g"][x]).sum(-1, keepdims=True)

    module = Unequal()
    assert rules(derive(function, module, {"f": (N, C), "g": (N, 2)}, tokens(N, 4, 9)), module) == [
        '- from: f\n  axes: DC\n  parameter: {name: e.weight, axes: "D(C + E)", part: "1 of 2"}',
        '- from: g\n  axes: DE\n  parameter: {name: e.weight, axes: "D(C + E)", part: "2 of 2"}',
    ]


def test_two_tables_are_added_to_what_a_linear_gives() -> None:
    class Conditioned(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.out, self.e = (
                torch.nn.Embedding(N, C),
                torch.nn.Linear(C, 2 * C),
                torch.nn.Embedding(N, 2 * C),
            )

        def forward(self, x: Any) -> Any:
            a, b = (self.out(self.inner(x).cumsum(1)) + self.e(x)).chunk(2, -1)
            return torch.tanh(a) * torch.sigmoid(b)

    def function(w: Any, x: Any) -> Any:
        h = jnp.cumsum(w["inner"][x], 1)
        return gate(h @ w["wf"] + w["bf"] + w["f"][x], h @ w["wg"] + w["bg"] + w["g"][x])

    shapes = {"inner": (N, C), "wf": (C, C), "wg": (C, C), "bf": (C,), "bg": (C,), **TWO}
    found = derive(function, Conditioned(), shapes, tokens(N, 4, 9))
    assert found.complete
    assert sources(found) == {
        "inner.weight": "inner",
        "out.weight": ("wf", "wg"),
        "out.bias": ("bf", "bg"),
        "e.weight": ("f", "g"),
    }


def test_columns_that_no_table_has_are_a_difference() -> None:
    def function(w: Any, x: Any) -> Any:
        return gate(w["f"][x], w["g"][(x + 1) % N])

    found = derive(function, Wide(halves), TWO, tokens(N, 4, 9))
    assert not found.complete and found.differences


def _width_first(w: Any, x: Any) -> Any:
    return gate(w["f"][:, x], w["g"][:, x]).transpose(1, 2, 0)


def test_tables_with_the_width_first_are_found() -> None:
    found = derive(_width_first, Wide(halves), {"f": (C, N), "g": (C, N)}, tokens(N, 4, 9))
    assert found.complete and sources(found) == {"e.weight": ("f", "g")}, sources(found)


def test_a_difference_at_a_lookup_does_not_say_that_the_source_has_none() -> None:
    found = derive(
        lambda w, x: _width_first(w, jnp.minimum(x, N - 2)),
        Wide(halves),
        {"f": (C, N), "g": (C, N)},
        tokens(N, 4, 9),
    )
    (difference,) = found.differences
    said = "they may be the same, as nothing was found for e.weight"
    assert difference.brief == f"in e: the target takes rows, and so does the JAX model; {said}"
