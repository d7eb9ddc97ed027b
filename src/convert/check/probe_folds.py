"""The weight that the source computes with, where that is not the one it stores: its library's formulas, on the stored axes."""

from __future__ import annotations

from typing import Any

import numpy as np

from convert.kinds import Convolution, Kind, Linear, Rule

Array = np.ndarray[Any, np.dtype[Any]]


def output_axis(kind: Kind) -> int:
    """Which stored axis of a weight is its output: flax's feature axis."""
    if isinstance(kind, Linear):
        equation = next(iter(kind.equations.values()))
        return equation.weight.index(equation.outputs)
    assert isinstance(kind, Convolution)
    return kind.numbers.kernel.index("O")


def effective(rule: Rule, own: Array, second: Array | None, kept: bool) -> Array:
    """In float64.

    Args:
        own: the leaf, stacked axes taken out.
        second: the leaf beside it, of a weight norm or spectral norm.
        kept: whether the target stores both, and computes with `own` alone here.
    """
    import jax
    import jax.numpy as jnp

    w = jnp.asarray(own).astype("float64")
    if isinstance(rule.kind, Convolution) and rule.kind.standardized is not None:
        said = rule.kind.standardized
        axes = tuple(k for k, axis in enumerate(rule.kind.numbers.kernel) if axis != "O")
        w = w - jnp.mean(w, axes, keepdims=True)
        if said.inside:
            w = w / jnp.sqrt(jnp.var(w, axes, keepdims=True) + said.epsilon)
        else:
            w = w / (jnp.std(w, axes, keepdims=True) + said.epsilon)
    if rule.normalized is not None and second is not None and not kept:
        epsilon = rule.normalized.epsilon
        given = jnp.asarray(second).astype("float64")
        at = output_axis(rule.kind)
        moved = jnp.moveaxis(w, at, -1)
        flat = moved.reshape(-1, moved.shape[-1])
        if rule.normalized.role == "weight_norm":
            flat = flat * jax.lax.rsqrt(jnp.sum(flat * flat, axis=0) + epsilon) * given.reshape(-1)
        else:
            u = given.reshape(1, -1)
            v = u @ flat.T
            v = v * jax.lax.rsqrt(jnp.sum(v * v) + epsilon)
            u = v @ flat
            u = u * jax.lax.rsqrt(jnp.sum(u * u) + epsilon)
            flat = flat / (v @ flat @ u.T)[0, 0]
        w = jnp.moveaxis(flat.reshape(moved.shape), -1, at)
    return np.asarray(w)
