"""Functions between the layers of TimesFM, with known mistakes, for the diagnosis (`Reference.variants`)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from convert.planning.plan import Plan
from convert.references.protocol import INPUT, Observed, Variant
from convert.references.variants import (
    QUERY_SCALES,
    added_variants,
    attention_variants,
    other_order,
    query_variants,
    rope_variants,
    scaled,
    swapped_halves,
    table_variants,
    undone,
)

Array = np.ndarray[Any, np.dtype[Any]]
Seen = Callable[[Observed], Array]
_LAYER = re.compile(r"(?P<layer>.*layers\.\d+|stacked_xf\.\d+)\.(?P<inner>.+)")


def _patch(boundary: str) -> Iterator[Variant]:
    """Yield the first block's input, a normalised patch concatenated with its padding mask, and known mistakes."""
    yield undone("mask before the patch", boundary, swapped_halves)
    yield undone("padding mask inverted", boundary, _inverted)


def _inverted(x: Array) -> Array:
    half = x.shape[-1] // 2
    return np.concatenate([x[..., :half], 1 - x[..., half:]], -1)


def _heads(x: Array, heads: int) -> Array:
    return x.reshape(*x.shape[:2], heads, -1)


class _Projections:
    """Queries, keys and values of an attention layer, from its projections: [batch, time, head, width]."""

    def __init__(self, attention: str, heads: int, fused: bool) -> None:
        self.attention, self.heads, self.fused = attention, heads, fused

    def get(self, part: str) -> Seen:
        """Of ``q``, ``k`` or ``v``."""

        def get(seen: Observed) -> Array:
            if self.fused:
                whole = seen.values[f"{self.attention}.qkv_proj"]
                return _heads(np.split(whole, 3, axis=-1)["qkv".index(part)], self.heads)
            return _heads(seen.values[f"{self.attention}.{part}_proj"], self.heads)

        return get


def _attended(value: Seen) -> Callable[[Observed, Array], Array]:
    """Compute the output projection's input from probabilities: [batch, time, heads * width]."""

    def finish(seen: Observed, probs: Array) -> Array:
        out = np.einsum("bhqk,bkhd->bqhd", probs, value(seen))
        return np.asarray(out.reshape(*out.shape[:2], -1))

    return finish


# ---- TimesFM 1.0 and 2.0


def variants_1(plan: Plan, patches: int, name: str) -> Sequence[Variant]:
    """Return `Reference.variants` of TimesFM 1.0 and 2.0, for series of `patches` patches."""
    return tuple(_variants_1(plan, patches, name))


def _variants_1(plan: Plan, patches: int, name: str) -> Iterator[Variant]:
    upstream = plan.target == "timesfm"
    stack = "stacked_transformer" if upstream else "decoder"
    outside = "" if upstream else "decoder."

    def padding(seen: Observed) -> Array:
        points = np.asarray(seen.inputs["input_padding"])[:, : np.asarray(seen.inputs["input_ts"]).shape[1]]
        return np.asarray(points.reshape(len(points), patches, -1).min(-1))

    if name == f"{outside}input_ff_layer{INPUT}":
        yield from _patch(name)
    elif name == f"{outside}position_emb":
        yield from table_variants(patches, plan.sizes["D"])
    elif name == f"{stack}.layers.0.input_layernorm{INPUT}":
        yield from added_variants(
            lambda seen: seen.values[f"{outside}input_ff_layer"],
            lambda seen: seen.values[f"{outside}freq_emb"],
            padding,
            plan.facts["use_positional_embedding"],
        )
    elif name == "output_ts":
        yield undone("quantiles before steps", name, other_order)
    elif (found := _LAYER.fullmatch(name)) and found["inner"] in ("self_attn", f"self_attn.o_proj{INPUT}"):
        attention = f"{found['layer']}.self_attn"
        parts = _Projections(attention, plan.sizes["N"], upstream)
        yield from attention_variants(
            lambda seen, scale: scaled(parts.get("q")(seen), seen.weights[f"{attention}.scaling"], scale),
            parts.get("k"),
            _attended(parts.get("v")) if name.endswith(INPUT) else lambda seen, probs: probs,
            padding,
            patches,
            tuple(QUERY_SCALES),
        )


