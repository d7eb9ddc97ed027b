"""Control paths and the CDEs that they drive, in NumPy, with the known mistakes.

For the `variants` of a user's reference whose models use paths of diffrax or torchcde: `path_variants` and
`solution_variants`. Sources: diffrax 0.7.2 `_global_interpolation.py`, torchcde 0.2.5 `interpolation_*.py`, torchdiffeq 0.2.5
`fixed_grid.py` and `rk_common.py`; tests/parity/test_control_path.py compares with all three.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from convert.references.protocol import Observed, Variant

Array = np.ndarray[Any, np.dtype[Any]]
Coefficients = tuple[Array, Array, Array, Array]
Slope = Callable[[float], Array]
Field = Callable[[Array], Array]

LEFT, RIGHT = "left derivative", "right derivative"
BROADCAST = "derivative broadcast to (T, T)"
UNIT = "knots at 0, 1, 2, ..."
CONSTANT_OUTSIDE = "path held constant outside its knots"
EXCHANGED = "time and batch axes exchanged"
HERMITE, NATURAL, LINEAR = "backward-Hermite cubic", "natural cubic", "linear path"
FACTORS, ORDER = "factors 2 and 3 missing", "coefficients in the order d, c, b, a"
INCREMENTS = "increments of the path in place of its derivative"


def interval(times: Array, at: Array, right: bool = False) -> Array:
    """Return the interval of each time: at a knot the one before it; outside of the knots the first or the last."""
    found = np.searchsorted(times, at, side="right" if right else "left") - 1
    return np.clip(found, 0, len(times) - 2)


def linear(times: Array, data: Array, at: Array, *, right: bool = False) -> tuple[Array, Array]:
    """Compute value and derivative of the linear path.

    Args:
        times: of the knots, (T,).
        data: at the knots, (..., T, C).
        at: times, (n,).

    Returns:
        Two arrays (..., n, C).
    """
    k = interval(times, at, right)
    before, after = data[..., k, :], data[..., k + 1, :]
    step, f = (times[k + 1] - times[k])[:, None], (at - times[k])[:, None]
    return before + (after - before) * (f / step), (after - before) / step


def hermite(times: Array, data: Array) -> Coefficients:
    """Compute coefficients a, b, c, d of the cubic Hermite path with backward differences, each (..., T-1, C).

    As in both libraries, the derivative at a knot is the slope before it; at the first knot, the slope after it.
    """
    step = np.diff(times)[:, None]
    slope = np.diff(data, axis=-2) / step
    before = np.concatenate([slope[..., :1, :], slope[..., :-1, :]], -2)
    return data[..., :-1, :], before, 2 * (slope - before) / step, -(slope - before) / step**2


def natural(times: Array, data: Array) -> Coefficients:
    """Compute coefficients a, b, c, d of the natural cubic path (second derivative zero at both ends), each (..., T-1, C)."""
    step = np.diff(times)
    count = len(times)
    matrix = np.zeros((count, count))
    for k, h in enumerate(step):
        matrix[k : k + 2, k : k + 2] += np.array([[2, 1], [1, 2]]) / h
    pull = 3 * np.diff(data, axis=-2) / (step**2)[:, None]
    wanted = np.zeros(data.shape)
    wanted[..., :-1, :] += pull
    wanted[..., 1:, :] += pull
    knots = np.linalg.solve(matrix, wanted)
    first, second = knots[..., :-1, :], knots[..., 1:, :]
    slope, h = np.diff(data, axis=-2) / step[:, None], step[:, None]
    return data[..., :-1, :], first, (3 * slope - 2 * first - second) / h, (first + second - 2 * slope) / h**2


def cubic(times: Array, coefficients: Coefficients, at: Array) -> tuple[Array, Array]:
    """Compute value and derivative of a cubic path, two arrays (..., n, C)."""
    k = interval(times, at)
    f = (at - times[k])[:, None]
    a, b, c, d = (x[..., k, :] for x in coefficients)
    return a + f * (b + f * (c + f * d)), b + f * (2 * c + f * 3 * d)


def path_variants(kind: str, of: str, *, times: str, data: str, at: str) -> list[Variant]:
    """Return the values or derivatives of a path, and known mistakes; the first variant is correct.

    Args:
        kind: ``linear`` or ``cubic`` (Hermite, backward differences).
        of: ``value`` or ``slope``.
        times, data, at: names of inputs: knots (T,), data (..., T, C), and the times (n,) at which the path is evaluated.
    """
    pick = 0 if of == "value" else 1

    def read(seen: Observed) -> tuple[Array, Array, Array]:
        t, y, x = (np.asarray(seen.inputs[name], np.float64) for name in (times, data, at))
        return t, y, x

    def variant(name: str, make: Callable[[Array, Array, Array], tuple[Array, Array]]) -> Variant:
        return Variant(name, lambda seen: make(*read(seen))[pick])

    def path(t: Array, y: Array, x: Array) -> tuple[Array, Array]:
        return linear(t, y, x) if kind == "linear" else cubic(t, hermite(t, y), x)

    def constant_outside(t: Array, y: Array, x: Array) -> tuple[Array, Array]:
        value, slope = path(t, y, np.clip(x, t[0], t[-1]))
        return value, np.where(((x < t[0]) | (x > t[-1]))[:, None], 0, slope)

    def broadcast(t: Array, y: Array, x: Array) -> tuple[Array, Array]:
        k = interval(t, x)
        before, rise, step = y[..., k, :], y[..., k + 1, :] - y[..., k, :], t[k + 1] - t[k]
        return before + rise * ((x - t[k]) / step), rise / step  # (..., n, C) with (n,): fits when C is n, or 1

    def turned(t: Array, y: Array, x: Array) -> tuple[Array, Array]:
        if y.ndim < 3 or y.shape[0] != y.shape[-2]:
            raise ValueError("only as many series as knots can be taken for knots")
        value, slope = path(t, np.swapaxes(y, 0, -2), x)
        return np.swapaxes(value, 0, -2), np.swapaxes(slope, 0, -2)

    def bare(t: Array, y: Array, x: Array) -> tuple[Array, Array]:
        a, b, c, d = hermite(t, y)
        return cubic(t, (a, b, c / 2, d / 3), x)

    def reversed_(t: Array, y: Array, x: Array) -> tuple[Array, Array]:
        a, b, c, d = hermite(t, y)
        return cubic(t, (d, c, b / 2, a / 3), x)

    unit = variant(UNIT, lambda t, y, x: path(np.arange(len(t), dtype=np.float64), y, x))
    shared = [unit, variant(CONSTANT_OUTSIDE, constant_outside), variant(EXCHANGED, turned)]
    if kind == "linear":
        variants = [variant(LEFT, path), variant(RIGHT, lambda t, y, x: linear(t, y, x, right=True))]
        variants += [variant(BROADCAST, broadcast), variant(HERMITE, lambda t, y, x: cubic(t, hermite(t, y), x))]
        return [*variants, *shared]
    variants = [variant(HERMITE, path), variant(NATURAL, lambda t, y, x: cubic(t, natural(t, y), x))]
    variants += [variant(LINEAR, linear), variant(FACTORS, bare), variant(ORDER, reversed_)]
    return [*variants, *shared]


# ---- solutions

TABLEAUS: Mapping[str, tuple[Sequence[Sequence[float]], Sequence[float]]] = {  # rows of stages, weights of the step
    "Euler": ([[]], [1]),
    "midpoint": ([[], [1 / 2]], [0, 1]),
    "Heun": ([[], [1]], [1 / 2, 1 / 2]),
    "Heun of order 3": ([[], [1 / 3], [0, 2 / 3]], [1 / 4, 0, 3 / 4]),
    "RK4, 3/8 rule": ([[], [1 / 3], [-1 / 3, 1], [1, -1, 1]], [1 / 8, 3 / 8, 3 / 8, 1 / 8]),  # torchdiffeq's rk4
    "classical RK4": ([[], [1 / 2], [0, 1 / 2], [0, 0, 1]], [1 / 6, 1 / 3, 1 / 3, 1 / 6]),
}


def solve(field: Field, start: Array, times: Array, slope: Slope, method: str) -> Array:
    """Compute the solution of ``dz = field(z) dX`` at the times (..., T, H), one step from each to the next.

    Args:
        field: (..., H) -> (..., H, C).
        start: (..., H).
        slope: dX/dt at a time, (..., C).
        method: one of `TABLEAUS`.
    """
    stages, weights = TABLEAUS[method]
    z, out = start, [start]
    for t, after in itertools.pairwise(times):
        h = after - t
        ks: list[Array] = []
        for row in stages:
            at = after if sum(row) == 1 else t + sum(row) * h
            here = z + h * sum((w * k for w, k in zip(row, ks, strict=True)), np.zeros_like(z))
            ks.append(np.einsum("...hc,...c->...h", field(here), slope(at)))
        z = z + h * sum((w * k for w, k in zip(weights, ks, strict=True)), np.zeros_like(z))
        out.append(z)
    return np.stack(out, -2)


def solution_variants(
    kind: str, method: str, *, times: str, data: str, field: Callable[[Observed], Field], start: str
) -> list[Variant]:
    """Return the solution, and known mistakes; the first variant is correct.

    Args:
        kind: of the path, ``linear`` or ``cubic``.
        method: one of `TABLEAUS`.
        times, data: names of inputs: knots (T,), at which the solution is known, and data (..., T, C).
        field: what was observed -> the vector field, with the PyTorch model's weights.
        start: name of the boundary with the first state.
    """

    def made(seen: Observed, method: str, right: bool = False, unit: bool = False, of: str = kind) -> Array:
        t, y = (np.asarray(seen.inputs[name], np.float64) for name in (times, data))
        grid = np.arange(len(t), dtype=np.float64) if unit else t
        coefficients = hermite(grid, y)

        def slope(at: float) -> Array:
            x = np.array([at])
            path = linear(grid, y, x, right=right) if of == "linear" else cubic(grid, coefficients, x)
            return path[1][..., 0, :]

        return solve(field(seen), seen.values[start], t, slope, method)

    def increments(seen: Observed) -> Array:
        """Solve as diffrax's ControlTerm without `to_ode`: every stage uses the path's whole rise from knot to knot."""
        t, y = (np.asarray(seen.inputs[name], np.float64) for name in (times, data))
        out = [seen.values[start]]
        for k, rise in enumerate(np.moveaxis(np.diff(y, axis=-2) / np.diff(t)[:, None], -2, 0)):
            step = solve(field(seen), out[-1], t[k : k + 2], lambda at, rise=rise: rise, method)  # type: ignore[misc]
            out.append(step[..., 1, :])
        return np.stack(out, -2)

    names = [method, *(name for name in TABLEAUS if name != method)]
    variants = [Variant(name, lambda seen, name=name: made(seen, name)) for name in names]  # type: ignore[misc]
    variants += [
        Variant(f"{method} with the {RIGHT}", lambda seen: made(seen, method, right=True)),
        Variant(UNIT, lambda seen: made(seen, method, unit=True)),
        Variant(INCREMENTS, increments),
    ]
    other = "cubic" if kind == "linear" else "linear"
    variants.append(Variant({"cubic": HERMITE, "linear": LINEAR}[other], lambda seen: made(seen, method, of=other)))
    return variants
