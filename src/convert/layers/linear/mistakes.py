"""Mistakes with the weight and the bias of a projection."""

from __future__ import annotations

from collections.abc import Iterator

from convert.layers.base import PlanView, Step
from convert.layers.mistake import Mistake
from convert.layers.transforms.mistakes import (
    factor_mistakes,
    flattened_mistakes,
    likely_factor,
    normalization_mistakes,
    rope_mistakes,
    undeclared_map,
)


def linear_mistakes(step: Step, plan: PlanView) -> Iterator[Mistake]:
    """Yield mistakes with a tensor that one leaf makes."""
    part, rule = step.parts[0], step.parts[0].rule
    assert rule is not None
    yield from normalization_mistakes(step, rule, plan)
    yield from flattened_mistakes(step, rule, plan)
    weight = step.role == "weight"
    if weight and rule.flattened is None and len(part.groups[-1]) == 1:
        yield from undeclared_map(step, plan.source)
    heads = weight and len(part.groups[0]) > 1
    factor = likely_factor(part.groups[0][-1], inverse=True) if heads else None  # 1/sqrt(H), folded into queries
    yield from factor_mistakes(step, rule, plan.source, factor)
    yield from rope_mistakes(step, rule, plan, heads=heads)
