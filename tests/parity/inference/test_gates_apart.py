"""The gates of a cell: one leaf with a part or an element for each in the source, a layer or a parameter for each in the target."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch

from support.inferred import WIDTH, derive, rules

D, N, T = WIDTH, 4, 7
GATES = "ifzo"
SHAPES = {"k": (D, 4 * D), "c": (4 * D,), "r": (4, N, N, N), "u": (D, 4 * D), "b": (4 * D,)}


class Gates(torch.nn.Module):
    """As an sLSTM has them: of the inputs, of the heads of a state, and of plain matrices."""

    def __init__(self) -> None:
        super().__init__()
        parameter = torch.nn.Parameter
        for gate in GATES:
            setattr(self, f"w{gate}", torch.nn.Linear(D, D))
            setattr(self, f"r{gate}", parameter(torch.zeros(N, N, N)))
            setattr(self, f"u{gate}", parameter(torch.zeros(D, D)))
            setattr(self, f"b{gate}", parameter(torch.zeros(D)))

    def forward(self, x: Any) -> Any:
        def heads(gate: str) -> Any:
            return torch.einsum("blhd,hde->blhe", x.unflatten(-1, (N, N)), getattr(self, f"r{gate}")).flatten(-2)

        i, f, z, o = (getattr(self, f"w{gate}")(x) + heads(gate) for gate in GATES)
        y = torch.sigmoid(i) * torch.tanh(z) + torch.relu(f) * torch.sigmoid(o)
        i, f, z, o = (y @ getattr(self, f"u{gate}") + getattr(self, f"b{gate}") for gate in GATES)
        return torch.sigmoid(i) * torch.tanh(z) + torch.relu(f) * o


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = Gates()

    def forward(self, x: Any) -> Any:
        return self.cell(x)


def gates(w: Mapping[str, Any], x: Any) -> Any:
    heads = jnp.einsum("blhd,ghde->blghe", x.reshape(*x.shape[:-1], N, N), w["r"])
    i, f, z, o = jnp.split(x @ w["k"] + w["c"] + heads.reshape(*x.shape[:-1], -1), 4, -1)
    y = jax.nn.sigmoid(i) * jnp.tanh(z) + jax.nn.relu(f) * jax.nn.sigmoid(o)
    i, f, z, o = jnp.split(y @ w["u"] + w["b"], 4, -1)
    return jax.nn.sigmoid(i) * jnp.tanh(z) + jax.nn.relu(f) * o


@pytest.mark.slow
def test_gates_that_one_side_has_apart_have_rules() -> None:
    module = Model()
    assert set(rules(derive(gates, module, SHAPES), module)) == {
        "- from: r\n  axes: (1 + 1 + 1 + 1)DCE\n  parameter: cell.{ri,rf,rz,ro}",
        "- from: u\n  axes: F(G + G + G + G)\n  parameter: cell.{ui,uf,uz,uo}",
        "- from: b\n  axes: (F + F + F + F)\n  parameter: cell.{bi,bf,bz,bo}",
        '- einsum: "...F,F(G + G + G + G)->...(G + G + G + G)"\n  from: k\n  bias: c\n  linear: cell.{wi,wf,wz,wo}',
    }
