"""Functions between the layers of a model, with the known mistakes: attention, RoPE, positions, patches.

They compute in NumPy and float64, for the diagnosis (`convert.references.protocol.Variant`). Names are stable.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from convert.layers.activations import NUMPY_ACTIVATIONS
from convert.references.protocol import Observed, Variant

Array = np.ndarray[Any, np.dtype[Any]]

BASES = (100.0, 1_000.0, 5_000.0, 10_000.0, 50_000.0, 100_000.0, 500_000.0, 1_000_000.0)  # of RoPE, in published models
CAPS = (10.0, 20.0, 30.0, 50.0, 100.0)  # of attention logits
R_SOFTPLUS_0 = 1.442695041  # 1 / softplus(0), as praxis and timesfm write it


# ---- RoPE


def rope(x: Array, position: Array, base: float, pairing: str = "half-split") -> Array:
    """Rotate queries or keys.

    Args:
        x: [batch, time, head, width].
        position: [batch or 1, time].
        pairing: ``half-split`` rotates feature k with feature k + width/2, ``interleaved`` with its neighbour.
    """
    width = x.shape[-1]
    angle = position[:, :, None, None] / base ** (2 * np.arange(width // 2) / width)
    sin, cos = np.sin(angle), np.cos(angle)
    halves = (x[..., : width // 2], x[..., width // 2 :]) if pairing == "half-split" else (x[..., ::2], x[..., 1::2])
    turned = halves[0] * cos - halves[1] * sin, halves[1] * cos + halves[0] * sin
    out: Array = np.concatenate(turned, -1) if pairing == "half-split" else np.stack(turned, -1).reshape(x.shape)
    return out


def rope_variants(
    unrotated: Callable[[Observed], Array], position: Callable[[Observed], Array], base: float
) -> Iterator[Variant]:
    """Yield half-split RoPE with `base`, and known mistakes.

    Args:
        unrotated: the queries or keys before RoPE: [batch, time, head, width].
        position: of each time step, as the model counts: [batch, time].
    """

    def made(
        base: float, pairing: str = "half-split", shift: int = 0, whole: bool = False
    ) -> Callable[[Observed], Array]:
        def make(seen: Observed) -> Array:
            x, at = unrotated(seen), position(seen)
            return rope(x, np.arange(x.shape[1])[None] if whole else at + shift, base, pairing)

        return make

    yield Variant("half-split RoPE", made(base))
    yield Variant("interleaved RoPE", made(base, "interleaved"))
    yield Variant("no RoPE", unrotated)
    yield Variant("RoPE turned backwards", lambda seen: rope(unrotated(seen), -position(seen), base))
    yield Variant("RoPE positions count padding", made(base, whole=True))
    yield Variant("RoPE positions off by one", made(base, shift=1))
    yield Variant("RoPE positions off by one, downwards", made(base, shift=-1))
    yield from (Variant(f"RoPE with base {other:g}", made(other)) for other in BASES if other != base)


def rope_fix(base: float, factor: float = 1.0) -> str:
    """Return what to change in a target so that it computes RoPE of this base and factor."""
    divided = f", positions divided by {factor:g}" if factor != 1 else ", positions not divided"
    return f"give this layer RoPE of base {base:g} in half-split pairs{divided}"


# ---- attention


@dataclass(frozen=True)
class Attention:
    """How attention is computed.

    Attributes:
        padding: whether keys that are padding are masked.
        reach: number of later positions that a query sees; None for all.
        window: number of positions that a query sees, itself included; None for all.
        power: exponent of the square root of a head's width, by which the query is multiplied in addition; 0 is correct.
        cap: logits are ``cap * tanh(logits / cap)``.
    """

    padding: bool = True
    reach: int | None = 0
    window: int | None = None
    power: int = 0
    cap: float | None = None


def probabilities(query: Array, key: Array, padding: Array, how: Attention, bias: Array | float = 0.0) -> Array:
    """Return the probabilities [batch, head, query, key] for queries and keys [batch, time, head, width].

    `padding` is [batch, time], and `bias` is added to the logits. If all logits of a query are masked, all have the same
    probability.
    """
    logits = np.einsum("bqhd,bkhd->bhqk", query, key) + bias
    if how.cap is not None:
        logits = how.cap * np.tanh(logits / how.cap)
    q, k = np.arange(query.shape[1])[:, None], np.arange(key.shape[1])[None, :]
    seen = np.ones((query.shape[1], key.shape[1]), bool)
    if how.reach is not None:
        seen &= k <= q + how.reach
    if how.window is not None:
        seen &= k > q - how.window
    allowed = np.broadcast_to(seen[None, None], logits.shape)
    if how.padding:
        allowed = allowed & ~np.asarray(padding, bool)[:, None, None, :]
    none = ~allowed.any(-1, keepdims=True)
    logits = np.where(allowed | none, logits, -np.inf)
    exponents = np.exp(logits - logits.max(-1, keepdims=True))
    exponents = np.where(none, 1.0, exponents)
    out: Array = exponents / exponents.sum(-1, keepdims=True)
    return out


def attention_variants(
    query: Callable[[Observed, str], Array],
    key: Callable[[Observed], Array],
    finish: Callable[[Observed, Array], Array],
    padding: Callable[[Observed], Array],
    steps: int,
    scales: Sequence[str] = ("",),
    meant: Attention = Attention(),
) -> Iterator[Variant]:
    """Yield causal attention as it is meant (by default without window or cap, padding masked), and known mistakes.

    Args:
        query: [batch, time, head, width], scaled by one of `scales`; the first is correct. key: the same, not scaled.
        scales: names of scales; they replace mistakes with the same name.
        finish: from the probabilities to the value at the boundary.
        padding: [batch, time].
        steps: length of the sequences.
    """

    def made(how: Attention, scale: str = scales[0]) -> Callable[[Observed], Array]:
        def make(seen: Observed) -> Array:
            q = query(seen, scale)
            factor = math.sqrt(q.shape[-1]) ** how.power
            return finish(seen, probabilities(factor * q, key(seen), padding(seen), how))

        return make

    mistakes: Mapping[str, Attention] = {
        "causal mask off by one": replace(meant, reach=1),
        "causal mask leaves the position itself out": replace(meant, reach=-1),
        "no causal mask": replace(meant, reach=None),
        "padding is attended to": replace(meant, padding=False),
        "no attention mask": replace(meant, reach=None, padding=False),
        "attention scale missing": replace(meant, power=1),
        "attention scale doubled": replace(meant, power=-1),
        **{f"soft cap {cap:g}": replace(meant, cap=cap) for cap in CAPS if cap != meant.cap},
        **{
            f"attention window of {size}": replace(meant, window=size)
            for size in range(1, steps)
            if size != meant.window
        },
    }
    if meant.cap is not None:
        mistakes = {**mistakes, "no soft cap": replace(meant, cap=None)}
    if meant.window is not None:
        mistakes = {**mistakes, "no attention window": replace(meant, window=None)}
    yield Variant("causal attention", made(meant))
    for name, how in mistakes.items():
        if name not in scales:
            yield Variant(name, made(how), fix=attention_fix(how, meant))
    yield from (Variant(name, made(meant, name), fix="correct what the scores are divided by") for name in scales[1:])


def attention_fix(how: Attention, meant: Attention) -> str:
    """Return what to change in a target that computes attention as `how`, so that it computes it as `meant`."""
    if how.window != meant.window:
        if meant.window is None:
            return "take the attention window out of this layer"
        return f"give this layer an attention window of {meant.window} positions" + (
            f", not {how.window}" if how.window else ""
        )
    if how.cap != meant.cap:
        if meant.cap is None:
            return "take the soft cap of the attention scores out"
        return f"set the soft cap of the attention scores to {meant.cap:g}" + (f", not {how.cap:g}" if how.cap else "")
    if how.power != meant.power:
        return "correct what the attention scores are divided by"
    sees = "a position sees " + ("all others" if meant.reach is None else "itself and those before it")
    return f"correct the attention mask: {sees}" + (", padding left out" if meant.padding else "")


# ---- per-dimension scale of the query


def softplus(x: Array) -> Array:
    """log(1 + exp(x))."""
    out: Array = np.logaddexp(0.0, x)
    return out


# The factor of a query in praxis' PerDimScale, by parameter and square root of a head's width; the correct one first
QUERY_SCALES: Mapping[str, Callable[[Array, float], Array]] = {
    "per-dim scale": lambda p, root: R_SOFTPLUS_0 / root * softplus(p),
    "per-dim scale without softplus": lambda p, root: R_SOFTPLUS_0 / root * p,
    "attention scale missing": lambda p, root: R_SOFTPLUS_0 * softplus(p),
    "attention scale doubled": lambda p, root: R_SOFTPLUS_0 / root**2 * softplus(p),
    "no per-dim scale": lambda p, root: np.full_like(p, 1 / root),
    "per-dim scale not divided by softplus(0)": lambda p, root: softplus(p) / root,
    "per-dim scale applied twice": lambda p, root: R_SOFTPLUS_0**2 / root * softplus(p) ** 2,
}


def scaled(query: Array, parameter: Array, name: str) -> Array:
    """Scale a query [..., width] by one of `QUERY_SCALES`."""
    out: Array = query * QUERY_SCALES[name](parameter, math.sqrt(parameter.shape[-1]))
    return out


def query_variants(query: Callable[[Observed], Array], parameter: str) -> Iterator[Variant]:
    """Yield the scaled query, and known mistakes; `parameter` is the name of the weight."""
    for name in QUERY_SCALES:
        yield Variant(name, lambda seen, name=name: scaled(query(seen), seen.weights[parameter], name))  # type: ignore[misc]


# ---- positions


def sinusoids(steps: int, width: int, start: int = 0, least: float = 1.0, longest: float = 10_000.0) -> Array:
    """Compute the sine and cosine table of praxis' PositionalEmbedding: [1, steps, width]."""
    count = width // 2
    inverse = least * np.exp(np.arange(count) * -(math.log(longest / least) / max(count - 1, 1)))
    time = (start + np.arange(steps))[None, :, None] * inverse
    return np.pad(np.concatenate([np.sin(time), np.cos(time)], 2), [(0, 0), (0, 0), (0, width % 2)])


