"""What a program adds up: the terms of a product that sums over experts, each of them weighed by its gate.

One program computes the results of each expert, multiplies them by the gates and adds them up; the other does all three in one product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from convert.inference.meetings.rows import MAX_EXPERTS
from convert.inference.meetings.sites import axes_of
from convert.programs.program import REFUSALS, Array, Operation, Program


class KnownRows:
    """The rows of arrays, each known by the sum of its cubes, as the rows of each softmax have the same sum.

    Args:
        arrays: returns them; it is called when they are first asked for.
    """

    def __init__(self, arrays: Callable[[], Iterator[Array]]) -> None:
        self._arrays = arrays
        self._sums: dict[int, Array] = {}  # by width

    def have(self, array: Array, tolerance: float) -> Array:
        """Return of each row of an array whether it is a known one."""
        known = self._of_width(array.shape[-1])
        with np.errstate(all="ignore"):
            rows = array.reshape(-1, array.shape[-1]) ** 3
            sums, slack = rows.sum(-1), tolerance * np.abs(rows).sum(-1)
            low, high = np.searchsorted(known, sums - slack, "left"), np.searchsorted(known, sums + slack, "right")
        return np.asarray(low < high)

    def _of_width(self, width: int) -> Array:
        if width not in self._sums:
            with np.errstate(all="ignore"):
                sums = [(a**3).sum(-1).ravel() for a in self._arrays() if a.shape[-1:] == (width,)]
            self._sums[width] = np.sort(np.concatenate([np.zeros(0), *sums]))
        return self._sums[width]


def weighs_rows(operation: Operation) -> bool:
    """Whether an operation multiplies rows of data by a number of data each, as the gates of an expert do with its results."""
    if operation.name.removesuffix("_") != "mul" or len(operation.data) != 2:
        return False
    one, two = sorted((x.array.shape for x in operation.operands), key=lambda shape: shape[-1:])
    return len(one) == len(two) > 1 and one[-1] == 1 < two[-1] and one[:-1] == two[:-1]


def added_up(program: Program) -> Iterator[Array]:
    """Yield what products add up along each axis that they sum over: of two values of data, or over several axes of a parameter."""
    for operation in program.operations:
        if operation.name != "dot_general" or not operation.data:
            continue
        axes = axes_of(operation, 1)
        assert axes is not None, "a product of JAX has numbers of its axes"
        (_, ours), (_, theirs) = axes
        if len(operation.data) < 2 and len(ours) < 2:
            continue
        for one, two in zip(ours, theirs, strict=True):
            if 1 < operation.operands[0].array.shape[one] <= MAX_EXPERTS:
                yield from _terms(operation, one, two)


def _terms(operation: Operation, one: int, two: int) -> Iterator[Array]:
    """Yield what a product gives for each place along an axis that it sums over."""
    left, right = (x.array for x in operation.operands)
    for place in range(left.shape[one]):
        try:
            yield np.asarray(operation.again([left.take([place], one), right.take([place], two)])[0])
        except REFUSALS:  # it was recorded for its own shapes
            return