# ---- TimesFM 2.5


def variants_2p5(plan: Plan, patches: int, ahead: int, name: str) -> Sequence[Variant]:
    """Return `Reference.variants` of TimesFM 2.5, for series of `patches` patches and a cache with `ahead` more."""
    return tuple(_variants_2p5(plan, patches, ahead, name))


def _variants_2p5(plan: Plan, patches: int, ahead: int, name: str) -> Iterator[Variant]:
    upstream = plan.target == "timesfm"
    if name == ("tokenizer" if upstream else "model.input_ff_layer") + INPUT:
        yield from _patch(name)
    elif name in ("renormed_outputs", "quantile_spread"):
        yield undone("quantiles before steps", name, other_order)
    elif found := _LAYER.fullmatch(name):
        if upstream:
            yield from _attention_timesfm(found["layer"], found["inner"], plan, patches, ahead)
        else:
            yield from _attention_transformers(found["layer"], found["inner"], plan, patches)


def _padding(patches: int) -> Seen:
    """Return true for patches whose last point is padding."""
    return lambda seen: np.asarray(seen.inputs["masks"]).reshape(-1, patches, _points(seen, patches))[..., -1]


def _points(seen: Observed, patches: int) -> int:
    return int(np.asarray(seen.inputs["masks"]).shape[1]) // patches


def _position(patches: int) -> Seen:
    padding = _padding(patches)
    return lambda seen: np.arange(patches)[None] - padding(seen).sum(-1, keepdims=True)


def _attention_timesfm(layer: str, inner: str, plan: Plan, patches: int, ahead: int) -> Iterator[Variant]:
    def cached(x: Seen) -> Seen:  # what is still to be decoded is zero, and no padding
        return lambda seen: np.pad(y := x(seen), [(0, 0), (0, ahead)] + [(0, 0)] * (y.ndim - 2))

    parts = _Projections(f"{layer}.attn", plan.sizes["N"], fused=True)
    base = float(plan.facts["rope_theta"])
    if inner in ("attn.rotary_position_embedding", f"attn.query_ln{INPUT}", f"attn.key_ln{INPUT}"):
        unrotated = parts.get("k" if "key" in inner else "q")
        yield from rope_variants(unrotated, _position(patches), base)
    elif inner == "attn.per_dim_scale":
        query = f"{layer}.attn.query_ln"
        yield from query_variants(lambda seen: seen.values[query], f"{layer}.attn.per_dim_scale.per_dim_scale")
    elif inner == f"attn.out{INPUT}":
        yield from attention_variants(
            lambda seen, scale: seen.values[f"{layer}.attn.per_dim_scale"],
            cached(lambda seen: seen.values[f"{layer}.attn.key_ln"]),
            _attended(cached(parts.get("v"))),
            cached(_padding(patches)),
            patches,
        )


def _attention_transformers(layer: str, inner: str, plan: Plan, patches: int) -> Iterator[Variant]:
    attention = f"{layer}.self_attn"
    parts = _Projections(attention, plan.sizes["N"], fused=False)

    def in_front(x: Seen) -> Seen:  # of the patches: the heads
        return lambda seen: np.swapaxes(x(seen), 1, 2)

    if inner in (f"self_attn.q_norm{INPUT}", f"self_attn.k_norm{INPUT}"):
        unrotated = parts.get("k" if "k_norm" in inner else "q")
        for variant in rope_variants(unrotated, _position(patches), float(plan.facts["rope_theta"])):
            yield Variant(variant.name, in_front(variant.make))
    elif inner == f"self_attn.o_proj{INPUT}":
        query, key = (in_front(lambda seen, n=n: seen.values[f"{attention}.{n}_norm"]) for n in "qk")  # type: ignore[misc]
        yield from attention_variants(
            lambda seen, scale: scaled(query(seen), seen.weights[f"{attention}.scaling"], scale),
            key,
            _attended(parts.get("v")),
            _padding(patches),
            patches,
            tuple(QUERY_SCALES),
        )
