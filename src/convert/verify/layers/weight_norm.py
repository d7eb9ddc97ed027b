"""The weight that the source computes with, where that is not the one it stores: its library's formulas, on the stored axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from convert.layers import Convolution, Linear, Rule
from convert.layers.base import LayerKind
from convert.layers.weight_normalization import features

Array = np.ndarray[Any, np.dtype[Any]]


def stored_letters(kind: LayerKind, variant: str | None) -> str:
    """Letters of a weight's axes, as stored."""
    if isinstance(kind, Linear):
        return kind.equations[variant or ""].weight
    assert isinstance(kind, Convolution)
    return kind.axes


def effective(rule: Rule, own: Array, sidecar: Sequence[Array], kept: bool, variant: str | None = None) -> Array:
    """In float64.

    Args:
        own: the leaf, stacked axes taken out.
        sidecar: the leaves beside it, of a weight norm or spectral norm.
        kept: whether the target stores both, and computes with `own` alone here.
        variant: of the rule's equations.
    """
    import jax
    import jax.numpy as jnp

    w = jnp.asarray(own).astype("float64")
    if isinstance(rule.kind, Convolution) and rule.kind.weight_standardization is not None:
        said = rule.kind.weight_standardization
        axes = tuple(k for k, axis in enumerate(rule.kind.numbers.kernel) if axis != "O")
        w = w - jnp.mean(w, axes, keepdims=True)
        if said.inside:
            w = w / jnp.sqrt(jnp.var(w, axes, keepdims=True) + said.epsilon)
        else:
            w = w / (jnp.std(w, axes, keepdims=True) + said.epsilon)
    if rule.normalized is not None and sidecar and not kept:
        epsilon = rule.normalized.epsilon
        given, *more = (jnp.asarray(second).astype("float64") for second in sidecar)
        letters = stored_letters(rule.kind, variant)
        at = [letters.index(x) for x in features(rule, letters, own.shape, given.shape)]
        moved = jnp.moveaxis(w, at, range(w.ndim - len(at), w.ndim))
        flat = moved.reshape(-1, int(np.prod([own.shape[axis] for axis in at])))
        if rule.normalized.role == "weight_norm":
            flat = flat * jax.lax.rsqrt(jnp.sum(flat * flat, axis=0) + epsilon) * given.reshape(-1)
        else:
            flat = _over_sigma(flat, given, more[0] if more else None, rule.normalized.steps, epsilon)
        w = jnp.moveaxis(flat.reshape(moved.shape), range(w.ndim - len(at), w.ndim), at)
    return np.asarray(w)


def normalized_bias(rule: Rule, own: Array, u: Array) -> Array:
    """A bias of several axes that a flax SpectralNorm divides by its own sigma: a matrix of all axes against the last."""
    import jax.numpy as jnp

    assert rule.normalized is not None
    flat = jnp.asarray(own).astype("float64").reshape(-1, own.shape[-1])
    made = _over_sigma(flat, jnp.asarray(u).astype("float64"), None, rule.normalized.steps, rule.normalized.epsilon)
    return np.asarray(made).reshape(own.shape)


def _over_sigma(flat: Any, u: Any, v: Any, steps: int | None, epsilon: float) -> Any:
    """A matrix (others, features) over v w u: the vectors as stored, or by steps of the power iteration from u."""
    import jax
    import jax.numpy as jnp

    u = u.reshape(1, -1)
    v = u if v is None else v.reshape(1, -1)
    for _ in range(1 if steps is None else steps):
        v = u @ flat.T
        v = v * jax.lax.rsqrt(jnp.sum(v * v) + epsilon)
        u = v @ flat
        u = u * jax.lax.rsqrt(jnp.sum(u * u) + epsilon)
    return flat / (v @ flat @ u.T)[0, 0]
