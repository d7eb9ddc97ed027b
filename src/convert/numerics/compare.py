"""Measure the difference of two arrays, and of the predictions of two arrays of logits."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import ml_dtypes
import numpy as np

from convert.numerics.magnitude import magnitudes
from convert.numerics.real_numbers import in_float64

Array = np.ndarray[Any, np.dtype[Any]]


TF32 = "tf32"  # no dtype: what the factors of float32 products are rounded to on a GPU
TF32_DIGITS = 10  # binary ones behind the point (NVIDIA A100 Tensor Core GPU Architecture, whitepaper of 2020)


def epsilon(dtype: str) -> float:
    """Return the distance from 1 to the next number of a floating-point dtype, or of `TF32`."""
    return 2.0**-TF32_DIGITS if dtype == TF32 else float(ml_dtypes.finfo(dtype).eps)


@dataclass(frozen=True)
class Difference:
    """The distance of two arrays of one shape.

    Attributes:
        max_abs: the largest error, absolute.
        relative: the largest error over the largest absolute value of the reference; values beside numbers that stand for masked ones
            have their own (`magnitudes`).
        ulps: the same error in units in the last place of that value, in the compared precision.
        cosine: of the angle between the two vectors; 1 is parallel.
        at: index of the largest error.
        got: the value there.
        want: the reference value there.
        size: number of elements compared, without masked ones.
        nan: number of elements that are NaN on both sides; they count as equal and prove nothing.
    """

    max_abs: float
    relative: float
    ulps: float
    cosine: float
    at: tuple[int, ...]
    got: float
    want: float
    size: int
    nan: int = 0

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "at": list(self.at)}


def difference(got: Any, want: Any, *, precision: str = "float32", mask: Array | None = None) -> Difference:
    """Compare `got` with the reference `want`.

    Args:
        precision: dtype that defines the unit of `ulps`.
        mask: true where positions count; its shape is a prefix of the shape of the arrays, with 1 for axes that count entirely.

    Raises:
        ValueError: the shapes differ, or nothing is left to compare.
    """
    got, want = in_float64(got), in_float64(want)
    if got.shape != want.shape:
        raise ValueError(f"shapes differ: {list(got.shape)} and {list(want.shape)}")
    keep = np.ones(got.shape, bool)
    if mask is not None:
        counts = np.asarray(mask, bool)
        keep &= counts.reshape(counts.shape + (1,) * (got.ndim - counts.ndim))
    if not keep.any():
        raise ValueError("no position is left to compare")
    neither = np.isnan(got) & np.isnan(want)
    unequal = ~((got == want) | neither)
    with np.errstate(invalid="ignore", over="ignore"):
        error = np.where(unequal, np.abs(got - want), 0.0)
    error = np.where(np.isnan(error), np.inf, error)  # NaN on one side only, or inf against -inf
    a, b = got[keep], want[keep]
    sizes = np.zeros(want.shape)
    sizes[keep] = magnitudes(b)
    with np.errstate(divide="ignore", invalid="ignore"):
        shares = np.where(error == 0, 0.0, error / sizes)
    at = np.unravel_index(int(np.argmax(np.where(keep, shares, -1.0))), error.shape)
    largest, max_abs = float(sizes[at]), float(error[at])
    if max_abs == 0:
        relative = ulps = 0.0
    elif largest == 0:
        relative = ulps = float("inf")
    else:
        relative = max_abs / largest
        ulps = max_abs / _last_place(largest, precision)
    return Difference(
        max_abs,
        relative,
        ulps,
        _cosine(a, b, max_abs),
        tuple(int(k) for k in at),
        float(got[at]),
        float(want[at]),
        int(keep.sum()),
        int((neither & keep).sum()),
    )


def _last_place(value: float, precision: str) -> float:
    """Return the distance of a number of `precision` to the next one, like ``numpy.spacing``."""
    smallest = float(ml_dtypes.finfo(precision).smallest_subnormal)
    return max(math.ldexp(epsilon(precision), math.frexp(value)[1] - 1), smallest)


def _cosine(a: Array, b: Array, max_abs: float) -> float:
    """Return the cosine of the angle between two vectors, or NaN. Scaling keeps the squares from overflow and underflow."""
    if max_abs == 0:
        return 1.0
    scales = [float(np.max(np.abs(x))) for x in (a, b)]
    if not all(0 < scale < math.inf for scale in scales):  # also false for NaN
        return math.nan
    a, b = a / scales[0], b / scales[1]
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))


@dataclass(frozen=True)
class Agreement:
    """The distance of the predictions of two arrays of logits.

    Attributes:
        kl: Kullback-Leibler divergence of the candidate from the reference in nats, the mean over positions.
        kl_max: the largest divergence of a position.
        top1: fraction of positions where both have the same most probable token; of equally probable tokens, any.
        positions: number of positions compared, without masked ones.
    """

    kl: float
    kl_max: float
    top1: float
    positions: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def agreement(got: Any, want: Any, *, mask: Array | None = None) -> Agreement:
    """Compare logits [..., tokens] with those of the reference, in float64; each addend of the divergence is at least 0.

    The divergence of a position is infinite or NaN where a logit is NaN, or infinite for a token that is not masked (``-inf``
    on both sides). NaN agrees with nothing.

    Args:
        mask: true where positions count; its shape is a prefix of the shape of the arrays, with 1 for axes that count entirely.
            Where it includes the last axis, masked tokens have no probability.

    Raises:
        ValueError: the shapes differ, or nothing is left to compare.
    """
    got, want = in_float64(got), in_float64(want)
    if got.shape != want.shape or got.ndim == 0:
        raise ValueError(f"shapes differ: {list(got.shape)} and {list(want.shape)}")
    if mask is not None:
        counts = np.asarray(mask, bool)
        keep = np.broadcast_to(counts.reshape(counts.shape + (1,) * (got.ndim - counts.ndim)), got.shape)
        got, want = np.where(keep, got, -np.inf)[keep.any(-1)], np.where(keep, want, -np.inf)[keep.any(-1)]
    got, want = got.reshape(-1, got.shape[-1]), want.reshape(-1, want.shape[-1])
    if not got.size:
        raise ValueError("no position is left to compare")
    with np.errstate(all="ignore"):
        log_q, log_p = _log_softmax(got), _log_softmax(want)
        p, q = np.exp(log_p), np.exp(log_q)
        d = log_q - log_p
        # sum(p log(p/q)) equals sum(p log(p/q) - p + q), with the addends p (exp(d) - 1 - d); a series for small d
        small = p * d * d * (1 / 2 + d * (1 / 6 + d / 24))
        addends = np.where(np.abs(d) < 1e-3, small, np.maximum(q - p - p * d, 0))
        addends = np.where(p == 0, q, addends)
    kl = addends.sum(-1)
    same = np.any((got == got.max(-1, keepdims=True)) & (want == want.max(-1, keepdims=True)), axis=-1)
    return Agreement(float(kl.mean()), float(kl.max()), float(same.mean()), len(kl))


def _log_softmax(x: Array) -> Array:
    shifted = x - x.max(-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))
