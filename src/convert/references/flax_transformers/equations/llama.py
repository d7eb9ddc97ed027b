"""Llama, Mistral and Gemma in plain JAX: the equations of transformers' flax classes, which transformers 5 no longer has.

Source: transformers 4.46.3 ``models/{llama,mistral,gemma}/modeling_flax_*.py``; what stands there as a number stands here as one.
tests/models/test_flax_transformers_check.py compares the values with those that the real classes gave for the golden checkpoints.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from convert.layers.activations import activation_pair
from convert.references.flax_transformers.equations.layers import attend, causal_mask
from convert.references.protocol import INPUT

BASE = 10000  # of RoPE: create_sinusoidal_positions


@dataclass(frozen=True)
class Decoder:
    """Hyperparameters that no weight holds.

    Attributes:
        layers, heads, groups: how many layers, query heads and key heads.
        epsilon: of the norms.
        activation: its name in rules.
        added: what a norm adds to its scale: 1 in Gemma.
        scaled: whether the embedding is multiplied by the square root of its width: in Gemma.
        window: how many tokens before itself a token sees; None for all.
        prefix: of the submodules in PyTorch; empty for a module without a head.
    """

    layers: int
    heads: int
    groups: int
    epsilon: float
    activation: str
    added: int
    scaled: bool
    window: int | None
    prefix: str


def run(model: Decoder, w: Mapping[str, Any], inputs: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """Return the values at boundaries, by the names of transformers' submodules, and the logits, or the last hidden state."""
    import jax.numpy as jnp

    values: OrderedDict[str, Any] = OrderedDict()
    act, _ = activation_pair(model.activation)
    root = "model/" if "model/norm/weight" in w else ""

    def dense(name: str, x: Any) -> Any:
        leaf = f"{root}{name.replace('.', '/')}"
        y = values[model.prefix + name] = x @ w[f"{leaf}/kernel"] + w.get(f"{leaf}/bias", 0)  # attention_bias
        return y

    def norm(name: str, x: Any) -> Any:
        values[model.prefix + name + INPUT] = x
        normed = x / jnp.sqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + model.epsilon)
        y = values[model.prefix + name] = normed * (model.added + w[f"{root}{name.replace('.', '/')}/weight"])
        return y

    def heads(x: Any, count: int) -> Any:
        return x.reshape(*x.shape[:2], count, -1)

    def spread(x: Any) -> Any:
        x = jnp.repeat(x, model.heads // model.groups, axis=2)
        return x.reshape(*x.shape[:2], -1)

    ids, table = inputs["input_ids"], w[f"{root}embed_tokens/embedding"]
    x = table[ids] * (table.shape[1] ** 0.5 if model.scaled else 1)
    values[f"{model.prefix}embed_tokens"] = x
    steps = ids.shape[1]
    visible = causal_mask(steps) & (inputs["attention_mask"][:, None, None, :] > 0)
    if model.window is not None:
        position = jnp.arange(steps)
        visible &= (position[:, None] - position[None, :] <= model.window)[None, None]
    for i in range(model.layers):
        block, mlp = f"layers.{i}.self_attn", f"layers.{i}.mlp"
        h = norm(f"layers.{i}.input_layernorm", x)
        q, k, v = (dense(f"{block}.{part}_proj", h) for part in "qkv")
        q, k = _rotated(heads(q, model.heads)), _rotated(heads(k, model.groups))
        y = attend(q.reshape(*q.shape[:2], -1), spread(k), spread(heads(v, model.groups)), model.heads, visible)
        values[f"{model.prefix}{block}.o_proj{INPUT}"] = y
        x = x + dense(f"{block}.o_proj", y)
        h = norm(f"layers.{i}.post_attention_layernorm", x)
        y = values[f"{model.prefix}{mlp}.down_proj{INPUT}"] = act(dense(f"{mlp}.gate_proj", h)) * dense(f"{mlp}.up_proj", h)  # fmt: skip
        x = x + dense(f"{mlp}.down_proj", y)
    x = norm("norm", x)
    if not model.prefix:
        values["last_hidden_state"] = x
    else:
        values["logits"] = x @ w.get("lm_head/kernel", table.T)
    return values


def _rotated(x: Any) -> Any:
    """Rotate [batch, time, head, width], feature k with feature k + width/2."""
    import jax.numpy as jnp

    width = x.shape[-1]
    angle = jnp.arange(x.shape[1])[:, None] / BASE ** (jnp.arange(0, width, 2) / width)
    sin, cos = jnp.sin(angle)[None, :, None], jnp.cos(angle)[None, :, None]
    one, two = x[..., : width // 2], x[..., width // 2 :]
    return jnp.concatenate([one * cos - two * sin, two * cos + one * sin], -1)