def rotated(table: Array, padding: Array) -> Array:
    """Rotate the table for each row of a batch so that it starts at the first step without padding: [batch, time, width]."""
    first = np.argmin(padding, axis=1)
    index = (np.arange(table.shape[1])[None] - first[:, None]) % table.shape[1]
    out: Array = table[0][index]
    return out


def table_variants(steps: int, width: int) -> Iterator[Variant]:
    """Yield the table of positions, and known mistakes."""
    half = width // 2
    table = sinusoids(steps, width)
    made = {
        "sinusoidal positions": table,
        "no positional embedding": np.zeros_like(table),
        "positions off by one": sinusoids(steps, width, start=1),
        "cosines before sines": np.concatenate([table[..., half : 2 * half], table[..., :half]], -1),
        "sines and cosines interleaved": np.stack([table[..., :half], table[..., half : 2 * half]], -1).reshape(
            1, steps, -1
        ),
    }
    yield from (Variant(name, lambda seen, value=value: value) for name, value in made.items())  # type: ignore[misc]


def added_variants(
    embedded: Callable[[Observed], Array],
    frequency: Callable[[Observed], Array],
    padding: Callable[[Observed], Array],
    positions: bool,
) -> Iterator[Variant]:
    """Yield embedded patches with positions and frequency added, and known mistakes.

    Args:
        embedded: [batch, time, width]. frequency: [batch, 1, width]. padding: [batch, time].
        positions: whether the model adds positions.
    """

    def made(table: Callable[[Array, Array], Array], add: float = 1.0) -> Callable[[Observed], Array]:
        def make(seen: Observed) -> Array:
            x = embedded(seen)
            return x + add * frequency(seen) + table(x, padding(seen))

        return make

    def none(x: Array, pads: Array) -> Array:
        return np.zeros_like(x)

    def plain(x: Array, pads: Array) -> Array:
        return sinusoids(x.shape[1], x.shape[2])

    def turned(x: Array, pads: Array) -> Array:
        return rotated(sinusoids(x.shape[1], x.shape[2]), pads)

    def late(x: Array, pads: Array) -> Array:
        return rotated(sinusoids(x.shape[1], x.shape[2], start=1), pads)

    with_positions = {
        "positions that start behind the padding": turned,
        "positions that count padding": plain,
        "no positional embedding": none,
        "positions off by one": late,
        "positional embedding added twice": lambda x, pads: 2 * turned(x, pads),
    }
    without = {"no positional embedding": none, "positional embedding added": turned}
    table = with_positions if positions else without
    yield from (Variant(name, made(function)) for name, function in table.items())
    first = next(iter(table.values()))
    yield Variant("no frequency embedding", made(first, 0.0))
    yield Variant("frequency embedding added twice", made(first, 2.0))


