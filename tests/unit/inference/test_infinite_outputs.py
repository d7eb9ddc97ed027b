"""Outputs with infinities: two runs that agree are equal, and a difference says where one model alone has them."""

from __future__ import annotations

import numpy as np
import pytest

from convert.core.errors import ConvertError
from convert.inference.grading.differences.explained import infinite_alone
from convert.programs.run_checks import require_same_outputs

MASKED = np.array([[-np.inf, 1.0], [2.0, -np.inf]])


def test_runs_with_the_same_infinities_are_equal() -> None:
    require_same_outputs({"y": MASKED}, {"y": MASKED + 1e-12})
    with pytest.raises(ConvertError, match="inf"):
        require_same_outputs({"y": MASKED}, {"y": np.where(np.isinf(MASKED), -1e30, MASKED)})


def test_the_model_that_alone_has_infinities_is_named() -> None:
    finite = np.where(np.isinf(MASKED), -1e30, MASKED)
    assert infinite_alone("y", MASKED, MASKED + 1) == ""
    assert (
        infinite_alone("y", MASKED, finite)
        == "; the output y has -inf at [0, 0] and 1 more elements in the target alone"
    )
    assert infinite_alone("y", finite, MASKED).endswith("in the JAX model alone")
