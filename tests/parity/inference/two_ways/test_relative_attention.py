"""Attention with relative positions, as Transformer-XL's in a Conformer, and Shaw's: the biases stand in the queries, or in the scores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from convert.inference.derivation import Grade
from support.inferred import HEADS, WIDTH, derive, floats, grades, rules, sources
from support.relative_scores import relative_scores

D, N, H, T = WIDTH, HEADS, WIDTH // HEADS, 6
BIASES = {"heads": (N, H), "flat": (N * H,), "with ones": (1, N, 1, H)}


def _positions() -> Any:
    angles = np.arange(T - 1, -T, -1.0)[:, None] * 10000.0 ** (-np.arange(0, D, 2) / D)
    return np.stack([np.sin(angles), np.cos(angles)], -1).reshape(2 * T - 1, D)


def _source(*, folded: bool, bias: tuple[int, ...], pairs: bool = False) -> Callable[[Any, Any], Any]:
    """Shifts the scores by indices; or takes the row of each pair of `pairs` in front of the product."""

    def function(w: Any, x: Any) -> Any:
        q, k, v = (jnp.einsum("btd,dnh->btnh", x, w[c]) + w["b" + c] for c in "qkv")
        p = jnp.einsum("td,dnh->tnh", _positions(), w["p"])
        one, two = (w[c].reshape(N, H) for c in ("one", "two"))
        made = relative_scores(q, k, p, one, two, folded=folded)
        if pairs:
            rows = p[T - 1 - np.arange(T)[:, None] + np.arange(T)]
            made = jnp.einsum("btnh,bsnh->bnts", q + one, k) + jnp.einsum("btnh,tsnh->bnts", q + two, rows)
        scores = jax.nn.softmax(made / np.sqrt(H), -1)
        return jnp.einsum("bnts,bsnh,nhd->btd", scores, v, w["o"]) + w["bo"]

    return function


class Attention(torch.nn.Module):
    """Shifts the scores by a column of zeros and a view, as ESPnet and transformers do."""

    def __init__(self, bias: tuple[int, ...], *, folded: bool = False, fault: str = "") -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (torch.nn.Linear(D, D) for _ in range(4))
        self.p = torch.nn.Linear(D, D, bias=False)
        self.one, self.two = (torch.nn.Parameter(torch.randn(bias)) for _ in range(2))
        self.folded, self.fault = folded, fault

    def shifted(self, x: Any) -> Any:
        zero = torch.zeros((*x.shape[:3], 1), dtype=x.dtype)
        x = torch.cat([zero, x] if self.fault != "shift" else [x, zero], -1).view(*x.shape[:2], -1, x.shape[2])
        return x[:, :, 1:].reshape(*x.shape[:2], T, -1)[..., :T]

    def forward(self, x: Any) -> Any:
        q, k, v = (m(x).view(len(x), -1, N, H).transpose(1, 2) for m in (self.q, self.k, self.v))
        p = self.p(torch.as_tensor(_positions(), dtype=x.dtype)[None]).view(1, -1, N, H).transpose(1, 2)
        one, two = (b.view(1, N, 1, H) for b in (self.one, self.two))
        if self.fault == "sign":
            one = -one
        if self.folded:
            content = q @ k.transpose(-2, -1) + (one * k).sum(-1)[:, :, None]
            position = q @ p.transpose(-2, -1) + (two * p).sum(-1)[:, :, None]
        else:
            content = (q + one) @ k.transpose(-2, -1)
            position = (q if self.fault == "one bias" else q + two) @ p.transpose(-2, -1)
        scores = ((content + self.shifted(position)) / H**0.5).softmax(-1)
        return self.o((scores @ v).transpose(1, 2).reshape(len(x), -1, D))


def _shapes(bias: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    weights = {**dict.fromkeys("qkvp", (D, N, H)), "o": (N, H, D), "bo": (D,)}
    return {**weights, **dict.fromkeys(("bq", "bk", "bv"), (N, H)), **dict.fromkeys(("one", "two"), bias)}


@pytest.mark.parametrize(
    ("source", "target", "of_source", "of_target"),
    [
        (True, False, "heads", "heads"),
        (False, True, "heads", "flat"),
        pytest.param(False, False, "heads", "with ones", marks=pytest.mark.slow),
        pytest.param(True, False, "with ones", "heads", marks=pytest.mark.slow),
        pytest.param(False, True, "flat", "with ones", marks=pytest.mark.slow),
        pytest.param(True, True, "flat", "heads", marks=pytest.mark.slow),
    ],
)
def test_biases_of_queries_in_any_form(source: bool, target: bool, of_source: str, of_target: str) -> None:
    module = Attention(BIASES[of_target], folded=target)
    found = derive(_source(folded=source, bias=BIASES[of_source]), module, _shapes(BIASES[of_source]), floats(2, T, D))
    assert found.complete and grades(found) == {Grade.DERIVED}
    assert {name: sources(found.tensor(name)) for name in ("one", "two", "p.weight", "q.bias")} == {
        "one": "one",
        "two": "two",
        "p.weight": "p",
        "q.bias": "bq",
    }
    assert rules(found, module)


@pytest.mark.parametrize("fault", ["", pytest.param("shift", marks=pytest.mark.slow)])
def test_the_row_of_each_pair_meets_queries_with_biases(fault: str) -> None:
    module = Attention((N, H), fault=fault)
    found = derive(_source(folded=False, bias=(N, H), pairs=True), module, _shapes((N, H)), floats(2, T, D))
    assert found.complete == (not fault), found.differences
    assert not fault or (found.proof is None and grades(found).isdisjoint({Grade.DERIVED, Grade.INTERCHANGEABLE}))


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["shift", "one bias"])
@pytest.mark.parametrize("folded", [False, True])
def test_a_fault_is_never_derived(fault: str, folded: bool) -> None:
    module = Attention((N, H), fault=fault)
    found = derive(_source(folded=folded, bias=(N, H)), module, _shapes((N, H)), floats(2, T, D))
    assert not found.complete and found.differences and found.proof is None
    assert grades(found).isdisjoint({Grade.DERIVED, Grade.INTERCHANGEABLE})


@pytest.mark.slow
def test_a_table_of_relative_positions_in_the_keys_or_in_the_scores() -> None:
    """Shaw's: q (k + a) is q k + q a."""
    rows = np.clip(np.arange(T) - np.arange(T)[:, None] + 3, 0, 6)

    def source(w: Any, x: Any) -> Any:
        q, k, v = ((x @ w[c]).reshape(-1, T, N, H) for c in "qkv")
        keys = k[:, None] + w["r"][rows][None, :, :, None]
        scores = jax.nn.softmax(jnp.einsum("btnh,btsnh->bnts", q, keys) / 2, -1)
        return jnp.einsum("bnts,bsnh->btnh", scores, v).reshape(x.shape) @ w["o"]

    class Shaw(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v, self.o = (torch.nn.Linear(D, D, bias=False) for _ in range(4))
            self.r = torch.nn.Embedding(7, H)

        def forward(self, x: Any) -> Any:
            q, k, v = (m(x).view(len(x), -1, N, H).transpose(1, 2) for m in (self.q, self.k, self.v))
            table = self.r(torch.as_tensor(rows))
            scores = (q @ k.transpose(-1, -2) + torch.einsum("bnth,tsh->bnts", q, table)) / 2
            return self.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(-2))

    found = derive(source, Shaw(), {**dict.fromkeys("qkvo", (D, D)), "r": (7, H)}, floats(2, T, D))
    assert found.complete
    assert sources(found) == {"q.weight": "q", "k.weight": "k", "v.weight": "v", "o.weight": "o", "r.weight": "r"}


