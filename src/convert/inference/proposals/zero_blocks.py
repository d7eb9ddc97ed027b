"""Which of the values that a product joins is which, where several are nothing but zeros, as the state and the context of a first step.

Their columns are equal, so that the data does not tell; a value has the width of the other program's.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from convert.inference.candidates.context import keeps_last_axis
from convert.inference.forms.elements import COPIES, JOINS
from convert.programs.program import Operation, Value

Array = np.ndarray[Any, np.dtype[Any]]
MAX_WAYS = 6


def widths_along_last(value: Value, made_by: Callable[[Value], Operation | None]) -> list[int]:
    """Return the widths of the values that stand side by side along the last axis of a value; its own, if it is one."""
    size = value.array.shape[-1]
    while (made := made_by(value)) is not None and made.name in COPIES:
        before = made.operands[0]
        if before.array.shape[-1:] != (size,) or not keeps_last_axis(made, before):
            return [size]
        value = before
    if made is None or made.name not in JOINS:
        return [size]
    axis = made.settings.get(JOINS[made.name], 0) % value.array.ndim
    if axis != value.array.ndim - 1:
        return [size]
    return [width for operand in made.operands for width in widths_along_last(operand, made_by)]


def rows_by_blocks(
    numbers: Array, target: Array, source: Array, of_target: Sequence[int], of_source: Sequence[int]
) -> Iterator[Array]:
    """Yield the source's column for each of the target's, with each block of zeros of one as a whole block of the other.

    Args:
        numbers: the source's column for each of the target's, where the data tells.
        target, source: the data, [rows, columns].
        of_target, of_source: widths of the blocks of columns.
    """
    ours, theirs = (
        [block for block in _blocks(widths) if not data[:, block].any()]
        for data, widths in ((target, of_target), (source, of_source))
    )
    if len(ours) < 2 or len(ours) != len(theirs):
        return
    orders = (
        order
        for order in itertools.permutations(theirs)
        if all(len(one) == len(other) for one, other in zip(ours, order, strict=True))
    )
    for order in itertools.islice(orders, MAX_WAYS):
        rows = numbers.copy()
        for one, other in zip(ours, order, strict=True):
            rows[one] = other
        if len(np.unique(rows)) == len(rows):
            yield rows


def _blocks(widths: Sequence[int]) -> list[Array]:
    ends = np.cumsum(widths)
    return [np.arange(end - width, end) for end, width in zip(ends, widths, strict=True)]
