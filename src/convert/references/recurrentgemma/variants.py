"""Functions between the layers of RecurrentGemma, with known mistakes, for the diagnosis (`Reference.variants`)."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from convert.planning.plan import Plan
from convert.references.protocol import INPUT, Observed, Variant
from convert.references.variants import (
    Attention,
    attention_variants,
    embedding_variants,
    gated_variants,
    logits_variants,
    rope,
    rope_fix,
    softplus,
)

Array = np.ndarray[Any, np.dtype[Any]]
Seen = Callable[[Observed], Array]
_LAYER = re.compile(r"(?P<layer>(model\.layers|blocks)\.\d+)\.(?P<inner>.+)")


@dataclass(frozen=True)
class _Names:
    """Names of the target's tensors."""

    query: str
    key: str
    value: str
    gates: tuple[tuple[str, str], tuple[str, str]]  # weight and bias of the input gate, of the recurrent gate
    decay: str
    taps: str
    table: str


_UPSTREAM = _Names(
    "proj_q",
    "proj_k",
    "proj_v",
    (("input_gate.w", "input_gate.b"), ("a_gate.w", "a_gate.b")),
    "a_param",
    "w",
    "embedder.input_embedding",
)
_HUGGING = _Names(
    "q_proj",
    "k_proj",
    "v_proj",
    (("input_gate_weight", "input_gate_bias"), ("recurrent_gate_weight", "recurrent_gate_bias")),
    "recurrent_param",
    "weight",
    "model.embed_tokens.weight",
)


def variants(plan: Plan, steps: int, name: str) -> Sequence[Variant]:
    """Return `Reference.variants` of RecurrentGemma, for sequences of `steps` positions."""
    return tuple(_variants(plan, steps, name))


def _variants(plan: Plan, steps: int, name: str) -> Iterator[Variant]:
    upstream = plan.target == "recurrentgemma"
    names = _UPSTREAM if upstream else _HUGGING
    if name == "logits":
        norm = "final_norm" if upstream else "model.final_norm"
        yield from logits_variants(norm, names.table, float(plan.facts["logits_soft_cap"]))
        return
    found = _LAYER.fullmatch(name)
    if found is None:
        return
    layer, inner = found["layer"], found["inner"]
    block, _, last = inner.removesuffix(INPUT).rpartition(".")
    if not inner.endswith(INPUT):
        if last == "rg_lru":
            yield from _recurrence(names, name, float(plan.facts["decay"]))
        elif last == "conv_1d":
            yield from _convolution(names, name, f"{layer}.{block}.linear_x")
    elif last == "temporal_pre_norm" and layer.endswith(".0"):
        yield from embedding_variants(names.table)
    elif last == "rg_lru":
        yield from _convolution(names, f"{layer}.{block}.conv_1d", f"{layer}.{block}.linear_x")
    elif last in ("proj_final", "o_proj"):
        yield from _attention(names, f"{layer}.{block}", plan, steps)
    elif last == "linear_out":
        yield from gated_variants(_value(f"{layer}.{block}.linear_y"), _value(f"{layer}.{block}.rg_lru"))
    elif last == "ffw_down":
        both = f"{layer}.mlp_block.ffw_up"
        yield from gated_variants(lambda seen: seen.values[both][0], lambda seen: seen.values[both][1])
    elif last == "down_proj":
        yield from gated_variants(_value(f"{layer}.mlp_block.gate_proj"), _value(f"{layer}.mlp_block.up_proj"))


def _value(name: str) -> Seen:
    return lambda seen: seen.values[name]


def _positions(seen: Observed) -> Array:
    return np.asarray(seen.inputs["positions"])


# ---- the recurrence


def _convolution(names: _Names, module: str, given: str) -> Iterator[Variant]:
    """Convolve each channel with its taps; the last tap is the current step."""

    def made(flip: bool = False, ahead: int = 0, bias: bool = True, apart: bool = True) -> Seen:
        def make(seen: Observed) -> Array:
            x, positions = seen.values[given], _positions(seen)
            stored = seen.weights[f"{module}.{names.taps}"]
            taps = stored[:, 0].T if stored.ndim == 3 else stored
            taps = taps[::-1] if flip else taps
            b = seen.weights[f"{module}.{'b' if names.taps == 'w' else 'bias'}"]
            document = np.cumsum(positions == 0, axis=1)
            out = np.zeros_like(x)
            for k, tap in enumerate(taps):
                shift = k - len(taps) + 1 + ahead
                for t in range(max(0, -shift), min(x.shape[1], x.shape[1] - shift)):
                    same = document[:, t + shift] == document[:, t] if apart else np.ones(len(x), bool)
                    out[:, t] += np.where(same[:, None], x[:, t + shift] * tap, 0)
            return out + b if bias else out

        return make

    yield Variant("causal convolution", made())
    yield Variant("convolution flipped", made(flip=True))
    yield Variant("convolution one step ahead", made(ahead=1))
    yield Variant("convolution one step behind", made(ahead=-1))
    yield Variant("convolution centred", made(ahead=2))
    yield Variant("convolution without bias", made(bias=False))
    yield Variant("convolution across documents", made(apart=False))


@dataclass(frozen=True)
class _How:
    swapped: bool = False
    decay: float = 8.0
    softplus: bool = True
    scaled: bool = True
    first: bool = True
    reset: bool = True
    transposed: bool = False


