"""Suggest the known name that is closest to an unknown one. Measures with rapidfuzz, which only error messages load."""

from __future__ import annotations

import re
from collections.abc import Iterable

from convert.core.path_index import path_template

CUTOFF = 0.6  # twice the length of the common subsequence, divided by the length of both names
MAX_TEMPLATES = 1000  # compared on each side by `ClosestNames`; more names than that have no pattern to suggest
_NUMBER = re.compile(r"[0-9]+")


def closest_match(name: str, known: Iterable[str], cutoff: float = CUTOFF) -> str | None:
    """Return the known name that is closest to `name`, the first of equally close ones; None if none is close.

    >>> closest_match("querry", ["key", "query"])
    'query'
    """
    from rapidfuzz.distance import Indel
    from rapidfuzz.process import extractOne

    just_below = cutoff - 1e-6  # rapidfuzz's rounding may reject a similarity that equals its cutoff
    found = extractOne(name, list(known), scorer=Indel.normalized_similarity, score_cutoff=just_below)
    return None if found is None else found[0]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ``did you mean 'x'?`` for the fix of a finding, or an empty string.

    >>> did_you_mean("querry", ["key", "query"])
    "did you mean 'query'?"
    """
    closest = closest_match(name, known)
    return "" if closest is None else f"did you mean {closest!r}?"


class ClosestNames:
    """Suggestions for many names. Names that differ only in their numbers are compared once."""

    def __init__(self, known: Iterable[str]) -> None:
        self._by_template: dict[str, dict[tuple[str, ...], str]] = {}
        for name in known:
            self._by_template.setdefault(path_template(name), {})[_numbers(name)] = name
        self._cache: dict[str, str | None] = {}

    def closest_match(self, name: str) -> str | None:
        """Return the known name of the closest template, with the same numbers if there is one."""
        template = path_template(name)
        if template not in self._cache:
            few = max(len(self._by_template), len(self._cache)) < MAX_TEMPLATES
            self._cache[template] = closest_match(template, self._by_template) if few else None
        closest = self._cache[template]
        if closest is None:
            return None
        names = self._by_template[closest]
        return names.get(_numbers(name), next(iter(names.values())))

    def did_you_mean(self, name: str) -> str:
        """Return ``did you mean 'x'?`` for the fix of a finding, or an empty string."""
        closest = self.closest_match(name)
        return "" if closest is None else f"did you mean {closest!r}?"


def _numbers(name: str) -> tuple[str, ...]:
    return tuple(_NUMBER.findall(name))
