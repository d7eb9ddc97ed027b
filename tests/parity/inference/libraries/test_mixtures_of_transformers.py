"""`infer` follows transformers' GPT-OSS, with each way in which it runs its experts; a fault in either program is never derived.

Its module sends tokens to experts by a loop over those that have some. With the module's own weights these are others than with the
weights that are found, so that it is recorded again.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch

from convert.inference.derivation import Derivation
from support.inferred import derive_logits, rms_norm, tokens

WIDTH, HEADS, GROUPS, HEAD, EXPERTS, TOKENS, LAYERS, WINDOW = 16, 4, 2, 4, 4, 23, 2, 3
BASE, EPSILON = 10000.0, 1e-5


def shapes() -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {"embed": (TOKENS, WIDTH), "norm": (WIDTH,), "head": (WIDTH, TOKENS)}
    for i in range(LAYERS):
        of = {
            "norm1": (WIDTH,), "norm2": (WIDTH,), "sinks": (HEADS,),
            "q/kernel": (WIDTH, HEADS, HEAD), "q/bias": (HEADS, HEAD), "o/kernel": (HEADS, HEAD, WIDTH), "o/bias": (WIDTH,),
            "k/kernel": (WIDTH, GROUPS, HEAD), "k/bias": (GROUPS, HEAD), "v/kernel": (WIDTH, GROUPS, HEAD), "v/bias": (GROUPS, HEAD),
            "router/kernel": (WIDTH, EXPERTS), "router/bias": (EXPERTS,),
            "wi": (EXPERTS, WIDTH, 2 * WIDTH), "bi": (EXPERTS, 2 * WIDTH), "wo": (EXPERTS, WIDTH, WIDTH), "bo": (EXPERTS, WIDTH),
        }  # fmt: skip
        found |= {f"layer_{i}/{name}": shape for name, shape in of.items()}
    return found


def rope(x: Any) -> Any:
    angles = jnp.arange(x.shape[1])[:, None] / BASE ** (jnp.arange(0, HEAD, 2) / HEAD)
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    one, two = jnp.split(x, 2, -1)
    return jnp.concatenate([one * cos - two * sin, two * cos + one * sin], -1)


def forward(
    w: Mapping[str, Any], tokens: Any, window: int = WINDOW, alpha: float = 1.702, plus: float = 1.0, sink: float = 1.0,
    early: bool = False,
) -> Any:  # fmt: skip
    """GPT-OSS with all experts for all tokens.

    Args:
        window: of the first layer.
        alpha, plus: of the gate, and what is added to what it opens.
        sink: what the sinks are multiplied by.
        early: whether the softmax is that of all experts, in front of the choice.
    """
    x = w["embed"][tokens]
    rows, steps = tokens.shape
    behind = jnp.arange(steps)[:, None] - jnp.arange(steps)
    for i in range(LAYERS):
        own = {name.removeprefix(f"layer_{i}/"): leaf for name, leaf in w.items()}
        y = rms_norm(x, own["norm1"], EPSILON)
        q, k, v = (jnp.einsum("btd,dnh->btnh", y, own[f"{n}/kernel"]) + own[f"{n}/bias"] for n in "qkv")
        q = rope(q).reshape(rows, steps, GROUPS, HEADS // GROUPS, HEAD)
        scores = jnp.einsum("btkgh,bskh->bkgts", q, rope(k)) * HEAD**-0.5
        scores = jnp.where((behind >= 0) & ((behind < window) if i == 0 else True), scores, -1e30)
        sinks = sink * own["sinks"].reshape(1, GROUPS, HEADS // GROUPS, 1, 1)
        joined = jnp.concatenate([scores, jnp.broadcast_to(sinks, (*scores.shape[:-1], 1))], -1)
        mixed = jnp.einsum("bkgts,bskh->btkgh", jax.nn.softmax(joined, -1)[..., :-1], v)
        x = x + jnp.einsum("btnh,nhd->btd", mixed.reshape(rows, steps, HEADS, HEAD), own["o/kernel"]) + own["o/bias"]
        y = rms_norm(x, own["norm2"], EPSILON)
        logits = y @ own["router/kernel"] + own["router/bias"]
        values, chosen = jax.lax.top_k(jax.nn.softmax(logits) if early else logits, 2)
        values = values if early else jax.nn.softmax(values, -1)
        share = (jax.nn.one_hot(chosen, EXPERTS) * values[..., None]).sum(-2)
        z = jnp.einsum("btd,edf->btef", y, own["wi"]) + own["bi"]
        gate, up = jnp.minimum(z[..., ::2], 7.0), jnp.clip(z[..., 1::2], -7.0, 7.0)
        z = (up + plus) * gate * jax.nn.sigmoid(alpha * gate)
        x = x + jnp.einsum("bted,bte->btd", jnp.einsum("btef,efd->bted", z, own["wo"]) + own["bo"], share)
    return rms_norm(x, w["norm"], EPSILON) @ w["head"]


def derived(experts: str, **fault: Any) -> Derivation:
    """Derive the module with one implementation of its experts from the JAX function with a fault."""
    from transformers import GptOssConfig, GptOssForCausalLM

    config = GptOssConfig(
        num_hidden_layers=LAYERS, num_local_experts=EXPERTS, vocab_size=TOKENS, hidden_size=WIDTH, intermediate_size=WIDTH,
        head_dim=HEAD, num_attention_heads=HEADS, num_key_value_heads=GROUPS, sliding_window=WINDOW, num_experts_per_tok=2,
        max_position_embeddings=64, rope_parameters={"rope_type": "default", "rope_theta": BASE},
    )  # fmt: skip
    config._attn_implementation, config._experts_implementation = "eager", experts
    torch.manual_seed(0)
    return derive_logits(partial(forward, **fault), GptOssForCausalLM(config), shapes(), tokens(TOKENS, 2, 6))


@pytest.mark.slow
@pytest.mark.parametrize("experts", ["eager", "batched_mm", "grouped_mm"])
def test_each_way_to_run_the_experts_is_derived(experts: str) -> None:
    found = derived(experts)
    assert found.complete, (found.differences, found.proof)


FAULTS: list[dict[str, Any]] = [{"window": 4}, {"alpha": 1.7}, {"plus": 0.0}, {"sink": 0.0}, {"early": True}]


@pytest.mark.slow
@pytest.mark.parametrize("experts", ["eager", "batched_mm"])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: next(iter(fault)))
def test_a_fault_is_never_derived(fault: dict[str, Any], experts: str) -> None:
    found = derived(experts, **fault)
    assert not found.complete and found.proof is None
