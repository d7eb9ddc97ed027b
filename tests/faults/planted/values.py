"""Faults in the values of one written tensor, or of one part of it: fewer bits, functions, constants, rows twice, order of axes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import ml_dtypes
import numpy as np

from faults.expected import HUGGING, IN, ONE, TWO_FIVE, UPSTREAM, Fault
from faults.plants import InFile, Tensors, exchange, tensor

Array = np.ndarray
Change = Callable[[Array], Array | None]
OTHER, OTHERS = "another value in the file", "other values in the file"
GRIFFIN = "recurrentgemma"


# ---- changes


def cut_off(x: Array) -> Array:
    """The lower half of the bits of each value is zero."""
    return (x.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def through(dtype: str) -> Change:
    """Rounded to a narrower type."""
    return lambda x: x.astype(getattr(ml_dtypes, dtype, None) or dtype).astype(x.dtype)


def in_8_bits(x: Array, axis: int | None = None) -> Array:
    """Whole numbers times one scale, of the tensor or of each row."""
    scale = np.abs(x).max(axis=axis, keepdims=axis is not None) / 127
    return (np.round(x / scale) * scale).astype(x.dtype)


def clipped(x: Array) -> Array:
    """To two thirds of the largest value."""
    bound = np.abs(x).max() * 2 / 3
    return np.clip(x, -bound, bound)


def without_tail(x: Array) -> None:
    """The last fifth is zero."""
    x.reshape(-1)[-(x.size // 5) :] = 0


def half_twice(x: Array, axis: int = 0) -> Array:
    half = np.take(x, range(x.shape[axis] // 2), axis)
    return np.concatenate([half, half], axis)


def rows_twice(width: int, to: int) -> Change:
    """A block of rows, such as a head, is written over another one."""

    def change(x: Array) -> None:
        x[to * width : (to + 1) * width] = x[:width]

    return change


def reshaped(x: Array) -> Array:
    """A reshape in place of the transpose."""
    return np.ascontiguousarray(x.T).reshape(x.shape)


def softplus(x: Array) -> Array:
    return np.logaddexp(x, np.zeros_like(x))


def rows(start: int, stop: int, change: Change, axis: int = 0) -> Change:
    """A change of some rows only, such as those of the keys in a fused tensor."""

    def edit(x: Array) -> Array:
        moved = np.moveaxis(x, axis, 0)
        copy = moved[start:stop].copy()
        changed = change(copy)
        moved[start:stop] = copy if changed is None else changed
        return np.moveaxis(moved, 0, axis)

    return edit


def columns_in_turns(x: Array) -> Array:
    """The two halves of each row, in turns."""
    return np.stack(np.split(x, 2, axis=-1), -1).reshape(x.shape)


def keys_of(layer: str) -> Callable[[Tensors], None]:
    """The keys in a fused tensor of TimesFM are those of another layer."""

    def edit(tensors: Tensors) -> None:
        name = f"{XF}attn.qkv_proj.weight"
        tensors[name] = np.concatenate(
            [tensors[name][:32], tensors[f"{layer}attn.qkv_proj.weight"][32:64], tensors[name][64:]]
        )

    return edit


def fault(name: str, case: str, to: str, edit: Callable[[Tensors], None], at: str, diagnosis: str, model: str | None, said: str = OTHER) -> Fault:  # fmt: skip
    return Fault(name, case, to, InFile(edit), "weights", at, diagnosis, (model, said) if model else None)


def one(name: str, case: str, to: str, at: str, change: Change, diagnosis: str, model: str | None = "") -> Fault:
    """A change of one tensor; the model level sees it at the tensor's module, unless `model` says otherwise."""
    place = at.rpartition(".")[0] if model == "" else model
    return fault(name, case, to, tensor(at, change), at, diagnosis, place)


