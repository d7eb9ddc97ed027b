"""Heads of attention one by one in one program, with a layer for each, and all at once in the other."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from torch import nn

from convert.inference.derivation import Grade
from convert.inference.rule_file.proof import compare_rules
from convert.inference.rule_file.write import write_rules
from convert.verify.target_model import model_of_module
from support.inferred import WIDTH, derive, floats, grades, rules, sources

D, K = WIDTH, 4


class Heads(nn.Module):
    """A layer for each head; `same`: the last head has the queries of the first."""

    def __init__(self, heads: int, shared: bool, same: bool = False) -> None:
        super().__init__()
        self.q, self.k, self.v = (
            nn.ModuleList(nn.Linear(D, K, bias=False) for _ in range(count))
            for count in (heads, heads, 1 if shared else heads)
        )
        self.o = nn.Linear(K if shared else heads * K, D)
        self.shared, self.same = shared, same

    def forward(self, x: Any) -> Any:
        out = []
        for h, k in enumerate(self.k):
            q = self.q[0] if self.same and k is self.k[-1] else self.q[h]
            p = torch.bmm(q(x), k(x).transpose(1, 2)) / math.sqrt(K)
            out.append(torch.bmm(p.softmax(-1), self.v[0 if self.shared else h](x)))
        return self.o(torch.stack(out, 2).mean(2) if self.shared else torch.cat(out, -1))


class Fused(nn.Module):
    def __init__(self, heads: int, shared: bool) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(D, heads * K, bias=False), nn.Linear(D, heads * K, bias=False)
        self.v = nn.Linear(D, K if shared else heads * K, bias=False)
        self.o = nn.Linear(K if shared else heads * K, D)
        self.heads, self.shared = heads, shared

    def forward(self, x: Any) -> Any:
        q, k, v = (f(x).unflatten(-1, (-1, K)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = (q @ k.transpose(-1, -2) / math.sqrt(K)).softmax(-1) @ v
        return self.o(y.mean(1) if self.shared else y.transpose(1, 2).flatten(2))


def fused(heads: int, shared: bool) -> Any:
    def function(w: Any, x: Any) -> Any:
        q, k, v = ((x @ w[name]).reshape(*x.shape[:2], -1, K) for name in "qkv")
        p = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(K))
        y = jnp.einsum("bhqk,bkhd->bqhd", p, jnp.broadcast_to(v, k.shape))
        return (y.mean(2) if shared else y.reshape(*x.shape[:2], -1)) @ w["o"] + w["b"]

    wide = heads * K
    return function, {
        "q": (D, wide),
        "k": (D, wide),
        "v": (D, K if shared else wide),
        "o": (K if shared else wide, D),
        "b": (D,),
    }


def listed(heads: int, shared: bool) -> Any:
    def function(w: Any, x: Any) -> Any:
        out = []
        for h in range(heads):
            q, k, v = (x @ w[name] for name in (f"{h}/q", f"{h}/k", "v" if shared else f"{h}/v"))
            out.append(jax.nn.softmax(q @ k.transpose(0, 2, 1) / math.sqrt(K)) @ v)
        return (sum(out) / heads if shared else jnp.concatenate(out, -1)) @ w["o"] + w["b"]

    of_each = {f"{h}/{name}": (D, K) for h in range(heads) for name in ("qk" if shared else "qkv")}
    return function, {**of_each, **({"v": (D, K)} if shared else {}), "o": (K if shared else heads * K, D), "b": (D,)}


@pytest.mark.slow
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("heads", [4, 8])
def test_a_layer_for_each_head(heads: int, shared: bool) -> None:
    found = derive(*_with(fused(heads, shared), Heads(heads, shared)))
    assert found.complete, found.differences
    assert sources(found)["k.1.weight"] == "k"
    assert grades(found) <= {Grade.DERIVED, Grade.INTERCHANGEABLE}


@pytest.mark.slow
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("heads", [3, 8])
def test_a_leaf_for_each_head(heads: int, shared: bool) -> None:
    found = derive(*_with(listed(heads, shared), Fused(heads, shared)))
    assert found.complete, found.differences
    assert sources(found)["o.weight"] == "o"


@pytest.mark.slow
def test_a_head_that_shares_its_queries_is_not_derived() -> None:
    found = derive(*_with(fused(4, False), Heads(4, False, same=True)))
    assert not found.complete and found.differences


def _with(source: Any, module: nn.Module) -> tuple[Any, nn.Module, Any]:
    function, shapes = source
    return function, module, shapes


class Sliced(nn.Module):
    """Queries, keys and values of one head after the other, as rows of one weight; ``fault``: the keys are the values, too."""

    def __init__(self, *, fault: bool = False) -> None:
        super().__init__()
        self.qkv, self.o = nn.Linear(K, 12 * K, bias=False), nn.Linear(4 * K, K, bias=False)
        self.fault = fault

    def forward(self, x: Any) -> Any:
        heads = []
        for rows in self.qkv.weight.split(3 * K):
            q, k, v = (nn.functional.linear(x, part) for part in rows.split(K))
            heads.append((q @ k.mT / math.sqrt(K)).softmax(-1) @ (k if self.fault else v))
        return self.o(torch.cat(heads, -1))


def _kernels_with_heads(w: Any, x: Any) -> Any:
    q, k, v = (jnp.einsum("btd,dhk->bhtk", x, w[name]) for name in "qkv")
    y = jax.nn.softmax(q @ jnp.swapaxes(k, 2, 3) / math.sqrt(K)) @ v
    return jnp.einsum("bhtk,hkd->btd", y, w["o"])


KERNELS = dict.fromkeys("qkv", (K, 4, K)) | {"o": (4, K, K)}


@pytest.mark.slow
def test_heads_that_are_sliced_from_one_weight_keep_their_order() -> None:
    module = Sliced()
    found = derive(_kernels_with_heads, module, KERNELS, floats(2, 5, K))
    assert found.complete
    assert any('"(N (1 + 1 + 1) H)D"' in rule for rule in rules(found, module))


@pytest.mark.slow
def test_heads_that_are_sliced_from_one_weight_without_values_are_not_derived() -> None:
    found = derive(_kernels_with_heads, Sliced(fault=True), KERNELS, floats(2, 5, K))
    assert found.differences and found.proof is None and Grade.DERIVED not in grades(found)


class InTurns(nn.Module):
    """Queries, keys and values of one head after the other, from one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.o = nn.Linear(5, 3 * 3 * K, bias=False), nn.Linear(3 * K, 5, bias=False)

    def forward(self, x: Any) -> Any:
        q, k, v = self.qkv(x).unflatten(-1, (3, 3 * K)).transpose(1, 2).chunk(3, -1)
        return self.o(((torch.tanh(q) @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("flat", ["q", "qkv"])
def test_kernels_without_an_axis_of_heads_in_a_matrix_with_one_head_after_the_other(flat: str) -> None:
    def function(w: Any, x: Any) -> Any:
        q, k, v = ((x @ w[name].reshape(5, -1)).reshape(*x.shape[:2], 3, K) for name in "qkv")
        p = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", jnp.tanh(q), k))
        return jnp.einsum("bhqk,bkhd->bqhd", p, v).reshape(*x.shape[:2], -1) @ w["o"]

    shapes = {name: (5, 3 * K) if name in flat else (5, 3, K) for name in "qkv"} | {"o": (3 * K, 5)}
    module = InTurns()
    found = derive(function, module, shapes, floats(2, 6, 5))
    found_rules = rules(found, module)
    kernels = (
        ['- einsum: "...D,D(N H)->...(N H)"\n  from: "{q,k,v}"\n']
        if flat == "qkv"
        else [
            '- einsum: "...D,D(N H)->...(N H)"\n  from: q\n',
            *(f"- einsum: ...D,DNH->...NH\n  from: {of}\n" for of in "kv"),
        ]
    )
    for rule, kernel in zip(found_rules, kernels, strict=False):
        assert rule.startswith(f'{kernel}  linear: {{module: qkv, axes: "(N (1 + 1 + 1) H)D"'), rule
    text = write_rules(found, model_of_module(module, "Model")).text
    planted = text.replace("from: k\n", "from: w\n").replace("from: v\n", "from: k\n").replace("from: w\n", "from: v\n")
    planted = planted.replace("{q,k,v}", "{q,v,k}")  # keys and values are swapped
    assert [wrong.tensor for wrong in compare_rules(planted, found)] == ["qkv.weight"]