def _recurrence(names: _Names, module: str, decay: float) -> Iterator[Variant]:
    """Compute the RG-LRU: ``h = a h + sqrt(1 - a^2) gate x``, with ``a = exp(-decay sigmoid(gate) softplus(parameter))``."""

    def gate(seen: Observed, k: int, transposed: bool) -> Array:
        w, b = (seen.weights[f"{module}.{name}"] for name in names.gates[k])
        x = seen.values[module + INPUT]
        blocks = x.reshape(*x.shape[:2], len(w), -1)
        out = np.einsum("bthi,hji->bthj" if transposed else "bthi,hij->bthj", blocks, w) + b
        return np.asarray(1 / (1 + np.exp(-out.reshape(x.shape))))

    def made(how: _How) -> Seen:
        def make(seen: Observed) -> Array:
            x, start = seen.values[module + INPUT], (_positions(seen) == 0)[..., None]
            first, second = (gate(seen, k, how.transposed) for k in ((1, 0) if how.swapped else (0, 1)))
            parameter = seen.weights[f"{module}.{names.decay}"]
            log_a = -how.decay * second * (softplus(parameter) if how.softplus else parameter)
            with np.errstate(over="ignore", invalid="ignore"):
                a = np.exp(log_a)
                size = np.sqrt(1 - a**2) if how.scaled else np.ones_like(a)
                size = np.where(start & how.first, 1.0, size)
                a = np.where(start & how.reset, 0.0, a)
                h, out = np.zeros_like(x[:, 0]), np.zeros_like(x)
                for t in range(x.shape[1]):
                    h = a[:, t] * h + (size * first * x)[:, t]
                    out[:, t] = h
            return out

        return make

    meant = _How(decay=decay)
    mistakes = {
        "input gate and recurrent gate swapped": replace(meant, swapped=True),
        "gates transposed": replace(meant, transposed=True),
        "softplus of the decay missing": replace(meant, softplus=False),
        "input not scaled by sqrt(1 - a^2)": replace(meant, scaled=False),
        "input scaled at the start of a document": replace(meant, first=False),
        "state not reset between documents": replace(meant, reset=False),
        **{f"decay {other:g}": replace(meant, decay=other) for other in (1.0, 4.0, 16.0) if other != decay},
    }
    yield Variant("RG-LRU", made(meant))
    yield from (Variant(name, made(how)) for name, how in mistakes.items())


# ---- attention


def _attention(names: _Names, block: str, plan: Plan, steps: int) -> Iterator[Variant]:
    """Yield attention over a window, with half of each head rotated and one key and value for all heads, and known mistakes."""
    heads, base, window = plan.sizes["N"], float(plan.facts["rope_theta"]), int(plan.facts["attention_window"])

    def rotated(
        base: float, pairing: str = "half-split", part: float = 0.5, shift: int = 0
    ) -> Callable[[Array, Array], Array]:
        def turn(x: Array, positions: Array) -> Array:
            width = int(x.shape[-1] * part)
            return np.concatenate([rope(x[..., :width], positions + shift, base, pairing), x[..., width:]], -1)

        return turn

    meant = "half of each head rotated"
    ropes: dict[str, Callable[[Array, Array], Array]] = {
        meant: rotated(base),
        "interleaved RoPE": rotated(base, "interleaved"),
        "whole heads rotated": rotated(base, part=1.0),
        "no RoPE": lambda x, positions: x,
        "RoPE turned backwards": lambda x, positions: rotated(base)(x, -positions),
        **{f"RoPE with base {other:g}": rotated(other) for other in (1e3, 1e5, 5e5, 1e6)},
    }

    def projected(name: str, count: int) -> Seen:
        def get(seen: Observed) -> Array:
            x = seen.values[f"{block}.{name}"]
            return x.reshape(*x.shape[:2], count, -1)

        return get

    queries, keys, values = projected(names.query, heads), projected(names.key, 1), projected(names.value, 1)

    def finish(seen: Observed, probabilities: Array) -> Array:
        # Only positions of the same document count; each row is normalised to the sum 1 again.
        document = np.cumsum(_positions(seen) == 0, axis=1)
        apart = np.where((document[:, :, None] == document[:, None, :])[:, None], probabilities, 0)
        with np.errstate(invalid="ignore"):  # a mistaken mask may leave nothing
            out = np.einsum("bhqk,bkhd->bqhd", apart / apart.sum(-1, keepdims=True), repeated(values(seen)))
        return np.asarray(out.reshape(*out.shape[:2], -1))

    def repeated(x: Array) -> Array:
        return np.repeat(x, heads, axis=2)

    def attended(turn: Callable[[Array, Array], Array]) -> Iterator[Variant]:
        def query(seen: Observed, scale: str) -> Array:
            q = turn(queries(seen), _positions(seen))
            return q / math.sqrt(q.shape[-1])

        def key(seen: Observed) -> Array:
            return repeated(turn(keys(seen), _positions(seen)))

        nothing = Attention(padding=False, window=window + 1)  # a position sees itself too
        yield from attention_variants(
            query, key, finish, lambda seen: np.zeros(_positions(seen).shape, bool), steps, meant=nothing
        )

    for name, turn in ropes.items():
        found = attended(turn)
        if name == meant:
            yield from found
        else:
            yield Variant(name, next(found).make, fix=f"{rope_fix(base)}, of half of each head")
