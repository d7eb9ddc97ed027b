"""Mistakes with the order of the parts that are concatenated to an axis."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from convert.core.ops import Op, Reorder
from convert.core.tensor_spec import TensorSpec
from convert.layers.base import PlanView, Step
from convert.layers.mistake import Mistake, symmetric
from convert.layers.step_tensor import maker

Array = np.ndarray[Any, np.dtype[Any]]
KEPT, MOVED = "concatenated in the source's order", "concatenated in another order needlessly"
OTHER_ORDER, EXCHANGED = "concatenated in a third order", "orders of the two sides exchanged"
MAX_PARTS = 4  # all orders of which are tried


def order_mistakes(step: Step, plan: PlanView) -> Iterator[Mistake]:
    """Yield a tensor with the parts of an axis that a rule declares in other orders."""
    moves = [[k for k, op in enumerate(part.ops) if isinstance(op, Reorder)] for part in step.parts]
    for places in zip(*moves, strict=False):
        op = step.parts[0].ops[places[0]]
        assert isinstance(op, Reorder)

        def made(change: Callable[[Reorder], tuple[Op, ...]], places: tuple[int, ...] = places) -> Callable[[], Array]:
            parts = []
            for part, at in zip(step.parts, places, strict=True):
                moved = part.ops[at]
                assert isinstance(moved, Reorder)
                parts.append(replace(part, ops=(*part.ops[:at], *change(moved), *part.ops[at + 1 :])))
            return maker(step, plan.source, tuple(parts))

        stored, wanted = _shown(op.lengths, range(len(op.lengths))), _shown(op.lengths, op.order)
        key = f"{op.lengths} {op.order}"
        yield Mistake(KEPT, MOVED, f"with {stored}, the source's order", f"with {wanted}", made(lambda op: ()), key)
        if len(op.lengths) > MAX_PARTS:
            continue
        back = op.inverse(TensorSpec((), "bool"))
        if isinstance(back, Reorder) and back != op:
            gives = f"as if the source had {wanted}, and the target {stored}"
            yield symmetric(EXCHANGED, gives, f"with {wanted}", made(lambda op: (op.inverse(TensorSpec((), "bool")),)), key)  # fmt: skip
        for order in itertools.permutations(range(len(op.lengths))):
            if order not in (op.order, tuple(range(len(order)))):
                make = made(lambda op, order=order: (replace(op, order=order),))  # type: ignore[misc]
                yield symmetric(
                    OTHER_ORDER, f"with {_shown(op.lengths, order)}", f"with {wanted}", make, f"{key} {order}"
                )


def _shown(lengths: tuple[int, ...], order: Iterator[int] | range | tuple[int, ...]) -> str:
    """Name the parts by the elements that they have in the source: ``elements 3 to 7, then 0 to 2``."""
    starts = [sum(lengths[:k]) for k in range(len(lengths))]
    runs = (f"{starts[k]} to {starts[k] + lengths[k] - 1}" if lengths[k] > 1 else str(starts[k]) for k in order)
    return f"elements {', then '.join(runs)}"
