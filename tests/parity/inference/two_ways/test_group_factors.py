"""A number for each node of a graph, in front of the sum over its edges or behind it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

from convert.inference.derivation import Grade
from convert.inference.forms.sums.group_factors import sums_of_scaled_groups
from convert.programs.record_torch import record_torch
from support.inferred import WIDTH, derive, floats, grades, sources

D, NODES = WIDTH, 6
SOURCE, TARGET = np.array([[0, 1, 2, 3, 4, 5, 0, 2, 2], [1, 2, 3, 4, 5, 0, 3, 5, 1]])
SHAPES = {"a": (D, D), "b": (D, D), "v": (D, D), "u": (D, D), "s": (D,)}


class Gated(nn.Module):
    """Gates of edges, divided by their sum; ``fault``: what differs."""

    def __init__(self, fault: str = "") -> None:
        super().__init__()
        self.a, self.b, self.v, self.u = (nn.Linear(D, D, bias=False) for _ in range(4))
        self.norm, self.fault = nn.LayerNorm(D, bias=False), fault

    def forward(self, x: Any) -> Any:
        source, target = torch.tensor(SOURCE), torch.tensor(TARGET)
        gate = (self.a(x)[target] + self.b(x)[source]).sigmoid()
        index = (source if self.fault == "nodes" else target)[:, None].expand(-1, D)
        total = torch.zeros_like(x).scatter_add_(0, index, gate) + (1e-2 if self.fault == "epsilon" else 1e-6)
        y = torch.zeros_like(x).index_add_(0, target, gate * self.v(x)[source]) / total
        return x + self.norm(self.u(x) + y)


def _gated(w: Any, x: Any) -> Any:
    gate = jax.nn.sigmoid((x @ w["a"])[TARGET] + (x @ w["b"])[SOURCE])
    gate = gate / (jax.ops.segment_sum(gate, TARGET, NODES)[TARGET] + 1e-6)
    y = x @ w["u"] + jax.ops.segment_sum(gate * (x @ w["v"])[SOURCE], TARGET, NODES)
    y = y - y.mean(-1, keepdims=True)
    return x + y / jnp.sqrt((y * y).mean(-1, keepdims=True) + 1e-5) * w["s"]


def test_gates_are_divided_by_their_sum() -> None:
    found = derive(_gated, Gated(), SHAPES, floats(NODES, D))
    assert found.complete and grades(found) == {Grade.DERIVED}, found.differences
    assert sources(found)["a.weight"] == "a" and sources(found)["v.weight"] == "v"


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["nodes", "epsilon"])
def test_a_fault_in_the_sum(fault: str) -> None:
    found = derive(_gated, Gated(fault), SHAPES, floats(NODES, D))
    assert found.differences and found.proof is None


@pytest.mark.parametrize("apart", [0.0, 1e-5])
def test_numbers_that_are_nearly_equal_in_each_group_stay_in_front(apart: float) -> None:
    """Of a small layer they are, before it is trained; with other weights they are not."""
    numbers = 1 + torch.as_tensor(TARGET) + apart * torch.arange(len(TARGET))

    class Weighted(nn.Module):
        def forward(self, x: Any, by: Any) -> Any:
            return torch.zeros_like(x).index_add(0, torch.as_tensor(TARGET), x[torch.as_tensor(SOURCE)] * by[:, None])

    given = {"x": np.random.default_rng(0).normal(size=(NODES, D)), "by": numbers.double().numpy()}
    record = record_torch(Weighted(), lambda net, i: {"y": net(i["x"], i["by"])}, given)
    assert sums_of_scaled_groups(record) == (apart == 0)
