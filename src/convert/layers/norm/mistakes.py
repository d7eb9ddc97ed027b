"""Mistakes with the tensors of norms: the factor, and one tensor in place of another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from convert.core.ops import apply
from convert.core.tensor_spec import numpy_dtype
from convert.core.value_ops import Add, Cast
from convert.layers.base import PlanView, Step
from convert.layers.mistake import OWN_VALUES, Mistake, symmetric
from convert.layers.step_tensor import expected
from convert.layers.transforms.mistakes import with_ops

Array = np.ndarray[Any, np.dtype[Any]]
MISSING, DOUBLED, ADDED, SUBTRACTED = (
    "1+scale missing",
    "1+scale doubled",
    "1+scale on a plain norm",
    "1 subtracted from a plain norm",
)
# (whether the target multiplies by 1+weight, what the rule adds to the scale, what the mistake adds) -> name and converse
OFFSETS = {
    (False, 1.0, 0.0): (MISSING, ADDED),
    (False, 1.0, 2.0): (DOUBLED, MISSING),
    (False, 0.0, 1.0): (ADDED, MISSING),
    (False, 0.0, -1.0): (SUBTRACTED, MISSING),
    (True, 0.0, -1.0): (MISSING, ADDED),
    (True, 0.0, 1.0): (DOUBLED, MISSING),
    (True, -1.0, 0.0): (ADDED, MISSING),
}
STATISTICS, SCALE_BIAS = "mean and variance exchanged", "scale and bias exchanged"
DEVIATION = "standard deviation for the variance"
EXCHANGED = {
    "running_mean": ("running_var", STATISTICS),
    "running_var": ("running_mean", STATISTICS),
    "weight": ("bias", SCALE_BIAS),
    "bias": ("weight", SCALE_BIAS),
}


def norm_mistakes(step: Step, plan: PlanView) -> Iterator[Mistake]:
    """Yield the mistakes with a tensor of any norm."""
    yield from _other_offsets(step, plan)
    yield from _exchanged(step, plan)


def _other_offsets(step: Step, plan: PlanView) -> Iterator[Mistake]:
    """Yield the scale with another offset than the one that follows from both factors."""
    rule = step.parts[0].rule
    layer = rule.layer(plan.target) if rule is not None else None
    if step.role != "weight" or layer is None:
        return
    target_adds = layer.multiplies_by == "1+weight"
    ops = step.parts[0].ops
    offset = sum(op.value for op in ops if isinstance(op, Add))
    bare = tuple(op for op in ops if not isinstance(op, (Add, Cast)))
    wide = "float64" if step.spec.dtype == "float64" else "float32"
    for (adds, right, wrong), (name, converse) in OFFSETS.items():
        if (adds, right) == (target_adds, offset):
            make = with_ops(step, plan.source, (*bare, Cast(wide), Add(wrong), Cast(step.spec.dtype)))
            yield Mistake(name, converse, _scale_plus(wrong), _scale_plus(right), make)


def _scale_plus(offset: float) -> str:
    return "the plain scale" if offset == 0 else f"scale{offset:+g}"


def _exchanged(step: Step, plan: PlanView) -> Iterator[Mistake]:
    """Yield another tensor of the same norm in place of this one, and the standard deviation in place of the variance."""
    other_role, name = EXCHANGED.get(step.role, ("", ""))
    module = step.name.rpartition(".")[0]
    others = (s for s in plan.steps if s.role == other_role and s.name.rpartition(".")[0] == module and s.parts)
    other = next(others, None)
    if other is not None and other.spec.shape == step.spec.shape:
        leaf, ops = other.parts[0].leaf, tuple(op for op in other.parts[0].ops if not isinstance(op, Cast))

        def exchanged() -> Array:
            return apply((*ops, Cast(step.spec.dtype)), plan.source.read(leaf))

        yield symmetric(name, f"what belongs to {other.name}", OWN_VALUES, exchanged, name)
    if step.role == "running_var":

        def root() -> Array:
            wide = np.abs(expected(step, plan.source).astype(np.float64))
            return np.asarray(np.sqrt(wide).astype(numpy_dtype(step.spec.dtype)))

        yield symmetric(DEVIATION, "the square root of the variance", "the variance", root)