BERT, GPT, DEC, ENC = "bert.encoder.layer.1.", "transformer.h.1.", "decoder.block.0.", "encoder.block.1."
XF, HF25, XF1, HF1 = "stacked_xf.1.", "model.layers.1.", "stacked_transformer.layers.1.", "decoder.layers.1."
WH = "model.encoder.layers.0."
RG, RGT = "blocks.1.", "model.layers.1."

FEWER_BITS = [
    one("a weight cut off to bfloat16", "bert", HUGGING, f"{BERT}output.dense.weight", cut_off, "truncated"),
    one("a weight cut off to bfloat16", "gemma3", HUGGING, f"{HF25}mlp.up_proj.weight", cut_off, "truncated"),
    one("a weight cut off to bfloat16", "conv-net", "torch", "stem.weight", cut_off, "truncated"),
    one("a weight rounded to float16", "t5", HUGGING, f"{ENC}layer.0.SelfAttention.v.weight", through("float16"), "rounded through float16"),
    one("a weight rounded to float16", "gpt2", HUGGING, f"{GPT}mlp.c_fc.weight", through("float16"), "rounded through float16"),
    one("a weight rounded to float8 (e4m3)", "whisper", HUGGING, f"{WH}fc1.weight", through("float8_e4m3fn"), "rounded"),
    one("a weight rounded to float8 (e5m2)", "gemma2-2b", HUGGING, f"{HF25}self_attn.o_proj.weight", through("float8_e5m2"), "rounded"),
    one("a weight in 8 bits", "timesfm-1.0", UPSTREAM, "horizon_ff_layer.output_layer.weight", in_8_bits, "quantized"),
    one("a table in 8 bits", "gemma1-mha", HUGGING, "model.embed_tokens.weight", in_8_bits, "quantized"),
    one("a weight in 8 bits", "recurrentgemma", HUGGING, f"{RGT}mlp_block.gate_proj.weight", in_8_bits, "quantized"),
    one("a weight in 8 bits for each row", "bert", HUGGING, f"{BERT}intermediate.dense.weight", partial(in_8_bits, axis=1), "quantized"),
    one("a weight byte-swapped", "bert", HUGGING, f"{BERT}attention.output.dense.weight", lambda x: x.byteswap(), "bytes swapped"),
    one("a table byte-swapped", "gpt2", HUGGING, "transformer.wpe.weight", lambda x: x.byteswap(), "bytes swapped"),
    one("a bias byte-swapped", "conv-net", "torch", "up.bias", lambda x: x.byteswap(), "bytes swapped"),
]  # fmt: skip

FUNCTIONS = [
    one("softplus put into the per-dim scale", TWO_FIVE, UPSTREAM, f"{XF}attn.per_dim_scale.per_dim_scale", softplus, "softplus applied"),
    one("softplus put into the per-dim scale", ONE, HUGGING, f"{HF1}self_attn.scaling", softplus, "softplus applied", f"{HF1}self_attn.o_proj{IN}"),
    one("softplus put into the recurrence's decay", GRIFFIN, HUGGING, f"{RGT}temporal_block.rg_lru.recurrent_param", softplus, "softplus applied"),
    one("softplus put into the recurrence's decay", GRIFFIN, GRIFFIN, f"{RG}recurrent_block.rg_lru.a_param", softplus, "softplus applied"),
    one("a running variance as 1 / root", "conv-net", "torch", "norm.running_var", lambda x: 1 / np.sqrt(x), "1 / sqrt applied"),
    one("absolute values", "gemma2-2b", HUGGING, f"{HF25}mlp.up_proj.weight", np.abs, "abs applied"),
    one("tanh put into a bias", "whisper", HUGGING, f"{WH}fc2.bias", np.tanh, "tanh applied"),
    one("exp of the decay", GRIFFIN, HUGGING, f"{RGT}temporal_block.rg_lru.recurrent_param", np.exp, "exp applied"),
    one("a weight clipped", "t5-v1.1", HUGGING, f"{ENC}layer.1.DenseReluDense.wi_1.weight", clipped, "clipped"),
    one("a weight clipped", TWO_FIVE, HUGGING, f"{HF25}mlp.fc1.weight", clipped, "clipped"),
    one("a table clipped", "gpt2", HUGGING, "transformer.wte.weight", clipped, "clipped"),
    one("negative values set to zero", "bert", HUGGING, f"{BERT}output.dense.weight", lambda x: np.maximum(x, 0), "clipped"),
]  # fmt: skip

