"""Probes of norms: the formulas of the JAX libraries, and torch's functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from convert.layers.base import ProbeSample
from convert.layers.probe import BATCH, Probe, Sides, accumulator, as_float64, probe_of_sum, torch_tensor
from convert.layers.transforms.probe import as_target_gives

if TYPE_CHECKING:
    import jax
    import torch

Array = np.ndarray[Any, np.dtype[Any]]
POSITIONS = 5  # of a map, besides the batch and the channels


def normal_input(rng: np.random.Generator, *shape: int) -> Array:
    """Return random inputs whose mean is not 0 and whose deviation is not 1."""
    return rng.standard_normal(shape) * 3 + 1


def jax_norm(x: Array, leaf: Array, precision: str, centred: bool, eps: float, factor: str) -> Mapping[str, jax.Array]:
    """Run a layer norm (`centred`) or an RMS norm over the axes of its scale, the last ones, in float64 and in `precision`.

    Args:
        leaf: the scale; the bias where the source has no scale (`factor` is ``1``).
    """
    exact, rounded = _compiled_norm(precision, centred, eps, factor, leaf.ndim)(x, leaf)
    return {precision: rounded, "float64": exact}


@lru_cache(maxsize=256)
def _compiled_norm(
    precision: str, centred: bool, eps: float, factor: str, rank: int
) -> Callable[[Array, Array], tuple[jax.Array, jax.Array]]:
    """Return the formula of flax and praxis, compiled; statistics are in float32 or wider, as in both libraries."""
    import jax
    import jax.numpy as jnp

    axes = tuple(range(-rank, 0))

    def one(x: jax.Array, leaf: jax.Array, dtype: str) -> jax.Array:
        wide = accumulator(dtype)
        y = x.astype(dtype).astype(wide)
        if centred:
            y = y - jnp.mean(y, axes, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axes, keepdims=True) + eps)
        y = _scaled(y, leaf.astype(wide), factor)
        return y.astype(dtype).astype("float64")

    return jax.jit(
        lambda x, leaf: tuple(one(x, leaf, dtype) for dtype in ("float64", precision)),
        # It runs once, and compiling takes longer than running.
        compiler_options={"xla_backend_optimization_level": 0},
    )


def _scaled(y: jax.Array, leaf: jax.Array, factor: str) -> jax.Array:
    """Multiply by the scale; without a scale (`factor` is ``1``) the leaf is the bias."""
    if factor == "1":
        return y + leaf
    return y * (1 + leaf if factor == "1+scale" else leaf)


def _torch_factor(weight: torch.Tensor | None, factor: str) -> torch.Tensor | None:
    return 1 + weight if factor == "1+weight" and weight is not None else weight


def torch_norm(
    x: Array, weight: Array | None, bias: Array | None, dtype: str, device: str, centred: bool, eps: float, factor: str
) -> Array:
    """Run torch's layer norm or RMS norm; x has one batch axis."""
    import torch

    wide = accumulator(dtype)
    x_tensor = torch_tensor(x, dtype, device).to(getattr(torch, wide))
    w, b = (None if value is None else torch_tensor(value, wide, device) for value in (weight, bias))
    function = torch.nn.functional.layer_norm if centred else torch.nn.functional.rms_norm
    y = function(x_tensor, list(x.shape[1:]), _torch_factor(w, factor), eps=eps)
    y = y if b is None else y + b
    return as_float64(y.to(getattr(torch, dtype)))


def group_norm(
    x: Array,
    leaf: Array,
    written: tuple[Array | None, Array | None],
    groups: int,
    eps: float,
    factors: tuple[str, str],
    device: str,
) -> Sides:
    """Run flax's group norm and torch's on x of shape (batch, positions, channels).

    Args:
        leaf: the source's scale; its bias where it has no scale.
        written: the target's weight and bias, if it has them.
        factors: what the source and the target multiply by.
    """

    def run(dtype: str) -> tuple[Array, Array]:
        import jax.numpy as jnp
        import torch

        wide = accumulator(dtype)
        y = jnp.asarray(x.astype(np.float64)).astype(dtype).astype(wide)
        split = y.reshape(*y.shape[:-1], groups, -1)  # neighbours are a group: flax linen/normalization.py GroupNorm
        mean = split.mean((1, 3), keepdims=True)
        variance = jnp.square(split - mean).mean((1, 3), keepdims=True)
        want = ((split - mean) / jnp.sqrt(variance + eps)).reshape(y.shape)
        want = _scaled(want, jnp.asarray(leaf).astype(wide), factors[0])
        w, b = (None if value is None else torch_tensor(value.reshape(-1), wide, device) for value in written)
        moved = torch_tensor(np.swapaxes(x, 1, 2), dtype, device).to(getattr(torch, wide))
        got = torch.nn.functional.group_norm(moved, groups, _torch_factor(w, factors[1]), b, eps=eps)
        return as_float64(got.to(getattr(torch, dtype))).swapaxes(1, 2), np.asarray(
            want.astype(dtype).astype("float64")
        )

    return run


def batch_norm(
    x: Array,
    leaves: Mapping[str, Array],
    written: Mapping[str, Array],
    eps: float,
    factors: tuple[str, str],
    device: str,
) -> Sides:
    """Run a batch norm at inference on x of shape (batch, channels), with all of its tensors on both sides.

    Args:
        leaves, written: role -> values.
        factors: what the source and the target multiply by.
    """

    def run(dtype: str) -> tuple[Array, Array]:
        import jax
        import jax.numpy as jnp
        import torch

        wide = accumulator(dtype)
        source = {role: jnp.asarray(value).astype(wide) for role, value in leaves.items()}
        y = jnp.asarray(x).astype(dtype).astype(wide)
        scale = {"1": 1.0, "1+scale": 1 + source.get("weight", 0.0), "scale": source.get("weight", 1.0)}[factors[0]]
        want = (y - source["running_mean"]) * (jax.lax.rsqrt(source["running_var"] + eps) * scale)
        want = want + source.get("bias", 0.0)
        target = {role: torch_tensor(value, wide, device) for role, value in written.items()}
        weight = _torch_factor(target.get("weight"), factors[1])
        x_tensor = torch_tensor(x, dtype, device).to(getattr(torch, wide))
        mean, variance = target["running_mean"], target["running_var"]
        got = torch.nn.functional.batch_norm(
            x_tensor, mean, variance, weight, target.get("bias"), training=False, eps=eps
        )
        return as_float64(got.to(getattr(torch, dtype))), np.asarray(want.astype(dtype).astype("float64"))

    return run


def probe_layer_or_rms_norm(
    sample: ProbeSample,
    leaf: Array,
    written: tuple[Array | None, Array | None],
    axes: str,
    eps: float,
    factor: str,
    *,
    centred: bool,
) -> Probe:
    """Probe a layer norm (`centred`) or an RMS norm.

    Args:
        leaf: the source's scale, without axes of size 1; its bias where it has no scale.
        written: the target's weight and bias, if it has them.
        axes: letters of the leaf's axes; factor: what the source multiplies by.
    """
    x = normal_input(sample.rng, BATCH, *leaf.shape)
    wanted = jax_norm(x, leaf, sample.precision, centred, eps, factor)
    letters = "." + (axes or "." * leaf.ndim)

    def run(dtype: str) -> tuple[Array, Array]:
        inputs = as_target_gives(x, letters, sample)  # the layer before gives the target its features in order
        got = torch_norm(inputs, *written, dtype, sample.device, centred, eps, sample.layer.multiplies_by)
        return got, as_target_gives(np.asarray(wanted[dtype]), letters, sample)

    return probe_of_sum(run, leaf.size)
