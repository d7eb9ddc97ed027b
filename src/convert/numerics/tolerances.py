"""Derive how large a difference may be, from the rounding errors measured on the JAX side."""

from __future__ import annotations

import math
from dataclasses import dataclass

from convert.numerics.compare import epsilon

# Two correct runs differ by two rounding errors of the measured size. The factor is chosen: it leaves room for other orders of
# the same sums, whose errors scatter (Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., section 2.8: the bound
# is linear in n, the typical error its square root).
SAFETY_FACTOR = 16.0

# The PyTorch run may be this many times as far from its lifted run as the JAX run: it rounds the same operations, fused and
# ordered differently. Over the goldens, in float32 and bfloat16, at every boundary, the ratio was at most 2.6.
MAX_DRIFT_RATIO = 4.0


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


def float64_tolerance(drift: float, precision: str, reduction: int, depth: int) -> Tolerance:
    """Derive the bound for two float64 runs of the same function.

    The amplification of rounding is measured: drift / eps(precision). The same function in float64 drifts by as many epsilons
    of float64.

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
        SAFETY_FACTOR * amplification * epsilon("float64"),
        f"{SAFETY_FACTOR:.0f} x {amplification:.3g} x eps(float64): the model amplifies rounding {amplification:.3g} times "
        f"(its {precision} run is {drift:.1e} from its float64 run; the floor is sqrt of {reduction} summands x {depth} layers)",
    )


def rounded_tolerance(
    lifted: Tolerance, perturbed: float, dtype: str, what: str = "the weights are known"
) -> Tolerance:
    """Derive the bound for two lifted runs when the weights, or other numbers, of one side are known only after rounding.

    Args:
        lifted: the bound without rounding.
        perturbed: change of the output when the rounded numbers move at random by up to half a unit in the last place, which
            is one more sample of the unknown rounding.
        dtype: the dtype to which they were rounded.
        what: which numbers, with a verb.
    """
    rounding = max(perturbed, epsilon(dtype) / 2) if math.isfinite(perturbed) else epsilon(dtype) / 2
    return Tolerance(
        MAX_DRIFT_RATIO * rounding + lifted.value,
        f"{MAX_DRIFT_RATIO:.0f} x {rounding:.1e} + {lifted.value:.1e}: {what} only in {dtype}, and rounding them to {dtype} again "
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
    drift: float,
    precision: str,
    reduction: int,
    depth: int,
    *,
    weights: float = 0.0,
    casts: bool = False,
    drifted_in: str = "",
) -> Tolerance:
    """Derive the bound for the PyTorch run in `precision` against the JAX run, without using the PyTorch error.

    By the triangle inequality it is the sum of three distances: the JAX run from its lifted run, the PyTorch run from its
    lifted run (at most `MAX_DRIFT_RATIO` times as far), and the two lifted runs from each other.

    Args:
        drift: largest relative distance of the JAX run from its lifted run, up to here in the order of the data flow. Where it
            is not finite (an overflow) or unknown (0), the floor replaces it.
        precision: native precision of the model.
        reduction: as in `float64_tolerance`.
        depth: as in `float64_tolerance`.
        weights: distance of the lifted runs, where the PyTorch weights were rounded to a narrower dtype than `precision`.
        casts: the PyTorch code casts to float32, so in float64 it rounds like float32.
        drifted_in: the precision of the JAX run that has this drift; `precision` where it is empty.
    """
    unit = "float32" if casts and precision == "float64" else precision
    floor = run_floor(unit, reduction, depth)
    rounding = max(drift, floor) if math.isfinite(drift) else floor
    more = f" + {weights:.1e} for the rounding of the weights" if weights else ""
    cast = f", as the PyTorch code casts to {unit}" if unit != precision else ""
    return Tolerance(
        (1 + MAX_DRIFT_RATIO) * rounding + weights,
        f"(1 + {MAX_DRIFT_RATIO:.0f}) x {rounding:.1e}{more}: the JAX run in {drifted_in or precision} is up to {drift:.1e} from its float64 run here, and "
        f"the PyTorch run may be {MAX_DRIFT_RATIO:.0f} times as far (floor {floor:.1e}: sqrt of {reduction} summands, {depth} layers, in {unit}{cast})",
    )