CONSTANTS = [
    one("a norm left at ones", "bert", HUGGING, f"{BERT}output.LayerNorm.weight", np.ones_like, "all ones"),
    one("a norm left at ones", "timesfm-1.0", UPSTREAM, f"{XF1}input_layernorm.weight", np.ones_like, "all ones"),
    one("a norm left at ones", "whisper", HUGGING, f"{WH}final_layer_norm.weight", np.ones_like, "all ones"),
    one("a norm left at zeros", "gemma3", HUGGING, f"{HF25}self_attn.k_norm.weight", np.zeros_like, "all zeros"),
    one("a running variance left at ones", "conv-net", "torch", "norm.running_var", np.ones_like, "all ones"),
    one("a running mean left at zeros", "conv-net", "torch", "norm.running_mean", np.zeros_like, "all zeros"),
    one("the tail of a table is zeros", "gemma1-mha", HUGGING, "model.embed_tokens.weight", without_tail, "tail zeroed"),
    one("the tail of a weight is zeros", "t5", HUGGING, f"{DEC}layer.2.DenseReluDense.wo.weight", without_tail, "rows zeroed"),
    one("the tail of a kernel is zeros", "conv-net", "torch", "mix.weight", without_tail, "tail zeroed"),
    one("the tail of a bias is zeros", "gpt2", HUGGING, f"{GPT}attn.c_attn.bias", without_tail, "tail zeroed"),
]  # fmt: skip

ROWS = [
    one("one half of a weight twice", "gemma3", HUGGING, f"{HF25}mlp.gate_proj.weight", half_twice, "one half twice"),
    one("one shard written twice", TWO_FIVE, UPSTREAM, f"{XF}ff0.weight", partial(half_twice, axis=1), "one half twice"),
    one("one half of a table twice", "bert", HUGGING, "bert.embeddings.word_embeddings.weight", lambda x: np.concatenate([x[:33], x[:33], x[66:]]), "rows repeated"),
    one("one half of a convolution's channels twice", "conv-net", "torch", "up.weight", half_twice, "one half twice"),
    one("one key head twice", "gemma2-2b", HUGGING, f"{HF25}self_attn.k_proj.weight", half_twice, "one half twice"),
    one("one value head over another", "gemma1-mha", HUGGING, f"{HF25}self_attn.v_proj.weight", rows_twice(12, 2), "rows repeated"),
    one("one query head over another", "whisper", HUGGING, f"{WH}self_attn.q_proj.weight", rows_twice(8, 1), "rows repeated"),
    one("one expert's gate over another's", GRIFFIN, GRIFFIN, f"{RG}recurrent_block.rg_lru.a_gate.w", rows_twice(1, 3), "rows repeated"),
    one("rows of a table in the reverse order", "t5", HUGGING, "shared.weight", lambda x: x[::-1].copy(), "rows reversed", "encoder.embed_tokens"),
]  # fmt: skip