# ---- both ends of a language model, and gated feed-forward blocks


def embedding_variants(table: str) -> Iterator[Variant]:
    """Yield rows of the weight `table` for the input ``tokens``, times the square root of their width, and known mistakes."""

    def made(power: float) -> Callable[[Observed], Array]:
        def make(seen: Observed) -> Array:
            rows = seen.weights[table][np.asarray(seen.inputs["tokens"])]
            return np.asarray(rows * math.sqrt(rows.shape[-1]) ** power)

        return make

    yield Variant("embedding times sqrt(width)", made(1))
    yield Variant("embedding not scaled", made(0))
    yield Variant("embedding scaled twice", made(2))
    yield Variant("embedding divided by sqrt(width)", made(-1))


def logits_variants(hidden: str, table: str, cap: float | None, head: str = "") -> Iterator[Variant]:
    """Yield the logits of the value `hidden` by the weight `table`, with or without a soft cap, and known mistakes.

    Args:
        head: name of the weight of a separate head that the target may have; empty for none.
    """

    def made(cap: float | None, by: str = table) -> Callable[[Observed], Array]:
        def make(seen: Observed) -> Array:
            logits = seen.values[hidden] @ seen.weights[by].T
            return np.asarray(logits if cap is None else cap * np.tanh(logits / cap))

        return make

    caps = [cap, *(other for other in (None, *CAPS) if other != cap)]
    yield from (Variant("no soft cap" if c is None else f"soft cap {c:g}", made(c)) for c in caps)
    if head:
        yield Variant("head not tied to the embedding", made(cap, head))


