"""One tensor for gate and up of all experts, and a leaf for each; the source applies the gates before it adds up the experts."""

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

D, EXPERTS, F, CHOSEN = 12, 4, 10, 2
SHAPES = {"r": (D, EXPERTS), **dict.fromkeys(("g", "u"), (EXPERTS, D, F)), "d": (EXPERTS, F, D)}


def experts(w: Any, x: Any) -> Any:
    top, chosen = jax.lax.top_k(x @ w["r"], CHOSEN)
    gates = (jax.nn.one_hot(chosen, EXPERTS) * jax.nn.softmax(top)[..., None]).sum(-2)
    gate, up = (jnp.einsum("bsd,edf->bsef", x, w[name]) for name in "gu")
    return jnp.einsum("bsef,efd,bse->bsd", jax.nn.silu(gate) * up, w["d"], gates)


class Experts(nn.Module):
    """`up_first`: which half is which; `shifted`: the gates of the next expert."""

    def __init__(self, up_first: bool = False, shifted: bool = False) -> None:
        super().__init__()
        self.router = nn.Linear(D, EXPERTS, bias=False)
        self.gate_up_proj = nn.Parameter(torch.randn(EXPERTS, D, 2 * F))
        self.down_proj = nn.Parameter(torch.randn(EXPERTS, F, D))
        self.up_first, self.shifted = up_first, shifted

    def forward(self, x: Any) -> Any:
        rows = x.reshape(-1, D)
        logits = self.router(rows)
        top, chosen = logits.topk(CHOSEN, -1)
        gates = torch.zeros_like(logits).scatter(1, chosen, top.softmax(-1))
        gate, up = torch.bmm(rows.expand(EXPERTS, -1, -1), self.gate_up_proj).chunk(2, -1)
        if self.up_first:
            gate, up = up, gate
        made = torch.bmm(functional.silu(gate) * up, self.down_proj)
        if self.shifted:
            gates = gates.roll(1, 1)
        return (made * gates.T[..., None]).sum(0).view(x.shape)


@pytest.mark.slow
@pytest.mark.parametrize("up_first", [False, True])
def test_gate_and_up_of_all_experts_in_one_tensor(up_first: bool) -> None:
    module = Experts(up_first)
    found = derive(experts, module, SHAPES, floats(2, 7, D))
    assert grades(found) == {Grade.DERIVED}
    (written,) = [rule for rule in rules(found, module) if "gate_up_proj" in rule]
    assert ('from: "{u,g}"' if up_first else 'from: "{g,u}"') in written
    assert 'parameter: {name: gate_up_proj, axes: "DC(E + E)"}' in written


@pytest.mark.slow
def test_gates_of_another_expert_are_a_difference() -> None:
    found = derive(experts, Experts(shifted=True), SHAPES, floats(2, 7, D))
    assert not found.complete and found.proof is None and len(found.differences) == 1