AXES = [
    one("a reshape for a transpose", "bert", HUGGING, f"{BERT}intermediate.dense.weight", reshaped, "reshaped, not permuted"),
    one("a reshape for a transpose", "t5-v1.1", HUGGING, f"{DEC}layer.1.EncDecAttention.o.weight", reshaped, "reshaped, not permuted"),
    one("a reshape for a transpose of a kernel", "conv-net", "torch", "stem.weight", lambda x: np.ascontiguousarray(x.transpose(2, 3, 1, 0)).reshape(x.shape), "reshaped, not permuted"),
    one("a reshape for a transpose of a kernel", "gpt2", HUGGING, f"{GPT}mlp.c_proj.weight", reshaped, "reshaped, not permuted"),
    one("transposed and divided by a head's root", "gemma1-mha", HUGGING, f"{HF25}self_attn.q_proj.weight", lambda x: x.T / np.float32(np.sqrt(12)), "transposed and multiplied"),
    one("transposed and divided by a head's root", "bert", HUGGING, f"{BERT}attention.self.query.weight", lambda x: x.T / np.float32(np.sqrt(8)), "transposed and multiplied"),
    one("transposed and negative", "timesfm-1.0", UPSTREAM, f"{XF1}mlp.gate_proj.weight", lambda x: -x.T, "transposed and multiplied"),
    one("sines and cosines in turns", "whisper", HUGGING, "model.encoder.embed_positions.weight", columns_in_turns, "halves interleaved"),
    one("positions in the reverse order", "whisper", HUGGING, "model.decoder.embed_positions.weight", lambda x: x[::-1].copy(), "rows reversed"),
]  # fmt: skip

NORMS = [
    fault("weight and bias of a norm exchanged", "bert", HUGGING, exchange(f"{BERT}output.LayerNorm.weight", f"{BERT}output.LayerNorm.bias"), f"{BERT}output.LayerNorm.weight", "scale and bias exchanged", f"{BERT}output.LayerNorm", OTHERS),
    fault("weight and bias of a norm exchanged", "whisper", HUGGING, exchange(f"{WH}final_layer_norm.weight", f"{WH}final_layer_norm.bias"), f"{WH}final_layer_norm.weight", "scale and bias exchanged", f"{WH}final_layer_norm", OTHERS),
    fault("weight and bias of a norm exchanged", "gpt2", HUGGING, exchange("transformer.ln_f.weight", "transformer.ln_f.bias"), "transformer.ln_f.weight", "scale and bias exchanged", "transformer.ln_f", OTHERS),
    fault("weight and bias of a norm exchanged", "timesfm-1.0", UPSTREAM, exchange(f"{XF1}mlp.layer_norm.weight", f"{XF1}mlp.layer_norm.bias"), f"{XF1}mlp.layer_norm.weight", "scale and bias exchanged", f"{XF1}mlp.layer_norm", OTHERS),
    fault("weight and bias of a norm exchanged", "conv-net", "torch", exchange("group.weight", "group.bias"), "group.weight", "scale and bias exchanged", "group", OTHERS),
    one("1 taken off a norm whose target adds it", "gemma3", HUGGING, f"{HF25}input_layernorm.weight", lambda x: x - 1, "1+scale missing"),
    one("1 taken off a norm whose target adds it", GRIFFIN, HUGGING, f"{RGT}channel_pre_norm.weight", lambda x: x - 1, "1+scale missing"),
    one("1 taken off a norm whose target adds it", GRIFFIN, GRIFFIN, f"{RG}temporal_pre_norm.scale", lambda x: x - 1, "1+scale missing"),
    one("1 taken off a plain norm", "t5", HUGGING, "encoder.final_layer_norm.weight", lambda x: x - 1, "1 subtracted from a plain norm"),
]  # fmt: skip

