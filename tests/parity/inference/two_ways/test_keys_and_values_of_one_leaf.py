"""Grouped queries: the source has keys and values in one leaf and turns halves, the target turns neighbours, as complex numbers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from support.inferred import derive, floats, rules, sources

D, GROUPS, EACH, HEAD, T = 16, 2, 2, 4, 7
N = GROUPS * EACH
SHAPES = {"q": (D, GROUPS, EACH, HEAD), "kv": (2, D, GROUPS, HEAD), "o": (GROUPS, EACH, HEAD, D)}
RATES = 1e4 ** (-np.arange(0, HEAD, 2) / HEAD)


def turned(x: Any) -> Any:
    angle = (np.arange(T)[:, None] * RATES).reshape(1, T, *[1] * (x.ndim - 3), HEAD // 2)
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], -1)


def attention(w: Any, x: Any) -> Any:
    queries = turned(jnp.einsum("BTD,DGMH->BTGMH", x, w["q"]))
    keys, values = jnp.einsum("BTD,CDGH->CBTGH", x, w["kv"])
    scores = jnp.einsum("BTGMH,BSGH->BGMTS", queries / np.sqrt(HEAD), turned(keys))
    scores = jnp.where(np.tri(T, dtype=bool), scores, -2e38)
    mixed = jnp.einsum("BGMTS,BSGH->BTGMH", jax.nn.softmax(scores, -1), values)
    return jnp.einsum("BTGMH,GMHD->BTD", mixed, w["o"])


class Attention(torch.nn.Module):
    def __init__(self, fused: bool) -> None:
        super().__init__()
        widths = [N * HEAD, GROUPS * HEAD, GROUPS * HEAD]
        self.widths, names = widths, ["wqkv"] if fused else ["wq", "wk", "wv"]
        for name, width in zip(names, [sum(widths)] if fused else widths, strict=True):
            self.add_module(name, torch.nn.Linear(D, width, bias=False))
        self.names, self.wo = names, torch.nn.Linear(N * HEAD, D, bias=False)

    def forward(self, x: Any) -> Any:
        each = torch.cat([getattr(self, name)(x) for name in self.names], -1).split(self.widths, -1)
        queries, keys, values = (y.unflatten(-1, (-1, HEAD)).transpose(1, 2) for y in each)
        angles = torch.outer(torch.arange(T).to(x.dtype), torch.as_tensor(RATES).to(x.dtype))
        turns = torch.polar(torch.ones_like(angles), angles)
        queries, keys = (
            torch.view_as_real(torch.view_as_complex(y.unflatten(-1, (-1, 2)).contiguous()) * turns).flatten(-2)
            for y in (queries, keys)
        )
        keys, values = (y.repeat_interleave(EACH, 1) for y in (keys, values))
        mixed = scaled_dot_product_attention(queries, keys, values, is_causal=True)
        return self.wo(mixed.transpose(1, 2).flatten(-2))


@pytest.mark.parametrize("fused", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_keys_that_lie_beside_values_are_turned(fused: bool) -> None:
    """The rows of a fused matrix are not divided into three equal parts."""
    module = Attention(fused)
    found = derive(attention, module, SHAPES, floats(3, T, D))
    assert found.complete, found.differences
    parts = {"wqkv.weight": ("q", "kv")} if fused else {"wq.weight": "q", "wk.weight": "kv", "wv.weight": "kv"}
    assert sources(found) == {**parts, "wo.weight": "o"}
    assert any("rope" in rule for rule in rules(found, module))
