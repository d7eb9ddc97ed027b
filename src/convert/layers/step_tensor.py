"""Compute the tensor of a step in memory, for probes and mistakes, which look at one tensor at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from convert.core.ops import apply
from convert.core.tensor_spec import numpy_dtype
from convert.core.value_ops import Cast
from convert.layers.base import Part, Step
from convert.layers.leaf_reader import LeafReader

Array = np.ndarray[Any, np.dtype[Any]]


def assemble(parts: tuple[Part, ...], made: Sequence[Array]) -> Array:
    """Put together the output tensor, from what each of its parts makes."""
    if len(made) == 1:
        return made[0]
    if parts[0].every > 1:  # they alternate
        shape = made[0].shape
        axis = parts[0].axis % len(shape)
        return np.stack(made, axis=axis + 1).reshape(*shape[:axis], -1, *shape[axis + 1 :])
    return np.concatenate(made, axis=parts[0].axis)


def expected(step: Step, source: LeafReader, parts: tuple[Part, ...] | None = None) -> Array:
    """Compute the tensor that a step makes, in memory; or what other parts make of it."""
    used = parts or step.parts
    if not used:
        assert isinstance(step.value, float)
        return np.full(step.spec.shape, step.value, numpy_dtype(step.spec.dtype))
    return assemble(used, [apply(part.ops, source.read(part.leaf)) for part in used])


def exact(step: Step, source: LeafReader) -> Array:
    """Compute what a step makes before its last cast, if that narrows; otherwise the tensor that it makes."""
    made = expected(step, source, tuple(_without_cast(part) for part in step.parts))
    return made if made.dtype.itemsize > numpy_dtype(step.spec.dtype).itemsize else expected(step, source)


def _without_cast(part: Part) -> Part:
    return replace(part, ops=part.ops[:-1]) if part.ops and isinstance(part.ops[-1], Cast) else part


def maker(step: Step, source: LeafReader, parts: tuple[Part, ...]) -> Callable[[], Array]:
    """Return what computes the tensor of a step from other parts."""
    return lambda: expected(step, source, parts)
