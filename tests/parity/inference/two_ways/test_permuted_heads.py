"""Heads whose columns stand in another order: RoPE's pairs interleaved or as halves, and queries that share keys as neighbours or in turns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from convert.inference.derivation import Derivation, Grade
from support.inferred import UNPROVEN, WIDTH, derive, floats, grades, rules

D, N, H, T, GROUPS = WIDTH, 4, 8, 6, 2
PROVEN = {Grade.DERIVED, Grade.INTERCHANGEABLE}


def _angles(base: float = 10000.0) -> Any:
    return np.arange(T)[:, None] * base ** (-np.arange(0, H, 2) / H)


def _turned(x: Any, pairs: str) -> Any:
    cos, sin = np.cos(_angles()), np.sin(_angles())
    if pairs == "halves":
        one, two = jnp.split(x, 2, -1)
        return jnp.concatenate([one * cos - two * sin, two * cos + one * sin], -1)
    one, two = x[..., ::2], x[..., 1::2]
    return jnp.stack([one * cos - two * sin, two * cos + one * sin], -1).reshape(x.shape)


def _source(pairs: str, *, bias: bool) -> Callable[[Any, Any], Any]:
    def function(w: Any, x: Any) -> Any:
        made = (x @ w[c] + (w["b" + c] if bias else 0) for c in "qkv")
        q, k, v = (y.reshape(-1, T, N, H).transpose(0, 2, 1, 3) for y in made)
        scores = jax.nn.softmax(_turned(q, pairs) @ _turned(k, pairs).swapaxes(2, 3) / np.sqrt(H), -1)
        return (scores @ v).transpose(0, 2, 1, 3).reshape(-1, T, N * H) @ w["o"]

    return function


class Rotary(torch.nn.Module):
    """Attention with RoPE; ``pairs``: their order; ``fused``: whether one matrix makes queries, keys and values; ``fault``: what differs."""

    def __init__(self, pairs: str, *, bias: bool, fused: bool, fault: str = "") -> None:
        super().__init__()
        parts = [torch.nn.Linear(D, 3 * N * H, bias=bias)] if fused else [torch.nn.Linear(D, N * H, bias=bias) for _ in "qkv"]  # fmt: skip
        self.parts, self.o = torch.nn.ModuleList(parts), torch.nn.Linear(N * H, D, bias=False)
        self.pairs, self.fault = pairs, fault

    def turned(self, x: Any, pairs: str) -> Any:
        angles = torch.as_tensor(_angles(1000.0 if self.fault == "base" else 10000.0), dtype=x.dtype)
        if pairs == "halves":
            angles, (one, two) = torch.cat([angles, angles], -1), x.chunk(2, -1)
            return x * angles.cos() + torch.cat([-two, one], -1) * angles.sin()
        angles = angles.repeat_interleave(2, -1)
        return x * angles.cos() + torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2) * angles.sin()

    def forward(self, x: Any) -> Any:
        parts = self.parts[0](x).chunk(3, -1) if len(self.parts) == 1 else [part(x) for part in self.parts]
        q, k, v = (y.view(len(x), T, N, H).transpose(1, 2) for y in parts)
        other = "halves" if self.pairs == "interleaved" else "interleaved"
        q, k = self.turned(q, self.pairs), self.turned(k, other if self.fault == "keys" else self.pairs)
        scores = (q @ k.transpose(-1, -2) / H**0.5).softmax(-1)
        return self.o((scores @ v).transpose(1, 2).flatten(-2))


def _shapes(*, bias: bool) -> dict[str, tuple[int, ...]]:
    weights = {**dict.fromkeys("qkv", (D, N * H)), "o": (N * H, D)}
    return weights | (dict.fromkeys(("bq", "bk", "bv"), (N * H,)) if bias else {})


def _rotary(source: str, module: Rotary, *, bias: bool) -> Derivation:
    return derive(_source(source, bias=bias), module, _shapes(bias=bias), floats(2, T, D))


@pytest.mark.parametrize(
    ("source", "target", "fused"),
    [
        ("interleaved", "halves", False),
        pytest.param("halves", "interleaved", True, marks=pytest.mark.slow),
        pytest.param("halves", "interleaved", False, marks=pytest.mark.slow),
        pytest.param("interleaved", "halves", True, marks=pytest.mark.slow),
    ],
)
def test_pairs_with_biases(source: str, target: str, fused: bool) -> None:
    module = Rotary(target, bias=True, fused=fused)
    found = _rotary(source, module, bias=True)
    assert found.complete and grades(found) <= PROVEN
    written = rules(found, module)
    assert [rule for rule in written if "rope" in rule] and not any(
        "rope" in rule for rule in written if "bias: bv" in rule
    )


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["base", "keys"])
@pytest.mark.parametrize("fused", [False, True])
def test_other_turns_are_found(fault: str, fused: bool) -> None:
    found = _rotary("interleaved", Rotary("halves", bias=True, fused=fused, fault=fault), bias=True)
    assert found.differences and found.proof is None
    assert grades(found) <= UNPROVEN


def _grouped(way: str) -> Callable[[Any, Any], Any]:
    def function(w: Any, x: Any) -> Any:
        q, k, v = (jnp.einsum("btd,dnh->btnh", x, w[c]) for c in "qkv")
        if way == "groups":
            q = q.reshape(-1, T, GROUPS, N // GROUPS, H)
            scores = jax.nn.softmax(jnp.einsum("btgnh,bsgh->bgnts", q, k) / np.sqrt(H), -1)
            y = jnp.einsum("bgnts,bsgh->btgnh", scores, v).reshape(-1, T, N, H)
        else:
            k, v = (
                (jnp.tile(y, (1, 1, N // GROUPS, 1)) if way == "turns" else jnp.repeat(y, N // GROUPS, 2))
                for y in (k, v)
            )
            scores = jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", q, k) / np.sqrt(H), -1)
            y = jnp.einsum("bnts,bsnh->btnh", scores, v)
        return jnp.einsum("btnh,nhd->btd", y, w["o"])

    return function


class Grouped(torch.nn.Module):
    """Queries that share keys and values; ``ways``: as neighbours or in turns, of keys and of values."""

    def __init__(self, *ways: str) -> None:
        super().__init__()
        self.q, self.o = torch.nn.Linear(D, N * H, bias=False), torch.nn.Linear(N * H, D, bias=False)
        self.k, self.v = (torch.nn.Linear(D, GROUPS * H, bias=False) for _ in "kv")
        self.ways = ways

    def forward(self, x: Any) -> Any:
        q, k, v = (m(x).view(len(x), T, -1, H).transpose(1, 2) for m in (self.q, self.k, self.v))
        k, v = (
            y.repeat(1, N // GROUPS, 1, 1) if way == "turns" else y.repeat_interleave(N // GROUPS, 1)
            for y, way in zip((k, v), self.ways, strict=True)
        )
        scores = (q @ k.transpose(-1, -2) / H**0.5).softmax(-1)
        return self.o((scores @ v).transpose(1, 2).flatten(-2))


OF_GROUPS = {"q": (D, N, H), "k": (D, GROUPS, H), "v": (D, GROUPS, H), "o": (N, H, D)}


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("turns", "neighbours"),
        pytest.param("groups", "turns", marks=pytest.mark.slow),
        pytest.param("neighbours", "turns", marks=pytest.mark.slow),
    ],
)
def test_heads_that_share_keys(source: str, target: str) -> None:
    module = Grouped(target, target)
    found = derive(_grouped(source), module, OF_GROUPS, floats(2, T, D))
    assert found.complete and grades(found) <= PROVEN
    assert rules(found, module)[0].startswith('- einsum: "...D,D(')


@pytest.mark.slow
@pytest.mark.parametrize("source", ["turns", "neighbours"])
def test_other_values_for_the_same_keys_are_found(source: str) -> None:
    found = derive(_grouped(source), Grouped("neighbours", "turns"), OF_GROUPS, floats(2, T, D))
    assert found.differences and found.proof is None
    assert grades(found) <= UNPROVEN
