"""Values that are computed first and used last: the way through what lies between does not depend on them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from torch import nn
from torch.nn import functional

from convert.inference.derivation import Grade
from support.inferred import WIDTH, derive, floats, layer_norm, sources

pytestmark = pytest.mark.slow

D, BESIDE = WIDTH, 12
LEAVES = {"hidden": (D, D), "value": (D, D), "gate": (D, D), **dict.fromkeys(("shift", "s", "o"), (D,))}
NAMES = ["cell", "state", "late", *(f"beside_{k}" for k in range(BESIDE))]
SHAPES = {f"{name}/{key}": shape for name in NAMES for key, shape in LEAVES.items()}
SHAPES |= dict.fromkeys(("into", "back", "out"), (D, D))


def gated(w: Mapping[str, Any], name: str, x: Any) -> Any:
    h = jnp.tanh(x @ w[f"{name}/hidden"] + w[f"{name}/shift"])
    opened = jax.nn.sigmoid(h @ w[f"{name}/gate"]) * (h @ w[f"{name}/value"])
    return layer_norm(x + opened, w[f"{name}/s"], w[f"{name}/o"])


def function(w: Mapping[str, Any], x: Any) -> Any:
    total = sum(gated(w, f"beside_{k}", x[:, k]) for k in range(BESIDE))
    cell, state = (gated(w, name, x[:, -1]) for name in ("cell", "state"))
    h = jnp.tanh(total @ w["into"] + state @ w["back"]) * cell
    return gated(w, "late", x[:, -1]) * (h @ w["out"])


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.glu = nn.Linear(D, D), nn.Linear(D, 2 * D, bias=False)
        self.norm = nn.LayerNorm(D, eps=1e-6)

    def forward(self, x: Any) -> Any:
        return self.norm(x + functional.glu(self.glu(torch.tanh(self.hidden(x))), -1))


class First(nn.Module):
    """Computes what it uses last in front of everything else."""

    def __init__(self) -> None:
        super().__init__()
        self.state, self.cell, self.late = (Gated() for _ in range(3))
        self.beside = nn.ModuleList(Gated() for _ in range(BESIDE))
        self.into, self.back, self.out = (nn.Linear(D, D, bias=False) for _ in range(3))

    def forward(self, x: Any) -> Any:
        state, cell, late = self.state(x[:, -1]), self.cell(x[:, -1]), self.late(x[:, -1])
        total = sum(layer(x[:, k]) for k, layer in enumerate(self.beside))
        return late * self.out(torch.tanh(self.into(total) + self.back(state)) * cell)


def test_layers_between_are_found() -> None:
    found = derive(function, First(), SHAPES, floats(3, BESIDE + 1, D))
    assert found.complete
    added_up = {f"beside.{k}.norm.bias" for k in range(BESIDE)}
    assert all(
        tensor.grade is (Grade.INTERCHANGEABLE if tensor.name in added_up else Grade.DERIVED)
        for tensor in found.tensors
    )
    assert [sources(found)[f"{name}.hidden.weight"] for name in ("state", "cell", "late")] == [
        "state/hidden",
        "cell/hidden",
        "late/hidden",
    ]


def attended(w: Mapping[str, Any], x: Any) -> Any:
    e = jax.nn.leaky_relu((x @ w["a"] + w["c"])[:, :, None] + (x @ w["b"] + w["d"])[:, None], 0.2) @ w["score"]
    return jax.nn.elu(jax.nn.softmax(e, -1) @ (x @ w["b"] + w["d"]) + x @ w["skip"] + w["bias"])


class Attended(nn.Module):
    """The residual comes first; ``slope``: of the leaky ReLU."""

    def __init__(self, slope: float) -> None:
        super().__init__()
        self.left, self.right, self.skip = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D)
        self.score, self.slope = nn.Parameter(torch.empty(D)), slope

    def forward(self, x: Any) -> Any:
        skip, left, right = self.skip(x), self.left(x), self.right(x)
        e = functional.leaky_relu(left[:, :, None] + right[:, None], self.slope)  # the difference
        return functional.elu((e @ self.score).softmax(-1) @ right + skip)


OF_PAIRS = {**dict.fromkeys(("a", "b", "skip"), (D, D)), **dict.fromkeys(("c", "d", "score", "bias"), (D,))}


@pytest.mark.parametrize("slope", [0.2, 0.1])
def test_a_difference_behind_a_residual_that_comes_first_is_named(slope: float) -> None:
    found = derive(attended, Attended(slope), OF_PAIRS, floats(3, 6, D))
    assert found.complete is (slope == 0.2)
    if not found.complete:
        (difference,) = found.differences
        assert "leaky_relu with slope 0.1 for leaky_relu with slope 0.2" in difference.problem and difference.shown
