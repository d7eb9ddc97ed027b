"""`infer` writes rules where one side has one tensor and the other several: tables of fields, the vectors of graph attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from support.inferred import derive, floats, rules

D = 8
FIELDS = {"equal": (6, 6, 6), "unequal": (4, 6, 3)}


class Tables(nn.Module):
    """A table for each field as a list, one below the other, or along an axis."""

    def __init__(self, way: str, rows: tuple[int, ...]) -> None:
        super().__init__()
        self.way, self.starts = way, [sum(rows[:k]) for k in range(len(rows))]
        if way == "list":
            self.t = nn.ModuleList(nn.Embedding(count, D) for count in rows)
        elif way == "flat":
            self.t = nn.Embedding(sum(rows), D)
        else:
            self.t = nn.Parameter(torch.randn(len(rows), rows[0], D))
        self.o = nn.Linear(len(rows) * D, 3, bias=False)

    def forward(self, x: Any) -> Any:
        if self.way == "list":
            y = torch.stack([table(x[:, k]) for k, table in enumerate(self.t)], 1)
        elif self.way == "flat":
            y = self.t(x + torch.tensor(self.starts))
        else:
            y = self.t[torch.arange(x.shape[1]), x]
        return self.o(torch.relu(y).flatten(1))


def tables(way: str, rows: tuple[int, ...]) -> Any:
    starts = np.cumsum([0, *rows[:-1]])

    def function(w: Mapping[str, Any], x: Any) -> Any:
        if way == "list":
            y = jnp.stack([w[f"t{k}"][x[:, k]] for k in range(len(rows))], 1)
        else:
            y = w["t"][x + starts] if way == "flat" else w["t"][np.arange(len(rows)), x]
        return jax.nn.relu(y).reshape(len(x), -1) @ w["o"]

    return function


def leaves_of(way: str, rows: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    if way == "list":
        return {f"t{k}": (count, D) for k, count in enumerate(rows)}
    return {"t": (sum(rows), D) if way == "flat" else (len(rows), rows[0], D)}


@pytest.mark.parametrize(
    ("source", "target", "fields", "written"),
    [
        ("list", "stacked", "equal", 'axes: DC\n  parameter: {name: t, axes: "(1 + 1 + 1)DC"}'),
        ("flat", "list", "equal", "axes: (D + D + D)C\n  parameter: t.{0,1,2}.weight"),
        ("flat", "list", "unequal", "axes: (D + E + F)C\n  parameter: t.{0,1,2}.weight"),
        ("stacked", "flat", "equal", 'axes: DCE\n  parameter: {name: t.weight, axes: "(D C)E"}'),
    ],
)
def test_tables_of_fields(source: str, target: str, fields: str, written: str):
    rows = FIELDS[fields]
    module = Tables(target, rows)
    shapes = {**leaves_of(source, rows), "o": (len(rows) * D, 3)}

    def inputs(seed: int) -> dict[str, Any]:
        rng = np.random.default_rng(seed)
        return {"x": np.stack([rng.permutation(np.arange(24) % count) for count in rows], 1)}

    found = derive(tables(source, rows), module, shapes, inputs)
    assert written in rules(found, module)[0], rules(found, module)[0]


class Attention(nn.Module):
    """Scores of pairs of nodes: a vector for both nodes, one for each, or a layer for each."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.w = way, nn.Linear(D, D, bias=False)
        if way == "both":
            self.a = nn.Parameter(torch.randn(2 * D, 1))
        elif way == "vectors":
            self.s, self.t = (nn.Parameter(torch.randn(D, 1)) for _ in range(2))
        else:
            self.s, self.t = (nn.Linear(D, 1, bias=False) for _ in range(2))

    def forward(self, x: Any) -> Any:
        h = self.w(x)
        count = h.shape[1]
        if self.way == "both":
            pairs = torch.cat([h[:, :, None].expand(-1, -1, count, -1), h[:, None].expand(-1, count, -1, -1)], -1)
            scores = (pairs @ self.a)[..., 0]
        elif self.way == "vectors":
            scores = h @ self.s + (h @ self.t).transpose(1, 2)
        else:
            scores = self.s(h) + self.t(h).transpose(1, 2)
        return functional.elu(torch.softmax(functional.leaky_relu(scores, 0.2), -1) @ h)


def attention(one: bool) -> Any:
    def function(w: Mapping[str, Any], x: Any) -> Any:
        h = x @ w["w"]
        s, t = (w["a"][:D], w["a"][D:]) if one else (w["s"], w["t"])
        scores = h @ s + (h @ t).transpose(0, 2, 1)
        return jax.nn.elu(jax.nn.softmax(jax.nn.leaky_relu(scores, 0.2), -1) @ h)

    return function


@pytest.mark.parametrize(
    ("one", "target", "written"),
    [
        (False, "both", 'axes: D.\n  parameter: {name: a, axes: "(D + D)."}'),
        (True, "vectors", 'axes: (D + D).\n  parameter: {name: "{s,t}", axes: D.}'),
        (True, "layers", 'einsum: "...(D + D),(D + D)E->...E"\n  from: a\n  linear: "{s,t}"'),
    ],
)
def test_the_vectors_of_graph_attention(one: bool, target: str, written: str):
    module = Attention(target)
    shapes = {"w": (D, D), **({"a": (2 * D, 1)} if one else {"s": (D, 1), "t": (D, 1)})}
    found = derive(attention(one), module, shapes, floats(3, 5, D))
    assert any(written in rule for rule in rules(found, module)), rules(found, module)
