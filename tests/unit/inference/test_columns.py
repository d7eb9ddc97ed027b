"""Columns are paired by what stands in them, whatever the size of the numbers and the order of the rows."""

from __future__ import annotations

import numpy as np
import pytest

from convert.inference.columns import columns_of_rows, pair


@pytest.mark.parametrize("rows", ["large numbers", "rows whose sum is zero"])
def test_columns_are_paired_in_spite_of_rounding(rows: str) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(30, 12))
    x = 1000 * x if rows == "large numbers" else x - x.mean(1, keepdims=True)
    order = rng.permutation(12)
    near = x[rng.permutation(30)][:, order] * (1 + 1e-8 * rng.normal(size=x.shape))
    found = pair(columns_of_rows([near]), columns_of_rows([x]))
    assert found is not None
    assert found.numbers.tolist() == order.tolist() and not found.tied.size
