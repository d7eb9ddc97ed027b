"""Another function of a value is no difference for which other weights make up: a factor, a number, or what a layer in front may give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from convert.inference.grading.differences.compensated import is_compensated

Array = np.ndarray[Any, np.dtype[Any]]
X = np.random.default_rng(0).normal(size=(4, 6))


def _sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def _silu(x: Array) -> Array:
    return x * _sigmoid(x)


def _relu(x: Array) -> Array:
    return np.maximum(x, 0)


@pytest.mark.parametrize(
    ("got", "want"),
    [
        (np.tanh(X), 3 * np.tanh(X)),
        (np.tanh(X), np.tanh(X) + 0.5),
        (np.tanh(X), np.tanh(X) * np.arange(1, 7)),
        (X, X + np.arange(6)),
    ],
)
def test_a_factor_or_a_number_is_what_the_layer_behind_may_have(got: Array, want: Array) -> None:
    assert is_compensated(X, got, want, None)


@pytest.mark.parametrize(
    ("target", "source", "expected"),
    [
        (_sigmoid, np.tanh, True),
        (_silu, lambda x: x * _sigmoid(1.702 * x), True),
        (_silu, np.tanh, False),
        (np.tanh, lambda x: x, True),  # of small numbers, tanh is a line
        (_relu, lambda x: np.clip(x, 0, 1), False),
        (lambda x: np.where(x > 0, x, 0.1 * x), lambda x: np.where(x > 0, x, 0.2 * x), False),
    ],
)
def test_a_layer_in_front_may_multiply_the_value_and_add_to_it(
    target: Callable[[Array], Array], source: Callable[[Array], Array], expected: bool
) -> None:
    assert is_compensated(X, target(X), source(X), target) is expected
    assert not is_compensated(X, target(X), source(X), None)


def test_no_weights_make_up_for_a_mask() -> None:
    assert not is_compensated(X, X, np.where(X > 0, X, -1e30), None)
