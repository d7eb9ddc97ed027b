"""Norms at the layers level: the libraries' formulas on JAX's side, torch's functions on the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from convert.layers.norm.layer_rms import UNSCALED
from convert.verify.numerics.torch_arrays import tensor

if TYPE_CHECKING:
    import jax

Array = np.ndarray[Any, np.dtype[Any]]
POSITIONS = 5  # of a map, besides batch and channels


def jax_norm(x: Array, own: Array, precision: str, centred: bool, eps: float, factor: str) -> Mapping[str, jax.Array]:
    """A norm over the axes that its scale has, the last ones, in float64 and in `precision`; without a scale `own` is the bias."""
    exact, drifted = _compiled_norm(precision, centred, eps, factor, own.ndim)(x, own)
    return {precision: drifted, "float64": exact}


@lru_cache(maxsize=256)
def _compiled_norm(
    precision: str, centred: bool, eps: float, factor: str, rank: int
) -> Callable[[Array, Array], tuple[jax.Array, jax.Array]]:
    """flax's and praxis's formula; statistics in float32 or wider, as both do."""
    import jax
    import jax.numpy as jnp

    axes = tuple(range(-rank, 0))

    def one(x: jax.Array, own: jax.Array, dtype: str) -> jax.Array:
        wide = "float64" if dtype == "float64" else "float32"
        y = x.astype(dtype).astype(wide)
        if centred:
            y = y - jnp.mean(y, axes, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axes, keepdims=True) + eps)
        s = own.astype(wide)
        y = y + s if factor == UNSCALED else y * (1 + s if factor == "1+scale" else s)
        return y.astype(dtype).astype("float64")

    return jax.jit(
        lambda x, own: tuple(one(x, own, dtype) for dtype in ("float64", precision)),
        compiler_options={
            "xla_backend_optimization_level": 0
        },  # it runs once: to compile it takes longer than to run it
    )


def torch_norm(
    x: Array, weight: Array | None, bias: Array | None, dtype: str, device: str, centred: bool, eps: float, factor: str
) -> Array:
    """The same by torch; x has one axis of a batch."""
    import torch

    wide = "float64" if dtype == "float64" else "float32"
    given = tensor(x, dtype, device).to(getattr(torch, wide))
    w, b = (None if value is None else tensor(value, wide, device) for value in (weight, bias))
    w = 1 + w if factor == "1+weight" and w is not None else w
    function = torch.nn.functional.layer_norm if centred else torch.nn.functional.rms_norm
    y = function(given, list(x.shape[1:]), w, eps=eps)
    y = y if b is None else y + b
    return np.asarray(y.to(getattr(torch, dtype)).double().cpu().numpy())


def group_norm_sides(
    x: Array,
    own: Array,
    pair: tuple[Array | None, Array | None],
    groups: int,
    eps: float,
    factors: tuple[str, str],
    device: str,
) -> Callable[[str], tuple[Array, Array]]:
    """flax's group norm and torch's, on x of shape (batch, positions, channels).

    Args:
        own: the source's scale, or where it has none, its bias.
        pair: the target's weight and bias, if it has them.
    """

    def run(dtype: str) -> tuple[Array, Array]:
        import jax.numpy as jnp
        import torch

        wide = "float64" if dtype == "float64" else "float32"
        given = jnp.asarray(x.astype(np.float64)).astype(dtype).astype(wide)
        apart = given.reshape(
            *given.shape[:-1], groups, -1
        )  # neighbours are a group: flax linen/normalization.py GroupNorm
        mean = apart.mean((1, 3), keepdims=True)
        variance = jnp.square(apart - mean).mean((1, 3), keepdims=True)
        s = jnp.asarray(own).astype(wide)
        want = ((apart - mean) / jnp.sqrt(variance + eps)).reshape(given.shape)
        want = want + s if factors[0] == UNSCALED else want * (1 + s if factors[0] == "1+scale" else s)
        w, b = (None if value is None else tensor(value.reshape(-1), wide, device) for value in pair)
        w = 1 + w if factors[1] == "1+weight" and w is not None else w
        moved = tensor(np.swapaxes(x, 1, 2), dtype, device).to(getattr(torch, wide))
        got = torch.nn.functional.group_norm(moved, groups, w, b, eps=eps).to(getattr(torch, dtype))
        rounded = np.asarray(want.astype(dtype).astype("float64"))
        return got.double().cpu().numpy().swapaxes(1, 2), rounded

    return run


def batch_norm_sides(
    x: Array,
    source: Mapping[str, Array],
    written: Mapping[str, Array],
    eps: float,
    factors: tuple[str, str],
    device: str,
) -> Callable[[str], tuple[Array, Array]]:
    """A batch norm at inference on x of shape (batch, channels), with all of its tensors on both sides.

    Args:
        source, written: role -> values.
    """

    def run(dtype: str) -> tuple[Array, Array]:
        import jax
        import jax.numpy as jnp
        import torch

        wide = "float64" if dtype == "float64" else "float32"
        s = {role: jnp.asarray(value).astype(wide) for role, value in source.items()}
        given = jnp.asarray(x).astype(dtype).astype(wide)
        scale = 1.0 if factors[0] == UNSCALED else 1 + s["weight"] if factors[0] == "1+scale" else s["weight"]
        want = (given - s["running_mean"]) * (jax.lax.rsqrt(s["running_var"] + eps) * scale)
        want = want + s["bias"] if "bias" in s else want
        w = {role: tensor(value, wide, device) for role, value in written.items()}
        weight = w.get("weight")
        weight = 1 + weight if factors[1] == "1+weight" and weight is not None else weight
        moved = tensor(x, dtype, device).to(getattr(torch, wide))
        got = torch.nn.functional.batch_norm(
            moved, w["running_mean"], w["running_var"], weight, w.get("bias"), training=False, eps=eps
        )
        rounded = np.asarray(want.astype(dtype).astype("float64"))
        return got.to(getattr(torch, dtype)).double().cpu().numpy(), rounded

    return run