Q, K, V = (0, 32), (32, 64), (64, 96)  # in TimesFM's fused rows
GQ, GK, GV = (0, 24), (24, 48), (48, 72)  # in GPT-2's fused columns
FUSED = [
    one("keys of a fused weight transposed", TWO_FIVE, UPSTREAM, f"{XF}attn.qkv_proj.weight", rows(*K, np.transpose), "transposed"),
    one("queries of a fused weight transposed", ONE, UPSTREAM, f"{XF1}self_attn.qkv_proj.weight", rows(*Q, np.transpose), "transposed"),
    one("keys of a fused weight transposed", "gpt2", HUGGING, f"{GPT}attn.c_attn.weight", rows(*GK, np.transpose, axis=1), "transposed"),
    one("values of a fused weight cut off to bfloat16", TWO_FIVE, UPSTREAM, f"{XF}attn.qkv_proj.weight", rows(*V, cut_off), "truncated"),
    one("values of a fused weight rounded to bfloat16", ONE, UPSTREAM, f"{XF1}self_attn.qkv_proj.weight", rows(*V, through("bfloat16")), "rounded through bfloat16"),
    one("queries of a fused weight divided by a head's root", TWO_FIVE, UPSTREAM, f"{XF}attn.qkv_proj.weight", rows(*Q, lambda x: x / np.float32(np.sqrt(8))), "multiplied by a number"),
    one("queries of a fused weight divided by a head's root", "gpt2", HUGGING, f"{GPT}attn.c_attn.weight", rows(*GQ, lambda x: x / np.float32(np.sqrt(8)), axis=1), "multiplied by a number"),
    one("keys of a fused bias clipped", ONE, UPSTREAM, f"{XF1}self_attn.qkv_proj.bias", rows(*K, clipped), "clipped"),
    one("keys of a fused weight are zeros", ONE, UPSTREAM, f"{XF1}self_attn.qkv_proj.weight", rows(*K, np.zeros_like), "all zeros"),
    one("values of a fused weight byte-swapped", "gpt2", HUGGING, f"{GPT}attn.c_attn.weight", rows(*GV, lambda x: x.byteswap(), axis=1), "bytes swapped"),
    one("heads of the keys of a fused weight permuted", TWO_FIVE, UPSTREAM, f"{XF}attn.qkv_proj.weight", rows(*K, lambda x: x.reshape(4, 8, -1)[[2, 3, 0, 1]].reshape(x.shape)), "heads in another order"),
    fault("keys of a fused weight are those of the other layer", TWO_FIVE, UPSTREAM, keys_of("stacked_xf.0."), f"{XF}attn.qkv_proj.weight", "of another layer", f"{XF}attn.qkv_proj"),
    one("keys of a fused weight are its queries", ONE, UPSTREAM, f"{XF1}self_attn.qkv_proj.weight", lambda x: np.concatenate([x[:32], x[:32], x[64:]]), "of another tensor"),
    one("a value head of a fused weight over another", TWO_FIVE, UPSTREAM, f"{XF}attn.qkv_proj.weight", rows(*V, rows_twice(8, 2)), "rows repeated"),
    one("one bit of a fused weight flipped", ONE, UPSTREAM, f"{XF1}self_attn.qkv_proj.weight", lambda x: x.view(np.uint32).__setitem__((70, 3), x.view(np.uint32)[70, 3] ^ np.uint32(1 << 20)), "one bit flipped"),
]  # fmt: skip


def every(change: Change) -> Callable[[Tensors], None]:
    """The same change of all tensors."""

    def edit(tensors: Tensors) -> None:
        for name in tensors:
            tensor(name, change)(tensors)

    return edit


WHOLE = [
    fault("the whole file cut off to bfloat16", TWO_FIVE, UPSTREAM, every(cut_off), "tokenizer.hidden_layer.weight", "truncated", "tokenizer.hidden_layer", OTHERS),
    fault("the whole file cut off to bfloat16", "whisper", HUGGING, every(cut_off), "model.encoder.conv1.weight", "truncated", "model.encoder.conv1", OTHERS),
    fault("the whole file byte-swapped", "rope-model", "torch", every(lambda x: x.byteswap()), "q.weight", "bytes swapped", "q", OTHERS),
    fault("the whole file rounded to float16", "bert", HUGGING, every(through("float16")), "bert.embeddings.word_embeddings.weight", "rounded through float16", "bert.embeddings.word_embeddings", OTHER),
]  # fmt: skip

VALUES = (*WHOLE, *FEWER_BITS, *FUNCTIONS, *CONSTANTS, *ROWS, *AXES, *NORMS, *FUSED)
