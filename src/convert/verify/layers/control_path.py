"""A path through data at the layers level: diffrax's definition with the source's coefficients, torchcde's with the written ones,
value and derivative, at the knots, between them, and outside.

Coefficients of data that happens to lie on a line have zeros where a factor or an order would show: so every path is run a
second time, with random numbers in place of the source's leaves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from convert.core.ops import apply, is_float
from convert.layers.base import LayerLeaves, Step, assemble
from convert.layers.control_path.declaration import TIMES
from convert.layers.control_path.kinds import CubicSpline, DataPath
from convert.verify.numerics.compare import Tolerance, difference, epsilon
from convert.verify.report.report import Measure

Array = np.ndarray[Any, np.dtype[Any]]
SERIES = 3  # of a batch that are evaluated: its members are alike


def measure_path(
    group: LayerLeaves,
    steps: list[Step],
    leaves: Mapping[str, Array],
    written: Mapping[str, Array],
    *,
    device: str,
    rng: np.random.Generator,
) -> list[Measure]:
    """Both sides in float64 and in float32, with the source's coefficients and with random ones.

    Args:
        steps: that make the tensors of this path.
        leaves: of the source, by name.
        written: tensors of the file, by name.
    """
    kind = group.rule.kind
    assert isinstance(kind, DataPath)
    if not all(is_float(x.dtype.name) for x in (*leaves.values(), *written.values())):
        return []
    times = group.leaves.get(TIMES, ("", ()))[0]
    invented = {
        name: x if name == times else np.asarray(rng.standard_normal(x.shape)).astype(x.dtype)
        for name, x in leaves.items()
    }
    made = {
        step.name: assemble(step.parts, [apply(part.ops, invented[part.leaf]) for part in step.parts]) for step in steps
    }
    measures = []
    for words, source, tensors in (("", leaves, written), (", random coefficients", invented, made)):
        own = {role: apply(takes, source[name]) for role, (name, takes) in group.leaves.items()}
        roles = {step.role: tensors[step.name] for step in steps}
        exact, drift = (
            difference(torch_path(kind, roles, at, dtype, device), jax_path(kind, own, at, dtype), precision=dtype)
            for dtype in ("float64", "float32")
            for at in [places(kind, own)]
        )
        measures.append(
            Measure(
                f"{group.module}{words}",
                drift,
                _bound("float32", steps),
                exact,
                _bound("float64", steps),
                group.rule.at.line_only,
            )
        )
    return measures


def _bound(precision: str, steps: list[Step]) -> Tolerance:
    """Four terms in another order; and what the written dtype lost of the coefficients."""
    value, said = 32 * epsilon(precision), f"32 x eps({precision}): four terms of a polynomial, summed in another way"
    lost = [step for step in steps if step.loses or step.arithmetic]
    if lost:
        value += 8 * epsilon(lost[0].spec.dtype)
        said += f", and the coefficients were rounded to {lost[0].spec.dtype}"
    return Tolerance(value, said)


def places(kind: DataPath, own: Mapping[str, Array]) -> Array:
    """Times at which a path is evaluated: knots, between them, and outside on both sides."""
    grid = times_of(kind, own).astype(np.float64)
    steps = np.diff(grid)
    return np.concatenate(
        [
            grid,
            grid[:-1] + 0.37 * steps,
            grid[:-1] + 0.81 * steps,
            [grid[0] - 0.6 * steps[0], grid[-1] + 0.4 * steps[-1]],
        ]
    )


def times_of(kind: DataPath, own: Mapping[str, Array]) -> Array:
    """The knots' times; 0, 1, 2, ... where the source has none, as torchcde then takes them."""
    if TIMES in own:
        return own[TIMES]
    role = next(iter(kind.DEFAULT))
    count = own[role].shape[kind.order(own[role].ndim)[0].index("T")]
    return np.arange(count + kind.PIECES, dtype=own[role].dtype)


def jax_path(kind: DataPath, own: Mapping[str, Array], at: Array, dtype: str) -> Array:
    """Values and left derivatives by diffrax's definition, (2, times, batch, channels).

    diffrax's paths have time first and no batch: the other axes are mapped over.
    """
    import jax
    import jax.numpy as jnp

    def series(role: str) -> Any:
        x = own[role]
        letters, order = kind.order(x.ndim)
        moved = x.transpose(order)
        moved = moved if "C" in letters else moved[..., None]
        return jnp.asarray(moved.reshape(-1, *moved.shape[-2:])[:SERIES]).astype(dtype)

    ts, t = (jnp.asarray(x).astype(dtype) for x in (times_of(kind, own), at))

    def one(arrays: Mapping[str, Any], t: Any) -> Any:
        index = jnp.clip(jnp.searchsorted(ts, t, side="left") - 1, 0, ts.shape[0] - 2)
        f = t - ts[index]
        if isinstance(kind, CubicSpline):
            d, c, b, a = (arrays[role][index] for role in "dcba")
            return jnp.stack([a + f * (b + f * (c + f * d)), b + f * (2 * c + f * 3 * d)])
        before, after = (arrays["knots"][index + k] for k in (0, 1))
        step = ts[index + 1] - ts[index]
        return jnp.stack([before + (after - before) * (f / step), (after - before) / step])

    arrays = {role: series(role) for role in kind.DEFAULT if role != TIMES}
    got = jax.vmap(lambda x: jax.vmap(lambda t: one(x, t))(t))(arrays)
    return np.moveaxis(np.asarray(got).astype(np.float64), (0, 2), (2, 0))


def torch_path(kind: DataPath, roles: Mapping[str, Array], at: Array, dtype: str, device: str = "cpu") -> Array:
    """What `jax_path` gives, by torchcde's definition.

    Args:
        roles: ``coeffs``, or the buffers ``a``, ``b``, ``c`` (2c) and ``d`` (3d); ``knots``; and ``times``.
    """
    import torch

    held = {key: torch.tensor(np.asarray(x, np.float64)).to(device, getattr(torch, dtype)) for key, x in roles.items()}
    if "coeffs" in held:
        held |= dict(zip("abcd", held["coeffs"].chunk(4, dim=-1), strict=True))
    x = held["a" if isinstance(kind, CubicSpline) else "knots"]
    ts = held.get(TIMES, torch.arange(x.shape[-2] + kind.PIECES, dtype=x.dtype, device=device))
    t = torch.tensor(at).to(device, x.dtype)
    index = torch.bucketize(t, ts).sub(1).clamp(0, len(ts) - 2)
    f = (t - ts[index])[:, None]

    def piece(role: str, ahead: int = 0) -> Any:
        y = held[role]
        return y.reshape(-1, *y.shape[-2:])[:SERIES][:, index + ahead]

    if isinstance(kind, CubicSpline):
        a, b, two_c, three_d = (piece(role) for role in "abcd")
        value = a + (b + (0.5 * two_c + three_d * f / 3) * f) * f
        slope = b + (two_c + three_d * f) * f
    else:
        step = (ts[index + 1] - ts[index])[:, None]
        value = piece("knots") + f * (piece("knots", 1) - piece("knots")) / step
        slope = (piece("knots", 1) - piece("knots")) / step
    return np.asarray(torch.stack([value, slope]).transpose(1, 2).double().cpu().numpy())
