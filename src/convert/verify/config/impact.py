"""Bound the effect of a wrong hyperparameter from its two values alone, without the weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from convert.layers.activations import NUMPY_ACTIVATIONS

Array = np.ndarray[Any, np.dtype[np.float64]]

RANGE = 12.0  # of the argument of an activation; beyond it, all of them are straight lines
STEP = 1e-3
FINE = 1e-6
SMALLEST_VARIANCE = 1e-4  # of the input of a norm: values around 0.01, as of an embedding initialised with 0.02
MAX_TIMES = 1000  # a number that one is multiplied by on purpose
MAX_POSITIONS = 16384
HEAD_DIM = 64  # where the model does not state it


@dataclass(frozen=True)
class Impact:
    """The largest effect of a difference.

    Attributes:
        text: a sentence; empty when the effect cannot be computed.
        data: the same as numbers.
    """

    text: str = ""
    data: Mapping[str, float] = field(default_factory=dict)


def of_activation(one: str, two: str) -> Impact:
    """Find the largest difference of two activations, and where it is."""
    if one not in NUMPY_ACTIVATIONS or two not in NUMPY_ACTIVATIONS:
        return Impact()

    def gap(x: Array) -> Array:
        return np.abs(NUMPY_ACTIVATIONS[one](x) - NUMPY_ACTIVATIONS[two](x))

    x = np.arange(-RANGE, RANGE + STEP / 2, STEP, dtype=np.float64)
    near = float(x[int(np.argmax(gap(x)))])
    fine = np.arange(max(near - STEP, -RANGE), min(near + STEP, RANGE), FINE, dtype=np.float64)
    at = round(float(fine[int(np.argmax(gap(fine)))]), 6)
    largest = float(gap(np.asarray([at]))[0])
    data = {"max_abs": largest, "at": at}
    if RANGE - abs(at) < 2 * STEP and gap(np.asarray([2 * at]))[0] > 1.01 * largest:
        return Impact(f"their difference grows without bound: {largest:.3g} at x = {at:.3g}", data)
    where = "|x|" if abs(float(gap(np.asarray([-at]))[0]) - largest) < 1e-9 else "x"
    value = abs(at) if where == "|x|" else at
    return Impact(f"at most {largest:.2e}, at {where} = {value:.2f}", data)


def of_epsilon(one: float, two: float) -> Impact:
    """Find the largest relative change of the output of a norm: at the smallest plausible variance, and in the limit."""
    if min(one, two) < 0 or max(one, two) == 0:
        return Impact()

    def change(variance: float) -> float:
        with np.errstate(divide="ignore"):
            return float(abs(np.sqrt(np.float64(variance + one) / (variance + two)) - 1))

    data = {"relative": change(SMALLEST_VARIANCE), "variance": SMALLEST_VARIANCE, "ordinary": change(1.0)}
    limit = change(0.0)  # not in `data`: it is infinite where one of the two is 0
    return Impact(
        f"changes a norm's output by {data['relative']:.1e} where the variance is {SMALLEST_VARIANCE:g}, "
        f"by {data['ordinary']:.1e} where it is 1"
        + (f", by {limit:.1e} where it tends to 0" if np.isfinite(limit) else ", without bound near 0"),
        data,
    )


def of_rope_theta(one: float, two: float, sizes: Mapping[str, int], context: int) -> Impact:
    """Find the largest change of a cosine or sine over the positions, and how early it exceeds 1."""
    if min(one, two) <= 0:
        return Impact()
    width = sizes.get("H", HEAD_DIM)
    powers = np.arange(0, width, 2) / width
    positions = np.arange(1, min(context, MAX_POSITIONS) + 1)[:, None]
    change = 2 * np.abs(np.sin(positions * (one**-powers - two**-powers) / 2)).max(axis=1)  # |exp(ia) - exp(ib)|
    first, largest = float(change[0]), float(change.max())
    at = int(positions[int(np.argmax(change)), 0])
    half = int(positions[int(np.argmax(change >= 1.0)), 0]) if largest >= 1.0 else 0
    text = f"rotates a pair of features by up to {largest:.2g} of its length (position {at}, head width {width})"
    return Impact(
        f"{text}; at position 1 by {first:.1e}" + (f", from position {half} by more than 1" if half else ""),
        {"max_abs": largest, "at": at, "first": first},
    )


def of_factor() -> Impact:
    """Describe a norm whose factor is larger by one."""
    return Impact("every output of the norm is wrong by the normalised input", {"max_abs": 1.0})


def of_numbers(one: Any, two: Any) -> Impact:
    """Find the relative difference of two numbers, or of two lists of numbers."""
    try:
        a, b = np.atleast_1d(np.asarray(one, np.float64)), np.atleast_1d(np.asarray(two, np.float64))
    except (TypeError, ValueError):
        return Impact()
    if a.shape != b.shape:
        return Impact(f"{a.size} numbers against {b.size}", {"declared": float(a.size), "configured": float(b.size)})
    gap = np.abs(a - b)
    k = int(np.argmax(gap))
    scale = max(abs(float(a[k])), abs(float(b[k])))
    relative = float(gap[k]) / scale if scale else 0.0
    known = relation(float(a[0]), float(b[0])) if a.size == 1 else ""
    text = f"{known}; " if known else ""
    return Impact(f"{text}a relative difference of {relative:.1e}", {"max_abs": float(gap[k]), "relative": relative})


def relation(declared: float, configured: float) -> str:
    """Say in words how a number was made of the declared one; empty if in no known way.

    >>> relation(12, 144), relation(30.0, 50.0), relation(1e-5, 1e-6), relation(8, 9)
    ('the square of the declared value', '', '1/10 of the declared value', 'one more than declared')
    """
    if not declared or not configured:
        return ""
    powers = {2.0: "the square", 0.5: "the root", -1.0: "the reciprocal", -0.5: "1 / the root", -2.0: "1 / the square"}
    for power, text in powers.items():
        if declared > 0 and declared != 1 and math.isclose(configured, declared**power, rel_tol=1e-6):
            return f"{text} of the declared value"
    if configured == -declared:
        return "the declared value with the other sign"
    if abs(configured - declared) == 1 and float(declared).is_integer():
        return f"one {'more' if configured > declared else 'less'} than declared"
    for large, small, text in ((configured, declared, "{} times"), (declared, configured, "1/{} of")):
        times = round(large / small)
        if 1 < times <= MAX_TIMES and math.isclose(large, times * small, rel_tol=1e-6):
            return f"{text.format(times)} the declared value"
    return ""


def impact_of(fact: str, declared: Any, configured: Any, sizes: Mapping[str, int], context: int) -> Impact:
    """Bound the effect of `configured` in place of `declared`, by the name of the fact."""
    if fact == "activation":
        return of_activation(str(declared), str(configured))
    if fact == "multiplies_by":
        return of_factor()
    both = [value for value in (declared, configured) if isinstance(value, int | float) and not isinstance(value, bool)]
    if len(both) == 2 and fact == "epsilon":
        return of_epsilon(float(declared), float(configured))
    if len(both) == 2 and fact.startswith("rope_theta"):
        return of_rope_theta(float(declared), float(configured), sizes, context)
    if len(both) == 2 or (isinstance(declared, list | tuple) and isinstance(configured, list | tuple)):
        return of_numbers(declared, configured)
    return Impact()
