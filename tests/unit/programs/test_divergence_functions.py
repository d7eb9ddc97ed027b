"""The functions that a divergence is named by are tried on the values of any program: numbers, infinities, masks."""

from __future__ import annotations

import numpy as np
import pytest

from convert.layers.activations import NUMPY_ACTIVATIONS
from convert.programs.divergence.layouts import same
from convert.programs.divergence.naming.functions import computed

MASK = np.tril(np.ones((4, 4), bool))


def test_an_activation_is_named() -> None:
    x = np.linspace(-3, 3, 12).reshape(3, 4)
    assert computed(np.tanh(x), x, NUMPY_ACTIVATIONS) == "tanh"


@pytest.mark.parametrize("given", [MASK, np.where(MASK, 0.5, -np.inf), np.arange(16).reshape(4, 4)])
@pytest.mark.parametrize("got", [~MASK, MASK * 3.5])
def test_a_mask_is_no_function_and_no_error(got: np.ndarray, given: np.ndarray) -> None:
    with np.errstate(all="ignore"):
        assert computed(got, given, NUMPY_ACTIVATIONS) == ""


def test_masks_are_compared() -> None:
    assert same(MASK, MASK) and not same(MASK, ~MASK) and not same(MASK.T, MASK)
