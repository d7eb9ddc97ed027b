"""Name the mistake in one tensor: the first known one that gives its values."""

from __future__ import annotations

from typing import Any

import numpy as np

from convert.core.tensor_spec import numpy_dtype
from convert.layers.base import Step
from convert.layers.mistake import Mistake
from convert.layers.step_tensor import expected
from convert.numerics.bits import nearly
from convert.planning.plan import Plan
from convert.verify.mistakes.catalogue import known_mistakes

Array = np.ndarray[Any, np.dtype[Any]]


def mistake_in(step: Step, got: Array, plan: Plan, dtype: str) -> Mistake | None:
    """Return the first known mistake that gives these values in this dtype, up to a few roundings; None for right values."""

    def same(want: Array) -> bool:
        return nearly(got.astype(numpy_dtype(dtype)), want.astype(numpy_dtype(dtype)))

    if same(expected(step, plan.source)):
        return None
    for mistake in known_mistakes(step, plan):
        try:
            if not mistake.rounding and same(mistake.make()):
                return mistake
        except OverflowError:  # the dtype cannot hold such a tensor
            continue
    return None


def in_words(mistake: Mistake) -> str:
    """Say what the tensor should be, and what it is."""
    return f"{mistake.name} (expected {mistake.instead}, got {mistake.gives})"
