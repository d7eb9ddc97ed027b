"""A gate and what it opens, in one matrix or in two, one below the other or in turns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from torch import nn
from torch.nn.functional import silu

from support.inferred import WIDTH, derive, rules

F = 24


class Gated(nn.Module):
    """The rows of gates and of what they open alternate."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.o = nn.Linear(WIDTH, 2 * F), nn.Linear(F, WIDTH, bias=False)

    def forward(self, x: Any) -> Any:
        y = self.w(x)
        return self.o(silu(y[..., ::2]) * y[..., 1::2])


def gated(one: bool) -> Any:
    def function(w: Mapping[str, Any], x: Any) -> Any:
        gate, up = jnp.split(x @ w["w"] + w["c"], 2, -1) if one else (x @ w["g"] + w["gb"], x @ w["u"] + w["ub"])
        return (jax.nn.silu(gate) * up) @ w["o"]

    return function


@pytest.mark.parametrize(
    ("one", "written"),
    [
        (True, 'einsum: "...D,D(H N)->...(H N)"\n  from: w\n  bias: c\n  linear: {module: w, axes: "(N H)D"}'),
        (
            False,
            'einsum: ...D,DC->...C\n  from: "{g,u}"\n  bias: "{gb,ub}"\n  linear: {module: w, axes: "(C (1 + 1))D"}',
        ),
    ],
)
def test_gates_that_alternate(one: bool, written: str):
    own = {"w": (WIDTH, 2 * F), "c": (2 * F,)} if one else {"g": (WIDTH, F), "gb": (F,), "u": (WIDTH, F), "ub": (F,)}
    module = Gated()
    found = derive(gated(one), module, {**own, "o": (F, WIDTH)})
    assert any(written in rule for rule in rules(found, module)), rules(found, module)
