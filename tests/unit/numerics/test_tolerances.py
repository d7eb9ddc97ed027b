"""Tolerances against their derivation."""

from __future__ import annotations

import math

import numpy as np
import pytest

from convert.numerics.compare import difference, epsilon
from convert.numerics.tolerances import (
    MAX_DRIFT_RATIO,
    SAFETY_FACTOR,
    float64_tolerance,
    rounded_tolerance,
    run_floor,
    run_tolerance,
)


def test_lifted_tolerance_is_the_amplification_in_float64() -> None:
    found = float64_tolerance(1e-4, "float32", 64, 3)
    assert found.value == pytest.approx(SAFETY_FACTOR * 1e-4 / epsilon("float32") * epsilon("float64"))
    assert "839" in found.why and "1.0e-04" in found.why and "64 summands x 3 layers" in found.why
    assert float64_tolerance(1e-4, "bfloat16", 64, 3).value < found.value  # the same drift is fewer of larger roundings


def test_lifted_tolerance_has_a_floor() -> None:
    """A model that happens to round to its lifted value still may round in another order."""
    assert float64_tolerance(0.0, "float32", 64, 3).value == SAFETY_FACTOR * 8 * 3 * epsilon("float64")


def test_run_tolerance_is_of_jax_alone() -> None:
    found = run_tolerance(3e-5, "float32", 64, 3)
    assert (
        found.value == pytest.approx((1 + MAX_DRIFT_RATIO) * 3e-5) and "up to 3.0e-05" in found.why and found.conclusive
    )
    floor = 8 * 3 * epsilon("float32") / 4
    assert (
        run_floor("float32", 64, 3) == floor
        and run_tolerance(0.0, "float32", 64, 3).value == (1 + MAX_DRIFT_RATIO) * floor
    )
    rounded = run_tolerance(3e-5, "float32", 64, 3, weights=1e-2)
    assert (
        rounded.value == pytest.approx(found.value + 1e-2) and "1.0e-02 for the rounding of the weights" in rounded.why
    )


def test_sums_are_wide_where_values_are_narrow() -> None:
    """In bfloat16 a layer's results are rounded, its sums are not: the floor does not grow with their length."""
    assert run_floor("bfloat16", 64, 4) == run_floor("bfloat16", 4096, 4) == 2 * epsilon("bfloat16")
    assert run_tolerance(0.0, "bfloat16", 5120, 34).conclusive


def test_casts_in_float64_round_as_float32_does() -> None:
    floor = run_floor("float32", 64, 3)
    assert run_tolerance(1e-15, "float64", 64, 3).value < 1e-13
    cast = run_tolerance(1e-15, "float64", 64, 3, casts=True)
    assert cast.value == (1 + MAX_DRIFT_RATIO) * floor and "the PyTorch code casts to float32" in cast.why
    assert run_tolerance(0.0, "float32", 64, 3, casts=True).value == (1 + MAX_DRIFT_RATIO) * floor


def test_weights_known_only_as_rounded() -> None:
    """What one more rounding changes stands for the one that nobody knows; the floor is half a last place."""
    exact = float64_tolerance(1e-6, "float32", 64, 3)
    found = rounded_tolerance(exact, 6e-3, "bfloat16")
    assert found.value == MAX_DRIFT_RATIO * 6e-3 + exact.value and "bfloat16 again changes this by 6.0e-03" in found.why
    floor = MAX_DRIFT_RATIO * epsilon("bfloat16") / 2 + exact.value
    assert (
        rounded_tolerance(exact, 0.0, "bfloat16").value == rounded_tolerance(exact, math.nan, "bfloat16").value == floor
    )


def test_a_bound_of_all_tells_nothing() -> None:
    assert not run_tolerance(0.3, "bfloat16", 64, 3).conclusive and run_tolerance(0.1, "bfloat16", 64, 3).conclusive


@pytest.mark.parametrize("drift", [math.inf, math.nan])
def test_a_run_that_overflows_does_not_allow_everything(drift: float) -> None:
    assert float64_tolerance(drift, "float16", 64, 3).value == float64_tolerance(0.0, "float16", 64, 3).value
    assert run_tolerance(drift, "float16", 64, 3).value == run_tolerance(0.0, "float16", 64, 3).value


def test_honest_sums_are_within_and_wrong_ones_beyond() -> None:
    """Two orders of one sum, of lengths up to a wide layer's, against the bound; and one summand left out."""
    rng = np.random.default_rng(0)
    for n in (8, 64, 1024, 16384):
        x, w = rng.standard_normal((2, 64, n))
        exact = np.array([math.fsum(row) for row in x * w])
        single = (x.astype(np.float32) * w.astype(np.float32)).sum(1, dtype=np.float32)
        drift = difference(single, exact).relative
        bound = float64_tolerance(drift, "float32", n, 1)
        assert difference((x * w)[:, ::-1].sum(1), (x * w).sum(1), precision="float64").relative <= bound.value
        assert difference((x * w)[:, 1:].sum(1), (x * w).sum(1), precision="float64").relative > 1000 * bound.value
