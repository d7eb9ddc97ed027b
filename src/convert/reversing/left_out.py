"""Tensors of published files that no leaf is made of: the target's constructor computes them, or they are copies of a tied table."""

from __future__ import annotations

from collections.abc import Collection

from convert.core.tensor_spec import TensorSpec
from convert.numerics.bits import same_bits
from convert.writing.written import Array, Written

COUNTED = "positions, which the constructor counts"
TIMESCALES = "the inverse timescales of RoPE, which the constructor computes"
MASK = "a causal mask, which the constructor computes"
HEAD = "lm_head.weight"  # of the classes of transformers; also in files that were saved with the untied copy
_ROWS = 1024  # that are compared at a time


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


def left_out(written: Written, made: Collection[str]) -> dict[str, str]:
    """Return the tensors that the rules do not know, and why no leaf is made of them; without those of which nothing says so.

    Args:
        made: the names that the rules know.

    Raises:
        CheckpointError: a head cannot be read.
    """
    specs = written.specs
    found = {name: why for name, spec in specs.items() if name not in made and (why := why_left_out(name, spec))}
    if HEAD in specs and HEAD not in made:
        tables = (name for name in made if specs.get(name) == specs[HEAD])
        copied = (name for name in tables if _same(written.read(HEAD), written.read(name)))
        if (table := next(copied, None)) is not None:
            found[HEAD] = f"a copy of {table}, to which the model ties its head"
    return found


def _same(a: Array, b: Array) -> bool:
    """Compare two mapped tensors without a third of their size."""
    return all(same_bits(a[at : at + _ROWS], b[at : at + _ROWS]) for at in range(0, len(a), _ROWS))
