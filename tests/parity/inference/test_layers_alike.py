"""What `infer` finds in one layer it tries first in the next: further layers cost one candidate for each of their parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from convert.inference.derivation import Grade
from support.inferred import HEADS, WIDTH, derive, floats, grades

D, H = WIDTH, WIDTH // HEADS


def attention(leaves: Mapping[str, Any], x: Any) -> Any:
    for i in range(sum(name.endswith("/q") for name in leaves)):
        q, k, v = (jnp.einsum("btd,dnh->btnh", x, leaves[f"{i}/{part}"]) for part in "qkv")
        seen = jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", q, k) / np.sqrt(H), -1)
        x = x + jnp.einsum("bnts,bsnh,nhd->btd", seen, v, leaves[f"{i}/o"])
    return x


class Attention(torch.nn.Module):
    """One layer; its projections have numbers for names."""

    def __init__(self) -> None:
        super().__init__()
        self.m = torch.nn.ModuleList(torch.nn.Linear(D, D, bias=False) for _ in range(4))

    def forward(self, x: Any) -> Any:
        k, v, q = (part(x).unflatten(-1, (HEADS, H)).transpose(1, 2) for part in self.m[:3])
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        return x + self.m[3](y.transpose(1, 2).flatten(2))


def tried(layers: int) -> int:
    shapes = {f"{i}/{part}": (D, HEADS, H) for i in range(layers) for part in "qkv"}
    shapes |= {f"{i}/o": (HEADS, H, D) for i in range(layers)}
    found = derive(attention, torch.nn.Sequential(*(Attention() for _ in range(layers))), shapes, floats(2, 5, D))
    assert found.complete and grades(found) <= {Grade.DERIVED, Grade.INTERCHANGEABLE}
    return found.tried


def test_a_further_layer_costs_one_candidate_for_each_parameter():
    parameters = 4
    assert tried(4) - tried(3) == parameters
