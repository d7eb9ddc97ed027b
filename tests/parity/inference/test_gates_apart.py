"""The gates of a cell: one leaf with a part or an element for each in the source, a layer or a parameter for each in the target."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch

from convert.inference.derivation import Grade
from support.inferred import WIDTH, derive, floats, grades, rules

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


def fused_gru(w: Mapping[str, Any], x: Any) -> Any:
    """As Haiku's: one matrix for all gates of the input, one for two gates of the state."""
    state, found = jnp.zeros((x.shape[0], D)), []
    for t in range(x.shape[1]):
        zr, a = jnp.split(x[:, t] @ w["i"], [2 * D], -1)
        z, r = jnp.split(jax.nn.sigmoid(zr + state @ w["h"][:, : 2 * D] + w["b"][: 2 * D]), 2, -1)
        a = jnp.tanh(a + (r * state) @ w["h"][:, 2 * D :] + w["b"][2 * D :])
        found.append(state := (1 - z) * state + z * a)
    return jnp.stack(found, 1)


def joined_gru(w: Mapping[str, Any], x: Any) -> Any:
    """A matrix for each gate, which multiplies input and state side by side."""
    state, found = jnp.zeros((x.shape[0], D)), []
    for t in range(x.shape[1]):
        both = jnp.concatenate([x[:, t], state], -1)
        z, r = jax.nn.sigmoid(both @ w["z"] + w["zb"]), jax.nn.sigmoid(both @ w["r"] + w["rb"])
        a = jnp.tanh(jnp.concatenate([x[:, t], r * state], -1) @ w["a"] + w["ab"])
        found.append(state := (1 - z) * state + z * a)
    return jnp.stack(found, 1)


class JoinedGRU(torch.nn.Module):
    def __init__(self, fault: bool = False) -> None:
        super().__init__()
        self.z, self.r, self.a = (torch.nn.Linear(N + D, D) for _ in "zra")
        self.fault = fault

    def forward(self, x: Any) -> Any:
        state, found = torch.zeros(len(x), D).to(x), []
        for t in range(x.shape[1]):
            both = torch.cat([x[:, t], state], -1)
            z, r = torch.sigmoid(self.z(both)), torch.sigmoid(self.r(both))
            reset = (0.5 if self.fault else 1) * r * state
            state = (1 - z) * state + z * torch.tanh(self.a(torch.cat([x[:, t], reset], -1)))
            found.append(state)
        return torch.stack(found, 1)


class FusedGRU(torch.nn.Module):
    def __init__(self, fault: bool = False) -> None:
        super().__init__()
        self.i, self.h = torch.nn.Linear(N, 3 * D), torch.nn.Linear(D, 2 * D, bias=False)
        self.a, self.fault = torch.nn.Linear(D, D, bias=False), fault

    def forward(self, x: Any) -> Any:
        state, found = torch.zeros(len(x), D).to(x), []
        for t in range(x.shape[1]):
            (z, r, a), (hz, hr) = self.i(x[:, t]).chunk(3, -1), self.h(state).chunk(2, -1)
            z, r = torch.sigmoid(z + hz), torch.sigmoid(r + hr)
            a = torch.tanh(a + (self.a(state) if self.fault else self.a(r * state)))
            state = (1 - z) * state + z * a
            found.append(state)
        return torch.stack(found, 1)


FUSED = {"i": (N, 3 * D), "h": (D, 3 * D), "b": (3 * D,)}
JOINED = dict.fromkeys("zra", (N + D, D)) | dict.fromkeys(("zb", "rb", "ab"), (D,))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "module", "shapes"),
    [(fused_gru, JoinedGRU, FUSED), pytest.param(joined_gru, FusedGRU, JOINED, marks=pytest.mark.slow)],
)
def test_gates_of_input_and_state_side_by_side_in_one_program(function, module, shapes):
    found = derive(function, module(), shapes, floats(3, T, N))
    assert found.complete and grades(found) == {Grade.DERIVED}
    faulty = derive(function, module(fault=True), shapes, floats(3, T, N))
    assert not faulty.complete and "multiplies" in str(faulty.differences[0].problem), faulty.differences
