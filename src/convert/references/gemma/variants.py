"""Functions between the layers of Gemma 1, 2 and 3, with known mistakes, for the diagnosis (`Reference.variants`)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from convert.planning.plan import Plan
from convert.references.gemma.jax_model import EPSILON, LOGITS, Gemma
from convert.references.protocol import INPUT, Observed, Variant
from convert.references.variants import (
    BASES,
    Attention,
    attention_variants,
    embedding_variants,
    gated_variants,
    logits_variants,
    rope,
    rope_fix,
)

Array = np.ndarray[Any, np.dtype[Any]]
Turn = Callable[[Array], Array]
HEAD, TABLE = "lm_head.weight", "model.embed_tokens.weight"
_LAYER = re.compile(r"(?P<layer>model\.layers\.(?P<i>\d+))\.(?P<inner>.+)")
_HALF_SPLIT, _REPEATED, _NORMED = "half-split RoPE", "heads in groups", "q and k norm before RoPE"


def variants(plan: Plan, model: Gemma, steps: int, name: str) -> Sequence[Variant]:
    """Return `Reference.variants` of Gemma, for sequences of `steps` positions."""
    return tuple(_variants(plan, model, steps, name))


def _variants(plan: Plan, model: Gemma, steps: int, name: str) -> Iterator[Variant]:
    if name == LOGITS:
        yield from logits_variants("model.norm", TABLE, model.logits_cap, HEAD)
        return
    if name == TABLE.removesuffix(".weight"):
        yield from embedding_variants(TABLE)
        return
    found = _LAYER.fullmatch(name)
    if found is None:
        return
    layer, i, inner = found["layer"], int(found["i"]), found["inner"]
    if inner == f"mlp.down_proj{INPUT}":
        gate, up = f"{layer}.mlp.gate_proj", f"{layer}.mlp.up_proj"
        yield from gated_variants(lambda seen: seen.values[gate], lambda seen: seen.values[up])
    elif inner in ("self_attn.q_norm", "self_attn.k_norm"):
        yield from _norm_order(plan, model, i, inner.removeprefix("self_attn.").removesuffix("_norm"), layer)
    elif inner == f"self_attn.o_proj{INPUT}":
        yield from _attention(plan, model, i, steps, f"{layer}.self_attn")


def _projected(block: str, part: str, count: int, seen: Observed) -> Array:
    x = seen.values[f"{block}.{part}_proj"]
    return x.reshape(*x.shape[:2], count, -1)


def _normed(block: str, part: str, seen: Observed, x: Array) -> Array:
    scale = 1 + seen.weights[f"{block}.{part}_norm.weight"]
    out: Array = x / np.sqrt(np.mean(np.square(x), -1, keepdims=True) + EPSILON) * scale
    return out


def _turn(base: float, factor: float = 1.0, pairing: str = "half-split", shift: int = 0, sign: int = 1) -> Turn:
    return lambda x: rope(x, sign * (np.arange(x.shape[1])[None] + shift) / factor, base, pairing)


def _norm_order(plan: Plan, model: Gemma, i: int, part: str, layer: str) -> Iterator[Variant]:
    """Yield the norm of queries or keys, and known mistakes: [batch, head, time, width]."""
    count, block = plan.sizes["N" if part == "q" else "K"], f"{layer}.self_attn"
    turn, norm = _turn(model.bases[i], model.factors[i]), partial(_normed, block, part)

    def made(what: Callable[[Observed, Array], Array]) -> Callable[[Observed], Array]:
        return lambda seen: np.swapaxes(what(seen, _projected(block, part, count, seen)), 1, 2)

    yield Variant(_NORMED, made(norm))
    yield Variant(f"no {part} norm", made(lambda seen, x: x))
    yield Variant(f"{part} norm behind RoPE", made(lambda seen, x: norm(seen, turn(x))))
    yield Variant(f"{part} norm over all heads", made(lambda seen, x: _over_all(norm, seen, x)))


def _over_all(norm: Callable[[Observed, Array], Array], seen: Observed, x: Array) -> Array:
    """Compute one mean square for all heads."""
    ratio = np.mean(np.square(x), -1, keepdims=True) + EPSILON
    together = np.mean(np.square(x), (-2, -1), keepdims=True) + EPSILON
    return np.asarray(norm(seen, x) * np.sqrt(ratio / together))


def _ropes(model: Gemma, i: int) -> Mapping[str, Turn]:
    """Yield how queries and keys may be rotated; the first is correct."""
    base, factor = model.bases[i], model.factors[i]
    ropes = {
        _HALF_SPLIT: _turn(base, factor),
        "interleaved RoPE": _turn(base, factor, "interleaved"),
        "no RoPE": lambda x: x,
        "RoPE turned backwards": _turn(base, factor, sign=-1),
    }
    near = model.windows[i] is not None
    for j, window in enumerate(model.windows):
        if (window is not None) != near:
            whose = "global" if near else "local"
            ropes.setdefault(f"RoPE of the {whose} layers", _turn(model.bases[j], model.factors[j]))
            ropes.setdefault(f"RoPE with the base of the {whose} layers", _turn(model.bases[j], factor))
    if factor != 1:
        ropes["RoPE positions not divided"] = _turn(base)
    others = (1 / factor, *(f for f in (2.0, 4.0, 8.0, 16.0) if f != factor))
    ropes |= {f"RoPE positions divided by {other:g}": _turn(base, other) for other in others if other != 1}
    return ropes | {f"RoPE with base {other:g}": _turn(other, factor) for other in BASES if other != base}


def _attention(plan: Plan, model: Gemma, i: int, steps: int, block: str) -> Iterator[Variant]:
    heads, groups, width = plan.sizes["N"], plan.sizes["K"], plan.sizes["H"]
    scales = {
        "": model.query_scale,
        "attention scale missing": 1.0,
        "attention scale doubled": model.query_scale**2,
        "attention scale 1/sqrt(head width)": width**-0.5,
        "attention scale 1/sqrt(model width / heads)": (plan.sizes["D"] / heads) ** -0.5,
        "attention scale 1/sqrt(model width)": plan.sizes["D"] ** -0.5,
    }

    def prepared(seen: Observed, part: str, turn: Turn, order: str) -> Array:
        x = _projected(block, part, heads if part == "q" else groups, seen)
        if f"{block}.{part}_norm.weight" not in seen.weights or order == "no q and k norm":
            return turn(x)
        return _normed(block, part, seen, turn(x)) if order != _NORMED else turn(_normed(block, part, seen, x))

    def attended(turn: Turn, order: str = _NORMED, grouping: str = _REPEATED) -> Iterator[Variant]:
        def query(seen: Observed, scale: str) -> Array:
            return np.asarray(prepared(seen, "q", turn, order) * scales[scale])

        def spread(x: Array) -> Array:
            if grouping == _REPEATED:
                return np.repeat(x, heads // groups, axis=2)
            return np.tile(x, (1, 1, heads // groups, 1))

        def finish(seen: Observed, probabilities: Array) -> Array:
            out = np.einsum("bhqk,bkhd->bqhd", probabilities, spread(_projected(block, "v", groups, seen)))
            return np.asarray(out.reshape(*out.shape[:2], -1))

        meant = Attention(padding=False, window=model.windows[i], cap=model.attention_cap)
        yield from attention_variants(
            query,
            lambda seen: spread(prepared(seen, "k", turn, order)),
            finish,
            lambda seen: np.zeros(seen.inputs["tokens"].shape, bool),
            steps,
            tuple(scales),
            meant,
        )

    ropes = _ropes(model, i)
    yield from attended(ropes[_HALF_SPLIT])
    fix = rope_fix(model.bases[i], model.factors[i])
    yield from (
        Variant(name, next(attended(turn)).make, fix=fix) for name, turn in ropes.items() if name != _HALF_SPLIT
    )
    if groups not in (1, heads):
        tiled = attended(ropes[_HALF_SPLIT], grouping="tiled")
        yield Variant("key heads in turns, not in groups", next(tiled).make)
    if plan.rules.model == "gemma3":
        for order in ("no q and k norm", "q and k norm behind RoPE"):
            yield Variant(order, next(attended(ropes[_HALF_SPLIT], order)).make)
