"""All pairs of nodes, of which a mask hides the node itself, in one program; a list of edges in the other: an EGNN's layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

from convert.inference.derivation import Derivation, Grade
from convert.inference.infer import infer
from support.inferred import grades

D, NODES = 8, 5
ONE, TWO = np.array([(i, j) for i in range(NODES) for j in range(NODES) if i != j]).T
SHAPES = {
    **dict.fromkeys(("of/kernel", "to/kernel", "edge/kernel", "move/kernel", "keep/kernel"), (D, D)),
    **dict.fromkeys(("of/bias", "distance", "edge/bias", "move/bias", "keep/bias"), (D,)),
    "gate/kernel": (D, 1),
    "gate/bias": (1,),
    "step/kernel": (D, 1),
    "node/kernel": (2 * D, D),
    "node/bias": (D,),
}


def linear(i: int, o: int, bias: bool = True) -> nn.Linear:
    return nn.Linear(i, o, bias=bias)


class Layer(nn.Module):
    """Nodes `h` at places `x`; messages along edges, gated, move the places, too."""

    def __init__(self, *, turned: bool) -> None:
        super().__init__()
        self.turned = turned
        self.message = nn.Sequential(linear(2 * D + 1, D), nn.SiLU(), linear(D, D), nn.SiLU())
        self.gate = nn.Sequential(linear(D, 1), nn.Sigmoid())
        self.step = nn.Sequential(linear(D, D), nn.SiLU(), linear(D, 1, bias=False))
        self.node = nn.Sequential(linear(2 * D, D), nn.SiLU(), linear(D, D))

    def forward(self, h: Any, x: Any) -> tuple[Any, Any]:
        one, two = torch.as_tensor(ONE), torch.as_tensor(TWO)
        away = x[:, one] - x[:, two]
        m = self.message(torch.cat([h[:, one], h[:, two], (away**2).sum(-1, keepdim=True)], -1))
        m = m * self.gate(m)
        x = x + torch.zeros_like(x).index_add(1, one, away * self.step(m)) / (NODES - 1)
        met = torch.zeros_like(h).index_add(1, two if self.turned else one, m)
        return h + self.node(torch.cat([h, met], -1)), x


class Model(nn.Module):
    def __init__(self, layers: int, *, turned: bool = False) -> None:
        super().__init__()
        self.first, self.layers = linear(D, D), nn.ModuleList(Layer(turned=turned) for _ in range(layers))

    def forward(self, h: Any, x: Any) -> Any:
        h = self.first(h)
        for layer in self.layers:
            h, x = layer(h, x)
        return torch.cat([h, x], -1)


def _layer(p: Mapping[str, Any], h: Any, x: Any) -> tuple[Any, Any]:
    def dense(name: str, x: Any) -> Any:
        return x @ p[f"{name}/kernel"] + p.get(f"{name}/bias", 0)

    away, others = x[:, :, None] - x[:, None], (1 - np.eye(NODES))[..., None]
    far = (away**2).sum(-1, keepdims=True)
    m = jax.nn.silu(dense("of", h)[:, :, None] + dense("to", h)[:, None] + far * p["distance"])
    m = jax.nn.silu(dense("edge", m))
    m = m * jax.nn.sigmoid(dense("gate", m))
    x = x + (away * dense("step", jax.nn.silu(dense("move", m))) * others).sum(2) / (NODES - 1)
    y = jax.nn.silu(dense("node", jnp.concatenate([h, (m * others).sum(2)], -1)))
    return h + dense("keep", y), x


def derived(layers: int, *, turned: bool = False, seed: int = 0) -> Derivation:
    def function(leaves: Mapping[str, Any], given: Mapping[str, Any]) -> Mapping[str, Any]:
        h, x = given["h"] @ leaves["first/kernel"] + leaves["first/bias"], given["x"]
        for k in range(layers):
            h, x = _layer({name: leaves[f"{k}/{name}"] for name in SHAPES}, h, x)
        return {"y": jnp.concatenate([h, x], -1)}

    def inputs(seed: int) -> dict[str, Any]:
        rng = np.random.default_rng(seed)
        return {"h": rng.normal(size=(2, NODES, D)), "x": rng.normal(size=(2, NODES, 3))}

    shapes = {f"{k}/{name}": shape for k in range(layers) for name, shape in SHAPES.items()}
    shapes |= {"first/kernel": (D, D), "first/bias": (D,)}
    module = Model(layers, turned=turned).eval()
    return infer(function, module, lambda net, i: {"y": net(**i)}, inputs, shapes, seed=seed)


@pytest.mark.parametrize("layers", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_pairs_of_which_one_program_leaves_some_out(layers: int) -> None:
    found = derived(layers)
    assert found.complete and grades(found) == {Grade.DERIVED}, found.differences


@pytest.mark.slow
def test_weights_that_saturate_a_gate_show_no_difference() -> None:
    """With the first weights a wrong bias of a gate fits, and fresh weights refute it; with the next ones the right one is found."""
    found = derived(3, seed=36)
    assert found.complete and grades(found) == {Grade.DERIVED}, found.differences


@pytest.mark.slow
def test_messages_to_the_other_end_are_not_derived() -> None:
    found = derived(1, turned=True)
    assert found.differences and not found.complete
