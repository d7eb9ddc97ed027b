"""Mistakes with a low-rank pair: not merged into its weight, or with another scale."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from convert.core.ops import apply
from convert.layers.base import Step
from convert.layers.mistake import Mistake, symmetric
from convert.layers.step_tensor import assemble
from convert.planning.low_rank_source import Merge
from convert.planning.plan import Plan

Array = np.ndarray[Any, np.dtype[Any]]
Scale = Callable[[Merge], float]
OTHER_SCALE = "another scale of a pair"


def pair_mistakes(step: Step, plan: Plan) -> Iterator[Mistake]:
    """Yield mistakes with the pairs that the plan merges into the leaves of a tensor."""
    merges = [plan.merges.get(part.leaf) for part in step.parts]
    first = next((merge for merge in merges if merge is not None), None)
    if first is None:
        return

    def merged(base: float, scale: Scale) -> Callable[[], Array]:
        """Return what computes the tensor with other factors of the weight and of the product."""

        def make() -> Array:
            made = []
            for part, merge in zip(step.parts, merges, strict=True):
                if merge is None:
                    leaf = plan.source.read(part.leaf)
                else:
                    leaf = merge.make(plan.checkpoint.read, base, scale(merge))
                made.append(apply(part.ops, leaf))
            return assemble(step.parts, made)

        return make

    right = f"the weight {first.arithmetic}" if first.base else first.arithmetic
    if first.base is not None:
        variants: tuple[tuple[str, str, float, Scale], ...] = (
            ("LoRA pair not merged", "the weight alone", 1.0, lambda merge: 0.0),
            ("LoRA pair merged twice", "the weight with the product added twice", 1.0, lambda merge: 2 * merge.scale),
            ("LoRA pair subtracted", "the weight without the product", 1.0, lambda merge: -merge.scale),
            ("LoRA pair without its weight", "the product alone", 0.0, lambda merge: merge.scale),
        )
        for name, gives, base, scale in variants:
            yield symmetric(name, gives, right, merged(base, scale))
    rank = _rank(first, plan)
    scales: dict[str, Scale] = {
        "the product without its scale": lambda merge: 1.0,
        "the scale not divided by the rank": lambda merge: merge.scale * rank,
        "the scale divided by the rank once more": lambda merge: merge.scale / rank,
        "the scale divided by the root of the rank": lambda merge: merge.scale * math.sqrt(rank),
    }
    for gives, scale in scales.items():
        if scale(first) != first.scale:
            yield symmetric(OTHER_SCALE, gives, right, merged(1.0, scale))


def _rank(merge: Merge, plan: Plan) -> int:
    form = merge.pair_forms[0]
    shape = form.shape or plan.checkpoint.leaves[merge.first].spec.shape
    sizes = dict(zip(form.axes, shape, strict=True))
    return math.prod(sizes[letter] for letter in merge.product.shared)