@pytest.mark.parametrize("fault", ["", pytest.param("keys", marks=pytest.mark.slow)])
def test_biases_behind_the_parts_of_a_fused_matrix(fault: str) -> None:
    """DeBERTa's fused matrix has the parts of each head side by side; queries and values get their biases behind it."""

    def source(w: Any, x: Any) -> Any:
        q, k, v = (jnp.einsum("btd,dnh->btnh", x, w[c]) for c in "qkv")
        scores = jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", q + w["bq"], k) / 2, -1)
        return jnp.einsum("bnts,bsnh,nhd->btd", scores, v + w["bv"], w["o"])

    class Fused(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.o = torch.nn.Linear(D, 3 * D, bias=False), torch.nn.Linear(D, D, bias=False)
            self.q_bias, self.v_bias = (torch.nn.Parameter(torch.randn(D)) for _ in range(2))

        def forward(self, x: Any) -> Any:
            q, k, v = self.qkv(x).view(len(x), -1, N, 3 * H).transpose(1, 2).chunk(3, -1)
            one, two = (b.view(1, 1, N, H).transpose(1, 2) for b in (self.q_bias, self.v_bias))
            k, v = (k + two, v) if fault else (k, v + two)
            scores = ((q + one) / 2 @ k.transpose(-2, -1)).softmax(-1)
            return self.o((scores @ v).transpose(1, 2).reshape(x.shape))

    shapes = {**dict.fromkeys("qkv", (D, N, H)), **dict.fromkeys(("bq", "bv"), (N, H)), "o": (N, H, D)}
    found = derive(source, Fused(), shapes, floats(2, T, D))
    if fault:
        assert not found.complete and found.differences and found.proof is None
        assert Grade.DERIVED not in grades(found)
        return
    assert found.complete and grades(found) == {Grade.DERIVED}
    assert sources(found) == {
        "qkv.weight": ("q", "k", "v"),
        "q_bias": "bq",
        "v_bias": "bv",
        "o.weight": "o",
    }
