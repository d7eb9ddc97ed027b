"""Fingerprints find a value whatever the order of its axes, and tell values apart that differ in one element."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from convert.programs.fingerprint import ValueTable, column_fingerprints


def drawn(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


@given(st.permutations([0, 1, 2]), st.integers(0, 3))
def test_the_order_of_axes_and_zeros_do_not_matter(order: list[int], zeros: int) -> None:
    x = drawn((3, 5, 7))
    table: ValueTable[str] = ValueTable()
    table.add(drawn((3, 5, 7), 1), "other")
    table.add(x, "x")
    moved = np.concatenate([x.transpose(order).ravel(), np.zeros(zeros)])
    assert table.find(moved) == ["x"]


def test_one_element_that_differs_is_another_value() -> None:
    x = drawn((3, 5, 7))
    table: ValueTable[str] = ValueTable()
    table.add(x, "x")
    changed = x.copy()
    changed[1, 2, 3] += 1e-3
    assert table.find(changed) == []
    assert table.find(-x) == [], "signs count"


def test_large_numbers_that_differ_in_the_eighth_digit_are_the_same_value() -> None:
    x = 1000 * drawn((3, 5, 7))
    near = x * (1 + 1e-8 * drawn(x.shape, 1))
    table: ValueTable[str] = ValueTable()
    table.add(x, "x")
    assert table.find(near) == ["x"]
    _, sums, scales = column_fingerprints(x, np.arange(7))
    _, found, _ = column_fingerprints(near, np.arange(7))
    assert (np.abs(sums - found) <= 1e-7 * scales).all()


def test_values_of_the_same_numbers_are_all_found_in_order() -> None:
    x = drawn((4, 6))
    table: ValueTable[int] = ValueTable()
    for number in range(3):
        table.add(x.T if number == 1 else x, number)
    assert table.find(x.reshape(2, 12)) == [0, 1, 2]


def test_a_table_that_is_empty_finds_nothing_and_nan_is_found_nowhere() -> None:
    table: ValueTable[str] = ValueTable()
    assert table.find(np.ones(3)) == []
    table.add(np.array([1.0, np.nan]), "x")
    assert table.find(np.array([1.0, np.nan])) == []


def test_columns_are_told_apart_wherever_they_stand() -> None:
    x = drawn((4, 3, 5))
    numbers, sums, scales = column_fingerprints(x, np.arange(5))
    order = np.array([3, 0, 4, 1, 2])
    _, moved, _ = column_fingerprints(x[..., order].transpose(1, 0, 2), np.arange(5))
    assert numbers.tolist() == [0, 1, 2, 3, 4]
    assert np.allclose(moved, sums[:, order])
    assert scales.shape == sums.shape == (5, 5)
    distances = np.abs(sums[:, :, None] - sums[:, None]) / scales[:, :, None]
    assert (distances.max(0) + np.eye(5) > 1e-3).all()
