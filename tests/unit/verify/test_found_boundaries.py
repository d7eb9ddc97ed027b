"""The orders of axes in which a value of a JAX module is compared with that of the module of PyTorch."""

from __future__ import annotations

import numpy as np

from convert.verify.diagnosis.found_boundaries import _orders


def test_heads_may_stand_in_front_of_the_positions() -> None:
    value = np.random.default_rng(0).standard_normal((3, 6, 2, 8))  # batch, positions, heads, features
    heads_first = value.swapaxes(1, 2)
    assert any(np.array_equal(x, heads_first) for x in _orders(value, heads_first.shape))
    assert np.array_equal(next(_orders(value, value.shape)), value)
    assert np.array_equal(next(_orders(value, (3, 6, 16))), value.reshape(3, 6, 16))
    assert not list(_orders(value, (3, 6, 2, 9)))
