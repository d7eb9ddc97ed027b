"""Columns are paired by what stands in them, whatever the size of the numbers and the order of the rows."""

from __future__ import annotations

import numpy as np
import pytest

from convert.inference.meetings.columns import columns_along, columns_of_rows, pair


@pytest.mark.parametrize("rows", ["large numbers", "rows whose sum is zero"])
def test_columns_are_paired_in_spite_of_rounding(rows: str) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(30, 12))
    x = 1000 * x if rows == "large numbers" else x - x.mean(1, keepdims=True)
    order = rng.permutation(12)
    near = x[rng.permutation(30)][:, order] * (1 + 1e-8 * rng.normal(size=x.shape))
    found = pair(columns_of_rows([near]), columns_of_rows([x]))
    assert found is not None
    assert found.numbers.tolist() == order.tolist() and not found.tied.size


def test_rows_that_are_repeated_throughout_count_once_and_others_are_counted() -> None:
    x = np.random.default_rng(0).normal(size=(6, 12))
    order = np.random.default_rng(1).permutation(12)
    batch, tokens = np.tile(x, (3, 1))[:, order], x[[0, 0, 1, 2, 3, 4, 5]]
    found = pair(columns_of_rows([batch]), columns_of_rows([x]))
    assert found is not None and found.numbers.tolist() == order.tolist()
    assert pair(columns_of_rows([tokens]), columns_of_rows([x])) is None
    apart = [columns_of_rows([tokens[:, part]]).sums for part in (slice(6), slice(6, 12))]
    assert np.allclose(np.concatenate(apart, 1)[:5], columns_of_rows([tokens]).sums[:5])


def test_columns_of_zeros_lie_as_the_others_do() -> None:
    """Units that no row fires, behind a flattened map whose channels come first on one side and last on the other."""
    x = np.random.default_rng(0).normal(size=(20, 2, 3, 4))
    for h, w, c in ((0, 1, 2), (1, 2, 2), (0, 0, 1)):
        x[:, h, w, c] = 0
    one, two = x.transpose(0, 3, 1, 2).reshape(20, -1), x.reshape(20, -1)
    found = pair(columns_of_rows([one]), columns_of_rows([two]))
    assert found is not None and len(found.tied) == 3
    assert found.numbers.tolist() == np.arange(24).reshape(2, 3, 4).transpose(2, 0, 1).ravel().tolist()
    shuffled = np.random.default_rng(1).permutation(24)
    found = pair(columns_of_rows([two[:, shuffled]]), columns_of_rows([two]))
    assert found is not None and len(found.tied) == 3 and np.array_equal(two[:, found.numbers], two[:, shuffled])


def test_a_column_of_rounding_is_the_same_as_one_of_other_rounding() -> None:
    """Far below zero a GELU gives nothing but the last digits of what it adds up, and two programs add up in other orders."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(20, 6)) * [40, 1, 1e-15, 1e-5, 2e-5, 1]
    order = rng.permutation(6)
    y = x[:, order]
    y[:, order == 2] = 1e-15 * rng.normal(size=(20, 1))
    for columns in (columns_of_rows, lambda arrays: columns_along(arrays[0], 1)):
        pairing = pair(columns([x]), columns([y]))
        assert pairing is not None and not len(pairing.tied)
        np.testing.assert_array_equal(order[pairing.numbers], range(6))


def test_a_small_column_is_told_from_a_column_of_another() -> None:
    rng = np.random.default_rng(1)
    x = rng.normal(size=(20, 3)) * [1, 1e-6, 1]
    y = x.copy()
    y[:, 1] = 1e-6 * rng.normal(size=20)
    assert pair(columns_of_rows([x]), columns_of_rows([y])) is None


def test_what_constants_of_float32_leave_in_a_column_of_small_numbers() -> None:
    """A unit behind a ReLU that hardly fires: its numbers are differences of larger ones, and keep their error."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(49, 6))
    x[:, 2] -= x[:, 2].max() - 0.02
    x = np.maximum(x, 0)
    near = np.where(x > 0, x + 7e-8 * rng.normal(size=x.shape), 0)
    order = rng.permutation(6)
    found = pair(columns_of_rows([near[:, order]]), columns_of_rows([x]))
    assert found is not None and found.numbers.tolist() == order.tolist() and not found.tied.size
    other = x.copy()
    other[:, 2] *= 1 + 1e-4  # no rounding
    assert pair(columns_of_rows([other]), columns_of_rows([x])) is None
