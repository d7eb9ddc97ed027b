"""How much a fact that differs can matter at most: computed from the two values, whatever the weights are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from convert.layers.activations import NUMPY_ACTIVATIONS

Array = np.ndarray[Any, np.dtype[np.float64]]

RANGE = 12.0  # of an activation's argument; beyond it every one of them is flat, or a straight line
STEP = 1e-3
FINE = 1e-6
SMALLEST_VARIANCE = 1e-4  # of what a norm gets: values around 0.01, as of an embedding initialised with 0.02
MAX_POSITIONS = 16384
HEAD_DIM = 64  # where the model does not say


@dataclass(frozen=True)
class Worst:
    """The largest effect of a difference.

    Attributes:
        said: in words; empty when it cannot be computed.
        data: the same as numbers.
    """

    said: str = ""
    data: Mapping[str, float] = field(default_factory=dict)


def of_activation(one: str, two: str) -> Worst:
    """The largest difference of two activations, and where."""
    if one not in NUMPY_ACTIVATIONS or two not in NUMPY_ACTIVATIONS:
        return Worst()

    def gap(x: Array) -> Array:
        return np.abs(NUMPY_ACTIVATIONS[one](x) - NUMPY_ACTIVATIONS[two](x))

    x = np.arange(-RANGE, RANGE + STEP / 2, STEP, dtype=np.float64)
    near = float(x[int(np.argmax(gap(x)))])
    fine = np.arange(max(near - STEP, -RANGE), min(near + STEP, RANGE), FINE, dtype=np.float64)
    at = round(float(fine[int(np.argmax(gap(fine)))]), 6)
    largest = float(gap(np.asarray([at]))[0])
    data = {"max_abs": largest, "at": at}
    if RANGE - abs(at) < 2 * STEP and gap(np.asarray([2 * at]))[0] > 1.01 * largest:
        return Worst(f"their difference grows without bound: {largest:.3g} at x = {at:.3g}", data)
    where = "|x|" if abs(float(gap(np.asarray([-at]))[0]) - largest) < 1e-9 else "x"
    value = abs(at) if where == "|x|" else at
    return Worst(f"at most {largest:.2e}, at {where} = {value:.2f}", data)


def of_epsilon(one: float, two: float) -> Worst:
    """The largest relative change of a norm's output: that of the smallest variance that is plausible, and the limit."""
    if min(one, two) < 0 or max(one, two) == 0:
        return Worst()

    def change(variance: float) -> float:
        with np.errstate(divide="ignore"):
            return float(abs(np.sqrt(np.float64(variance + one) / (variance + two)) - 1))

    data = {"relative": change(SMALLEST_VARIANCE), "variance": SMALLEST_VARIANCE, "ordinary": change(1.0)}
    limit = change(0.0)  # not for machines: infinite where one of the two is 0, which JSON does not have
    return Worst(
        f"changes a norm's output by {data['relative']:.1e} where the variance is {SMALLEST_VARIANCE:g}, "
        f"by {data['ordinary']:.1e} where it is 1"
        + (f", by {limit:.1e} where it tends to 0" if np.isfinite(limit) else ", without bound near 0"),
        data,
    )


def of_rope_theta(one: float, two: float, sizes: Mapping[str, int], context: int) -> Worst:
    """The largest change of a cosine or sine over the positions, and how early half of it is reached."""
    if min(one, two) <= 0:
        return Worst()
    width = sizes.get("H", HEAD_DIM)
    powers = np.arange(0, width, 2) / width
    positions = np.arange(1, min(context, MAX_POSITIONS) + 1)[:, None]
    turned = 2 * np.abs(np.sin(positions * (one**-powers - two**-powers) / 2)).max(axis=1)  # |exp(ia) - exp(ib)|
    first, largest = float(turned[0]), float(turned.max())
    at = int(positions[int(np.argmax(turned)), 0])
    half = int(positions[int(np.argmax(turned >= 1.0)), 0]) if largest >= 1.0 else 0
    said = f"turns a pair of a query's numbers by up to {largest:.2g} of its length (position {at}, heads of {width})"
    return Worst(
        f"{said}; at position 1 by {first:.1e}" + (f", from position {half} by more than 1" if half else ""),
        {"max_abs": largest, "at": at, "first": first},
    )


def of_factor() -> Worst:
    """A norm whose factor is larger by one."""
    return Worst("every output of the norm is off by the normalised input itself", {"max_abs": 1.0})


def of_numbers(one: Any, two: Any) -> Worst:
    """The relative difference of two numbers, or of two lists of them."""
    try:
        a, b = np.atleast_1d(np.asarray(one, np.float64)), np.atleast_1d(np.asarray(two, np.float64))
    except (TypeError, ValueError):
        return Worst()
    if a.shape != b.shape:
        return Worst(f"{a.size} numbers against {b.size}", {"declared": float(a.size), "configured": float(b.size)})
    gap = np.abs(a - b)
    k = int(np.argmax(gap))
    scale = max(abs(float(a[k])), abs(float(b[k])))
    relative = float(gap[k]) / scale if scale else 0.0
    return Worst(f"a relative difference of {relative:.1e}", {"max_abs": float(gap[k]), "relative": relative})


def worst(fact: str, declared: Any, configured: Any, sizes: Mapping[str, int], context: int) -> Worst:
    """The largest effect of `configured` in place of `declared`; by the fact's name."""
    if fact == "activation":
        return of_activation(str(declared), str(configured))
    if fact == "multiplies_by":
        return of_factor()
    both = [value for value in (declared, configured) if isinstance(value, int | float) and not isinstance(value, bool)]
    if len(both) == 2 and fact == "epsilon":
        return of_epsilon(float(declared), float(configured))
    if len(both) == 2 and fact == "rope_theta":
        return of_rope_theta(float(declared), float(configured), sizes, context)
    if len(both) == 2 or (isinstance(declared, list | tuple) and isinstance(configured, list | tuple)):
        return of_numbers(declared, configured)
    return Worst()
