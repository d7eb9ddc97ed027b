"""Find the leaves that a path pattern matches without trying every leaf.

Names are grouped by template: the name with every number replaced by ``#``. A tree of 50,000 leaves has a few dozen
templates, and a pattern is tried only on the names whose template it can produce.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import cached_property

from convert.core.path_pattern import Index, Match, Pattern, Words

_NUMBER = re.compile(r"[0-9]+")
_DIGITS = str.maketrans("123456789", "000000000")


def path_template(name: str) -> str:
    """Replace every number: ``layers_#/w`` for ``layers_12/w``."""
    return _NUMBER.sub("#", name)


class TemplateIndex:
    """Names of leaves by template. Each leaf has one or more spellings that rules may use, in order of preference."""

    def __init__(self, names: Iterable[tuple[str, Sequence[str]]]) -> None:
        # Digits are unified with `translate` first: it is three times as fast as the regular expression.
        by_zeroed: dict[str, list[tuple[int, int, str, str]]] = defaultdict(list)
        for k, (name, spellings) in enumerate(names):
            for rank, spelling in enumerate(spellings):
                by_zeroed[spelling.translate(_DIGITS)].append((k, rank, name, spelling))
        self._by_template: dict[str, list[tuple[int, int, str, str]]] = defaultdict(list)
        for zeroed, entries in by_zeroed.items():
            self._by_template[path_template(zeroed)] += entries
        self._cache: dict[str, list[tuple[str, Match]]] = {}

    def matches(self, pattern: Pattern) -> list[tuple[str, Match]]:
        """Return the matching names in their given order, each with what the pattern binds in its preferred spelling."""
        if pattern.text not in self._cache:
            found: dict[str, tuple[int, int, Match]] = {}
            for template in self._candidates(pattern):
                for k, rank, name, spelling in self._by_template[template]:
                    match = pattern.match(spelling)
                    if match is not None and (name not in found or rank < found[name][1]):
                        found[name] = (k, rank, match)
            in_order = sorted(found.items(), key=lambda item: item[1][0])
            self._cache[pattern.text] = [(name, match) for name, (_, _, match) in in_order]
        return self._cache[pattern.text]

    def _candidates(self, pattern: Pattern) -> list[str]:
        """Return the templates that the pattern's matches may have. The texts of its pieces exclude most of them."""
        texts = [text for piece in pattern.pieces if isinstance(piece, str) for text in _NUMBER.split(piece)]
        first, last = pattern.pieces[0], pattern.pieces[-1]
        head, tail = texts[0] if isinstance(first, str) else "", texts[-1] if isinstance(last, str) else ""
        near = [
            template
            for template in self._by_template
            if template.startswith(head) and template.endswith(tail) and all(text in template for text in texts)
        ]
        if not near:
            return []
        fits = _template_regex(pattern).fullmatch
        return [t for t in near if "##" in t or not pattern.is_quick(len(t)) or fits(t)]


def _template_regex(pattern: Pattern) -> re.Pattern[str]:
    """Build the expression for the templates of a pattern's matches; a number in it may be part of one in the name."""
    parts = []
    for piece in pattern.pieces:
        if isinstance(piece, str):
            parts.append(_any_numbers(piece))
        elif isinstance(piece, Index):
            parts.append(f"(?:{'|'.join(map(_any_numbers, piece.words))})" if piece.words else "#*")
        elif isinstance(piece, Words):
            parts.append(f"(?:{'|'.join(map(_any_numbers, piece.words))})")
        else:
            parts.append(".*")
    return re.compile("".join(parts), re.DOTALL)


def _any_numbers(text: str) -> str:
    return "#*".join(map(re.escape, _NUMBER.split(text)))


class PathIndex:
    """The leaves of a tree, indexed once for all the rule files that are tried on it."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = tuple(names)
        self._by_root: dict[str, TemplateIndex] = {}

    def below(self, root: str) -> TemplateIndex:
        """Index the leaves below `root`; paths start there."""
        prefix = f"{root}/" if root else ""
        if root not in self._by_root:
            self._by_root[root] = TemplateIndex((name, _spellings(name, prefix)) for name in self._names)
        return self._by_root[root]

    @cached_property
    def from_top(self) -> TemplateIndex:
        """All leaves by their absolute paths, which start with a slash."""
        return TemplateIndex((name, _spellings("/" + name, "")) for name in self._names)


def keys_above(paths: Iterable[str]) -> set[str]:
    """Return the path of each key that has one of these paths below it; the top of the tree is the empty one.

    >>> sorted(keys_above(["a/b/kernel", "a/bias"]))
    ['', 'a', 'a/b']
    """
    return {"/".join(keys[:k]) for path in paths for keys in [path.split("/")] for k in range(len(keys))}


def _spellings(name: str, prefix: str) -> tuple[str, ...]:
    """Return the paths of a leaf below `prefix`: as it is, and without the ``value`` that flax nnx appends."""
    if not name.startswith(prefix):
        return ()
    inside = name.removeprefix(prefix)
    return (inside, inside.removesuffix("/value")) if inside.endswith("/value") else (inside,)
