"""A fused matrix whose parts lie group by group, and are not of one size: queries, a key and a value of each group; keys and wider values."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from torch import nn
from torch.nn import functional

from convert.inference.derivation import Grade
from support.inferred import derive, floats, grades, rms_norm, rules

D, GROUPS, QUERIES, K, V, W, RANK = 12, 2, 3, 6, 5, 4, 5
APART: dict[str, tuple[int, ...]] = {
    "q": (D, GROUPS * QUERIES, K),
    **dict.fromkeys("kv", (D, GROUPS, K)),
    "qb": (GROUPS * QUERIES, K),
    **dict.fromkeys(("kb", "vb"), (GROUPS, K)),
    "o": (GROUPS * QUERIES, K, D),
}


def grouped(w: Any, x: Any) -> Any:
    q, k, v = (jnp.einsum("bsd,dhk->bshk", x, w[name]) + w[f"{name}b"] for name in "qkv")
    return jnp.einsum("bqhk,hkd->bqd", _attend(q, k, v), w["o"])


def _attend(q: Any, k: Any, v: Any) -> Any:
    k, v = (jnp.repeat(y, q.shape[2] // y.shape[2], 2) for y in (k, v))
    weights = jax.nn.softmax(jnp.einsum("bqhk,bshk->bhqs", q, k) / math.sqrt(q.shape[-1]))
    return jnp.einsum("bhqs,bshk->bqhk", weights, v)


class Falcon(nn.Module):
    """For each group its queries, a key and a value; `one`: all groups have the key of the first."""

    def __init__(self, one: bool = False) -> None:
        super().__init__()
        self.query_key_value = nn.Linear(D, GROUPS * (QUERIES + 2) * K)
        self.dense, self.one = nn.Linear(GROUPS * QUERIES * K, D, bias=False), one

    def forward(self, x: Any) -> Any:
        of_groups = self.query_key_value(x).view(*x.shape[:2], GROUPS, QUERIES + 2, K)
        q, k, v = of_groups[..., :-2, :], of_groups[..., [-2], :], of_groups[..., [-1], :]
        k, v = (y.expand(q.shape) for y in (k[:, :, :1] if self.one else k, v))
        q, k, v = (y.flatten(2, 3).transpose(1, 2) for y in (q, k, v))
        return self.dense(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


@pytest.mark.slow
def test_queries_a_key_and_a_value_of_each_group() -> None:
    module = Falcon()
    found = derive(grouped, module, APART, floats(2, 7, D))
    assert grades(found) == {Grade.DERIVED}
    written = rules(found, module)
    assert [rule.split("linear: ")[1] for rule in written[:3]] == [
        '{module: query_key_value, axes: "(C (N + 1 + 1) H)D", part: "1 of 3"}',
        '{module: query_key_value, axes: "(K (F + 1 + 1) H)D", part: "2 of 3"}',
        '{module: query_key_value, axes: "(K (F + 1 + 1) H)D", part: "3 of 3"}',
    ]


@pytest.mark.slow
def test_one_key_for_all_groups_is_a_difference() -> None:
    found = derive(grouped, Falcon(one=True), APART, floats(2, 7, D))
    assert not found.complete and found.proof is None and len(found.differences) == 1


class LowRank(nn.Module):
    """Keys and values of all heads from one latent; a value is not as wide as a key. All heads have one more key, as for positions."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.kv_a = nn.Linear(D, GROUPS * (K + W), bias=False), nn.Linear(D, RANK + W, bias=False)
        self.norm, self.kv_b = nn.RMSNorm(RANK, eps=1e-6), nn.Linear(RANK, GROUPS * (K + V), bias=False)
        self.o_proj = nn.Linear(GROUPS * V, D, bias=False)

    def forward(self, x: Any) -> Any:
        q = self.q_proj(x).unflatten(-1, (GROUPS, K + W)).transpose(1, 2)
        latent, shared = self.kv_a(x).split([RANK, W], -1)
        both = self.kv_b(self.norm(latent)).view(*x.shape[:2], GROUPS, K + V).transpose(1, 2)
        k, v = both.split([K, V], -1)
        k = torch.cat([k, torch.tanh(shared)[:, None].expand(-1, GROUPS, -1, -1)], -1)
        return self.o_proj(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def low_rank(w: Any, x: Any) -> Any:
    """The scores of both parts of the keys are added up."""
    latent = rms_norm(x @ w["a"], w["n"])
    q, k, v = (jnp.einsum("bsd,dhk->bshk", y, w[name]) for name, y in (("q", x), ("k", latent), ("v", latent)))
    scores = jnp.einsum("bqhk,bshk->bhqs", q[..., :K], k)
    scores = (scores + jnp.einsum("bqhk,bsk->bhqs", q[..., K:], jnp.tanh(x @ w["p"]))) / math.sqrt(K + W)
    return jnp.einsum("bqhk,hkd->bqd", jnp.einsum("bhqs,bshk->bqhk", jax.nn.softmax(scores), v), w["o"])


def test_keys_and_wider_values_of_each_head() -> None:
    module = LowRank()
    shapes = {
        "a": (D, RANK),
        "n": (RANK,),
        "p": (D, W),
        "q": (D, GROUPS, K + W),
        "k": (RANK, GROUPS, K),
        "v": (RANK, GROUPS, V),
        "o": (GROUPS, V, D),
    }
    found = derive(low_rank, module, shapes, floats(2, 7, D))
    assert grades(found) == {Grade.DERIVED}
    written = [rule for rule in rules(found, module) if "kv_b" in rule]
    assert [rule.split("part: ")[1] for rule in written] == ['"1 of 2"}', '"2 of 2"}']
