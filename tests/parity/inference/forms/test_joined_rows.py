"""Rows of several values are joined in front of a matrix in one program, and behind it in the other: memory tokens, a resampler's latents."""

from __future__ import annotations

import math
from typing import Any

import flax.linen
import jax
import jax.numpy as jnp
import pytest
import torch
from torch import nn
from torch.nn import functional

from convert.inference.derivation import Grade
from support.inferred import derive, floats, grades, linen, rules

D, H, K, MEMORY, LATENTS = 12, 3, 6, 3, 4
HEADS = {**dict.fromkeys("qkv", (D, H, K)), **dict.fromkeys(("qb", "kb", "vb"), (H, K))}
MEMORIES: dict[str, tuple[int, ...]] = {"m": (MEMORY, D), **HEADS, "o": (H, K, D), "ob": (D,)}


def _attend(q: Any, k: Any, v: Any) -> Any:
    weights = jax.nn.softmax(jnp.einsum("bqhk,bshk->bhqs", q, k) / math.sqrt(K))
    return jnp.einsum("bhqs,bshk->bqhk", weights, v)


def _memories(joined: bool) -> Any:
    def function(w: Any, x: Any) -> Any:
        def project(name: str, x: Any) -> Any:
            return jnp.einsum("...d,dhk->...hk", x, w[name]) + w[f"{name}b"]

        def of_both(name: str) -> Any:
            memory = w["m"] if joined else project(name, w["m"])
            memory = jnp.broadcast_to(memory, (len(x), *memory.shape))
            if joined:
                return project(name, jnp.concatenate([memory, x], 1))
            return jnp.concatenate([memory, project(name, x)], 1)

        return jnp.einsum("bshk,hkd->bsd", _attend(project("q", x), of_both("k"), of_both("v")), w["o"]) + w["ob"]

    return function


class Memories(nn.Module):
    """Attention to memory tokens and the sequence; `in_front`: of which of keys and values the memory comes first."""

    def __init__(self, joined: bool, in_front: str = "kv") -> None:
        super().__init__()
        self.m, self.o = nn.Parameter(torch.randn(1, MEMORY, D)), nn.Linear(H * K, D)
        self.q, self.k, self.v = (nn.Linear(D, H * K) for _ in range(3))
        self.joined, self.in_front = joined, in_front

    def forward(self, x: Any) -> Any:
        memory = self.m.expand(len(x), -1, -1)

        def of_both(name: str) -> Any:
            both = [memory, x] if name in self.in_front else [x, memory]
            layer = getattr(self, name)
            return layer(torch.cat(both, 1)) if self.joined else torch.cat([layer(one) for one in both], 1)

        q, k, v = (y.unflatten(-1, (H, K)).transpose(1, 2) for y in (self.q(x), of_both("k"), of_both("v")))
        return self.o(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("joined", [True, False])
def test_memory_tokens(joined: bool) -> None:
    module = Memories(joined)
    found = derive(_memories(not joined), module, MEMORIES, floats(2, 7, D))
    assert grades(found) == {Grade.DERIVED}
    assert len(rules(found, module)) == 3


@pytest.mark.slow
@pytest.mark.parametrize("joined", [True, False])
def test_memory_behind_the_sequence_for_the_values_alone_is_a_difference(joined: bool) -> None:
    found = derive(_memories(not joined), Memories(joined, "k"), MEMORIES, floats(2, 7, D))
    assert not found.complete and found.proof is None
    (difference,) = found.differences
    assert difference.problem.endswith("the elements are in another order")


class Latents(flax.linen.Module):
    """A resampler: latents attend to the sequence and to themselves, with keys and values apart."""

    @flax.linen.compact
    def __call__(self, x: Any) -> Any:
        latents = self.param("latents", flax.linen.initializers.normal(), (LATENTS, D))
        z = jnp.broadcast_to(latents, (len(x), LATENTS, D))
        for number in range(2):
            y, z_ = (
                flax.linen.LayerNorm(epsilon=1e-5, name=f"{name}{number}")(of) for name, of in (("m", x), ("l", z))
            )
            k, v = (flax.linen.DenseGeneral((H, K), use_bias=False, name=f"{name}{number}") for name in "kv")
            q = flax.linen.DenseGeneral((H, K), use_bias=False, name=f"q{number}")(z_)
            keys, values = (jnp.concatenate([layer(y), layer(z_)], 1) for layer in (k, v))
            out = flax.linen.DenseGeneral(D, (-2, -1), use_bias=False, name=f"o{number}")
            z = z + out(_attend(q, keys, values))
        return flax.linen.Dense(5)(z)


class _Resampled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_media, self.norm_latents = nn.LayerNorm(D), nn.LayerNorm(D)
        self.to_q, self.to_kv = nn.Linear(D, H * K, bias=False), nn.Linear(D, 2 * H * K, bias=False)
        self.to_out = nn.Linear(H * K, D, bias=False)

    def forward(self, x: Any, latents: Any) -> Any:
        x, latents = self.norm_media(x), self.norm_latents(latents)
        k, v = self.to_kv(torch.cat([x, latents], 1)).chunk(2, -1)
        q, k, v = (y.unflatten(-1, (H, K)).transpose(1, 2) for y in (self.to_q(latents), k, v))
        return self.to_out(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Resampler(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.latents, self.proj = nn.Parameter(torch.randn(LATENTS, D)), nn.Linear(D, 5)
        self.layers = nn.ModuleList(_Resampled() for _ in range(2))

    def forward(self, x: Any) -> Any:
        latents = self.latents.expand(len(x), -1, -1)
        for layer in self.layers:
            latents = latents + layer(x, latents)
        return self.proj(latents)


@pytest.mark.slow
def test_latents_that_are_projected_with_the_sequence() -> None:
    module = Resampler()
    function, shapes = linen(Latents(), floats(2, 7, D)(0)["x"])
    found = derive(function, module, shapes, floats(2, 7, D))
    assert grades(found) == {Grade.DERIVED}
    rules(found, module)
