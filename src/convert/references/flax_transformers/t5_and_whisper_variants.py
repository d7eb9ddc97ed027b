"""Functions between the layers of T5 and Whisper, with known mistakes, for the diagnosis (`Reference.variants`)."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from convert.layers.activations import NUMPY_ACTIVATIONS
from convert.references.protocol import INPUT, Observed, Variant
from convert.references.variants import Attention, gated_variants, probabilities

Array = np.ndarray[Any, np.dtype[Any]]
FURTHEST = (8, 16, 20, 32, 64, 128, 256, 512)  # values that relative_attention_max_distance may have
POSITIONS = "relative_attention_bias"
_T5_ATTENTION = re.compile(
    rf"(?P<block>(?P<side>encoder|decoder)\.block\.\d+\.layer\.\d\.(?P<kind>SelfAttention|EncDecAttention))\.o{INPUT}"
)
_T5_POSITIONS = re.compile(rf"(?P<side>encoder|decoder)\.block\.\d+\.layer\.0\.SelfAttention\.{POSITIONS}")
_T5_GATED = re.compile(rf"(?P<block>.+\.DenseReluDense)\.wo{INPUT}")
_WHISPER = re.compile(
    rf"(?P<block>model\.(?P<side>encoder|decoder)\.layers\.\d+\.(?P<kind>self|encoder)_attn)\.out_proj{INPUT}"
)
TEXT = "model.decoder.embed_positions"
SOUND = f"model.encoder.layers.0.self_attn_layer_norm{INPUT}"


@dataclass(frozen=True)
class T5Sizes:
    """Sizes of a T5.

    Attributes:
        heads: number of heads; wide: their total width; width: of the model.
        furthest: from this distance on, all share a bucket.
        gate: activation of the gate of the feed-forward blocks; empty if they have no gate.
        scales_head: whether the head's input is divided by sqrt(width), as where it is tied to the embedding.
    """

    heads: int
    wide: int
    width: int
    furthest: int
    gate: str
    scales_head: bool


@dataclass(frozen=True)
class WhisperSizes:
    """Sizes of a Whisper: heads of encoder and decoder, and the model's width."""

    encoder_heads: int
    decoder_heads: int
    width: int


@dataclass(frozen=True)
class _Place:
    """An attention layer.

    Attributes:
        parts: ``q``, ``k``, ``v`` -> their boundaries.
        heads: number of heads.
        power: exponent of the square root of a head's width, by which the source multiplies queries.
        meant: which keys a query sees.
        padding: of the keys: [batch, time].
        bias: added to the logits; None for none.
    """

    parts: Mapping[str, str]
    heads: int
    power: int
    meant: Attention
    padding: Callable[[Observed], Array]
    bias: Callable[[Observed], Array] | None = None

    def make(
        self, how: Attention, heads: int | None = None, power: int | None = None, biased: bool = True
    ) -> Callable[[Observed], Array]:
        """Return the function that computes the attention's output, [batch, time, heads x width]."""

        def made(seen: Observed) -> Array:
            q, k, v = (seen.values[self.parts[part]] for part in "qkv")
            q, k, v = (x.reshape(*x.shape[:2], heads or self.heads, -1) for x in (q, k, v))
            q = q * math.sqrt(q.shape[-1]) ** (self.power if power is None else power)
            bias: Array | float = self.bias(seen) if self.bias is not None and biased else 0.0
            out = np.einsum("bhqk,bkhd->bqhd", probabilities(q, k, self.padding(seen), how, bias), v)
            return np.asarray(out.reshape(*out.shape[:2], -1))

        return made


