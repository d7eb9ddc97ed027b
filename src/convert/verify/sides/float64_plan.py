"""Remove rounding from a plan: every tensor in float64, the operations without casts."""

from __future__ import annotations

from dataclasses import replace

from convert.core.tensor_spec import is_float
from convert.core.value_ops import Cast
from convert.layers.base import Part, Step
from convert.planning.low_rank_source import in_float64
from convert.planning.plan import Plan


def float64_plan(plan: Plan) -> Plan:
    """Return the plan with every floating tensor in float64, so that no rounding hides what a trial restores."""
    return replace(plan, steps=tuple(map(float64_step, plan.steps)), merges=in_float64(plan.merges))


def float64_step(step: Step) -> Step:
    """Return the step with the same operations in float64 and without casts; a step of integers is unchanged."""
    if not step.parts or not is_float(step.spec.dtype):
        return step
    return replace(step, spec=replace(step.spec, dtype="float64"), parts=tuple(map(_in_float64, step.parts)), loses="")


def _in_float64(part: Part) -> Part:
    """Return the part with a cast in front of its operations, which counts among those that select and open axes."""
    ops = (Cast("float64"), *(op for op in part.ops if not isinstance(op, Cast)))
    return replace(part, ops=ops, opening=part.opening + 1 if part.opening else 0)
