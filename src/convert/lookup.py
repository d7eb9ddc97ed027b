"""Finds the leaves that a pattern matches without trying every leaf: those of one layer are spelt like those of the next.

Names are sorted by what is left of them when every number becomes ``#``. A tree of 50,000 leaves has some dozens of
such spellings, and only names of a spelling that a pattern can have are matched with it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence

from convert.pattern import Index, Match, Pattern, Words

_NUMBER = re.compile(r"[0-9]+")
_DIGITS = str.maketrans("123456789", "000000000")


def spelling(name: str) -> str:
    """``layers_#/w`` of ``layers_12/w``."""
    return _NUMBER.sub("#", name)


class Lookup:
    """Names of leaves, each in the ways in which rules may call it, in order of preference."""

    def __init__(self, names: Iterable[tuple[str, Sequence[str]]]) -> None:
        zeroed: dict[str, list[tuple[int, int, str, str]]] = defaultdict(
            list
        )  # not yet spelt: that takes three times as long
        for k, (name, calls) in enumerate(names):
            for rank, call in enumerate(calls):
                zeroed[call.translate(_DIGITS)].append((k, rank, name, call))
        self._spelt: dict[str, list[tuple[int, int, str, str]]] = defaultdict(list)
        for call, entries in zeroed.items():
            self._spelt[spelling(call)] += entries
        self._found: dict[str, list[tuple[str, Match]]] = {}

    def matches(self, pattern: Pattern) -> list[tuple[str, Match]]:
        """The names that match, in the order in which they were given, each with what the pattern binds in its first call."""
        if pattern.text not in self._found:
            can = _outline(pattern)
            found: dict[str, tuple[int, int, Match]] = {}
            for spelt, entries in self._spelt.items():
                if can.fullmatch(spelt) is None:
                    continue
                for k, rank, name, call in entries:
                    match = pattern.match(call)
                    if match is not None and (name not in found or rank < found[name][1]):
                        found[name] = (k, rank, match)
            self._found[pattern.text] = [
                (name, match) for name, (_, _, match) in sorted(found.items(), key=lambda item: item[1][0])
            ]
        return self._found[pattern.text]


def _outline(pattern: Pattern) -> re.Pattern[str]:
    """What spellings the pattern's matches may have: a number in the pattern may be a part of one in the name."""
    parts = []
    for piece in pattern.pieces:
        if isinstance(piece, str):
            parts.append(_loose(piece))
        elif isinstance(piece, Index):
            parts.append(f"(?:{'|'.join(map(_loose, piece.words))})" if piece.words else "#*")
        elif isinstance(piece, Words):
            parts.append(f"(?:{'|'.join(map(_loose, piece.words))})")
        else:
            parts.append(".*")
    return re.compile("".join(parts), re.DOTALL)


def _loose(text: str) -> str:
    return "#*".join(map(re.escape, _NUMBER.split(text)))
