"""A number is written for a person whatever number a model has in it: zero and the infinities are no roots."""

from __future__ import annotations

import pytest

from convert.numerics.roots import factor_text


@pytest.mark.parametrize(
    ("factor", "text"),
    [
        (0.0, "0"),
        (float("inf"), "inf"),
        (float("-inf"), "-inf"),
        (float("nan"), "nan"),
        (1e-300, "1e-300"),
        (1e300, "1e+300"),
        (-(6**-0.5), "-0.4082483 = -1/sqrt(6)"),
    ],
)
def test_every_number_has_a_text(factor: float, text: str) -> None:
    assert factor_text(factor) == text
