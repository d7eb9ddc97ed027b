"""How far two arrays are apart, in the units that people ask for, and how far they may be, with the derivation."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import ml_dtypes
import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


def epsilon(dtype: str) -> float:
    """Distance from 1 to the next number of a floating-point dtype."""
    return float(ml_dtypes.finfo(dtype).eps)


@dataclass(frozen=True)
class Difference:
    """The distance of two arrays of one shape.

    Attributes:
        max_abs: largest absolute error.
        relative: `max_abs` over the largest absolute value of the reference.
        ulps: `max_abs` in units in the last place that the reference's largest value has in the precision.
        cosine: of the angle between the two as vectors; 1 is parallel.
        at: index of the largest error.
        got, want: the two values there.
        size: elements compared, masked ones left out.
        nan: those of them that are NaN on both sides: no difference, and no proof of anything.
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
    """Compares `got` with the reference `want`.

    Args:
        precision: dtype in whose last places `ulps` is counted.
        mask: true where positions count; its shape is a prefix of the arrays' shape, with 1 where all along an axis do.

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
    """Distance of a number of `precision` to the next one, as ``numpy.spacing`` gives it."""
    smallest = float(ml_dtypes.finfo(precision).smallest_subnormal)
    return max(math.ldexp(epsilon(precision), math.frexp(value)[1] - 1), smallest)


def _cosine(a: Array, b: Array, max_abs: float) -> float:
    """Of the angle between two vectors; NaN where there is none. Scaled first, so that squares neither overflow nor vanish."""
    if max_abs == 0:
        return 1.0
    scales = [float(np.max(np.abs(x))) for x in (a, b)]
    if not all(0 < scale < math.inf for scale in scales):  # false for NaN, too
        return math.nan
    a, b = a / scales[0], b / scales[1]
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))


@dataclass(frozen=True)
class Agreement:
    """How far the predictions of two arrays of logits are apart.

    Attributes:
        kl: Kullback-Leibler divergence of the candidate's distribution from the reference's, in nats: the mean over positions.
        kl_max: the largest of a position.
        top1: fraction of the positions at which both find the same token the most probable; of tokens equally probable, any.
        positions: that were compared; masked ones are left out.
    """

    kl: float
    kl_max: float
    top1: float
    positions: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def agreement(got: Any, want: Any, *, mask: Array | None = None) -> Agreement:
    """Compares logits [..., tokens] with the reference's: in float64, and each addend of the divergence at least 0.

    A position with NaN or with an infinite logit that is not a masked token's (``-inf`` on both sides) has no finite
    divergence, or none at all (NaN), and NaN agrees with nothing.

    Args:
        mask: true where positions count; its shape is a prefix of the arrays' shape, with 1 where all along an axis do.
            Where it reaches to the last axis, tokens that do not count have no probability.

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
        # sum(p log(p/q)) is sum(p log(p/q) - p + q), whose addends are p (exp(d) - 1 - d); for a small d by its series
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
    """How large a relative error may be, and why.

    Attributes:
        value: the bound on `Difference.relative`.
        why: the derivation, with its numbers.
    """

    value: float
    why: str

    @property
    def tells(self) -> bool:
        """Whether to be within it says anything: an error of 1 is as large as the values themselves."""
        return self.value < 1


# An honest difference of two runs is the sum of two rounding errors of the size that was measured; sixteen is the
# margin for the reference and the candidate being two different orders of the same sums (Higham, Accuracy and Stability
# of Numerical Algorithms, 2nd ed., section 2.8: the bound is linear in n, the typical error its square root).
MARGIN = 16.0