def gated_variants(
    gate: Callable[[Observed], Array], other: Callable[[Observed], Array], meant: str = "gelu_tanh"
) -> Iterator[Variant]:
    """Yield an activation of the gate, by default the tanh GeLU, times the other, and known mistakes."""
    for name in [meant, *(name for name in NUMPY_ACTIVATIONS if name != meant)]:
        yield Variant(name, lambda seen, name=name: NUMPY_ACTIVATIONS[name](gate(seen)) * other(seen))  # type: ignore[misc]
    yield Variant("gate and up swapped", lambda seen: NUMPY_ACTIVATIONS[meant](other(seen)) * gate(seen))


# ---- patches and outputs


def swapped_halves(x: Array) -> Array:
    """Move the second half of the last axis before the first."""
    half = x.shape[-1] // 2
    return np.concatenate([x[..., half:], x[..., :half]], -1)


def other_order(x: Array) -> Array:
    """Flatten the last two axes in the other order, keeping the shape."""
    return np.swapaxes(x, -1, -2).reshape(x.shape)


def undone(name: str, boundary: str, change: Callable[[Array], Array]) -> Variant:
    """Return the variant of a mistake in the PyTorch model's value at `boundary`, which `change` undoes."""
    return Variant(name, lambda seen: change(seen.values[boundary]), undoes=True)
