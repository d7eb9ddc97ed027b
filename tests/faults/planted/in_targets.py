"""Faults in what the models compute, where no weight is wrong: in the PyTorch code or its configuration, or on JAX's side."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any
from unittest import mock

import jax
import torch
from timesfm.torch import transformer
from torch.nn import functional as F  # noqa: N812 - its usual name
from transformers.models.timesfm import modeling_timesfm
from transformers.models.timesfm2_5 import modeling_timesfm2_5

from convert.references.timesfm import praxis as praxis_timesfm
from convert.references.timesfm import timesfm_1
from faults.expected import BOTH, HUGGING, IN, ONE, TWO_FIVE, UPSTREAM, Fault, layer
from faults.plants import InReference, InTarget, Shim, attribute, each, forward

Edit = Callable[[Any], None]
Patch = Callable[[], AbstractContextManager[Any]]


def target(name: str, case: str, to: str, at: str, diagnosis: str, edit: Edit | None = None, patch: Patch | None = None, level: str = "model", fact: tuple[str, str] | None = None) -> Fault:  # fmt: skip
    """A fault that the model level names `diagnosis`; with `fact`, the layers level sees it already, at and by name."""
    plant = InTarget(edit, patch)
    if fact is None:
        return Fault(name, case, to, plant, "model", at, diagnosis)
    return Fault(name, case, to, plant, "layers", *fact, (at, diagnosis))


# ---- norms

RMS = {
    (ONE, UPSTREAM): "RMSNorm",
    (ONE, HUGGING): "TimesFmRMSNorm",
    (TWO_FIVE, UPSTREAM): "RMSNorm",
    (TWO_FIVE, HUGGING): "TimesFm2_5RMSNorm",
}
EPSILON = {(ONE, UPSTREAM): "eps", (TWO_FIVE, UPSTREAM): "epsilon"}
CASES = list(RMS)


def first_norm(case: str, to: str) -> str:
    """The first RMSNorm of the stack."""
    return f"{layer(case, to)}{'pre_attn_ln' if (case, to) == (TWO_FIVE, UPSTREAM) else 'input_layernorm'}"


def stated_first(case: str, to: str) -> str:
    """The RMSNorm that comes first in the target's module."""
    return f"{layer(case, to)}self_attn.q_norm" if (case, to) == (TWO_FIVE, HUGGING) else first_norm(case, to)


def weight_of(norm: Any) -> torch.Tensor:
    """Under either name."""
    found: torch.Tensor = norm.scale if hasattr(norm, "scale") else norm.weight
    return found


def rms(norm: Any, x: torch.Tensor, add: float = 0.0, centre: bool = False) -> torch.Tensor:
    """RMSNorm, or with the mean taken off first."""
    x = x - x.mean(-1, keepdim=True) if centre else x
    y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * (weight_of(norm) + add)
    return y + norm.bias if getattr(norm, "bias", None) is not None else y


NORMS = [
    fault
    for case, to in CASES
    for fault in (
        target(
            "LayerNorm for RMSNorm",
            case,
            to,
            first_norm(case, to),
            "LayerNorm for RMSNorm",
            each(RMS[case, to], forward(partial(rms, centre=True))),
        ),
        target(
            "epsilon 1e-5 for 1e-6",
            case,
            to,
            first_norm(case, to),
            "epsilon 1e-05 for 1e-06",
            each(RMS[case, to], attribute(EPSILON.get((case, to), "variance_epsilon"), 1e-5)),
            fact=(stated_first(case, to), "epsilon"),
        ),
        target(
            "1+scale on a plain norm",
            case,
            to,
            first_norm(case, to),
            "1+scale on a plain norm",
            each(RMS[case, to], forward(partial(rms, add=1.0))),
            fact=(stated_first(case, to), "multiplies_by"),
        ),
    )
] + [
    fault
    for to in BOTH
    for fault in (
        target(
            "RMSNorm for LayerNorm",
            ONE,
            to,
            f"{layer(ONE, to)}mlp.layer_norm",
            "RMSNorm for LayerNorm",
            each("LayerNorm", forward(rms)),
        ),
        target(
            "1+scale doubled",
            ONE,
            to,
            f"{layer(ONE, to)}mlp.layer_norm",
            "1+scale doubled",
            each("LayerNorm", forward(partial(rms, add=1.0, centre=True))),
            fact=(f"{layer(ONE, to)}mlp.layer_norm", "multiplies_by"),
        ),
        target(
            "epsilon 1e-5 for 1e-6 in a LayerNorm",
            ONE,
            to,
            f"{layer(ONE, to)}mlp.layer_norm",
            "epsilon 1e-05 for 1e-06",
            each("LayerNorm", attribute("eps", 1e-5)),
            fact=(f"{layer(ONE, to)}mlp.layer_norm", "epsilon"),
        ),
    )
]


