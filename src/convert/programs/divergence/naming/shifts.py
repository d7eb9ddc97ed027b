"""Values that are those of the other program some steps later or earlier along an axis."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from convert.programs.divergence.kinds import kind_of
from convert.programs.divergence.layouts import same
from convert.programs.divergence.naming.both import Both
from convert.programs.divergence.naming.selections import MOVES
from convert.programs.divergence.naming.windows import moved_from
from convert.programs.divergence.words import Words, arithmetic
from convert.programs.program import Value

Array = np.ndarray[Any, np.dtype[Any]]
FARTHEST = 16  # steps by which values are shifted


def shifted_along(got: Array, want: Array) -> tuple[int, int] | None:
    """Return (axis, n) where index k of an axis of one array is index k + n of the other's, in more than half of them."""
    if got.shape != want.shape:
        return None
    for axis, size in enumerate(got.shape):
        one, two = np.moveaxis(got, axis, 0), np.moveaxis(want, axis, 0)
        for by in range(1, min(FARTHEST, (size - 1) // 2) + 1):
            for n, a, b in ((by, one[:-by], two[by:]), (-by, one[by:], two[:-by])):
                if same(a, b) and not same(a[:-1], a[1:]):  # numbers that are equal along the axis tell nothing
                    return axis, n
    return None


def said_shift(got: Array, want: Array) -> str:
    """Say by how much one array is shifted against the other; empty if it is not."""
    found = shifted_along(got, want)
    return "" if found is None else _in_words(*found)


def _in_words(axis: int, n: int) -> str:
    return f"index k of axis {axis} in the target is index k {'+' if n > 0 else '-'} {abs(n)} in the JAX model"


def shifted(both: Both) -> str:
    """Say by how much the two sides of a repair shift a value, and what they keep of it; empty if they compute something, or do not."""
    repair = both.repair
    if any(kind_of(one) not in (*MOVES, "join") for ones in (repair.target, repair.source) for one in arithmetic(ones)):
        return ""
    found = shifted_along(repair.got, repair.want)
    if found is None:
        return ""
    ends = (
        (both.ours, repair.target[-1].results[0] if repair.target else repair.operands[0], repair.got),
        (both.theirs, repair.source[-1].results[0] if repair.source else repair.source_operands[0], repair.want),
    )
    kept = [_kept(value, array, found[0], words) for words, value, array in ends]
    said = _in_words(*found)
    if kept[0] is None or kept[1] is None:
        return said
    return f"{said}; the target has {kept[0]}{kept[0].of(found[0], both.ours)}, and the JAX model {kept[1]}"


@dataclass(frozen=True)
class _Kept:
    """Indices of an axis of a value, with zeros around them.

    Attributes:
        value: the value.
        indices: the first and the last of them.
        zeros: in front of them, and behind.
    """

    value: Value
    indices: tuple[int, int]
    zeros: tuple[int, int]

    def __str__(self) -> str:
        before, behind = (f"{n} zero{'s' if n > 1 else ''}" if n else "" for n in self.zeros)
        return " and ".join(filter(None, (before, f"the indices {self.indices[0]} to {self.indices[1]}", behind)))

    def of(self, axis: int, words: Words) -> str:
        """Say of which value the indices are."""
        return f" of axis {axis} of {words.value(self.value)}"


def _kept(value: Value, array: Array, axis: int, words: Words) -> _Kept | None:
    """Return what a value has of the first one that operations which move elements lead to it from; None if it is no part of one."""
    if array.shape != value.array.shape or not same(array, value.array):
        return None  # it has another layout
    found = None
    for one in moved_from(value, words.producer):
        found = _part_of(one, np.moveaxis(array, axis, 0), axis) or found
    return found


def _part_of(whole: Value, made: Array, axis: int) -> _Kept | None:
    """Return which indices of the axis of a value are the first axis of an array, with zeros around them."""
    if whole.array.ndim != made.ndim:
        return None
    given = np.moveaxis(whole.array, axis, 0)
    if given.shape[1:] != made.shape[1:]:
        return None
    n, size = len(given), len(made)
    for low in sorted(range(1 - n, size), key=abs):
        first, last = max(0, low), min(size, n + low)
        if made[:first].any() or made[last:].any():
            continue
        if same(made[first:last], given[first - low : last - low]):
            return _Kept(whole, (first - low, last - low - 1), (first, size - last))
    return None
