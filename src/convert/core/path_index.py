"""Finds the leaves that a pattern matches without trying every leaf: those of one layer are spelt like those of the next.

Names are sorted by what is left of them when every number becomes ``#``. A tree of 50,000 leaves has some dozens of
such spellings, and only names of a spelling that a pattern can have are matched with it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import cached_property

from convert.core.path_pattern import Index, Match, Pattern, Words

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
            found: dict[str, tuple[int, int, Match]] = {}
            for spelt in self._possible(pattern):
                for k, rank, name, call in self._spelt[spelt]:
                    match = pattern.match(call)
                    if match is not None and (name not in found or rank < found[name][1]):
                        found[name] = (k, rank, match)
            self._found[pattern.text] = [
                (name, match) for name, (_, _, match) in sorted(found.items(), key=lambda item: item[1][0])
            ]
        return self._found[pattern.text]

    def _possible(self, pattern: Pattern) -> list[str]:
        """The spellings that the pattern's matches may have; most patterns of another layout end at their first word."""
        first, last = (piece if isinstance(piece, str) else "" for piece in (pattern.pieces[0], pattern.pieces[-1]))
        head, tail = _NUMBER.split(first)[0], _NUMBER.split(last)[-1]
        near = [spelt for spelt in self._spelt if spelt.startswith(head) and spelt.endswith(tail)]
        return list(filter(_outline(pattern).fullmatch, near)) if near else []


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


class Below:
    """The leaves of a tree as they are called below a root, looked up once for all the rule files that are tried on it."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = tuple(names)
        self._lookups: dict[str, Lookup] = {}

    def __call__(self, root: str) -> Lookup:
        prefix = f"{root}/" if root else ""
        if root not in self._lookups:
            self._lookups[root] = Lookup((name, _spellings(name, prefix)) for name in self._names)
        return self._lookups[root]

    @cached_property
    def top(self) -> Lookup:
        """For the few paths that are written from the top, with a slash in front."""
        return Lookup((name, _spellings("/" + name, "")) for name in self._names)


def _spellings(name: str, prefix: str) -> tuple[str, ...]:
    """How rules may call a leaf: below the root, with and without the ``value`` that flax nnx adds to every variable."""
    if not name.startswith(prefix):
        return ()
    inside = name.removeprefix(prefix)
    return (inside, inside.removesuffix("/value")) if inside.endswith("/value") else (inside,)
