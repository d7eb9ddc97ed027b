"""The attention of a Transformer-XL in JAX, with its two biases of the queries in either form."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp


def relative_scores(q: Any, k: Any, p: Any, one: Any, two: Any, *, folded: bool) -> Any:
    """Return what the queries give with the keys, and with the projected positions, shifted by indices; not scaled.

    Args:
        q, k: [batch, T, heads, head].
        p: of the positions, [2 T - 1, heads, head], the largest distance first.
        one, two: biases, [heads, head].
        folded: whether a bias meets the keys by itself, and not with the queries.
    """
    if folded:
        content = jnp.einsum("btnh,bsnh->bnts", q, k) + jnp.einsum("nh,bsnh->bns", one, k)[:, :, None]
        position = jnp.einsum("btnh,snh->bnts", q, p) + jnp.einsum("nh,snh->ns", two, p)[None, :, None]
    else:
        content = jnp.einsum("btnh,bsnh->bnts", q + one, k)
        position = jnp.einsum("btnh,snh->bnts", q + two, p)
    length = q.shape[1]
    at = length - 1 - jnp.arange(length)[:, None] + jnp.arange(length)
    return content + jnp.take_along_axis(position, jnp.broadcast_to(at, (*position.shape[:2], length, length)), -1)
