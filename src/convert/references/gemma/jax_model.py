"""Text models Gemma 1, 2 and 3 in plain JAX: gemma's equations without the gemma package, which needs TensorFlow.

Sources: gemma 3.3.0 ``gm/nn/_modules.py``, ``gm/nn/_layers.py``, ``gm/nn/_transformer.py``, ``gm/math/_positional_embeddings.py``.
tests/models/test_gemma_check.py compares the logits with those that the real package gave for the golden checkpoints.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from convert.core.errors import ConvertError
from convert.core.findings import Finding
from convert.references.protocol import INPUT

MASKED = -2.3819763e38  # _modules.py, K_MASK
EPSILON = 1e-6  # _layers.py, RMSNorm
LOGITS, TABLE = "logits", "embedder/input_embedding"
_STACKED = re.compile(r"stacked_layers/attention_type_(\d+)/(.+)")
_WRAPPED = re.compile(r"_(?:SimulateQuantized|Int)Einsum_(\w+)/kernel$")  # of quantised weights


@dataclass(frozen=True)
class Gemma:
    """Hyperparameters that no weight holds.

    Attributes:
        bases: base of the rotation, by layer.
        factors: by which positions are divided, by layer.
        windows: number of positions that a query sees, itself included, by layer; None for all.
        query_scale: by which queries are multiplied.
        attention_cap, logits_cap: soft caps; None for none.
        vocabulary: number of tokens; the table may have more rows.
        transposed: whether gate and up have the layout [2, F, D] (upstream's transpose_gating_einsum), instead of [2, D, F].
    """

    bases: Sequence[float]
    factors: Sequence[float]
    windows: Sequence[int | None]
    query_scale: float
    attention_cap: float | None
    logits_cap: float | None
    vocabulary: int
    transposed: bool


@dataclass(frozen=True)
class Images:
    """Images among the tokens.

    Attributes:
        at: [batch, time], true at the tokens of an image.
        soft: [batch, n, width], their embeddings, in order.
        sees: [batch, query, key], true where a query sees a key, before windows apply.
    """

    at: Any
    soft: Any
    sees: Any


@dataclass(frozen=True)
class Seen:
    """Where tokens stand, and what they see.

    Attributes:
        places: [batch or 1, time], their positions.
        sees: [batch or 1, query, key], true where a query sees a key, before windows apply.
        before: rotated keys and values of tokens in front of these, by layer; none: the keys are these tokens'.
    """

    places: Any
    sees: Any
    before: Sequence[tuple[Any, Any]] = ()


def layered(weights: Mapping[str, Any]) -> dict[str, Any]:
    """Return the leaves by their names in the NESTED layout, from any layout: ``layer_7/attn/q_einsum/w``.

    Raises:
        ConvertError: there are stacked and single layers, whose order is unknown.
    """
    names = [found for name in weights if (found := _STACKED.fullmatch(name))]
    kinds = 1 + max((int(found[1]) for found in names), default=-1)
    out: dict[str, Any] = {}
    for name, value in weights.items():
        found = _STACKED.fullmatch(name)
        if found is None:
            if kinds and name.startswith("layer_"):
                raise ConvertError(
                    Finding(
                        "reference-unavailable",
                        "the tree has this layer and stacked_layers, and their order is unknown",
                        path=name,
                        fix="give a reference of your own with --reference",
                    )
                )
            out[_short(name)] = value
            continue
        for k in range(value.shape[0]):
            out[_short(f"layer_{k * kinds + int(found[1])}/{found[2]}")] = value[k]
    return out


def _short(name: str) -> str:
    name = _WRAPPED.sub(lambda found: "w" if found[1] == "0" else found[1], name)
    return name.removesuffix("/w") if "/mlp/" in name else name


def run(model: Gemma, weights: Mapping[str, Any], tokens: Any, images: Images | None = None) -> OrderedDict[str, Any]:
    """Return the values at boundaries, by the names of transformers' submodules and in their layouts, and the logits."""
    import jax.numpy as jnp

    w = layered(weights)
    values: OrderedDict[str, Any] = OrderedDict()
    x = embed(w, values, tokens)
    places = jnp.arange(tokens.shape[1])[None]
    sees = places[:, None, :] <= places[:, :, None]
    if images is not None:
        nth = jnp.maximum(jnp.cumsum(images.at, axis=1) - 1, 0)
        x = jnp.where(images.at[..., None], jnp.take_along_axis(images.soft, nth[..., None], axis=1), x)
        sees = images.sees
    x, _ = blocks(model, w, values, x, Seen(places, sees))
    logits = x @ w[TABLE][: model.vocabulary].T
    values[LOGITS] = logits if model.logits_cap is None else jnp.tanh(logits / model.logits_cap) * model.logits_cap
    return values


def embed(w: Mapping[str, Any], values: Any, tokens: Any) -> Any:
    """Return the scaled embeddings, which are put into `values`, too."""
    import jax.numpy as jnp

    x = values["model.embed_tokens"] = w[TABLE][tokens] * jnp.sqrt(w[TABLE].shape[-1]).astype(w[TABLE].dtype)
    return x


def blocks(model: Gemma, w: Mapping[str, Any], values: Any, x: Any, seen: Seen) -> tuple[Any, list[tuple[Any, Any]]]:
    """Run all layers and the last norm. Return the result, and the rotated keys and the values of each layer."""
    import jax
    import jax.numpy as jnp

    def norm(name: str, leaf: str, x: Any) -> Any:
        y = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + EPSILON) * (1 + w[f"{leaf}/scale"])
        values[name] = y
        return y

    kept = []
    for i in range(len(model.windows)):
        name, leaf = f"model.layers.{i}", f"layer_{i}"
        values[f"{name}.input_layernorm{INPUT}"] = x
        y, keys = _attention(model, w, values, i, norm(f"{name}.input_layernorm", f"{leaf}/pre_attention_norm", x), seen, norm)  # fmt: skip
        kept.append(keys)
        x = x + y
        deep = f"{leaf}/post_ffw_norm/scale" in w  # Gemma 1 has no norms behind its blocks
        before = "pre_feedforward_layernorm" if deep else "post_attention_layernorm"
        y = norm(f"{name}.{before}", f"{leaf}/pre_ffw_norm", x)
        both = jnp.einsum("btd,gfd->gbtf" if model.transposed else "btd,gdf->gbtf", y, w[f"{leaf}/mlp/gating_einsum"])
        values[f"{name}.mlp.gate_proj"], values[f"{name}.mlp.up_proj"] = both[0], both[1]
        y = jax.nn.gelu(both[0], approximate=True) * both[1]
        values[f"{name}.mlp.down_proj{INPUT}"] = y
        y = values[f"{name}.mlp.down_proj"] = y @ w[f"{leaf}/mlp/linear"]
        x = x + (norm(f"{name}.post_feedforward_layernorm", f"{leaf}/post_ffw_norm", y) if deep else y)
        values[name] = x
    return norm("model.norm", "final_norm", x), kept


