"""Masks that leave small weights, as one by -100 does, where the other program hides the position at any score.

No output shows such a weight, unless the scores of other weights or inputs differ more.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from convert.inference.forms.sums.masks import SOFTMAX, UNSEEN
from convert.programs.program import Array, Operation, Program

SHOWN = 1e-16  # a weight of this size changes a sum of float64


def notes(source: Program, target: Program) -> tuple[str, ...]:
    """Return which softmaxes of one program leave weights that are nearly zeros where the other program has zeros, in words."""
    sides = {"JAX function": list(_softmaxes(source)), "PyTorch module": list(_softmaxes(target))}
    largest: dict[str, float] = {}  # by softmax, as a line of code may have those of several layers
    for (side, own), other in zip(sides.items(), reversed(sides.values()), strict=True):
        for operation, weights in own:
            small = weights[(weights > 0) & (weights < UNSEEN)]
            if small.size and _is_hidden(weights, [x for _, x in other]):
                what = f"`{operation.name}` of the {side} at {operation.place}"
                largest[what] = max(float(small.max()), largest.get(what, 0.0))
    return tuple(
        f"{what}: its mask leaves weights of {weight:.0e}, the other program's none; "
        f"they show where scores differ by {math.log(SHOWN / weight):.0f} more"
        for what, weight in largest.items()
    )


def _is_hidden(weights: Array, others: Sequence[Array]) -> bool:
    """Whether the softmaxes of the other program that show as many weights have more zeros than these.

    Scores that differ much leave small weights, too; both programs then have them.
    """
    as_many = [x for x in others if x.size == weights.size and (x >= UNSEEN).sum() == (weights >= UNSEEN).sum()]
    return bool(as_many) and all((x == 0).sum() > (weights == 0).sum() for x in as_many)


def _softmaxes(program: Program) -> Iterator[tuple[Operation, Array]]:
    for operation in program.operations:
        if operation.name in SOFTMAX and operation.operands[0].data:
            yield operation, operation.results[0].array
