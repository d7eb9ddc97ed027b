"""Read the values of one tensor of a plan, without the others. Needs no torch."""

from __future__ import annotations

from typing import Any

import numpy as np

from convert.core.ops import apply
from convert.core.tensor_spec import numpy_dtype
from convert.core.weight_norm_ops import operand_leaves, with_operands
from convert.layers.base import Step
from convert.planning.plan import Plan
from convert.writing.execute import computed, overflowed
from convert.writing.scatter import needed_box

Array = np.ndarray[Any, np.dtype[Any]]


def read_step(plan: Plan, step: Step) -> Array:
    """Read a tensor; of a stack of layers only that layer's part of the leaf.

    Raises:
        CheckpointError: a leaf cannot be read.
        PlanError: a value does not fit the dtype of the tensor.
    """
    if step.value is not None:
        return computed(step).astype(numpy_dtype(step.spec.dtype), copy=False)
    out = np.empty(step.spec.shape, numpy_dtype(step.spec.dtype))
    for part in step.parts:
        box, rest = needed_box(part.ops, plan.source.leaves[part.leaf].spec)
        operands = {leaf: plan.source.read(leaf) for leaf in operand_leaves(part.ops)}
        try:
            part.share(out)[...] = apply(with_operands(rest, operands), plan.source.read_box(part.leaf, box))
        except OverflowError as error:
            raise overflowed(step, part, error) from None
    return out
