"""Differences against NumPy's own numbers."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from convert.numerics.compare import agreement, difference, epsilon
from convert.numerics.magnitude import relative_error

PRECISIONS = ("float64", "float32", "float16", "bfloat16")


def test_equal_arrays() -> None:
    found = difference([[1.0, -2.0], [3.0, 4.0]], [[1.0, -2.0], [3.0, 4.0]])
    assert (found.max_abs, found.relative, found.ulps, found.cosine, found.size) == (0, 0, 0, 1, 4)


def test_what_is_measured() -> None:
    found = difference([[1.0, 2.0], [3.0, -4.5]], [[1.0, 2.5], [3.0, -5.0]])
    assert found.max_abs == 0.5 and found.relative == 0.1 and found.at == (0, 1)
    assert (found.got, found.want) == (2.0, 2.5)
    want = (1 + 5 + 9 + 22.5) / math.sqrt((1 + 4 + 9 + 20.25) * (1 + 6.25 + 9 + 25))
    assert found.cosine == pytest.approx(want, rel=1e-15)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_one_number_further_is_one_ulp(precision: str) -> None:
    """At every binade, the denormals included, for every dtype whose spacing NumPy or ml_dtypes knows."""
    dtype = np.dtype(getattr(ml_dtypes, precision, None) or precision)
    tiny = float(ml_dtypes.finfo(dtype).smallest_normal)
    for value in (1.0, 1.5, 1.9375, 3.0, 100.0, 0.3, tiny, 4 * tiny, tiny / 2):
        x = np.array(value, dtype)
        up = np.nextafter(x, np.array(np.inf, dtype))
        found = difference(up, x, precision=precision)
        assert found.ulps == 1.0, value
        assert found.max_abs == float(np.spacing(x)), value


@given(st.floats(1e-30, 1e30), st.integers(-50, 50))
def test_ulps_are_multiples_of_the_spacing(value: float, steps: int) -> None:
    x = np.float32(value)
    y = np.float64(x) + steps * np.float64(np.spacing(x))
    assert difference(y, x).ulps == abs(steps)


def test_nan_and_infinity() -> None:
    nan, inf = float("nan"), float("inf")
    assert difference([nan, inf, -inf, 1], [nan, inf, -inf, 1]).max_abs == 0  # the same in both: no difference
    for got, want in (
        ([nan, 1], [0, 1]),
        ([0, 1], [nan, 1]),
        ([inf, 1], [-inf, 1]),
        ([inf, 1], [0, 1]),
        ([0, 1], [inf, 1]),
    ):
        found = difference(got, want)
        assert found.max_abs == found.relative == found.ulps == inf and found.at == (0,), (got, want)
    found = difference([inf, 1.5], [inf, 1.0])  # what is finite gives the scale
    assert found.relative == 0.5 and found.at == (1,)


def test_nan_on_both_sides_is_counted() -> None:
    """It is no difference, and it is no proof: who compares has to say so."""
    got = np.array([[1.0, np.nan], [np.nan, np.nan]])
    assert difference(got, got).nan == 3 and difference(got, got).max_abs == 0
    assert difference(got, got, mask=np.array([True, False])).nan == 1
    assert difference(got, np.ones((2, 2))).nan == 0


def test_a_reference_of_zeros() -> None:
    assert difference([0.0, 0.0], [0.0, 0.0]).relative == 0
    found = difference([0.0, 1e-30], [0.0, 0.0])
    assert found.relative == math.inf and found.ulps == math.inf and math.isnan(found.cosine)


def test_large_and_tiny_numbers_overflow_nowhere() -> None:
    found = difference([1e300, -1e300], [1e300, 1e300])
    assert found.relative == 2 and found.cosine == 0
    assert difference([1.7e308], [-1.7e308]).max_abs == math.inf
    assert difference([3e-300, 4e-300], [3e-300, 3e-300]).cosine == pytest.approx(7 / math.sqrt(50))


def test_masks() -> None:
    got, want = np.zeros((2, 3, 4)), np.zeros((2, 3, 4))
    got[0, 1], got[1, 2, 3], want[1, 2] = 9, 2, 1
    rows = np.ones((2, 3), bool)
    assert difference(got, want).max_abs == 9
    rows[0, 1] = False
    found = difference(got, want, mask=rows)
    assert found.size == 20 and found.max_abs == 1 and found.at[:2] == (1, 2)
    assert difference(got, want, mask=np.array([[True], [True]])).size == 24  # 1: all along that axis alike
    assert difference(got, want, mask=np.array([False, True])).size == 12
    found = difference(got, want, mask=np.array([True, False]))
    assert found.at == (0, 1, 0)
    with pytest.raises(ValueError, match="no position is left"):
        difference(got, want, mask=np.zeros((2, 3), bool))


def test_the_place_is_one_that_counts() -> None:
    found = difference([5.0, 1.0], [7.0, 1.0], mask=np.array([False, True]))
    assert found.max_abs == 0 and found.at == (1,) and found.want == 1.0


def test_shapes() -> None:
    assert difference(2.0, 1.0).at == ()
    with pytest.raises(ValueError, match=r"shapes differ: \[2\] and \[2, 1\]"):
        difference([1, 2], [[1], [2]])
    with pytest.raises(ValueError, match="no position is left"):
        difference(np.zeros(0), np.zeros(0))


def test_narrow_dtypes_are_compared_exactly() -> None:
    x = np.array([1, 2, 3], ml_dtypes.bfloat16)
    assert difference(x, x.astype(np.float32)).max_abs == 0
    assert difference(x, np.array([1, 2, 3.01]), precision="bfloat16").ulps == pytest.approx(0.01 / 2**-6)


# ---- logits

P, Q = np.log([[0.5, 0.25, 0.25], [0.2, 0.3, 0.5]]), np.log([[0.25, 0.5, 0.25], [0.2, 0.3, 0.5]])


def test_divergence_and_agreement_by_hand() -> None:
    """KL(P || Q) of the first row is 1/2 ln 2 - 1/4 ln 2; the second rows are equal."""
    found = agreement(Q + np.array([[7.0], [-3.0]]), P)  # a constant changes no probability
    assert found.kl == pytest.approx(math.log(2) / 8, rel=1e-14) and found.kl_max == pytest.approx(math.log(2) / 4)
    assert (found.top1, found.positions) == (0.5, 2)
    assert agreement(np.log([0.1, 0.9]), np.log([0.5, 0.5])).kl == pytest.approx(0.5 * math.log(25 / 9))
    assert agreement(np.log([0.5, 0.5]), np.log([0.1, 0.9])).kl == pytest.approx(0.1 * math.log(0.2) + 0.9 * math.log(1.8))  # fmt: skip


@pytest.mark.parametrize("d", [1e-15, 1e-12, 1e-8, 9e-4, 1.1e-3, 0.1, 20.0, 400.0])
def test_a_small_divergence_is_not_lost_in_rounding(d: float) -> None:
    """Of (d, -d) from (0, 0): ln cosh d, which is d^2/2 - d^4/12 + ..."""
    want = d**2 / 2 - d**4 / 12 if d < 1e-2 else d + math.log1p(math.exp(-2 * d)) - math.log(2)
    found = agreement([d, -d], [0.0, 0.0])
    assert found.kl == pytest.approx(want, rel=1e-9, abs=4 * epsilon("float64") * d)  # the logarithms' own rounding


def test_equal_logits_have_no_divergence() -> None:
    x = np.random.default_rng(0).normal(0, 40, (3, 5, 31))
    found = agreement(x, x)
    assert (found.kl, found.kl_max, found.top1, found.positions) == (0, 0, 1, 15)
    big = agreement(x + 1e300, x + 1e300)
    assert (big.kl, big.top1) == (0, 1)


def test_masked_positions_and_tokens_do_not_count() -> None:
    got, want = np.stack([Q, P]), np.stack([P, P])
    assert agreement(got, want, mask=np.array([[False, True], [True, True]])).kl_max == 0
    assert agreement(got, want, mask=np.array([[True, False], [True, False]])).kl == pytest.approx(math.log(2) / 8)
    assert agreement(got, want, mask=np.array([False, True])).positions == 2
    assert agreement(got, want, mask=np.array([True, False])).kl_max == pytest.approx(math.log(2) / 4)
    nan = got.copy()
    nan[0] = np.nan
    assert agreement(nan, want, mask=np.array([[False], [True]])).kl == 0
    # of P's and Q's first rows, the last two tokens: (1/2, 1/2) and (2/3, 1/3)
    tokens = np.array([[[False, True, True]]])
    found = agreement(Q[None, :1], P[None, :1], mask=tokens)
    assert found.kl == pytest.approx(0.5 * math.log(9 / 8)) and found.top1 == 1
    with pytest.raises(ValueError, match="no position is left"):
        agreement(got, want, mask=np.zeros((2, 2), bool))


def test_infinite_and_missing_logits() -> None:
    inf = math.inf
    assert agreement([0.0, 0.0, -inf], [0.0, 0.0, -inf]).kl == 0
    assert agreement([0.0, -inf], [0.0, 0.0]).kl == inf
    assert agreement([0.0, 0.0], [0.0, -inf]).kl == pytest.approx(math.log(2))
    found = agreement([[0.0, math.nan], [0.0, 1.0]], [[0.0, 1.0], [0.0, 1.0]])
    assert math.isnan(found.kl) and math.isnan(found.kl_max) and found.top1 == 0.5


def test_of_equal_logits_any_is_the_first() -> None:
    assert agreement([0.0, 1e-9], [0.0, 0.0]).top1 == 1
    assert agreement([0.0, 1.0, 1.0], [0.0, 1.0, 0.0]).top1 == 1
    assert agreement([2.0, 1.0, 1.0], [0.0, 1.0, 0.0]).top1 == 0
    with pytest.raises(ValueError, match=r"shapes differ: \[2\] and \[3\]"):
        agreement([0.0, 1.0], [0.0, 1.0, 2.0])


def test_the_relative_error_of_outputs_with_infinities() -> None:
    one = np.array([-np.inf, 2.0, 4.0])
    assert relative_error(one, one) == 0.0 and relative_error(one, np.array([-np.inf, 2.0, 5.0])) == 0.2
    for other in (-1e30, np.inf, np.nan):
        assert (
            relative_error(one, np.array([other, 2.0, 4.0]))
            == relative_error(np.array([other, 2.0, 4.0]), one)
            == np.inf
        )
