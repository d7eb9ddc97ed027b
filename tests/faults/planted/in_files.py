"""Faults in the written tensors: the weights level sees each, bit for bit, and names what was done."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np

from convert.layers.transforms.mistakes import DEINTERLEAVED, INTERLEAVED
from faults.expected import BOTH, HUGGING, ONE, TWO_FIVE, UPSTREAM, Fault, layer
from faults.plants import InFile, Tensors, exchange, tensor

Change = Callable[[np.ndarray], np.ndarray | None]
OTHER = "another value in the file"  # what the model level calls every tensor that is not what the rules make


def file(
    name: str,
    case: str,
    to: str,
    edit: Callable[[Tensors], None],
    at: str,
    diagnosis: str,
    model: str | None,
    said: str = OTHER,
) -> Fault:
    """A fault in the file; `model` is the boundary where the model level sees it, if it does."""
    return Fault(name, case, to, InFile(edit), "weights", at, diagnosis, (model, said) if model else None)


def heads(x: np.ndarray) -> np.ndarray:
    """The first two of four heads swapped, in the query's rows."""
    width = 8
    return np.concatenate([x[width : 2 * width], x[:width], x[2 * width :]])


def turned(order: list[int]) -> Change:
    """The features of each of four heads in another order, in the query's rows."""

    def change(x: np.ndarray) -> np.ndarray:
        width = len(order)
        query, rest = x[: 4 * width], x[4 * width :]
        return np.concatenate([query.reshape(4, width, -1)[:, order].reshape(query.shape), rest])

    return change


def bfloat16_fold(x: np.ndarray) -> np.ndarray:
    """1+scale, added in bfloat16."""
    return ((x - 1).astype(ml_dtypes.bfloat16) + ml_dtypes.bfloat16(1)).astype(np.float32)


def through_bfloat16(x: np.ndarray) -> np.ndarray:
    """Rounded on the way."""
    return x.astype(ml_dtypes.bfloat16).astype(np.float32)


def flip(bit: int) -> Change:
    """One bit of one value."""

    def change(x: np.ndarray) -> None:
        x.view(np.uint32)[3, 5] ^= np.uint32(1 << bit)

    return change


def put(value: float) -> Change:
    """One value."""

    def change(x: np.ndarray) -> None:
        x[1, 2] = value

    return change


def zero(x: np.ndarray) -> None:
    """One row."""
    x[2] = 0


def swap_rows(x: np.ndarray) -> None:
    """The first row and the last."""
    x[[0, -1]] = x[[-1, 0]]


def quantiles_first(x: np.ndarray) -> np.ndarray:
    """Rows that run over ten quantiles within each step, as if they ran over the steps within each quantile."""
    return x.reshape(-1, 10, *x.shape[1:]).swapaxes(0, 1).reshape(x.shape)


