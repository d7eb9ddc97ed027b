"""Mistakes with a table: other rows of a padded one, a factor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from convert.core.ops import Slice
from convert.layers.base import PlanView, Rule, Step
from convert.layers.mistake import Mistake, symmetric
from convert.layers.step_tensor import maker
from convert.layers.transforms.mistakes import factor_mistakes, likely_factor

OTHER_ROWS = "another slice of the rows"


def table_mistakes(step: Step, rule: Rule, plan: PlanView, axes: str) -> Iterator[Mistake]:
    """Yield mistakes with a table.

    Args:
        axes: letters of its axes; empty where the rule names none.
    """
    if step.kind_name == "embedding":
        yield from _other_rows(step, plan)
    factor = likely_factor(axes[-1], inverse=False) if axes else None  # sqrt(D), by which sources multiply embeddings
    yield from factor_mistakes(step, rule, plan.source, factor)


def _other_rows(step: Step, plan: PlanView) -> Iterator[Mistake]:
    """Yield other rows than the first of a table that the source pads."""
    part = step.parts[0]
    first = next((op for op in part.ops if isinstance(op, Slice) and op.axis == 0), None)
    if first is None or first.start != 0:
        return
    spare = plan.source.leaves[part.leaf].spec.shape[0] - first.stop
    for start in dict.fromkeys((spare, 1)):
        if 0 < start <= spare:
            moved = replace(first, start=start, stop=start + first.stop)
            parts = (replace(part, ops=tuple(moved if op is first else op for op in part.ops)),)
            gives = f"rows {start} to {start + first.stop - 1} of {part.leaf}"
            make = maker(step, plan.source, parts)
            yield symmetric(OTHER_ROWS, gives, f"its rows 0 to {first.stop - 1}", make)
