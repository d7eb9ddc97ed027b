"""Which of many names is most like another, as difflib measures it, without measuring all of them."""

from __future__ import annotations

import math
from collections.abc import Sequence


def most_alike(name: str, others: Sequence[str], cutoff: float, *, before: bool = False) -> tuple[int, float] | None:
    """The place of the name that is most like `name`, and how alike they are; the first of several that are equally so.

    It is what the ratio of `difflib.SequenceMatcher(None, other, name)` is greatest for: 2 M / (the characters of both),
    M the characters in the blocks that they share. The blocks stand in the same order in both, so M is at most the length
    of the longest common subsequence. That is much quicker to find: names are measured in its order, until none can be
    better.

    Args:
        name: a path, or a key.
        others: where to look.
        cutoff: how alike they must be, above 0 and up to 1.
        before: `SequenceMatcher(None, name, other)`: among blocks of one length it takes the one that is first in its first
            text, so their order matters.

    Returns:
        None where no name is alike enough.
    """
    common = _CommonSubsequence(name)
    bounds = []
    for k, other in enumerate(others):
        total = len(name) + len(other)
        if total and 2 * min(len(name), len(other)) / total >= cutoff:
            bounds.append((2 * common.length(other) / total, k))
    best, at = cutoff, -1
    for bound, k in sorted(bounds, key=lambda b: (-b[0], b[1])):
        if bound < best:
            break
        one, two = (name, others[k]) if before else (others[k], name)
        total = len(one) + len(two)
        ratio = 2 * _shared(one, two, math.ceil(best * total / 2 - 1e-6)) / total
        if ratio > best or (ratio == best and (at < 0 or k < at)):
            best, at = ratio, k
    return None if at < 0 else (at, best)


def _shared(a: str, b: str, least: int) -> int:
    """The characters of the blocks that two texts share: the longest one, then those before it and those behind it.

    Less than `least` is not counted to the end.
    """
    size = at = 0
    for k in range(len(a)):
        while k + size < len(a) and a[k : k + size + 1] in b:
            size, at = size + 1, k
    if not size:
        return 0
    there = b.index(a[at : at + size])
    behind = min(len(a) - at, len(b) - there) - size
    if size + min(at, there) + behind < least:
        return size
    before = _shared(a[:at], b[:there], least - size - behind) if at and there else 0
    return size + before + (_shared(a[at + size :], b[there + size :], least - size - before) if behind else 0)


class _CommonSubsequence:
    """Length of the longest common subsequence of one text with others: a row of the table in the bits of one number.

    H. Hyyro, "Bit-parallel LCS-length computation revisited", 2004.
    """

    def __init__(self, text: str) -> None:
        self._all = (1 << len(text)) - 1
        self._at: dict[str, int] = {}
        for k, character in enumerate(text):
            self._at[character] = self._at.get(character, 0) | 1 << k

    def length(self, other: str) -> int:
        row, at = self._all, self._at
        for character in other:
            if bits := at.get(character):
                both = row & bits
                row = (row + both) | (row - both)
        return (self._all & ~row).bit_count()
