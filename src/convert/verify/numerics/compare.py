"""Measure the distance of two arrays, and derive how large it may be."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import ml_dtypes
import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


def epsilon(dtype: str) -> float:
    """Return the distance from 1 to the next number of a floating-point dtype."""
    return float(ml_dtypes.finfo(dtype).eps)


@dataclass(frozen=True)
class Difference:
    """The distance of two arrays of one shape.

    Attributes:
        max_abs: largest absolute error.
        relative: `max_abs` over the largest absolute value of the reference.
        ulps: `max_abs` in units in the last place of the largest reference value, in the compared precision.
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
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
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
    at = np.unravel_index(int(np.argmax(np.where(keep, error, -1.0))), error.shape)
    a, b = got[keep], want[keep]
    largest = float(np.max(np.abs(b), initial=0.0, where=np.isfinite(b)))
    max_abs = float(error[at])
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
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
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


@dataclass(frozen=True)
class Tolerance:
    """An upper bound of a relative error, with its derivation.

    Attributes:
        value: the bound of `Difference.relative`.
        why: the derivation, with its numbers.
    """

    value: float
    why: str

    @property
    def conclusive(self) -> bool:
        """Whether an error within the tolerance proves anything: an error of 1 is as large as the values."""
        return self.value < 1


# Two correct runs differ by two rounding errors of the measured size. The factor allows for two different orders of the same
# sums (Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., section 2.8: the bound is linear in n, the typical
# error its square root).
MARGIN = 16.0


def lifted_tolerance(drift: float, precision: str, reduction: int, depth: int) -> Tolerance:
    """Derive the bound for two float64 runs of the same function.

    The model shows how much it amplifies rounding: its run in `precision` is `drift` away from its lifted run, which is
    drift / eps epsilons. In float64 the same function drifts by as many epsilons of float64.

    Args:
        drift: relative distance of the run of one side in `precision` from its lifted run; where it is not finite (an
            overflow), the floor replaces it.
        precision: native precision of the model.
        reduction: length of the longest sum.
        depth: number of layers; with `reduction`, it gives the floor of the amplification.
    """
    floor = math.sqrt(reduction) * depth
    # A float64 run of code with casts to float32 drifts by epsilons of float32; the geometric mean separates the two cases.
    coarse = precision == "float64" and drift > math.sqrt(epsilon("float64") * epsilon("float32"))
    unit = epsilon("float32" if coarse else precision)
    amplification = max(drift / unit, floor) if math.isfinite(drift) else floor
    return Tolerance(
        MARGIN * amplification * epsilon("float64"),
        f"{MARGIN:.0f} x {amplification:.3g} x eps(float64): the model amplifies rounding {amplification:.3g} times "
        f"(its {precision} run is {drift:.1e} from its float64 run; the floor is sqrt of {reduction} summands x {depth} layers)",
    )


# The PyTorch run may be this many times as far from its lifted run as the JAX run: it rounds the same operations, fused and
# ordered differently. Over the goldens, in float32 and bfloat16, at every boundary, the factor was at most 2.6.
OTHER = 4.0


def rounded_tolerance(lifted: Tolerance, perturbed: float, dtype: str) -> Tolerance:
    """Derive the bound for two lifted runs when the weights of one side are known only after rounding.

    Args:
        lifted: the bound without rounding.
        perturbed: change of the output when the rounded weights move at random by up to half a unit in the last place, which
            is one more sample of the unknown rounding.
        dtype: the dtype to which the weights were rounded.
    """
    rounding = max(perturbed, epsilon(dtype) / 2) if math.isfinite(perturbed) else epsilon(dtype) / 2
    return Tolerance(
        OTHER * rounding + lifted.value,
        f"{OTHER:.0f} x {rounding:.1e} + {lifted.value:.1e}: the weights are known only in {dtype}, and rounding them to {dtype} again "
        f"changes this by {perturbed:.1e}; plus {lifted.why}",
    )


def run_floor(precision: str, reduction: int, depth: int) -> float:
    """Return the least rounding error expected of a model in `precision`, relative to its largest value.

    Products are summed in float32 or wider, and sums of n terms drift by about sqrt(n) epsilons (Higham, section 2.8). The
    output of each layer is rounded to `precision`, and independent roundings of n layers add up to sqrt(n) of them.
    """
    summed = min(epsilon(precision), epsilon("float32"))
    return max(math.sqrt(reduction) * depth * summed / 4, math.sqrt(depth) * epsilon(precision))


def run_tolerance(
    drift: float, precision: str, reduction: int, depth: int, *, weights: float = 0.0, casts: bool = False
) -> Tolerance:
    """Derive the bound for the PyTorch run in `precision` against the JAX run, without using the PyTorch error.

    By the triangle inequality it is the sum of three distances: the JAX run from its lifted run, the PyTorch run from its
    lifted run (at most `OTHER` times as far), and the two lifted runs from each other.

    Args:
        drift: largest relative distance of the JAX run from its lifted run, up to here in the order of the data flow. Where it
            is not finite (an overflow) or unknown (0), the floor replaces it.
        precision: native precision of the model.
        reduction: as in `lifted_tolerance`.
        depth: as in `lifted_tolerance`.
        weights: distance of the lifted runs, where the PyTorch weights were rounded to a narrower dtype than `precision`.
        casts: the PyTorch code casts to float32, so in float64 it rounds like float32.
    """
    unit = "float32" if casts and precision == "float64" else precision
    floor = run_floor(unit, reduction, depth)
    rounding = max(drift, floor) if math.isfinite(drift) else floor
    more = f" + {weights:.1e} for the rounding of the weights" if weights else ""
    cast = f", as the PyTorch code casts to {unit}" if unit != precision else ""
    return Tolerance(
        (1 + OTHER) * rounding + weights,
        f"(1 + {OTHER:.0f}) x {rounding:.1e}{more}: the JAX run in {precision} is up to {drift:.1e} from its float64 run here, and "
        f"the PyTorch run may be {OTHER:.0f} times as far (floor {floor:.1e}: sqrt of {reduction} summands, {depth} layers, in {unit}{cast})",
    )
