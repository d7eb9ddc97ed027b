"""Find a prefix that replaces another in the names of a file, in linear time."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

MAX_DEPTH = 4  # components of a prefix
MIN_TENSORS = 2  # tensors that must share the change


def find_prefix_change(missing: Sequence[str], extra: Sequence[str]) -> tuple[str, str] | None:
    """Return the prefix of most missing names and the prefix that replaces it in the extra names, or None.

    Either prefix may be empty: ``("", "model.")`` where the file has ``model.`` before every name.
    """
    prefixes: dict[str, list[str]] = {}  # end of an extra name -> what precedes it
    for name in extra:
        for start in _component_starts(name):
            prefixes.setdefault(name[start:], []).append(name[:start])
    pairs: Counter[tuple[str, str]] = Counter()
    for name in missing:
        for start in _component_starts(name):
            theirs = prefixes.get(name[start:], [])
            if len(theirs) == 1:  # an end that several names share, such as `weight`, identifies nothing
                pairs[name[:start], theirs[0]] += 1
    best = max(pairs, key=lambda pair: (pairs[pair], -len(pair[0]) - len(pair[1])), default=None)
    return best if best is not None and pairs[best] >= max(MIN_TENSORS, len(missing) / 2) else None


def _component_starts(name: str) -> list[int]:
    return [0, *(dot.end() for dot in re.finditer(r"\.", name))][: MAX_DEPTH + 1]
