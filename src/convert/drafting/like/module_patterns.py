"""Write the names of several modules as one pattern."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence

from convert.drafting.like.similarity import numbers
from convert.drafting.like.target import Place


def pattern_of(names: Sequence[str], indices: Sequence[tuple[int, ...]], places: Sequence[Place]) -> str | None:
    """Return the pattern of modules with these indices; None if their numbers are not those of the indices."""
    first = places[0].name
    varying: dict[int, str] = {}
    for position in range(len(numbers(first))):
        values = [numbers(place.name)[position] for place in places]
        if len(set(values)) > 1:
            d = next((d for d in range(len(names)) if values == [at[d] for at in indices]), None)
            if d is None:
                return None
            varying[position] = names[d]
    if len(set(varying.values())) != len(names):
        return None
    parts = re.split(r"([0-9]+)", first)
    for position, name in varying.items():
        parts[2 * position + 1] = f"{{{name}}}"
    return "".join(parts)


def listed_pattern(
    names: Sequence[str], indices: Sequence[tuple[int, ...]], places: Sequence[Place]
) -> tuple[str, dict[str, str]] | None:
    """Return the pattern of modules whose numbers are listed, and the lists of the tree's numbers by index.

    None if the layers are no grid, or if a name has other numbers than one for each index.
    """
    axes = [list(dict.fromkeys(at[d] for at in indices)) for d in range(len(names))]
    found = [re.split(r"([0-9]+)", place.name) for place in places]
    differs = [k for k, part in enumerate(found[0]) if any(other[k] != part for other in found)]
    if len(indices) != math.prod(map(len, axes)) or len(differs) > len(names):
        return None
    known: dict[str, str] = {}
    text = list(found[0])
    for d, (name, values) in enumerate(zip(names, axes, strict=True)):
        if len(values) == 1:
            known[name] = str(values[0])
            continue
        at = {n: next(k for k, index in enumerate(indices) if index[d] == n) for n in values}
        of = [k for k in differs if len({found[at[n]][k] for n in values}) == len(values)]
        if not of:
            return None
        theirs = [found[at[n]][of[0]] for n in values]
        if values == list(range(len(values))) and theirs == list(map(str, values)):
            text[of[0]] = f"{{{name}}}"
            continue
        known[name] = "{" + ",".join(map(str, values)) + "}"
        text[of[0]] = "{" + ",".join(theirs) + "}"
    return "".join(text), known


def common_pattern(texts: Sequence[str], *, nested: bool = False) -> str | None:
    """Return one pattern for several: what differs becomes alternatives; None if that has an index.

    Args:
        nested: whether an alternative may have several keys of a path.
    """
    if len(texts) == 1:
        return texts[0]
    start, middles, end = apart(texts)
    excluded = r"[{}*\\,]" if nested else r"[{}*\\,/]"
    if any(re.search(excluded, middle) for middle in middles) or len(set(middles)) < len(middles):
        return None
    return f"{start}{{{','.join(middles)}}}{end}"


def apart(texts: Sequence[str]) -> tuple[str, list[str], str]:
    """Return what several names start with, what each has in between, and what they end with, in whole words."""
    parts = [re.findall(r"\{[^{}]*\}|[._/]|[^._/{}]+", text) for text in texts]
    start = _shared(parts, lambda part, k: part[k])
    end = _shared([part[start:] for part in parts], lambda part, k: part[-1 - k])
    middles = ["".join(part[start : len(part) - end]) for part in parts]
    first = parts[0]
    return "".join(first[:start]), middles, "".join(first[len(first) - end :] if end else [])


def _shared(parts: Sequence[Sequence[str]], at: Callable[[Sequence[str], int], str]) -> int:
    shortest = min(map(len, parts))
    return next((k for k in range(shortest) if len({at(part, k) for part in parts}) > 1), shortest)


def filled(value: str, known: Mapping[str, object]) -> str:
    for name, number in known.items():
        value = value.replace(f"{{{name}}}", str(number))
    return value
