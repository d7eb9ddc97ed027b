"""Errors are relative to the largest value, and those beside masked values to the largest of the others."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from convert.numerics.compare import difference
from convert.numerics.magnitude import magnitudes, relative_error

LOGITS = np.array([3.0, -2.0, 0.5])


@pytest.mark.parametrize(
    ("masked", "own"),
    [
        ([-1e30, -1e30], [1e30, 1e30]),
        ([-1e9 + 1, -1e9 - 2], [1e9 + 2, 1e9 + 2]),
        ([-1e30, -1e30, -1e9, -1e9], [1e30, 1e30, 1e9, 1e9]),
        ([-1e30], [1e30]),
        ([-np.inf, np.nan], [3.0, 3.0]),
    ],
)
def test_masked_values_have_their_own(masked: list[float], own: list[float]) -> None:
    assert magnitudes(np.array([*LOGITS, *masked])).tolist() == [3.0, 3.0, 3.0, *own]


@pytest.mark.parametrize("large", [[1e6], [1e6, 9e5], [2e4, -2e4]])
def test_large_values_that_stand_for_nothing_do_not(large: list[float]) -> None:
    assert set(magnitudes(np.array([*LOGITS, *large])).tolist()) == {max(map(abs, large))}


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=8))
def test_without_masked_values_it_is_the_largest(values: list[float]) -> None:
    array = np.array(values)
    if np.count_nonzero(array) and np.abs(array).max() < 1e4 * np.abs(array[array != 0]).min():
        assert (magnitudes(array) == np.abs(array).max()).all()


def test_a_difference_beside_masked_values_shows() -> None:
    want = np.array([*LOGITS, -1e30, -1e30])
    got = want * np.array([1, 1.1, 1, 1, 1])
    found = difference(got, want)
    assert found.relative == pytest.approx(0.2 / 3) and found.at == (1,) and found.max_abs == pytest.approx(0.2)
    assert relative_error(got, want) == pytest.approx(0.2 / 3)


@pytest.mark.parametrize("got", [[1.0, np.nan], [1.0, np.inf], [1.0, -np.inf], [1.0]])
def test_what_is_no_number_on_one_side_is_infinitely_far(got: list[float]) -> None:
    assert relative_error(np.array(got), np.array([1.0, 2.0])) == np.inf
