"""Whether multiples of the weights make up for a factor that one program alone has: in all layers of a residual stream, they may.

A layer in front of a factor, or behind it, is looked at where the difference is explained (`other_weights`). Here the factors of all weights
are sought at once: of ``h = (h + f(norm(h))) / 2`` each layer may give a smaller f.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from convert.core.errors import ConvertError
from convert.inference.derivation import Tensor
from convert.inference.grading import proof
from convert.programs.program import REFUSALS, Array, Program
from convert.programs.rerun import rerun

STEPS = 30
CLOSE = 1e-6  # of an output's largest element: nearer and nearer, no multiples end above it
SLOPE = 1e-6  # by which the logarithm of a factor is changed to see what follows
WORK = 10**9  # elements that all runs may compute; an operation counts as `CALL` more
CALL = 5000


def is_made_up(tensors: Sequence[Tensor], target: Program, source: Program) -> bool:
    """Whether multiples of the weights give the source's outputs; also where it would take too long to know.

    Each part of a tensor, such as the queries of a fused matrix, has a factor of its own.
    """
    weights = {name: array for name, array in proof.weights(tensors, source).items() if name in target.parameters}
    parts = [(t.name, p.elements) for t in tensors if t.name in weights for p in t.parts if p.leaf or p.leaves]
    given = {name: value.array for name, value in source.inputs.items()}
    each = sum(CALL + sum(x.array.size for x in one.results) for one in target.operations)
    if len(parts) * STEPS * each > WORK:
        return True

    def left(factors: Array) -> Array:
        made = rerun(target, _times(weights, parts, factors), given).outputs
        rest = [(made[name].array - x.array) / (np.abs(x.array).max() or 1.0) for name, x in source.outputs.items()]
        return np.concatenate([np.ravel(x) for x in rest])

    return bool(np.abs(_solved(left, len(parts))).max(initial=0.0) <= CLOSE)


def _times(weights: Mapping[str, Array], parts: Sequence[tuple[str, Array]], factors: Array) -> dict[str, Array]:
    """Return the weights with factors, of which the logarithms are given."""
    made = {name: array.ravel().copy() for name, array in weights.items()}
    for (name, elements), factor in zip(parts, factors, strict=True):
        made[name][elements] *= np.exp(factor)
    return {name: array.reshape(weights[name].shape) for name, array in made.items()}


def _solved(left: Callable[[Array], Array], count: int) -> Array:
    """Return what is left of the best numbers, by steps of Levenberg and Marquardt from zeros."""
    numbers, damping = np.zeros(count), 1e-3
    rest = left(numbers)
    for _ in range(STEPS):
        if np.abs(rest).max(initial=0.0) <= CLOSE:
            break
        slopes = np.stack([(left(numbers + SLOPE * one) - rest) / SLOPE for one in np.eye(count)], 1)
        square = slopes.T @ slopes
        while damping < 1e9:
            step = np.linalg.solve(square + damping * np.eye(count), -slopes.T @ rest)
            try:
                after = left(numbers + step)
            except (*REFUSALS, ConvertError):  # not a number
                after = np.full_like(rest, np.inf)
            if after @ after < rest @ rest:
                numbers, rest, damping = numbers + step, after, damping / 10
                break
            damping *= 10
        else:
            break
    return rest
