"""Faults in the order of rows and in the rounding of values: of heads, of parts of a fused tensor, of one tensor or of the file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import ml_dtypes
import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from faults.expected import HUGGING, TWO_FIVE, UPSTREAM, Fault
from faults.planted.values import BERT, GPT, HF25, OTHER, OTHERS, WH, XF, Change, every, fault, in_8_bits, one
from faults.plants import InFile, Tensors, tensor

Array = np.ndarray


class InBfloat16File(InFile):
    """The whole file in bfloat16, made of the float32 values by the edit."""

    options: ClassVar[dict[str, Any]] = {"dtype": "bfloat16"}

    def file(self, out: Path) -> None:
        super().file(out)
        with safe_open(out, "np") as opened:
            metadata = {**opened.metadata(), "dtype": "bfloat16"}
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        save_file(tensors, out, metadata)


# ---- changes


def both(of: str, *changes: Change) -> Callable[[Tensors], None]:
    """A change of a weight, and one of its bias."""

    def edit(tensors: Tensors) -> None:
        for role, change in zip(("weight", "bias"), changes, strict=True):
            tensor(f"{of}.{role}", change)(tensors)

    return edit


def grid(*shape: int, order: tuple[int, ...], axis: int = 0) -> Change:
    """The rows of a grid, with its axes in another order."""

    def change(x: Array) -> Array:
        rows = np.arange(x.shape[axis]).reshape(shape).transpose(order)
        return np.take(x, rows.reshape(-1), axis)

    return change


def within(width: int, rows: list[int], axis: int = 0) -> Change:
    """The same order within each block of rows."""

    def change(x: Array) -> Array:
        first = np.arange(0, x.shape[axis], width)[:, None]
        return np.take(x, (first + np.array(rows)).reshape(-1), axis)

    return change


def cut(bits: int) -> Change:
    """The last bits of each value are zeros."""
    return lambda x: (x.view(np.uint32) & np.uint32((0xFFFFFFFF << bits) & 0xFFFFFFFF)).view(np.float32)


def at_random(x: Array) -> Array:
    """Rounded to bfloat16, up or down by chance."""
    noise = np.random.default_rng(x.size).integers(0, 1 << 16, x.shape).astype(np.uint32)
    return cut(16)((x.view(np.uint32) + noise).view(np.float32))


def in_4_bits(x: Array) -> Array:
    """Groups of eight values, with a scale of their own."""
    groups = x.reshape(-1, 8)
    scale = np.abs(groups).max(axis=1, keepdims=True) / 7
    return (np.round(groups / scale) * scale).reshape(x.shape).astype(x.dtype)


def narrow(change: Callable[[Array], Array]) -> Callable[[Tensors], None]:
    """All tensors in bfloat16, after a change of the float32 values."""

    def edit(tensors: Tensors) -> None:
        for name, x in tensors.items():
            tensors[name] = change(x).astype(ml_dtypes.bfloat16)

    return edit


def narrowed(name: str, change: Callable[[Array], Array], diagnosis: str, model: str) -> Fault:
    plant = InBfloat16File(narrow(change))
    return Fault(name, "gemma2-2b", HUGGING, plant, "weights", "model.embed_tokens.weight", diagnosis, (model, OTHER))


GROUPS = grid(3, 3, 8, order=(1, 0, 2), axis=-1)
ROW_ORDERS = [
    fault("queries, keys and values within each head", "gpt2", HUGGING, both(f"{GPT}attn.c_attn", GROUPS, GROUPS), f"{GPT}attn.c_attn.weight", "parts within heads", f"{GPT}attn.c_attn", OTHERS),
    one("queries, keys and values within each head", TWO_FIVE, UPSTREAM, f"{XF}attn.qkv_proj.weight", grid(3, 4, 8, order=(1, 0, 2)), "parts within heads"),
    one("the keys' heads reversed in a fused weight", "gpt2", HUGGING, f"{GPT}attn.c_attn.weight", lambda x: np.concatenate([x[:, :24], grid(3, 8, order=(0, 1), axis=1)(x[:, 24:48]).reshape(24, 3, 8)[:, ::-1].reshape(24, 24), x[:, 48:]], 1), "blocks in another order"),
    one("two heads exchanged in a flat weight", "bert", HUGGING, f"{BERT}attention.self.query.weight", lambda x: x.reshape(3, 8, -1)[[1, 0, 2]].reshape(x.shape), "thirds in another order"),
    one("features of each head reversed", "gemma2-2b", HUGGING, f"{HF25}self_attn.q_proj.weight", within(12, list(range(12))[::-1]), "reversed within blocks"),
    one("features of each head rolled", "gemma2-2b", HUGGING, f"{HF25}self_attn.q_proj.weight", within(12, [11, *range(11)]), "another order within blocks"),
    one("positions in the order of strings", "gpt2", HUGGING, "transformer.wpe.weight", lambda x: x[sorted(range(len(x)), key=str)], "rows in the order of strings"),
    one("one column rolled", "gpt2", HUGGING, f"{GPT}mlp.c_fc.weight", lambda x: x.__setitem__((slice(None), 3), np.roll(x[:, 3], 1)), "rows rolled"),
]  # fmt: skip

ROUNDINGS = [
    narrowed("a bfloat16 file cut off, not rounded", cut(16), "truncated", "model.embed_tokens"),
    narrowed("a bfloat16 file rounded at random", at_random, "not rounded to the nearest", "model.embed_tokens"),
    narrowed("a bfloat16 file through float16", lambda x: x.astype(np.float16), "rounded", "model.embed_tokens"),
    narrowed("a bfloat16 file through float8", lambda x: x.astype(ml_dtypes.float8_e4m3fn), "rounded", "model.embed_tokens"),
    narrowed("a bfloat16 file through 8 bits", in_8_bits, "quantized", "model.embed_tokens"),
    fault("the whole file rounded at random to bfloat16", "gpt2", HUGGING, every(at_random), "transformer.wte.weight", "not rounded to the nearest", "transformer.wte", OTHER),
    one("a weight cut off to TF32", "gpt2", HUGGING, f"{GPT}mlp.c_fc.weight", cut(13), "truncated"),
    one("a weight in 4 bits for each group of 8", "gpt2", HUGGING, f"{GPT}mlp.c_fc.weight", in_4_bits, "quantized"),
    one("a weight in 4 bits for each group of 8", "whisper", HUGGING, f"{WH}fc1.weight", in_4_bits, "quantized"),
]  # fmt: skip

ORDERS = (*ROW_ORDERS, *ROUNDINGS)
