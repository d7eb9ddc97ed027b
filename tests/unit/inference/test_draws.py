"""Weights are drawn on which the function is defined."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from convert import ConvertError
from convert.core.findings import Finding
from convert.inference.draws import Array, Draws


@pytest.mark.parametrize("shape", [(16,), (1, 1, 16), (3, 16)])
def test_a_variance_is_positive_also_with_axes_of_one_element_or_of_layers(shape: tuple[int, ...]) -> None:
    """Haiku's BatchNorm keeps its averages as [1, 1, D], a scanned one of linen as [layers, D]."""

    def root(weights: Mapping[str, Array]) -> Array:
        if (weights["variance"] < 0).any():
            raise ConvertError(
                Finding("output-not-a-number", "NaN", data={"leaves": ["kernel", "variance"], "alone": ["variance"]})
            )
        return weights["kernel"]

    draws = Draws({"variance": shape, "kernel": (16, 16)})
    assert (np.asarray(draws.run(0, root)) < 0).any()
    assert draws.positive == {"variance"}
