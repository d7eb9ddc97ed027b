"""A mistake that may have been made with a tensor, and the tensor that it gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from convert.checkpoints.source import Source
from convert.core.ops import apply
from convert.layers.base import Part, Step, assemble

Array = np.ndarray[Any, np.dtype[Any]]


def expected(step: Step, source: Source, parts: tuple[Part, ...] | None = None) -> Array:
    """The tensor that a step makes, computed in memory; with other `parts`, what those make."""
    made = [apply(part.ops, source.read(part.leaf)) for part in parts or step.parts]
    return assemble(parts or step.parts, made)


def maker(step: Step, source: Source, parts: tuple[Part, ...]) -> Callable[[], Array]:
    """Computes, on demand, what a step makes of other parts."""
    return lambda: expected(step, source, parts)
