"""The scale of a weight norm that the source lacks: the length of each row of the weight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from convert.inference.derivation import Arithmetic, Part, Tensor
from convert.inference.forms.weight_norms import lengths, weight_norms
from convert.inference.grading import proof
from convert.programs.program import Program


def with_row_lengths(tensors: Sequence[Tensor], target: Program, source: Program) -> tuple[Tensor, ...]:
    """Return the tensors with the scale of each weight norm that nothing reads, as sure as its direction.

    Args:
        tensors: of a search that has the direction in place of the weight.
        target: the record, as it ran.
        source: the record of the function.
    """
    found = {tensor.name: tensor for tensor in tensors}
    for norm in weight_norms(target):
        scale, direction = found.get(norm.scale), found.get(norm.direction)
        if scale is None or direction is None or scale.parts or not direction.parts:
            continue
        known = proof.weights([direction], source)[norm.direction]
        if np.isnan(known).any():
            continue
        size = int(np.prod(scale.shape))
        leaves = tuple(sorted({leaf for part in direction.parts for leaf in (part.leaf, *part.leaves) if leaf}))
        part = Part(
            np.arange(size),
            "",
            np.arange(size),
            Arithmetic.COMPUTED,
            direction.parts[0].evidence,
            leaves=leaves,
            values=lengths(known, scale.shape).ravel(),
            rows_of=norm.direction,
        )
        found[norm.scale] = replace(scale, parts=(part,), grade=direction.grade, unread=False, candidates=())
    return tuple(found[tensor.name] for tensor in tensors)
