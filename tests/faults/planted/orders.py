"""Faults in the order of rows and in the rounding of values: of heads, of parts of a fused tensor, of one tensor or of the file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import ml_dtypes
import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from convert.verify.weights.other_values import NEAR, UNRELATED
from faults.expected import HUGGING, TWO_FIVE, UPSTREAM, Fault
from faults.planted.values import (
    BERT,
    GPT,
    GRIFFIN,
    HF25,
    OTHER,
    OTHERS,
    RGT,
    WH,
    XF,
    Change,
    every,
    fault,
    in_8_bits,
    one,
    rows,
)
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


def block(width: int, k: int, change: Callable[[Array], Array]) -> Change:
    """A change of one head, or of one block of a block-diagonal kernel."""
    return rows(k * width, (k + 1) * width, change)


def cut(bits: int) -> Change:
    """The last bits of each value are zeros."""
    return lambda x: (x.view(np.uint32) & np.uint32((0xFFFFFFFF << bits) & 0xFFFFFFFF)).view(np.float32)


def at_random(x: Array) -> Array:
    """Rounded to bfloat16, up or down by chance."""
    noise = np.random.default_rng(x.size).integers(0, 1 << 16, x.shape).astype(np.uint32)
    return cut(16)((x.view(np.uint32) + noise).view(np.float32))


def in_float8(x: Array) -> Array:
    """With one scale, so that the largest value is the largest of the type."""
    scale = np.abs(x).max() / 448
    return (x / scale).astype(ml_dtypes.float8_e4m3fn).astype(x.dtype) * scale


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


FC, SQUARE = f"{GPT}mlp.c_fc.weight", f"{GPT}attn.c_proj.weight"
GROUPS = grid(3, 3, 8, order=(1, 0, 2), axis=-1)
ROW_ORDERS = [
    fault("queries, keys and values within each head", "gpt2", HUGGING, both(f"{GPT}attn.c_attn", GROUPS, GROUPS), f"{GPT}attn.c_attn.weight", "parts and heads exchanged", f"{GPT}attn.c_attn", OTHERS),
    one("queries, keys and values within each head", TWO_FIVE, UPSTREAM, f"{XF}attn.qkv_proj.weight", grid(3, 4, 8, order=(1, 0, 2)), "parts within heads"),
    one("the keys' heads reversed in a fused weight", "gpt2", HUGGING, f"{GPT}attn.c_attn.weight", lambda x: np.concatenate([x[:, :24], grid(3, 8, order=(0, 1), axis=1)(x[:, 24:48]).reshape(24, 3, 8)[:, ::-1].reshape(24, 24), x[:, 48:]], 1), "blocks in another order"),
    one("two heads exchanged in a flat weight", "bert", HUGGING, f"{BERT}attention.self.query.weight", lambda x: x.reshape(3, 8, -1)[[1, 0, 2]].reshape(x.shape), "thirds in another order"),
    one("features of each head reversed", "gemma2-2b", HUGGING, f"{HF25}self_attn.q_proj.weight", within(12, list(range(12))[::-1]), "reversed within blocks"),
    one("features of each head rolled", "gemma2-2b", HUGGING, f"{HF25}self_attn.q_proj.weight", within(12, [11, *range(11)]), "another order within blocks"),
    one("positions in the order of strings", "gpt2", HUGGING, "transformer.wpe.weight", lambda x: x[sorted(range(len(x)), key=str)], "rows in the order of strings"),
    one("one head in the order of the other RoPE pairs", "llama", HUGGING, f"{HF25}self_attn.k_proj.weight", block(6, 1, lambda x: x[[0, 3, 1, 4, 2, 5]]), "RoPE pairs interleaved needlessly"),
    one("features of one head rolled", "gemma2-2b", HUGGING, f"{HF25}self_attn.q_proj.weight", block(12, 2, lambda x: np.roll(x, 1, 0)), "rows rolled"),
    one("one block of a gate transposed", GRIFFIN, HUGGING, f"{RGT}temporal_block.rg_lru.input_gate_weight", block(1, 0, lambda x: x.swapaxes(1, 2)), "axes permuted"),
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
    one("a weight in float8 with a scale", "gpt2", HUGGING, FC, in_float8, "quantized"),
    fault("the whole file with four decimal digits", "gpt2", HUGGING, every(lambda x: np.round(x.astype(float), 4).astype(x.dtype)), "transformer.wte.weight", "rounded", "transformer.wte"),
    one("a weight in 4 bits for each group of 8", "whisper", HUGGING, f"{WH}fc1.weight", in_4_bits, "quantized"),
]  # fmt: skip


def heads(layer: str, order: list[int], read: bool = True) -> Callable[[Tensors], None]:
    """The heads of a layer of BERT in another order, and the columns of what reads them."""

    def edit(tensors: Tensors) -> None:
        rows = within(24, [8 * head + k for head in order for k in range(8)])
        for name in ("query", "key", "value"):
            both(f"{layer}attention.self.{name}", rows, rows)(tensors)
        if read:
            tensor(f"{layer}attention.output.dense.weight", lambda x: rows(x.T).T)(tensors)

    return edit


def hidden(of: str, reader: str, order: list[int]) -> Callable[[Tensors], None]:
    """The hidden features of an MLP of BERT in another order, consistently."""

    def edit(tensors: Tensors) -> None:
        both(of, lambda x: x[order], lambda x: x[order])(tensors)
        tensor(f"{reader}.weight", lambda x: x[:, order])(tensors)

    return edit


def trained_on(x: Array) -> Array:
    """Some steps later."""
    return x * (1 + 1e-3 * np.random.default_rng(x.size).standard_normal(x.shape)).astype(x.dtype)


def drawn_anew(x: Array) -> Array:
    return (np.random.default_rng(x.size).standard_normal(x.shape) * x.std()).astype(x.dtype)


def layers_of(order: list[int]) -> Callable[[Tensors], None]:
    """The layers of GPT-2 in another order."""

    def edit(tensors: Tensors) -> None:
        old = dict(tensors)
        for name in tensors:
            if name.startswith("transformer.h."):
                i, rest = name.removeprefix("transformer.h.").split(".", 1)
                tensors[name] = old[f"transformer.h.{order[int(i)]}.{rest}"]

    return edit


def scaled(ending: str, factor: float) -> Callable[[Tensors], None]:
    """All tensors with this ending, multiplied."""

    def edit(tensors: Tensors) -> None:
        for name in tensors:
            if name.endswith(ending):
                tensor(name, lambda x: x * np.float32(factor))(tensors)

    return edit


WTE, QUERY = "transformer.wte.weight", f"{BERT}attention.self.query"
CAUSES = [
    fault("heads exchanged consistently", "bert", HUGGING, heads(BERT, [2, 1, 0]), f"{QUERY}.weight", "blocks in another order", QUERY, OTHERS),
    fault("heads exchanged, but not in what reads them", "bert", HUGGING, heads(BERT, [2, 1, 0], read=False), f"{QUERY}.weight", "blocks in another order", QUERY, OTHERS),
    fault("hidden features in another order consistently", "bert", HUGGING, hidden(f"{BERT}intermediate.dense", f"{BERT}output.dense", [5, 3, 0, 1, 2, 4, *range(6, 40)]), f"{BERT}intermediate.dense.weight", "rows in another order", f"{BERT}intermediate.dense", OTHERS),
    fault("a file of another training step", "gpt2", HUGGING, every(trained_on), WTE, NEAR, "transformer.wte", OTHER),
    fault("a file of another model of the same size", "gpt2", HUGGING, every(drawn_anew), WTE, UNRELATED, "transformer.wte", OTHER),
    fault("layers rotated by one", "gpt2", HUGGING, layers_of([1, 2, 0]), "transformer.h.0.ln_1.weight", "of another layer", "transformer.h.0.ln_1", OTHERS),
    fault("layers in the reverse order", "gpt2", HUGGING, layers_of([2, 1, 0]), "transformer.h.0.ln_1.weight", "of another layer", "transformer.h.0.ln_1", OTHERS),
    fault("residual projections scaled once more", "gpt2", HUGGING, scaled("c_proj.weight", 6**-0.5), "transformer.h.0.attn.c_proj.weight", "multiplied by a number", "transformer.h.0.attn.c_proj"),
]  # fmt: skip


def two_values(x: Array) -> None:
    x[0, 1], x[5, 7] = x[5, 7], x[0, 1]


def from_layer(name: str, start: int) -> Callable[[Tensors], None]:
    """A tensor of the second layer of GPT-2 that was not written to its end, over that of the first layer."""

    def edit(tensors: Tensors) -> None:
        old, x = tensors[f"transformer.h.0.{name}"].reshape(-1), tensors[f"{GPT}{name}"].copy()
        x.reshape(-1)[start:] = old[start:]
        tensors[f"{GPT}{name}"] = x

    return edit


def combined(of: str, other: str, combine: Callable[[Array, Array], Array]) -> Callable[[Tensors], None]:
    """A tensor made of its own values and those of another one."""

    def edit(tensors: Tensors) -> None:
        tensors[of] = combine(tensors[of], tensors[other]).astype(np.float32)

    return edit


ELEMENTS = [
    one("a square matrix turned by a quarter", "gpt2", HUGGING, SQUARE, np.rot90, "rotated"),
    one("a matrix reversed along both axes", "gpt2", HUGGING, FC, lambda x: x[::-1, ::-1], "axes reversed"),
    one("two values exchanged", "gpt2", HUGGING, FC, two_values, "two values exchanged"),
    one("values moved by some bytes", "gpt2", HUGGING, FC, lambda x: np.roll(x, 3), "values in another order"),
    one("the lower triangle is zeros", "gpt2", HUGGING, SQUARE, np.triu, "a triangle zeroed"),
    one("small values pruned", "gpt2", HUGGING, FC, lambda x: np.where(np.abs(x) < 0.03, 0, x), "small values zeroed"),
    one("rows of a table scaled to length 1", "gpt2", HUGGING, "transformer.wte.weight", lambda x: x / np.linalg.norm(x, axis=1, keepdims=True), "normalised"),
    one("the residual put into a projection", "gpt2", HUGGING, SQUARE, lambda x: x + np.eye(24, dtype=np.float32), "identity added"),
    one("a number added to a bias", "bert", HUGGING, f"{BERT}output.dense.bias", lambda x: x + np.float32(0.5), "a number added"),
    one("the mean of each column taken off", "gpt2", HUGGING, FC, lambda x: x - x.mean(0, keepdims=True), "mean subtracted"),
    one("the mean of all values taken off, divided by their spread", "gpt2", HUGGING, FC, lambda x: (x - x.mean()) / x.std(), "scaled and shifted"),
    one("a matrix made symmetric", "gpt2", HUGGING, SQUARE, lambda x: (x + x.T) / 2, "made symmetric"),
    one("an edit of rank one", "gpt2", HUGGING, FC, lambda x: x + np.outer(x[:, 3], x[5]), "a change of low rank"),
    one("positions with an offset of two", "gpt2", HUGGING, "transformer.wpe.weight", lambda x: np.concatenate([0 * x[:2], x[:-2]]), "rows shifted"),
    one("a token inserted into a table", "gpt2", HUGGING, "transformer.wte.weight", lambda x: np.concatenate([x[:3], x[3:4], x[3:-1]]), "rows shifted"),
    one("bits of bfloat16 read as float16", "gpt2", HUGGING, FC, lambda x: x.astype(ml_dtypes.bfloat16).view(np.float16).astype(x.dtype), "bits of another type"),
    one("16-bit halves of the values exchanged", "gpt2", HUGGING, SQUARE, lambda x: x.view(np.uint16).reshape(24, 24, 2)[..., ::-1].copy().view(np.float32)[..., 0], "halves of values swapped"),
    fault("the end of a weight is the other layer's", "gpt2", HUGGING, from_layer("mlp.c_fc.weight", 1000), FC, "partly of another layer", f"{GPT}mlp.c_fc"),
    fault("a weight is the mean of two layers", "gpt2", HUGGING, combined(FC, "transformer.h.0.mlp.c_fc.weight", lambda x, y: (x + y) / 2), FC, "mixed with another tensor", f"{GPT}mlp.c_fc"),
    fault("one bias added to another", "gpt2", HUGGING, combined(f"{GPT}mlp.c_proj.bias", f"{GPT}attn.c_proj.bias", np.add), f"{GPT}mlp.c_proj.bias", "another tensor added", f"{GPT}mlp.c_proj"),
    fault("a norm's scale folded into the weight", "gpt2", HUGGING, combined(FC, f"{GPT}ln_2.weight", lambda x, y: x * y[:, None]), FC, "a scale folded in", f"{GPT}mlp.c_fc"),
    fault("a transposed weight of the other half of an MLP", "gpt2", HUGGING, combined(FC, "transformer.h.2.mlp.c_proj.weight", lambda x, y: y.T), FC, "of another tensor, transposed", f"{GPT}mlp.c_fc"),
]  # fmt: skip

ORDERS = (*ROW_ORDERS, *ROUNDINGS, *CAUSES, *ELEMENTS)
