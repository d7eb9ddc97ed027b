"""Tensors of published files that no weight is made of: the target's constructor computes them."""

from __future__ import annotations

from convert.core.tensor_spec import TensorSpec

COUNTED = "positions, which the constructor counts"
TIMESCALES = "the inverse timescales of RoPE, which the constructor computes"
MASK = "a causal mask, which the constructor computes"


def why_left_out(name: str, spec: TensorSpec) -> str:
    """Return why no leaf is made of a tensor that the rules do not know; empty where nothing says so."""
    last = name.rpartition(".")[2]
    if last == "position_ids" and "int" in spec.dtype:
        return COUNTED
    if name.endswith("rotary_emb.inv_freq") and len(spec.shape) == 1:
        return TIMESCALES
    square = len(spec.shape) == 4 and spec.shape[:2] == (1, 1) and spec.shape[2] == spec.shape[3]
    if (name.endswith("attn.bias") and square) or (last == "masked_bias" and spec.size == 1):  # GPT-2 of transformers 4
        return MASK
    return ""
