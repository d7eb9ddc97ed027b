"""`infer` follows transformers' DeepSeek-V3: latent attention, groups of experts, more of them than the tokens of one run choose."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch

from convert.inference.derivation import Derivation, Grade
from support.inferred import derive_logits, grades, rms_norm, tokens

WIDTH, HEADS, LAYERS, TOKENS = 16, 4, 3, 32
EXPERTS, CHOSEN, GROUPS, CHOSEN_GROUPS, SCALE = 8, 3, 4, 2, 2.5
PLAIN, ROTATED, EPSILON = 8, 8, 1e-6


def shapes() -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {"embed": (TOKENS, WIDTH), "norm": (WIDTH,), "head": (WIDTH, TOKENS)}
    dense = dict.fromkeys(("gate", "up", "down"), (WIDTH, WIDTH))
    for i in range(LAYERS):
        of: dict[str, tuple[int, ...]] = {
            "norm1": (WIDTH,), "norm2": (WIDTH,), "q_a": (WIDTH, WIDTH), "q_norm": (WIDTH,), "q_b": (WIDTH, HEADS, PLAIN + ROTATED),
            "kv_a": (WIDTH, WIDTH + ROTATED), "kv_norm": (WIDTH,), "kv_b": (WIDTH, HEADS, 2 * PLAIN), "o": (HEADS, PLAIN, WIDTH),
        }  # fmt: skip
        experts = {
            "router": (WIDTH, EXPERTS),
            "bias": (EXPERTS,),
            **dict.fromkeys(("wi_0", "wi_1", "wo"), (EXPERTS, WIDTH, WIDTH)),
        }
        of |= {**experts, **{f"shared/{name}": shape for name, shape in dense.items()}} if i else dense
        found |= {f"layer_{i}/{name}": shape for name, shape in of.items()}
    return found


def rope(x: Any) -> Any:
    """Rotate pairs that stand side by side."""
    angles = jnp.arange(x.shape[1])[:, None] / 1e4 ** (jnp.arange(0, ROTATED, 2) / ROTATED)
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    one, two = x[..., ::2], x[..., 1::2]
    return jnp.stack([one * cos - two * sin, two * cos + one * sin], -1).reshape(x.shape)


def attention(w: Mapping[str, Any], x: Any) -> Any:
    q = jnp.einsum("btr,rnh->btnh", rms_norm(x @ w["q_a"], w["q_norm"], EPSILON), w["q_b"])
    latent, rotated = jnp.split(x @ w["kv_a"], [WIDTH], -1)
    kv = jnp.einsum("btr,rnh->btnh", rms_norm(latent, w["kv_norm"], EPSILON), w["kv_b"])
    rotated = jnp.broadcast_to(rope(rotated[:, :, None]), (*kv.shape[:3], ROTATED))
    q = jnp.concatenate([q[..., :PLAIN], rope(q[..., PLAIN:])], -1)
    k = jnp.concatenate([kv[..., :PLAIN], rotated], -1)
    scores = jnp.einsum("bqnh,bknh->bnqk", q, k) * (PLAIN + ROTATED) ** -0.5
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e30)
    mixed = jnp.einsum("bnqk,bknh->bqnh", jax.nn.softmax(scores, -1), kv[..., PLAIN:])
    return jnp.einsum("bqnh,nhd->bqd", mixed, w["o"])


def dense(w: Mapping[str, Any], x: Any, of: str = "") -> Any:
    return (jax.nn.silu(x @ w[f"{of}gate"]) * (x @ w[f"{of}up"])) @ w[f"{of}down"]


def experts(w: Mapping[str, Any], x: Any, scale: float, biased: bool, best: int) -> Any:
    shares = jax.nn.sigmoid(x @ w["router"])
    ranked = shares + w["bias"]
    of_groups = jax.lax.top_k(ranked.reshape(*ranked.shape[:-1], GROUPS, -1), best)[0].sum(-1)
    groups = jax.nn.one_hot(jax.lax.top_k(of_groups, CHOSEN_GROUPS)[1], GROUPS).sum(-2)
    ranked = jnp.where(jnp.repeat(groups, EXPERTS // GROUPS, -1) > 0, ranked, -jnp.inf)
    chosen = jax.lax.top_k(ranked, CHOSEN)[1]
    taken = jnp.take_along_axis(ranked if biased else shares, chosen, -1)
    taken = taken / (taken.sum(-1, keepdims=True) + 1e-20) * scale
    share = (jax.nn.one_hot(chosen, EXPERTS) * taken[..., None]).sum(-2)
    inner = jax.nn.silu(jnp.einsum("btd,edf->btef", x, w["wi_0"])) * jnp.einsum("btd,edf->btef", x, w["wi_1"])
    return jnp.einsum("btef,efd,bte->btd", inner, w["wo"], share) + dense(w, x, "shared/")


def forward(w: Mapping[str, Any], tokens: Any, scale: float = SCALE, biased: bool = False, best: int = 2) -> Any:
    """DeepSeek-V3 with all experts for all tokens; `biased`: the bias of the router is in the shares, too."""
    x = w["embed"][tokens]
    for i in range(LAYERS):
        own = {name.removeprefix(f"layer_{i}/"): leaf for name, leaf in w.items()}
        x = x + attention(own, rms_norm(x, own["norm1"], EPSILON))
        y = rms_norm(x, own["norm2"], EPSILON)
        x = x + (experts(own, y, scale, biased, best) if i else dense(own, y))
    return rms_norm(x, w["norm"], EPSILON) @ w["head"]


def derived(**fault: Any) -> Derivation:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    config = DeepseekV3Config(
        vocab_size=TOKENS, hidden_size=WIDTH, intermediate_size=WIDTH, moe_intermediate_size=WIDTH, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=HEADS, n_shared_experts=1, n_routed_experts=EXPERTS, num_experts_per_tok=CHOSEN,
        n_group=GROUPS, topk_group=CHOSEN_GROUPS, routed_scaling_factor=SCALE, q_lora_rank=WIDTH, kv_lora_rank=WIDTH,
        qk_nope_head_dim=PLAIN, qk_rope_head_dim=ROTATED, v_head_dim=PLAIN, first_k_dense_replace=1, norm_topk_prob=True,
        rope_interleave=True, tie_word_embeddings=False, attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(0)
    return derive_logits(partial(forward, **fault), DeepseekV3ForCausalLM(config), shapes(), tokens(TOKENS, 2, 12))


@pytest.mark.slow
def test_all_experts_are_derived() -> None:
    found = derived()
    assert found.complete and grades(found) == {Grade.DERIVED}, (found.differences, found.proof)


FAULTS: list[dict[str, Any]] = [{"scale": 2.4}, {"biased": True}, {"best": 1}]


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: next(iter(fault)))
def test_a_fault_is_never_derived(fault: dict[str, Any]) -> None:
    found = derived(**fault)
    assert not found.complete and found.proof is None
