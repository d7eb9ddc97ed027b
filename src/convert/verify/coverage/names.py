"""Names of a file against those of a plan: one prefix for another, and the most similar name, in linear time."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

from convert.core.fields import nearest

DEEPEST = 4  # components of a prefix
FEWEST = 2  # tensors that must have it
MOST_PATTERNS = 64  # of names that are compared one with another, on each side
_NUMBER = re.compile(r"[0-9]+")


def other_prefix(missing: Sequence[str], extra: Sequence[str]) -> tuple[str, str] | None:
    """The prefix of most missing names and what stands in its place in the extra ones; None when there is no such.

    Either may be empty: ``("", "model.")`` where the file has ``model.`` before every name.
    """
    ends: dict[str, list[str]] = {}
    for name in extra:
        for start in _starts(name):
            ends.setdefault(name[start:], []).append(name[:start])
    found: Counter[tuple[str, str]] = Counter()
    for name in missing:
        for start in _starts(name):
            theirs = ends.get(name[start:], [])
            if len(theirs) == 1:  # an end like `weight` alone says nothing
                found[name[:start], theirs[0]] += 1
    best = max(found, key=lambda pair: (found[pair], -len(pair[0]) - len(pair[1])), default=None)
    return best if best is not None and found[best] >= max(FEWEST, len(missing) / 2) else None


def _starts(name: str) -> list[int]:
    return [0, *(found.end() for found in re.finditer(r"\.", name))][: DEEPEST + 1]


class Nearest:
    """The most similar of some names. Names that differ in their numbers alone count as one, so that it is quick."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names: dict[str, dict[tuple[str, ...], str]] = {}
        for name in names:
            self._names.setdefault(_NUMBER.sub("#", name), {})[tuple(_NUMBER.findall(name))] = name
        self._known: dict[str, str | None] = {}

    def __call__(self, name: str) -> str:
        """``; did you mean 'x'?``, or nothing when no name is near."""
        pattern = _NUMBER.sub("#", name)
        if pattern not in self._known:
            near = ""
            if len(self._names) <= MOST_PATTERNS and len(self._known) < MOST_PATTERNS:
                near = nearest(pattern, self._names, "")
            self._known[pattern] = near[1:-2] if near else None
        found = self._known[pattern]
        if found is None:
            return ""
        alike = self._names[found]
        return f"; did you mean {alike.get(tuple(_NUMBER.findall(name)), next(iter(alike.values())))!r}?"
