"""Tokens that are sorted by expert, as transformers has them: the first layer of all experts runs before the second of any."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from torch import nn
from torch.nn import functional

from convert.inference.derivation import Grade
from support.inferred import derive, floats, grades, rules

D, EXPERTS, CHOSEN = 8, 5, 2
SHAPES = {"r": (D, EXPERTS), "o": (D, D), **dict.fromkeys("gud", (EXPERTS, D, D))}


def experts(w: Any, x: Any) -> Any:
    top, chosen = jax.lax.top_k(jax.nn.softmax(x @ w["r"]), CHOSEN)
    gates = (jax.nn.one_hot(chosen, EXPERTS) * top[..., None]).sum(-2)
    made = jax.nn.silu(jnp.einsum("td,edf->tef", x, w["g"])) * jnp.einsum("td,edf->tef", x, w["u"])
    return jnp.tanh(x + jnp.einsum("tef,efd,te->td", made, w["d"], gates)) @ w["o"]


class Sorted(nn.Module):
    """`exchanged`: the tokens of two experts go to each other's; `up_first`: the activation is on the other half."""

    def __init__(self, exchanged: bool = False, up_first: bool = False) -> None:
        super().__init__()
        self.router, self.out = nn.Linear(D, EXPERTS, bias=False), nn.Linear(D, D, bias=False)
        self.gate_up_proj = nn.Parameter(torch.randn(EXPERTS, 2 * D, D))
        self.down_proj = nn.Parameter(torch.randn(EXPERTS, D, D))
        self.exchanged, self.up_first = exchanged, up_first

    def forward(self, x: Any) -> Any:
        gates, chosen = self.router(x).softmax(-1).topk(CHOSEN, -1)
        if self.exchanged:
            chosen = torch.tensor([0, 3, 2, 1, 4])[chosen]
        of, order = chosen.reshape(-1).sort()
        ends = torch.histc(of.float(), bins=EXPERTS, min=0, max=EXPERTS - 1).cumsum(0, dtype=torch.int32)
        both = torch._grouped_mm(x[order // CHOSEN], self.gate_up_proj.transpose(-2, -1), offs=ends)
        gate, up = both.chunk(2, -1)
        if self.up_first:
            gate, up = up, gate
        made = torch._grouped_mm(functional.silu(gate) * up, self.down_proj.transpose(-2, -1), offs=ends)
        made = (made * gates.reshape(-1)[order][:, None])[order.argsort()]
        return self.out(torch.tanh(x + made.view(-1, CHOSEN, D).sum(1)))


@pytest.mark.parametrize("up_first", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_tokens_sorted_by_expert(up_first: bool) -> None:
    module = Sorted(up_first=up_first)
    found = derive(experts, module, SHAPES, floats(20, D))
    assert found.complete and grades(found) == {Grade.DERIVED}
    assert found.tried < 300
    (written,) = [rule for rule in rules(found, module) if "gate_up_proj" in rule]
    assert ('from: "{u,g}"' if up_first else 'from: "{g,u}"') in written


@pytest.mark.slow
def test_two_experts_that_are_exchanged_have_each_others_weights() -> None:
    """The same values: so each tensor has the leaf's experts in another order."""
    found = derive(experts, Sorted(exchanged=True), SHAPES, floats(20, D))
    assert found.complete and grades(found) == {Grade.DERIVED}
    assert len(found.tensor("down_proj").parts) > 1 or found.tensor("down_proj").parts[0].positions[D * D] != D * D
