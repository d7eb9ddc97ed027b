"""Which second difference is none: one known function of nearly equal values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from convert.layers.activations import NUMPY_ACTIVATIONS
from convert.programs.divergence.naming.by_functions import same_function
from convert.programs.divergence.repair import Repair
from convert.programs.divergence.rerun import Change
from convert.programs.program import Operation, Value

Array = np.ndarray[Any, np.dtype[Any]]
X = np.random.default_rng(0).standard_normal((4, 6))


def relu(x: Array) -> Array:
    return np.maximum(x, 0)


def leaky(x: Array) -> Array:
    return np.where(x > 0, x, 0.01 * x)


def repair(ours: Callable[[Array], Array], theirs: Callable[[Array], Array], theirs_of: Array) -> Repair:
    mine, other = Value(X, data=True), Value(theirs_of, data=True)
    got, want = Value(ours(X), data=True), Value(theirs(theirs_of), data=True)
    one, two = (Operation("f", (x,), (y,), {}, lambda _: []) for x, y in ((mine, got), (other, want)))
    return Repair((one,), (two,), (mine,), (X,), (other,), got.array, want.array, 0, Change())


@pytest.mark.parametrize(
    ("ours", "theirs", "theirs_of", "is_same"),
    [
        (relu, relu, X * 1.006, True),
        (relu, leaky, X, False),
        (relu, relu, X[::-1], False),
        (relu, relu, -X, False),
        (np.tanh, np.tanh, X * 1.006, True),
    ],
)
def test_one_function_of_nearly_equal_values_is_no_difference(
    ours: Callable[[Array], Array], theirs: Callable[[Array], Array], theirs_of: Array, is_same: bool
) -> None:
    assert same_function(repair(ours, theirs, theirs_of), NUMPY_ACTIVATIONS) is is_same