def _attention(place: _Place, wide: int) -> Iterator[Variant]:
    meant = place.meant
    causal = meant.reach is not None
    yield Variant("causal attention" if causal else "attention", place.make(meant))
    mistakes: dict[str, Attention] = {}
    if causal:
        mistakes |= {
            "causal mask off by one": replace(meant, reach=1),
            "causal mask leaves the position itself out": replace(meant, reach=-1),
            "no causal mask": replace(meant, reach=None),
        }
    else:
        mistakes["causal mask"] = replace(meant, reach=0)
    if meant.padding:
        mistakes["padding is attended to"] = replace(meant, padding=False)
        if causal:
            mistakes["no attention mask"] = replace(meant, reach=None, padding=False)
    for name, how in mistakes.items():
        yield Variant(name, place.make(how), fix="correct the attention mask")
    scales = {0: "attention scale added", -1: "attention scale missing", -2: "attention scale doubled"}
    power = {0: -1, -1: 0}[place.power]  # the other one
    yield Variant(scales[place.power], place.make(meant, power=power), fix="correct what the attention scores are divided by")  # fmt: skip
    yield Variant(scales[-2], place.make(meant, power=-2), fix="correct what the attention scores are divided by")
    if place.bias is not None:
        yield Variant("no relative positions", place.make(meant, biased=False), fix="add the first layer's relative positions to the scores")  # fmt: skip
        return  # the table of relative positions fixes the number of heads
    for count in range(1, wide + 1):
        if count != place.heads and wide % count == 0:
            yield Variant(f"{count} heads" if count > 1 else "1 head", place.make(meant, heads=count))


# ---- T5


def buckets(queries: int, keys: int, count: int, furthest: int, *, causal: bool, turned: bool = False) -> Array:
    """Compute equations.buckets without JAX; with `turned`, distances count backwards."""
    distance = np.arange(keys)[None, :] - np.arange(queries)[:, None]
    distance = -distance if turned else distance
    if causal:
        first, distance = np.zeros_like(distance), -np.minimum(distance, 0)
    else:
        count //= 2
        first, distance = (distance > 0) * count, np.abs(distance)
    exact = count // 2
    share = np.log(np.maximum(distance, 1) / exact) / math.log(furthest / exact)
    far = np.minimum(exact + share * (count - exact), count - 1).astype(int)
    return np.asarray(first + np.where(distance < exact, distance, far))


def _positions(side: str, furthest: int, name: str) -> Iterator[Variant]:
    """Yield rows of the table of relative positions, [queries, keys, heads], and known mistakes."""
    causal = side == "decoder"

    def made(furthest: int = furthest, causal: bool = causal, turned: bool = False) -> Callable[[Observed], Array]:
        def make(seen: Observed) -> Array:
            table, steps = seen.weights[f"{name}.weight"], seen.values[name].shape[0]
            return table[buckets(steps, steps, len(table), furthest, causal=causal, turned=turned)]

        return make

    yield Variant("relative positions", made())
    other = "both directions" if causal else "one direction"
    yield Variant(f"buckets of {other}", made(causal=not causal), fix=f"take the {side}'s buckets: those of {'one direction' if causal else 'both directions'}")  # fmt: skip
    yield Variant("relative positions turned round", made(turned=True), fix="count distances from the query to the key")
    for n in FURTHEST:
        if n != furthest:
            yield Variant(f"relative_attention_max_distance {n}", made(furthest=n), fix=f"set relative_attention_max_distance to {furthest}")  # fmt: skip


def _scaled_head(sizes: T5Sizes) -> Iterator[Variant]:
    """Yield the head's input, which is divided by sqrt(width) if the head is tied (UMT5: always), and known mistakes."""

    def made(power: float) -> Callable[[Observed], Array]:
        return lambda seen: seen.values["decoder.final_layer_norm"] * sizes.width**power

    names = {-0.5: "head's input divided by sqrt(width)", 0.0: "head's input not scaled", -1.0: "head's input divided by the width", 0.5: "head's input times sqrt(width)"}  # fmt: skip
    for power in sorted(names, key=lambda power: power != (-0.5 if sizes.scales_head else 0.0)):
        yield Variant(names[power], made(power))


