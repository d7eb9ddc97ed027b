"""Matrices whose rows are gates and whose columns are the input and the state, each block a leaf of its own: one rule, with two lists of leaves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import flax.linen as linen_layers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

from convert.inference.rule_file.layers.tensors import GRID
from convert.inference.rule_file.proof import compare_rules
from convert.inference.rule_file.write import write_rules
from convert.verify.target_model import model_of_module
from support.inferred import derive, floats, linen, rules

B, T = 3, 5
Leaves = Mapping[str, Any]


class Lstm(nn.Module):
    """An LSTM with one layer for all gates, as tutorials write it; `wrong`: the gates of input and state in other orders."""

    def __init__(self, width: int, hidden: int, wrong: bool = False) -> None:
        super().__init__()
        self.gates, self.hidden, self.wrong = nn.Linear(width + hidden, 4 * hidden), hidden, wrong

    def forward(self, given: Any) -> Any:
        h = c = torch.zeros(len(given), self.hidden).to(given)
        found = []
        for x in given.unbind(1):
            i, f, g, o = self.gates(torch.cat([x, h], -1)).chunk(4, -1)
            if self.wrong:
                i, f = torch.minimum(i, f), torch.maximum(i, f)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            found.append(h)
        return torch.stack(found, 1)


class Flax(linen_layers.Module):
    hidden: int

    @linen_layers.compact
    def __call__(self, x: Any) -> Any:
        return linen_layers.RNN(linen_layers.LSTMCell(self.hidden, name="cell"))(x)


@pytest.mark.slow
@pytest.mark.parametrize(("width", "hidden"), [(4, 6), (6, 6)])
def test_the_gates_of_flax_in_one_layer(width: int, hidden: int) -> None:
    function, shapes = linen(Flax(hidden), np.zeros((B, T, width)))
    net = Lstm(width, hidden)
    (rule,) = rules(derive(function, net, shapes, floats(B, T, width)), net)
    assert '  from: ["params/cell/{ii,if,ig,io}/kernel", "params/cell/{hi,hf,hg,ho}/kernel"]\n' in rule
    assert "  bias: params/cell/{hi,hf,hg,ho}/bias\n" in rule and rule.endswith("linear: gates")


@pytest.mark.slow
def test_other_gates_are_not_derived() -> None:
    function, shapes = linen(Flax(6), np.zeros((B, T, 4)))
    assert not derive(function, Lstm(4, 6, wrong=True), shapes, floats(B, T, 4)).complete


def test_a_stack_of_layers() -> None:
    """Its rule has an index."""
    width = 4

    def function(w: Leaves, given: Any) -> Any:
        for k in range(2):

            def step(h: Any, x: Any, k: int = k) -> Any:
                z, n = (x @ w[f"{k}/w{g}"] + h @ w[f"{k}/u{g}"] + w[f"{k}/b{g}"] for g in "zn")
                h = jax.nn.sigmoid(z) * h + jnp.tanh(n)
                return h, h

            given = jax.lax.scan(step, jnp.zeros((B, width)), given.swapaxes(0, 1))[1].swapaxes(0, 1)
        return given

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(2 * width, 2 * width) for _ in range(2))

        def forward(self, given: Any) -> Any:
            for layer in self.layers:
                h = torch.zeros(len(given), width).to(given)
                found = []
                for x in given.unbind(1):
                    z, n = layer(torch.cat([x, h], -1)).chunk(2, -1)
                    h = z.sigmoid() * h + n.tanh()
                    found.append(h)
                given = torch.stack(found, 1)
            return given

    net = Net()
    shapes = {f"{k}/{leaf}{g}": (width,) * (1 + (leaf != "b")) for k in range(2) for leaf in "wub" for g in "zn"}
    (rule,) = rules(derive(function, net, shapes, floats(B, T, width)), net)
    assert '  from: ["{i}/{wz,wn}", "{i}/{uz,un}"]\n' in rule and rule.endswith("linear: layers.{i}")


def test_blocks_of_unequal_sizes_have_no_rule() -> None:
    """Two gates in one leaf, and the third in another; one rule would say that all have as many rows."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gates = nn.Linear(5, 3 * 2)

        def forward(self, x: Any) -> Any:
            h = x.new_zeros(len(x), 2)
            for step in x.unbind(1):
                z, r, o = self.gates(torch.cat([step, h], -1)).chunk(3, -1)
                h = z.sigmoid() * h + r.sigmoid() * o.tanh()
            return h

    def function(w: Leaves, x: Any) -> Any:
        h = jnp.zeros((len(x), 2))
        for t in range(x.shape[1]):
            z, r = jnp.split(jax.nn.sigmoid(x[:, t] @ w["wg"] + h @ w["ug"] + w["bg"]), 2, -1)
            h = z * h + r * jnp.tanh(x[:, t] @ w["wo"] + h @ w["uo"] + w["bo"])
        return h

    shapes = {"wg": (3, 4), "ug": (2, 4), "bg": (4,), "wo": (3, 2), "uo": (2, 2), "bo": (2,)}
    net = Net()
    found = derive(function, net, shapes, floats(B, 4, 3))
    written = write_rules(found, model_of_module(net, "Net"))
    assert found.complete and GRID in written.open["gates.weight"]
    assert compare_rules(written.decided, found, written.open) == []
