"""Which constants have the precision of float32, and which were written as they are."""

from __future__ import annotations

import numpy as np
import pytest

from convert.inference.rounding import ROUNDING, rounded_where, tolerance
from convert.programs.fingerprint import EXACT
from convert.programs.program import Operation, Program, Value


def _program(*numbers: float) -> Program:
    x = Value(np.ones(len(numbers)), data=True)
    y = Value(x.array * numbers, data=True)
    times = Operation(
        "mul", (x, Value(np.array(numbers))), (y,), {}, lambda arrays: [arrays[0] * arrays[1]], "model.py:7"
    )
    return Program({}, {"x": x}, (times,), {"y": y})


@pytest.mark.parametrize("number", [0.375, 1e-6, 7.0, 1e8, -1e8, 2.5e7, 2.0**30, 299_790_000.0, 1e30])
def test_a_number_that_float32_holds_was_written_as_it_is(number: float) -> None:
    assert rounded_where(_program(number, 1.0)) is None
    assert tolerance(_program(number)) == ROUNDING


@pytest.mark.parametrize("number", [0.1, np.pi, 123_456_789.0, -299_792_458.0, 1e8 / 3])
def test_a_number_that_was_rounded_to_float32_is_found(number: float) -> None:
    rounded = float(np.float32(number))
    assert rounded_where(_program(1e8, rounded)) == "model.py:7"
    assert tolerance(_program(1.0), _program(rounded)) == EXACT
    assert rounded_where(_program(number)) is None  # in float64
