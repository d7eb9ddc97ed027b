"""Mistakes with the weight and the bias of a projection."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

from convert.core.axis_groups import AxisGroup
from convert.core.ops import Permute, Reshape, out_spec
from convert.layers.base import PlanView, Step
from convert.layers.mistake import Mistake, symmetric
from convert.layers.transforms.mistakes import (
    factor_mistakes,
    flattened_mistakes,
    likely_factor,
    normalization_mistakes,
    rope_mistakes,
    undeclared_map,
    with_ops,
)

MAX_LETTERS = 4  # of a composite axis, all orders of which are tried


def linear_mistakes(step: Step, plan: PlanView) -> Iterator[Mistake]:
    """Yield mistakes with a tensor that one leaf makes."""
    part, rule = step.parts[0], step.parts[0].rule
    assert rule is not None
    yield from normalization_mistakes(step, rule, plan)
    for variant in rule.kind.variants or (None,):
        yield from split_mistakes(step, plan, rule.kind.axis_groups(variant))
    yield from flattened_mistakes(step, rule, plan)
    weight = step.role == "weight"
    if weight and rule.flattened is None and len(part.groups[-1]) == 1:
        yield from undeclared_map(step, plan.source)
    heads = weight and len(part.groups[0]) > 1
    factor = likely_factor(part.groups[0][-1], inverse=True) if heads else None  # 1/sqrt(H), folded into queries
    yield from factor_mistakes(step, rule, plan.source, factor)
    yield from rope_mistakes(step, rule, plan, heads=heads)


def split_mistakes(step: Step, plan: PlanView, groups: Mapping[str, AxisGroup]) -> Iterator[Mistake]:
    """Yield the tensor as if the axes that make a stored axis were in another order, where one of them is split among modules."""
    part = step.parts[0]
    for group in groups.values():
        letters = group.letters or ""
        if len(group.parts) > 1 or len(letters) > MAX_LETTERS or not any(letter in part.taken for letter in letters):
            continue
        sizes = [plan.sizes[letter] for letter in letters]
        at = next(k for k, op in enumerate(part.ops) if isinstance(op, Reshape))
        opened = part.ops[at].out_spec(out_spec(part.ops[:at], plan.source.leaves[part.leaf].spec)).shape
        first = next(k for k in range(len(opened)) if list(opened[k : k + len(sizes)]) == sizes)
        for order in itertools.permutations(range(len(letters))):
            if order == tuple(range(len(order))):
                continue
            shape = (*opened[:first], *(sizes[k] for k in order), *opened[first + len(sizes) :])
            back = (*range(first), *(first + order.index(k) for k in range(len(order))), *range(first + len(sizes), len(opened)))  # fmt: skip
            ops = (*part.ops[:at], Reshape(shape), Permute(back), *part.ops[at + 1 :])
            other = f"({' '.join(letters[k] for k in order)})"
            name = f"{group} read as {other}"
            yield symmetric(name, f"from an axis {other}", f"from the axis {group}", with_ops(step, plan.source, ops), name)  # fmt: skip