# ---- activations


def silu(case: str, to: str, function: Callable[[torch.Tensor], torch.Tensor]) -> Edit:
    """An edit of every SiLU."""
    kind = "SiLUActivation" if (case, to) == (TWO_FIVE, HUGGING) else "SiLU"
    return each(kind, forward(lambda _, x: function(x)))


def relu(to: str, function: Any) -> Patch:
    """ReLU is called as a function in TimesFM 1.0."""
    return lambda: mock.patch.object(
        timesfm_1.upstream_module() if to == UPSTREAM else modeling_timesfm, "F", Shim(F, relu=function)
    )


def hidden(case: str, to: str) -> str:
    """The first block's first layer."""
    if case == ONE:
        return "input_ff_layer.hidden_layer.0" if to == UPSTREAM else "decoder.input_ff_layer.input_layer"
    return "tokenizer.hidden_layer" if to == UPSTREAM else "model.input_ff_layer.input_layer"


def output(case: str, to: str) -> str:
    """The input of its second layer."""
    return f"{hidden(case, to).rsplit('.hidden', 1)[0].removesuffix('.input_layer')}.output_layer{IN}"


ACTIVATIONS = [
    fault
    for to in BOTH
    for fault in (
        *(
            target(
                "SiLU for ReLU",
                ONE,
                to,
                f"{layer(ONE, to)}mlp.down_proj{IN}",
                "silu for relu",
                patch=relu(to, F.silu),
                fact=(f"{layer(ONE, to)}mlp.gate_proj", "activation"),
            ),
            target(
                "GeLU (tanh) for ReLU",
                ONE,
                to,
                f"{layer(ONE, to)}mlp.down_proj{IN}",
                "gelu_tanh for relu",
                patch=relu(to, partial(F.gelu, approximate="tanh")),
                fact=(f"{layer(ONE, to)}mlp.gate_proj", "activation"),
            ),
        ),
        *(
            target(
                "GeLU (erf) for SiLU",
                case,
                to,
                output(case, to),
                "gelu_erf for silu",
                silu(case, to, F.gelu),
                fact=(hidden(case, to), "activation"),
            )
            for case in (ONE, TWO_FIVE)
        ),
    )
]


# ---- RoPE


def interleaved(x: torch.Tensor, sin: torch.Tensor, cos: torch.Tensor) -> torch.Tensor:
    """Each feature turns with its neighbour."""
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)