def _attention(
    model: Gemma, w: Mapping[str, Any], values: Any, i: int, x: Any, seen: Seen, norm: Any
) -> tuple[Any, tuple[Any, Any]]:
    import jax
    import jax.numpy as jnp

    name, leaf = f"model.layers.{i}.self_attn", f"layer_{i}/attn"
    if f"{leaf}/qkv_einsum/w" in w:
        q, k, v = jnp.einsum("btd,sndh->sbtnh", x, w[f"{leaf}/qkv_einsum/w"])
    else:
        q = jnp.einsum("btd,ndh->btnh", x, w[f"{leaf}/q_einsum/w"])
        k, v = jnp.einsum("btd,skdh->sbtkh", x, w[f"{leaf}/kv_einsum/w"])
    for part, value in (("q", q), ("k", k), ("v", v)):
        values[f"{name}.{part}_proj"] = value.reshape(*value.shape[:2], -1)
    if f"{leaf}/_query_norm/scale" in w:  # transformers has the heads before the time
        q = norm(f"{name}.q_norm", f"{leaf}/_query_norm", q)
        k = norm(f"{name}.k_norm", f"{leaf}/_key_norm", k)
        for part in "qk":
            values[f"{name}.{part}_norm"] = values[f"{name}.{part}_norm"].swapaxes(1, 2)
    half = q.shape[-1] // 2
    exponents = (2.0 / q.shape[-1]) * jnp.arange(half, dtype=jnp.float32)
    angle = (seen.places[..., None] / model.bases[i] ** exponents / model.factors[i])[:, :, None, :]

    def turn(y: Any) -> Any:
        first, second = y[..., :half], y[..., half:]
        sin, cos = jnp.sin(angle), jnp.cos(angle)
        return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(y.dtype)

    k, sees = turn(k), seen.sees
    if seen.before:
        k, v = (jnp.concatenate([before, own], 1) for before, own in zip(seen.before[i], (k, v), strict=True))
    heads, groups = q.shape[2], q.shape[2] // k.shape[2]
    logits = jnp.einsum("btnh,bsnh->bnts", turn(q) * model.query_scale, jnp.repeat(k, groups, axis=2))
    if model.attention_cap is not None:
        logits = jnp.tanh(logits / model.attention_cap) * model.attention_cap
    if (window := model.windows[i]) is not None:  # _modules.py, create_sliding_mask: to both sides
        sees = sees & (jnp.abs(seen.places[:, None, :] - seen.places[:, :, None]) < window)
    probs = jax.nn.softmax(jnp.where(sees[:, None], logits, MASKED), axis=-1).astype(v.dtype)
    y = jnp.einsum("bnts,bsnh->btnh", probs, jnp.repeat(v, groups, axis=2))
    assert y.shape[2] == heads
    values[f"{name}.o_proj{INPUT}"] = y.reshape(*y.shape[:2], -1)
    y = values[f"{name}.o_proj"] = jnp.einsum("btnh,nhd->btd", y, w[f"{leaf}/attn_vec_einsum/w"])
    if f"layer_{i}/post_attention_norm/scale" in w:
        y = norm(f"model.layers.{i}.post_attention_layernorm", f"layer_{i}/post_attention_norm", y)
    return y, (k, v)
