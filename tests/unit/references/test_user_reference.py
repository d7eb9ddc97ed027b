"""The values that a user's functions return."""

from __future__ import annotations

import numpy as np
import pytest

from convert.core.errors import UserCodeError
from convert.references.user_reference import require_inputs


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        (np.longdouble, np.float64),
        (np.clongdouble, np.complex128),
        *((dtype, dtype) for dtype in (np.float64, np.float16, np.complex64, np.uint64, np.bool_)),
    ],
)
def test_numbers_wider_than_float64_are_taken_as_float64(given: type, taken: type) -> None:
    """As NumPy's longdouble, for which neither JAX nor PyTorch has a type: infer ended with an internal error."""
    x = np.array([0, 1, 1], given)
    (array,) = require_inputs({"x": x}).values()
    assert array.dtype == taken and (array == x).all()


def test_what_is_no_number_is_refused() -> None:
    with pytest.raises(UserCodeError, match="expected a NumPy array of numbers for 'x', got an array of <U1"):
        require_inputs({"x": np.array(["a"])})
