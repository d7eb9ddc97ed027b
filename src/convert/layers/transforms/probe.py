"""How the probes apply what a rule says of a weight: the factor, the RoPE pairs, the flattened map, the weight norm or spectral norm.

Nothing of the plan's operations is used: pairs are listed one by one, norms are the formulas of the libraries on the stored axes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from convert.layers.base import ProbeSample
from convert.layers.transforms.rope import Heads, head_width, rotated_heads, target_rope_pairs
from convert.layers.transforms.weight_normalization import features, kept
from convert.layers.transforms.weight_transforms import target_order

Array = np.ndarray[Any, np.dtype[Any]]


def rope_pairs(width: int, convention: str) -> list[tuple[int, int]]:
    """Return the pairs of a head's features that RoPE rotates, the fastest first.

    >>> rope_pairs(6, "interleaved"), rope_pairs(6, "half-split")
    ([(0, 1), (2, 3), (4, 5)], [(0, 3), (1, 4), (2, 5)])
    """
    half = width // 2
    return [(2 * k, 2 * k + 1) if convention == "interleaved" else (k, k + half) for k in range(half)]


def _to_target_pairs(y: Array, axis: int, heads: Array, source: str, target: str) -> Array:
    """Move each pair of the source's convention to where the target's convention has it.

    Args:
        heads: for each head, the places of its features along the axis.
    """
    order = list(range(y.shape[axis]))
    width = heads.shape[1]
    pairs = list(zip(rope_pairs(width, source), rope_pairs(width, target), strict=True))
    for head in heads:
        for source_pair, target_pair in pairs:
            for at_source, at_target in zip(source_pair, target_pair, strict=True):
                order[head[at_target]] = int(head[at_source])
    return np.take(y, order, axis)


def _rows(heads: Heads, size: int, sizes: Mapping[str, int]) -> Array:
    """Return the places of the heads' features along their axis."""
    places = np.arange(size)
    if heads.group is None:
        return places
    outer = int(np.prod([sizes[x] for x in heads.group.before]))
    lengths = [int(np.prod([sizes[x] for x in part])) for part in heads.group.parts]
    start = sum(lengths[: heads.part])
    return places.reshape(outer, sum(lengths), -1)[:, start : start + lengths[heads.part]]


def with_target_map(y: Array, axes: str, sample: ProbeSample) -> Array:
    """Return a value of the source with a flattened map in the target's order.

    Args:
        axes: letters of the value's axes.
    """
    flat = sample.rule.flattened
    if flat is None or flat.axis not in axes:
        return y
    at = axes.index(flat.axis)
    split = y.reshape(*y.shape[:at], *(sample.plan.sizes[x] for x in flat.order), *y.shape[at + 1 :])
    moved = [at + flat.order.index(x) for x in target_order(sample.rule, sample.layer)]
    rest = range(at + len(flat.order), split.ndim)
    return split.transpose([*range(at), *moved, *rest]).reshape(y.shape)


def as_target_gives(y: Array, axes: str, sample: ProbeSample) -> Array:
    """Return a result of the source as the target's layer gives it: without the factor that the weight carries, its features in order.

    Args:
        axes: letters of the value's axes.
    """
    rule = sample.rule
    if rule.prescaled_by is not None:
        y = y / rule.prescaled_by.value(sample.plan.sizes, sample.plan.facts)
    if rule.rope is not None:
        for heads in rotated_heads(rule, axes, sample.variant):
            width = head_width(rule, heads, sample.plan.sizes) or y.shape[heads.at]
            rows = _rows(heads, y.shape[heads.at], sample.plan.sizes).reshape(-1, width)
            y = _to_target_pairs(y, heads.at, rows, rule.rope.pairs, target_rope_pairs(sample.layer))
    return with_target_map(y, axes, sample)


def normalized_weight(sample: ProbeSample, weight: Array, letters: str) -> Array:
    """Return the weight that the source computes with, by its library's formula, in float64; `weight` itself without a norm.

    Args:
        letters: of the weight's axes, as stored.
    """
    import jax
    import jax.numpy as jnp

    normalized, operands = sample.rule.normalized, sample.operands
    if normalized is None or not operands or kept(sample.rule, sample.layer):
        return weight
    vector, *more = (jnp.asarray(operand).astype("float64") for operand in operands)
    w = jnp.asarray(weight).astype("float64")
    axes = [letters.index(x) for x in features(sample.rule, letters, weight.shape, vector.shape)]
    moved = jnp.moveaxis(w, axes, range(w.ndim - len(axes), w.ndim))
    flat = moved.reshape(-1, int(np.prod([weight.shape[axis] for axis in axes])))
    if normalized.role == "weight_norm":
        flat = flat * jax.lax.rsqrt(jnp.sum(flat * flat, axis=0) + normalized.epsilon) * vector.reshape(-1)
    else:
        flat = _over_sigma(flat, vector, more[0] if more else None, normalized.steps, normalized.epsilon)
    return np.asarray(jnp.moveaxis(flat.reshape(moved.shape), range(w.ndim - len(axes), w.ndim), axes))


def row_lengths(sample: ProbeSample, letters: str, outputs: str) -> Array:
    """Return the length of each row that torch's weight norm has of the source's weight, in the order of the target.

    Args:
        letters: of the weight's axes, as stored.
        outputs: those of its outputs.
    """
    weight = normalized_weight(sample, sample.stored, letters).astype(np.float64)
    rows = sample.rule.kind.rows_of_torch(outputs)
    moved = np.moveaxis(weight, [letters.index(x) for x in rows], range(len(rows)))
    lengths = np.sqrt(np.sum(np.square(moved), tuple(range(len(rows), moved.ndim))))
    return as_target_gives(lengths, rows, sample).reshape(-1)


def normalized_bias(sample: ProbeSample) -> Array:
    """Return the bias that the source adds: a flax SpectralNorm divides one of several axes by a sigma of its own."""
    import jax.numpy as jnp

    normalized, operands, bias = sample.rule.normalized, sample.operands, sample.stored
    if normalized is None or not operands:
        return bias
    flat = jnp.asarray(bias).astype("float64").reshape(-1, bias.shape[-1])  # all axes against the last one
    u = jnp.asarray(operands[0]).astype("float64")
    return np.asarray(_over_sigma(flat, u, None, normalized.steps, normalized.epsilon)).reshape(bias.shape)


def _over_sigma(flat: Any, u: Any, v: Any, steps: int | None, epsilon: float) -> Any:
    """Divide a matrix (others, features) by v w u: of the stored vectors, or after steps of the power iteration from u."""
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