def halves(x: np.ndarray) -> np.ndarray:
    """Columns of the padding mask before those of the patch."""
    return np.roll(x, x.shape[1] // 2, axis=1)


def each_of(names: list[str], change: Change) -> Callable[[Tensors], None]:
    """The same change of several tensors."""

    def edit(tensors: Tensors) -> None:
        for name in names:
            tensor(name, change)(tensors)

    return edit


def gone(name: str) -> Callable[[Tensors], None]:
    """A tensor is not written."""

    def edit(tensors: Tensors) -> None:
        del tensors[name]

    return edit


def of(one: str, other: str) -> Callable[[Tensors], None]:
    """One tensor has another's values."""

    def edit(tensors: Tensors) -> None:
        tensors[one] = tensors[other].copy()

    return edit


def first(to: str) -> str:
    """TimesFM 1.0's first layer."""
    return layer(ONE, to)


def second(to: str, i: int = 0) -> str:
    """A layer of TimesFM 2.5."""
    return layer(TWO_FIVE, to, i)


def attention(to: str, name: str) -> str:
    """A projection in TimesFM 2.5's second layer."""
    names = (
        {"q": "attn.qkv_proj", "out": "attn.out"}
        if to == UPSTREAM
        else {"q": "self_attn.q_proj", "out": "self_attn.o_proj"}
    )
    return f"{second(to, 1)}{names[name]}"


def mlp(to: str, i: int = 1) -> str:
    """TimesFM 2.5's first feed-forward projection."""
    return f"{second(to, i)}{'ff0' if to == UPSTREAM else 'mlp.fc1'}"


def norm(to: str) -> tuple[str, str]:
    """TimesFM 2.5's first norm, and its weight."""
    module = f"{second(to)}{'pre_attn_ln' if to == UPSTREAM else 'input_layernorm'}"
    return module, f"{module}.{'scale' if to == UPSTREAM else 'weight'}"


def outside(to: str, name: str) -> str:
    """A module outside of TimesFM 1.0's stack."""
    return name if to == UPSTREAM else f"decoder.{name}"


def block(to: str, name: str) -> str:
    """TimesFM 2.5's first block."""
    return f"{'tokenizer' if to == UPSTREAM else 'model.input_ff_layer'}.{name}"


def hidden(to: str) -> str:
    """Its first layer."""
    return "hidden_layer" if to == UPSTREAM else "input_layer"


MOVED = [
    fault
    for to in BOTH
    for fault in (
        file(
            "output projection transposed (square)",
            TWO_FIVE,
            to,
            tensor(f"{attention(to, 'out')}.weight", np.transpose),
            f"{attention(to, 'out')}.weight",
            "transposed",
            attention(to, "out"),
        ),
        file(
            "heads permuted",
            TWO_FIVE,
            to,
            tensor(f"{attention(to, 'q')}.weight", heads),
            f"{attention(to, 'q')}.weight",
            "heads in another order",
            attention(to, "q"),
        ),
        *(
            file(
                name,
                TWO_FIVE,
                to,
                tensor(f"{attention(to, 'q')}.weight", turned(order)),
                f"{attention(to, 'q')}.weight",
                diagnosis,
                attention(to, "q"),
            )
            for name, order, diagnosis in (
                ("q's pairs brought to RoPE's halves, as for Llama", [0, 2, 4, 6, 1, 3, 5, 7], DEINTERLEAVED),
                ("q's halves brought to RoPE's pairs", [0, 4, 1, 5, 2, 6, 3, 7], INTERLEAVED),
            )
        ),
        file(
            "two layers swapped",
            TWO_FIVE,
            to,
            exchange(second(to), second(to, 1)),
            f"{attention(to, 'q').replace('1', '0')}.weight",
            "of another layer",
            norm(to)[0],
        ),
        file(
            "a bias added to another's layer",
            ONE,
            to,
            of(f"{first(to)}self_attn.o_proj.bias", f"{first(to)}mlp.down_proj.bias"),
            f"{first(to)}self_attn.o_proj.bias",
            "of another tensor",
            f"{first(to)}self_attn.o_proj",
        ),
        file(
            "row of the frequency embedding swapped",
            ONE,
            to,
            tensor(f"{outside(to, 'freq_emb')}.weight", swap_rows),
            f"{outside(to, 'freq_emb')}.weight",
            "two rows swapped",
            outside(to, "freq_emb"),
        ),
        file(
            "quantile-major rows of the quantile head",
            TWO_FIVE,
            to,
            each_of([f"output_projection_quantiles.{n}_layer.weight" for n in ("output", "residual")], quantiles_first),
            "output_projection_quantiles.output_layer.weight",
            "axes of a product swapped",
            "output_projection_quantiles.output_layer",
        ),
        file(
            "quantile-major rows of the output head",
            ONE,
            to,
            each_of(
                [f"horizon_ff_layer.{n}_layer.{t}" for n in ("output", "residual") for t in ("weight", "bias")],
                quantiles_first,
            ),
            "horizon_ff_layer.output_layer.weight",
            "axes of a product swapped",
            "horizon_ff_layer.output_layer",
            "other values in the file",
        ),
        file(
            "patch and mask halves of the input swapped",
            TWO_FIVE,
            to,
            each_of([f"{block(to, n)}.weight" for n in (hidden(to), "residual_layer")], halves),
            f"{block(to, hidden(to))}.weight",
            "halves swapped",
            block(to, hidden(to)),
        ),
    )
]

VALUES = [
    fault
    for to in BOTH
    for fault in (
        file(
            "1+scale doubled",
            ONE,
            to,
            tensor(f"{first(to)}mlp.layer_norm.weight", lambda x: x + 1),
            f"{first(to)}mlp.layer_norm.weight",
            "1+scale doubled",
            f"{first(to)}mlp.layer_norm",
        ),
        file(
            "1+scale missing",
            ONE,
            to,
            tensor(f"{first(to)}mlp.layer_norm.weight", lambda x: x - 1),
            f"{first(to)}mlp.layer_norm.weight",
            "1+scale missing",
            f"{first(to)}mlp.layer_norm",
        ),
        file(
            "1+scale on a plain norm",
            TWO_FIVE,
            to,
            tensor(norm(to)[1], lambda x: x + 1),
            norm(to)[1],
            "1+scale on a plain norm",
            norm(to)[0],
        ),
        file(
            "norm folded in bfloat16",
            ONE,
            to,
            tensor(f"{first(to)}mlp.layer_norm.weight", bfloat16_fold),
            f"{first(to)}mlp.layer_norm.weight",
            "folded in bfloat16",
            f"{first(to)}mlp.layer_norm",
        ),
        file(
            "weight rounded through bfloat16",
            TWO_FIVE,
            to,
            tensor(f"{mlp(to)}.weight", through_bfloat16),
            f"{mlp(to)}.weight",
            "rounded through bfloat16",
            mlp(to),
        ),
        file(
            "bias dropped (zeros)",
            ONE,
            to,
            tensor(f"{first(to)}self_attn.o_proj.bias", np.zeros_like),
            f"{first(to)}self_attn.o_proj.bias",
            "bias dropped",
            f"{first(to)}self_attn.o_proj",
        ),
        Fault(
            "bias dropped (not written)",
            ONE,
            to,
            InFile(gone(f"{first(to)}self_attn.o_proj.bias")),
            "coverage",
            f"{first(to)}self_attn.o_proj.bias",
            "not in the file",
        ),
        file(
            "last bit of one weight flipped",
            TWO_FIVE,
            to,
            tensor(f"{mlp(to)}.weight", flip(0)),
            f"{mlp(to)}.weight",
            "one bit flipped",
            mlp(to),
        ),
        file(
            "an exponent bit of one weight flipped",
            TWO_FIVE,
            to,
            tensor(f"{mlp(to)}.weight", flip(24)),
            f"{mlp(to)}.weight",
            "one bit flipped",
            mlp(to),
        ),
        file(
            "one row zeroed",
            TWO_FIVE,
            to,
            tensor(f"{mlp(to)}.weight", zero),
            f"{mlp(to)}.weight",
            "row zeroed",
            mlp(to),
        ),
        file(
            "NaN in one weight",
            TWO_FIVE,
            to,
            tensor(f"{mlp(to)}.weight", put(np.nan)),
            f"{mlp(to)}.weight",
            "NaN or Inf",
            mlp(to),
        ),
        file(
            "a weight multiplied by √D",
            TWO_FIVE,
            to,
            tensor(f"{mlp(to)}.weight", lambda x: x * np.float32(np.sqrt(32))),
            f"{mlp(to)}.weight",
            "multiplied by a number",
            mlp(to),
        ),
    )
    # by turns for the two targets, since the file is made and read in the same way for both
    if (fault.case == ONE) == (to == HUGGING)
]

SWAPPED = [
    file(
        "q and k swapped",
        TWO_FIVE,
        UPSTREAM,
        tensor(f"{attention(UPSTREAM, 'q')}.weight", lambda x: np.concatenate([x[32:64], x[:32], x[64:]])),
        f"{attention(UPSTREAM, 'q')}.weight",
        "fused parts in another order",
        attention(UPSTREAM, "q"),
    ),
    file(
        "q and k swapped",
        TWO_FIVE,
        HUGGING,
        exchange(f"{second(HUGGING)}self_attn.q_proj", f"{second(HUGGING)}self_attn.k_proj"),
        f"{second(HUGGING)}self_attn.q_proj.weight",
        "of another tensor",
        f"{second(HUGGING)}self_attn.q_proj",
    ),
]

IN_FILES: tuple[Fault, ...] = (*MOVED, *VALUES, *SWAPPED)
