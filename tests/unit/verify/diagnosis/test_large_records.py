"""Models that are too large to be recorded: the report says that they were not compared operation by operation."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from convert.verify.diagnosis.other_operation import other_operation
from convert.verify.sides.records import LARGEST


def test_the_limit_is_named() -> None:
    module = SimpleNamespace(state_dict=lambda: {"weight": SimpleNamespace(numel=lambda: 1 << 26)})
    evidence = SimpleNamespace(is_live=True, float64_values={}, native_values={"y": np.zeros(8)})
    site, reference = SimpleNamespace(evidence=evidence, module=module), SimpleNamespace(jax=print)
    told = other_operation(cast(Any, site), cast(Any, reference), ())
    assert LARGEST == 2**30 and told.explanation is None
    assert "their records would take about 1.5 GiB, and at most 1 GiB are kept" in told.known