def lifted_tolerance(drift: float, precision: str, reduction: int, depth: int) -> Tolerance:
    """The bound for two float64 runs of the same function.

    The model itself tells how much it amplifies rounding: its float32 run is `drift` away from its lifted run, which is
    drift / eps32 epsilons; in float64 the same function drifts by as many epsilons of float64.

    Args:
        drift: relative distance of one side's run in `precision` from its own lifted run; when it is not finite (a run
            that overflows), it tells nothing and the floor stands in for it.
        reduction: length of the longest sum; depth: number of layers; both give the floor below which no model stays.
    """
    floor = math.sqrt(reduction) * depth
    # A float64 run of code that casts to float32 in the middle drifts by float32's epsilons; half-way between is far from both.
    coarse = precision == "float64" and drift > math.sqrt(epsilon("float64") * epsilon("float32"))
    unit = epsilon("float32" if coarse else precision)
    amplification = max(drift / unit, floor) if math.isfinite(drift) else floor
    return Tolerance(
        MARGIN * amplification * epsilon("float64"),
        f"{MARGIN:.0f} x {amplification:.3g} x eps(float64): the model amplifies rounding {amplification:.3g} times "
        f"(its {precision} run is {drift:.1e} from its lifted run; sqrt of {reduction} summands x {depth} layers is the floor)",
    )


# Torch's run may be this many times as far from the lifted run as JAX's is: it is another draw of the same roundings, fused
# and ordered otherwise. Over the goldens, in float32 and bfloat16, at every boundary, it was at most 2.6 times as far.
OTHER = 4.0


def rounded_tolerance(lifted: Tolerance, moved: float, dtype: str) -> Tolerance:
    """The bound for two lifted runs when one side's weights are known only as they were rounded.

    Args:
        lifted: the bound without that.
        moved: what moving the rounded weights at random by up to half a last place changes: another draw of the rounding that
            nobody knows.
    """
    rounding = max(moved, epsilon(dtype) / 2) if math.isfinite(moved) else epsilon(dtype) / 2
    return Tolerance(
        OTHER * rounding + lifted.value,
        f"{OTHER:.0f} x {rounding:.1e} + {lifted.value:.1e}: the weights are known in {dtype} alone, and rounding them to {dtype} once more "
        f"changes this by {moved:.1e}; besides, {lifted.why}",
    )


def run_floor(precision: str, reduction: int, depth: int) -> float:
    """The least rounding that is expected of a model in `precision`, relative to its largest value.

    Products are summed in float32 at least, and sums of n terms drift by about sqrt(n) epsilons (Higham, section 2.8); what a
    layer hands on is rounded to `precision`, and independent roundings of so many layers add up as their root.
    """
    summed = min(epsilon(precision), epsilon("float32"))
    return max(math.sqrt(reduction) * depth * summed / 4, math.sqrt(depth) * epsilon(precision))


def run_tolerance(
    drift: float, precision: str, reduction: int, depth: int, *, weights: float = 0.0, casts: bool = False
) -> Tolerance:
    """The bound for torch's run in `precision` against JAX's. Torch's own error has no part in it.

    By the triangle inequality: JAX's distance from its lifted run, torch's from its own, which is taken to be at most
    `OTHER` times JAX's, and the distance of the two lifted runs.

    Args:
        drift: how far JAX's run is from its lifted run: the largest relative distance up to here, as data flows. When it is
            not finite (a run that overflows) or not known (0), the floor stands in for it.
        weights: distance of the lifted runs, where torch's weights were rounded more coarsely than `precision`.
        casts: torch's code casts to float32 in the middle, so that in float64, too, it rounds as float32 does.
    """
    unit = "float32" if casts and precision == "float64" else precision
    floor = run_floor(unit, reduction, depth)
    rounding = max(drift, floor) if math.isfinite(drift) else floor
    more = f" + {weights:.1e}, what rounding the weights changes in float64" if weights else ""
    cast = f", as torch's code casts to {unit}" if unit != precision else ""
    return Tolerance(
        (1 + OTHER) * rounding + weights,
        f"(1 + {OTHER:.0f}) x {rounding:.1e}{more}: JAX's run in {precision} is up to {drift:.1e} from its lifted run here, and "
        f"torch's may be {OTHER:.0f} times as far (floor {floor:.1e}: sqrt of {reduction} summands, {depth} layers, in {unit}{cast})",
    )