def t5_variants(sizes: T5Sizes, name: str) -> list[Variant]:
    """Return `Reference.variants` of a T5."""
    if found := _T5_ATTENTION.fullmatch(name):
        side, block = found["side"], found["block"]
        crossing = found["kind"] == "EncDecAttention"
        masks = "attention_mask" if crossing or side == "encoder" else "decoder_attention_mask"
        shared = f"{side}.block.0.layer.0.SelfAttention.{POSITIONS}"
        own = f"{block}.{POSITIONS}"  # of UMT5

        def positions(seen: Observed) -> Array:
            return seen.values[own if own in seen.values else shared].transpose(2, 0, 1)[None]

        place = _Place(
            {part: f"{block}.{part}" for part in "qkv"},
            sizes.heads,
            0,
            Attention(reach=None if crossing or side == "encoder" else 0),
            lambda seen: np.asarray(seen.inputs[masks]) == 0,
            None if crossing else positions,
        )
        return list(_attention(place, sizes.wide))
    if found := _T5_POSITIONS.fullmatch(name):
        return list(_positions(found["side"], sizes.furthest, name))
    if (found := _T5_GATED.fullmatch(name)) and sizes.gate:
        gate, other = f"{found['block']}.wi_0", f"{found['block']}.wi_1"
        return list(gated_variants(lambda seen: seen.values[gate], lambda seen: seen.values[other], sizes.gate))
    return list(_scaled_head(sizes)) if name == f"lm_head{INPUT}" else []


# ---- Whisper


def _sound() -> Iterator[Variant]:
    """Yield the input of the encoder's first layer: the second convolution, its GELU and the positions; and known mistakes."""

    def made(act: str = "gelu_erf", factor: float = 1.0, shift: int = 0) -> Callable[[Observed], Array]:
        def make(seen: Observed) -> Array:
            table = np.roll(seen.values["model.encoder.embed_positions"], shift, axis=0)
            return np.asarray(
                NUMPY_ACTIVATIONS[act](seen.values["model.encoder.conv2"]).swapaxes(1, 2) + factor * table
            )

        return make

    yield Variant("gelu_erf behind conv2", made())
    yield Variant("no positions", made(factor=0.0))
    yield Variant("positions added twice", made(factor=2.0))
    yield Variant("positions off by one", made(shift=-1))
    others = {act: "no activation" if act == "none" else act for act in NUMPY_ACTIVATIONS if act != "gelu_erf"}
    yield from (Variant(f"{shown} behind conv2", made(act)) for act, shown in others.items())


def _text() -> Iterator[Variant]:
    """Yield rows of the table of the text's positions, and known mistakes."""

    def made(shift: int) -> Callable[[Observed], Array]:
        def make(seen: Observed) -> Array:
            table, shape = seen.weights[f"{TEXT}.weight"], seen.values[TEXT].shape
            return np.broadcast_to(np.roll(table, -shift, axis=0)[: shape[-2]], shape)

        return make

    yield Variant("positions from 0", made(0))
    yield Variant("positions off by one", made(1))
    yield Variant("positions off by two", made(2))


def whisper_variants(sizes: WhisperSizes, name: str) -> list[Variant]:
    """Return `Reference.variants` of a Whisper."""
    if found := _WHISPER.fullmatch(name):
        block = found["block"]
        of_text = found["side"] == "decoder" and found["kind"] == "self"
        place = _Place(
            {part: f"{block}.{part}_proj" for part in "qkv"},
            sizes.encoder_heads if found["side"] == "encoder" else sizes.decoder_heads,
            -1,
            Attention(padding=False, reach=0 if of_text else None),
            lambda seen: np.zeros(seen.values[f"{block}.k_proj"].shape[:2], bool),
        )
        return list(_attention(place, sizes.width))
    if name == TEXT:
        return list(_text())
    return list(_sound()) if name == SOUND else []
