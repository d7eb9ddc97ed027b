"""Layers in plain JAX that several of the models have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def layer_norm(w: Mapping[str, Any], leaf: str, x: Any, epsilon: float) -> Any:
    """Compute flax.linen.LayerNorm."""
    import jax
    import jax.numpy as jnp

    x = x - jnp.mean(x, axis=-1, keepdims=True)
    y = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + epsilon)
    return y * w[f"{leaf}/scale"] + w[f"{leaf}/bias"]


def attend(q: Any, k: Any, v: Any, heads: int, visible: Any, factor: float | None = None, bias: Any = 0) -> Any:
    """Compute flax.linen.dot_product_attention of [batch, time, heads x width].

    Args:
        visible: true where a query sees a key.
        factor: of the logits; None is 1 / sqrt(width).
        bias: is added to the logits.
    """
    import jax
    import jax.numpy as jnp

    q, k, v = (x.reshape(*x.shape[:2], heads, -1) for x in (q, k, v))
    factor = q.shape[-1] ** -0.5 if factor is None else factor
    logits = jnp.einsum("btnh,bsnh->bnts", q, k) * factor + bias
    probs = jax.nn.softmax(jnp.where(visible, logits, jnp.finfo(logits.dtype).min), axis=-1)
    y = jnp.einsum("bnts,bsnh->btnh", probs, v)
    return y.reshape(*y.shape[:2], -1)


def causal_mask(steps: int) -> Any:
    """Return [1, 1, query, key]: a position sees itself and those before it."""
    import jax.numpy as jnp

    position = jnp.arange(steps)
    return (position[None, :] <= position[:, None])[None, None]