def rope(module: Any, x: torch.Tensor, position: torch.Tensor, *, pairs: bool = False, shift: int = 0, whole: bool = False) -> torch.Tensor:  # fmt: skip
    """timesfm/torch/transformer.py, RotaryPositionalEmbedding, with a mistake."""
    if whole:
        position = torch.arange(x.shape[1])[None]
    if not pairs:
        moved: torch.Tensor = type(module).forward(module, x, position + shift)
        return moved
    width = x.shape[-1]
    angle = position[..., None, None] / 10000.0 ** (2 * torch.arange(width // 2) / width)
    return interleaved(x, torch.sin(angle), torch.cos(angle))


def every_second(module: Any) -> None:
    """Queries are turned first, then keys."""
    count = itertools.count()
    module.forward = lambda x, position: type(module).forward(module, x, position + next(count) % 2)


def rope_pairs(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> tuple[Any, Any]:
    """transformers' apply_rotary_pos_emb, with neighbours as pairs."""
    half = cos.shape[-1] // 2
    sin, cos = (x[..., :half].unsqueeze(unsqueeze_dim) for x in (sin, cos))
    return interleaved(q, sin, cos), interleaved(k, sin, cos)


ROTARY, ROTATED = "RotaryPositionalEmbedding", f"{layer(TWO_FIVE, UPSTREAM)}attn.rotary_position_embedding"
NORMED = f"{layer(TWO_FIVE, HUGGING)}self_attn.q_norm{IN}"


def of_rotary(change: Callable[..., Any]) -> Edit:
    """An edit of the module that makes transformers' table."""
    return each("TimesFm2_5RotaryEmbedding", forward(lambda m, x, position: type(m).forward(m, x, change(position))))


def base(module: Any) -> None:
    """transformers keeps inverse frequencies."""
    width = 2 * len(module.inv_freq)
    module.inv_freq = 1.0 / 1e6 ** (torch.arange(0, width, 2, device=module.inv_freq.device) / width)


ROPE = [
    target(
        "interleaved for half-split RoPE",
        TWO_FIVE,
        UPSTREAM,
        ROTATED,
        "interleaved RoPE",
        each(ROTARY, forward(partial(rope, pairs=True))),
    ),
    target(
        "wrong RoPE base",
        TWO_FIVE,
        UPSTREAM,
        ROTATED,
        "RoPE with base 1e+06",
        each(ROTARY, attribute("max_timescale", 1_000_000.0)),
        fact=(ROTATED, "rope_theta"),
    ),
    target("no RoPE", TWO_FIVE, UPSTREAM, ROTATED, "no RoPE", each(ROTARY, forward(lambda _, x, position: x))),
    target(
        "RoPE positions count padding",
        TWO_FIVE,
        UPSTREAM,
        ROTATED,
        "RoPE positions count padding",
        each(ROTARY, forward(partial(rope, whole=True))),
    ),
    target(
        "RoPE of keys alone off by one",
        TWO_FIVE,
        UPSTREAM,
        f"{layer(TWO_FIVE, UPSTREAM)}attn.key_ln{IN}",
        "RoPE positions off by one",
        each(ROTARY, every_second),
    ),
    target(
        "interleaved for half-split RoPE",
        TWO_FIVE,
        HUGGING,
        NORMED,
        "interleaved RoPE",
        patch=lambda: mock.patch.object(modeling_timesfm2_5, "apply_rotary_pos_emb", rope_pairs),
    ),
    target(
        "wrong RoPE base", TWO_FIVE, HUGGING, NORMED, "RoPE with base 1e+06", each("TimesFm2_5RotaryEmbedding", base)
    ),
    target(
        "no RoPE",
        TWO_FIVE,
        HUGGING,
        NORMED,
        "no RoPE",
        patch=lambda: mock.patch.object(modeling_timesfm2_5, "apply_rotary_pos_emb", lambda q, k, *_, **__: (q, k)),
    ),
    target(
        "RoPE positions count padding",
        TWO_FIVE,
        HUGGING,
        NORMED,
        "RoPE positions count padding",
        of_rotary(lambda position: position - position[:, :1]),
    ),
]


# ---- attention


def raw_scale(x: torch.Tensor) -> torch.Tensor:
    """No softplus."""
    return x


def scale(to: str, function: Any) -> Patch:
    """TimesFM 2.5's per-dim scale, with another function for softplus."""
    module = transformer if to == UPSTREAM else modeling_timesfm2_5
    return lambda: mock.patch.object(module, "F", Shim(F, softplus=function))


def scale_1(to: str, function: Callable[[Any], torch.Tensor]) -> Edit:
    """TimesFM 1.0's per-dim scale: `function` gives what a query is multiplied by, but for 1.44 / √H."""
    kind, name = ("TimesFMAttention", "_per_dim_scaling") if to == UPSTREAM else ("TimesFmAttention", "_scale_query")

    def change(attention: Any) -> None:
        def scaled(query: torch.Tensor) -> torch.Tensor:
            axis = -1  # heads are before the last axis in the one, before the last but one in the other
            return query * (1.442695041 / math.sqrt(query.shape[axis]) * function(attention.scaling))

        setattr(attention, name, scaled)

    return each(kind, change)


def attend(
    query: Any, key: Any, value: Any, mask: Any = None, *, cap: float = 0.0, factor: float = 1.0
) -> torch.Tensor:
    """timesfm/torch/transformer.py, _dot_product_attention, with a soft cap or a scale."""
    logits = torch.einsum("...qhd,...khd->...hqk", query, key) * factor
    logits = cap * torch.tanh(logits / cap) if cap else logits
    probs = F.softmax(torch.where(mask, logits, -torch.finfo(logits.dtype).max / 2), dim=-1)
    return torch.einsum("...hqk,...khd->...qhd", probs, value)


def mask_2p5(reach: int | None = 0, window: int | None = None, padding: bool = True) -> Patch:
    """timesfm/torch/transformer.py, make_attn_mask, with a mistake."""

    def make(
        query_length: int, num_all_masked_kv: Any, query_index_offset: Any = None, kv_length: int = 0
    ) -> torch.Tensor:
        q = torch.arange(query_length)[None, None, :, None]
        q = q if query_index_offset is None else q + query_index_offset[:, None, None, None]
        k = torch.arange(kv_length or query_length)[None, None, None, :]
        seen = torch.ones_like(q >= k) if reach is None else q + reach >= k
        seen = seen if window is None else seen & (k > q - window)
        return (
            seen & (k >= num_all_masked_kv[:, None, None, None])
            if padding
            else seen.expand(len(num_all_masked_kv), -1, -1, -1)
        )

    return lambda: mock.patch.object(transformer, "make_attn_mask", make)


def mask_hugging(case: str, **mistake: Any) -> Patch:
    """Both of transformers' masks: what may be seen, made anew from what it is given."""

    def seen(
        length: int, pads: torch.Tensor, reach: int | None = 0, window: int | None = None, padding: bool = True
    ) -> torch.Tensor:
        q, k = torch.arange(length)[:, None], torch.arange(length)[None, :]
        out = torch.ones(length, length, dtype=torch.bool) if reach is None else k <= q + reach
        out = out if window is None else out & (k > q - window)
        return out[None, None] & ~pads[:, None, None, :] if padding else out[None, None].expand(len(pads), 1, -1, -1)

    def added(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return torch.where(mask, 0.0, torch.finfo(dtype).min).to(dtype)

    def make_1(
        attention_mask: Any, sequence_length: int, dtype: Any, device: Any, is_causal: bool = True
    ) -> torch.Tensor:
        return added(seen(sequence_length, attention_mask.reshape(-1, sequence_length) > 0.5, **mistake), dtype)

    def make_2p5(
        config: Any, embeddings: torch.Tensor, padding_mask: torch.Tensor, past_key_values: Any = None
    ) -> torch.Tensor:
        return added(seen(embeddings.shape[1], padding_mask == 0, **mistake), embeddings.dtype)

    if case == ONE:
        return lambda: mock.patch.object(
            modeling_timesfm.TimesFmModel, "_prepare_4d_attention_mask", staticmethod(make_1)
        )
    return lambda: mock.patch.object(modeling_timesfm2_5, "create_causal_mask", make_2p5)


def mask_1(reach: int | None = 0, window: int | None = None, padding: bool = True) -> Patch:
    """pytorch_patched_decoder.py, causal_mask and convert_paddings_to_mask, with a mistake."""

    def causal(x: torch.Tensor) -> torch.Tensor:
        q, k = torch.arange(x.shape[1])[:, None], torch.arange(x.shape[1])[None, :]
        out = torch.zeros(x.shape[1], x.shape[1], dtype=torch.bool) if reach is None else k > q + reach
        out = out if window is None else out | (k <= q - window)
        return (out.to(x.dtype) * (-0.7 * torch.finfo(x.dtype).max))[None, None]

    def changed() -> AbstractContextManager[Any]:
        module = timesfm_1.upstream_module()
        if padding:
            return mock.patch.object(module, "causal_mask", causal)
        return mock.patch.object(
            module, "convert_paddings_to_mask", lambda paddings, dtype: torch.zeros_like(paddings)[:, None, None, :]
        )

    return changed


MASKS = (
    ("causal mask off by one", {"reach": 1}, "causal mask off by one"),
    ("no causal mask", {"reach": None}, "no causal mask"),
    ("an attention window that the source does not have", {"window": 4}, "attention window of 4"),
    ("padding is attended to", {"padding": False}, "padding is attended to"),
)
OUT = {
    (ONE, UPSTREAM): f"{layer(ONE, UPSTREAM)}self_attn",
    (ONE, HUGGING): f"{layer(ONE, HUGGING)}self_attn.o_proj{IN}",
    (TWO_FIVE, UPSTREAM): f"{layer(TWO_FIVE, UPSTREAM)}attn.out{IN}",
    (TWO_FIVE, HUGGING): f"{layer(TWO_FIVE, HUGGING)}self_attn.o_proj{IN}",
}
SCALED = f"{layer(TWO_FIVE, UPSTREAM)}attn.per_dim_scale"


def masked(case: str, to: str, mistake: dict[str, Any]) -> Patch:
    """The mask of a target, with a mistake."""
    if to == HUGGING:
        return mask_hugging(case, **mistake)
    return mask_1(**mistake) if case == ONE else mask_2p5(**mistake)


ATTENTION = [
    *(
        target(name, case, to, OUT[case, to], diagnosis, patch=masked(case, to, mistake))
        for case, to in OUT
        for name, mistake, diagnosis in MASKS
    ),
    *(
        target(
            f"per-dim scale {name}",
            TWO_FIVE,
            to,
            SCALED if to == UPSTREAM else OUT[TWO_FIVE, to],
            diagnosis,
            patch=scale(to, function),
        )
        for to in BOTH
        for name, diagnosis, function in (
            ("without softplus", "per-dim scale without softplus", raw_scale),
            (
                "without 1/√H (attention scale missing)",
                "attention scale missing",
                lambda x: math.sqrt(8) * F.softplus(x),
            ),
        )
    ),
    *(
        target(f"per-dim scale {name}", ONE, to, OUT[ONE, to], diagnosis, scale_1(to, function))
        for to in BOTH
        for name, diagnosis, function in (
            ("without softplus", "per-dim scale without softplus", raw_scale),
            (
                "without 1/√H (attention scale missing)",
                "attention scale missing",
                lambda x: math.sqrt(8) * F.softplus(x),
            ),
        )
    ),
    target(
        "attention scale doubled",
        TWO_FIVE,
        UPSTREAM,
        OUT[TWO_FIVE, UPSTREAM],
        "attention scale doubled",
        each("MultiHeadAttention", attribute("attention_fn", partial(attend, factor=1 / math.sqrt(8)))),
    ),
    target(
        "a soft cap that the source does not have",
        TWO_FIVE,
        UPSTREAM,
        OUT[TWO_FIVE, UPSTREAM],
        "soft cap 50",
        each("MultiHeadAttention", attribute("attention_fn", partial(attend, cap=50.0))),
    ),
]


# ---- positions, patches and outputs


def outside(to: str, name: str) -> str:
    """A place outside of TimesFM 1.0's stack."""
    return name if to == UPSTREAM else f"decoder.{name}"


def sinusoids(to: str, start: int, factor: float = 1.0) -> Edit:
    """An edit of TimesFM 1.0's table of positions."""

    def table(module: Any, seq_length: int) -> torch.Tensor:
        position = torch.arange(start, start + seq_length)[None]
        return factor * type(module).forward(module, position=position)

    return each("PositionalEmbedding" if to == UPSTREAM else "TimesFmPositionalEmbedding", forward(table))


def unshifted(to: str) -> Patch:
    """TimesFM 1.0's positions start behind the padding; not so here."""

    def same(mask: torch.Tensor, seq: torch.Tensor) -> torch.Tensor:
        return seq

    if to == HUGGING:
        return lambda: mock.patch.object(modeling_timesfm.TimesFmModel, "_timesfm_shift_padded_seq", staticmethod(same))
    return lambda: mock.patch.object(timesfm_1.upstream_module(), "_shift_padded_seq", same)


def mask_first(name: str) -> Edit:
    """An edit: the first block gets the mask before the patch."""

    def change(module: Any) -> None:
        def swap(_: Any, args: tuple[torch.Tensor]) -> torch.Tensor:
            return torch.cat(args[0].chunk(2, -1)[::-1], -1)

        module.get_submodule(name).register_forward_pre_hook(swap)

    return change


def quantiles_first(module: Any) -> None:
    """The output head's rows are read as if they ran over the steps within each quantile."""

    def post(model_output: torch.Tensor, num_outputs: int, stats: Any) -> torch.Tensor:
        y = module.horizon_ff_layer(model_output)
        y = y.view(*y.shape[:2], num_outputs, -1).transpose(-1, -2)
        restored: torch.Tensor = module._reverse_transform(y, stats)
        return restored

    module._postprocess_output = post


def sample_deviation() -> AbstractContextManager[Any]:
    """Statistics that divide by n - 1."""
    upstream = timesfm_1.upstream_module()
    right = upstream._masked_mean_std

    def wrong(inputs: torch.Tensor, padding: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mu, sigma = right(inputs, padding)
        return mu, sigma * math.sqrt(32 / 31)

    return mock.patch.object(upstream, "_masked_mean_std", wrong)


BEFORE = {to: f"{layer(ONE, to)}input_layernorm{IN}" for to in BOTH}
TOKENS = {UPSTREAM: "tokenizer", HUGGING: "model.input_ff_layer"}
PLACES = [
    fault
    for to in BOTH
    for fault in (
        target(
            "positional embedding missing",
            ONE,
            to,
            outside(to, "position_emb"),
            "no positional embedding",
            sinusoids(to, 0, 0.0),
        ),
        target("positions off by one", ONE, to, outside(to, "position_emb"), "positions off by one", sinusoids(to, 1)),
        target("positions count padding", ONE, to, BEFORE[to], "positions that count padding", patch=unshifted(to)),
        target(
            "mask before the patch",
            ONE,
            to,
            outside(to, f"input_ff_layer{IN}"),
            "mask before the patch",
            mask_first(outside(to, "input_ff_layer")),
        ),
        target(
            "mask before the patch", TWO_FIVE, to, f"{TOKENS[to]}{IN}", "mask before the patch", mask_first(TOKENS[to])
        ),
    )
] + [
    target(
        "quantile-major reading of the output", ONE, UPSTREAM, "output_ts", "quantiles before steps", quantiles_first
    ),
    target(
        "statistics divide by n - 1",
        ONE,
        UPSTREAM,
        f"input_ff_layer{IN}",
        "operation that the JAX model lacks",
        patch=sample_deviation,
    ),
]


# ---- norms of queries and keys


def norms_first(module: Any) -> None:
    """Queries and keys are normed in front of RoPE, whose positions leave padding out, and not behind it."""
    for attention in (one for one in module.modules() if hasattr(one, "query_ln")):
        turn, norms = attention.rotary_position_embedding, (attention.query_ln, attention.key_ln)
        in_turns, turned = itertools.cycle([norm.forward for norm in norms]), turn.forward
        turn.forward = lambda x, position, f=turned, norms=in_turns: f(next(norms)(x), position)
        for norm in norms:
            norm.forward = lambda x: x


NORMS_FIRST = target("norms of queries and keys in front of RoPE", TWO_FIVE, UPSTREAM, ROTATED, "norm in front of RoPE", norms_first)  # fmt: skip


# ---- JAX's side


def reference(name: str, to: str, at: str, diagnosis: str, patch: Patch) -> Fault:
    """A fault of TimesFM 1.0's JAX side."""
    return Fault(name, ONE, to, InReference(patch), "model", at, diagnosis)


def praxis(**changed: Any) -> Patch:
    """Names of the module with praxis' equations."""
    return lambda: mock.patch.multiple(praxis_timesfm, **changed)


def jax_nn(**changed: Any) -> Patch:
    """Functions of ``jax.nn``, as those equations call them."""
    return praxis(jax=Shim(jax, nn=Shim(jax.nn, **changed)))


def whole_scale(x: Any, scale: Any) -> Any:
    """praxis' RmsNorm, if its direct_scale were False."""
    return x * jax.lax.rsqrt(jax.numpy.mean(jax.numpy.square(x), -1, keepdims=True) + 1e-6) * (1 + scale)


REFERENCES = [
    reference("epsilon 1e-5 in the JAX model", UPSTREAM, f"{layer(ONE, UPSTREAM)}input_layernorm", "epsilon 1e-06 for 1e-05", praxis(EPSILON=1e-5)),
    reference("1+scale in the JAX model's RMSNorm", HUGGING, f"{layer(ONE, HUGGING)}input_layernorm", "1+scale missing", praxis(rms_norm=whole_scale)),
    reference("no softplus in the JAX model", UPSTREAM, OUT[ONE, UPSTREAM], "per-dim scale without softplus, in the JAX model", jax_nn(softplus=lambda x: x)),
    reference("GeLU in the JAX model's MLP", HUGGING, f"{layer(ONE, HUGGING)}mlp.down_proj{IN}", "relu for gelu_tanh", jax_nn(relu=jax.nn.gelu)),
    reference("positions count padding in the JAX model", UPSTREAM, BEFORE[UPSTREAM], "positions that count padding, in the JAX model", praxis(shift_padded_seq=lambda padding, seq: seq)),
]  # fmt: skip

IN_TARGETS: tuple[Fault, ...] = (*NORMS, *ACTIVATIONS, *ROPE, *ATTENTION, *PLACES, NORMS_FIRST)
IN_REFERENCES: tuple[Fault, ...] = (*REFERENCES,)
