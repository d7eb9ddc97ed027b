"""Compare the names of a file with those of a plan: find a prefix that replaces another, in linear time."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

DEEPEST = 4  # components of a prefix
FEWEST = 2  # tensors that must have it


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
