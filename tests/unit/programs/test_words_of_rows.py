"""Of what picks whole rows by their indices the words say so; single elements are picked."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from convert.programs.divergence.words import Words
from convert.programs.program import Operation, Value

TABLE = np.random.default_rng(0).normal(size=(5, 3))
STACK = np.random.default_rng(1).normal(size=(2, 5, 3))
ROWS = "takes rows", "the rows taken"
ELEMENTS = "picks elements", "the picked elements"
AT = np.array([[4, 0, 0], [2, 2, 1]])


@pytest.mark.parametrize(
    ("table", "made", "data", "does", "noun"),
    [
        (TABLE, TABLE[AT], True, *ROWS),
        (TABLE, TABLE[AT], False, *ROWS),
        (STACK, STACK[:, AT], True, *ROWS),
        (TABLE.T, TABLE.T[:, AT], False, *ROWS),  # of a table that is stored width first
        (TABLE.T, TABLE.T[:, AT], True, *ELEMENTS),  # of data the last axis has the features
        (TABLE, np.take_along_axis(TABLE, AT, 0), True, *ELEMENTS),
        (TABLE[:, 0], TABLE[AT, 0], True, *ELEMENTS),
    ],
)
def test_rows_and_elements(table: Any, made: Any, data: bool, does: str, noun: str) -> None:
    picked = Value(made, data=True)
    given = Value(table, data=data), Value(AT, data=True)
    one = Operation("gather", given, (picked,), {}, lambda given: given, where="net.py:7")
    words = Words((one,), {})
    assert words.verb(one) == does and words.value(picked) == f"{noun} at net.py:7"
