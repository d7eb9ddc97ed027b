"""The probe of a control path: diffrax's definition with the leaves, torchcde's with the written tensors.

Values and derivatives are compared at the knots, between them, and outside of them on both sides.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from convert.layers.probe import Probe

Array = np.ndarray[Any, np.dtype[Any]]
SERIES = 3  # of a batch, that are evaluated: all are treated the same


def probe_path(
    leaves: Mapping[str, Array], tensors: Mapping[str, Array], times: Array, *, cubic: bool, device: str
) -> Probe:
    """Probe a path.

    Args:
        leaves: role -> coefficients, (batch, time, channels).
        tensors: ``coeffs``, or the buffers ``a``, ``b``, ``c`` (2c) and ``d`` (3d); ``knots``; and ``times``.
        times: of the knots.
        cubic: whether the path is a cubic spline, not a linear interpolation.
    """
    at = evaluation_times(times)

    def run(dtype: str) -> tuple[Array, Array]:
        got = torch_path(tensors, at, dtype, cubic=cubic, device=device)
        return got, jax_path(leaves, times, at, dtype, cubic=cubic)

    return Probe(run, 32, "32", "four terms of a polynomial, summed in another way", cast_factor=8)


def evaluation_times(times: Array) -> Array:
    """Return times at which a path is evaluated: knots, between them, and outside on both sides."""
    knots = times.astype(np.float64)
    steps = np.diff(knots)
    outside = [knots[0] - 0.6 * steps[0], knots[-1] + 0.4 * steps[-1]]
    return np.concatenate([knots, knots[:-1] + 0.37 * steps, knots[:-1] + 0.81 * steps, outside])


def jax_path(leaves: Mapping[str, Array], times: Array, at: Array, dtype: str, *, cubic: bool) -> Array:
    """Compute values and left derivatives by diffrax's definition, (2, times, batch, channels).

    diffrax's paths have time first and no batch: the batch is mapped over.

    Args:
        leaves: role -> coefficients, (batch, time, channels).
    """
    import jax
    import jax.numpy as jnp

    ts, t = (jnp.asarray(x).astype(dtype) for x in (times, at))

    def one(arrays: Mapping[str, Any], t: Any) -> Any:
        index = jnp.clip(jnp.searchsorted(ts, t, side="left") - 1, 0, ts.shape[0] - 2)
        f = t - ts[index]
        if cubic:
            d, c, b, a = (arrays[role][index] for role in "dcba")
            return jnp.stack([a + f * (b + f * (c + f * d)), b + f * (2 * c + f * 3 * d)])
        before, after = (arrays["knots"][index + k] for k in (0, 1))
        step = ts[index + 1] - ts[index]
        return jnp.stack([before + (after - before) * (f / step), (after - before) / step])

    arrays = {role: jnp.asarray(leaf[:SERIES]).astype(dtype) for role, leaf in leaves.items()}
    got = jax.vmap(lambda x: jax.vmap(lambda t: one(x, t))(t))(arrays)
    return np.moveaxis(np.asarray(got).astype(np.float64), (0, 2), (2, 0))


def torch_path(tensors: Mapping[str, Array], at: Array, dtype: str, *, cubic: bool, device: str = "cpu") -> Array:
    """Compute what `jax_path` gives, by torchcde's definition.

    Args:
        tensors: as for `probe_path`.
    """
    import torch

    arrays = {
        role: torch.tensor(np.asarray(x, np.float64)).to(device, getattr(torch, dtype)) for role, x in tensors.items()
    }
    if "coeffs" in arrays:
        arrays |= dict(zip("abcd", arrays["coeffs"].chunk(4, dim=-1), strict=True))
    first = arrays["a" if cubic else "knots"]
    intervals = first.shape[-2] if cubic else first.shape[-2] - 1
    ts = arrays.get("times", torch.arange(intervals + 1, dtype=first.dtype, device=device))
    t = torch.tensor(at).to(device, first.dtype)
    index = torch.bucketize(t, ts).sub(1).clamp(0, len(ts) - 2)
    f = (t - ts[index])[:, None]

    def piece(role: str, ahead: int = 0) -> Any:
        y = arrays[role]
        return y.reshape(-1, *y.shape[-2:])[:SERIES][:, index + ahead]

    if cubic:
        a, b, two_c, three_d = (piece(role) for role in "abcd")
        value = a + (b + (0.5 * two_c + three_d * f / 3) * f) * f
        slope = b + (two_c + three_d * f) * f
    else:
        step = (ts[index + 1] - ts[index])[:, None]
        value = piece("knots") + f * (piece("knots", 1) - piece("knots")) / step
        slope = (piece("knots", 1) - piece("knots")) / step
    return np.asarray(torch.stack([value, slope]).transpose(1, 2).double().cpu().numpy())
