"""Patterns for tree paths: ``layers_{i}/{query,key,value}/w``, ``opt_state/**``.

``{i}`` captures an index (digits), ``{p:local,global}`` an index that is written as words (numbered from 0), ``{a,b,c}``
lists alternatives, ``*`` is any text within one key, ``**`` any text. A backslash escapes the next character. The same
name twice must capture the same index.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

_TOKEN = re.compile(
    r"\\(?P<escaped>.)|(?P<any>\*\*)|(?P<star>\*)|\{(?P<index>[A-Za-z_][A-Za-z0-9_]*)(?::(?P<spelt>(?:[^{}\\]|\\.)*))?\}|\{(?P<words>(?:[^{}\\]|\\.)*)\}|(?P<bad>[{}\\])|(?P<text>[^{}*\\]+)"
)

_WORD = re.compile(r"(?:^|,)((?:[^,\\]|\\.)*)")  # an escaped comma does not separate


@dataclass(frozen=True)
class Words:
    """Alternatives ``{a,b,c}``; one of them may be empty."""

    words: tuple[str, ...]


@dataclass(frozen=True)
class Index:
    """A captured index ``{i}``; with `words`, the k-th word has the value k."""

    name: str
    words: tuple[str, ...] = ()

    @property
    def regex(self) -> str:
        return (
            "|".join(map(re.escape, self.words)) or "[0-9]{1,18}"
        )  # 18 digits fit 64 bits; a longer key is not an index

    def value(self, text: str) -> int:
        return self.words.index(text) if self.words else int(text)

    def spell(self, value: int) -> str:
        return self.words[value] if self.words else str(value)


@dataclass(frozen=True)
class Wild:
    """``*`` (within one key) or ``**`` (across keys)."""

    deep: bool


Piece = str | Words | Index | Wild


class Match(NamedTuple):  # created for every leaf, twice as fast as a dataclass
    """The values that a path binds: indices by name, and the number of the alternative in each group, from 0."""

    indices: tuple[tuple[str, int], ...]
    choices: tuple[int, ...]


@dataclass(frozen=True)
class Pattern:
    """A parsed pattern, created by `parse_pattern`."""

    text: str
    pieces: tuple[Piece, ...]

    @cached_property
    def indices(self) -> tuple[str, ...]:
        """Names of the captured indices, in order of first appearance."""
        return tuple(dict.fromkeys(piece.name for piece in self.pieces if isinstance(piece, Index)))

    @cached_property
    def _captures(self) -> tuple[list[tuple[str, int, Callable[[str], int]]], list[tuple[int, Callable[[str], int]]]]:
        """Groups of the regular expression that are indices and that are alternatives, each with the value of its text."""
        indices: dict[str, tuple[str, int, Callable[[str], int]]] = {}
        words: list[tuple[int, Callable[[str], int]]] = []
        for piece in self.pieces:
            at = len(indices) + len(words)
            if isinstance(piece, Index):
                indices.setdefault(piece.name, (piece.name, at, piece.value if piece.words else int))
            elif isinstance(piece, Words):
                words.append((at, piece.words.index))
        return list(indices.values()), words

    @cached_property
    def groups(self) -> tuple[Words, ...]:
        """The groups of alternatives, from left to right."""
        return tuple(piece for piece in self.pieces if isinstance(piece, Words))

    @cached_property
    def wild(self) -> bool:
        """Whether ``*`` or ``**`` occurs: such a pattern can match paths, but cannot name one."""
        return any(isinstance(piece, Wild) for piece in self.pieces)

    @cached_property
    def _regex(self) -> re.Pattern[str]:
        parts, seen, group = [], set[str](), 0
        for piece in self.pieces:
            if isinstance(piece, str):
                parts.append(re.escape(piece))
            elif isinstance(piece, Index):
                again = piece.name in seen
                parts.append(f"(?P=i_{piece.name})" if again else f"(?P<i_{piece.name}>{piece.regex})")
                seen.add(piece.name)
            elif isinstance(piece, Words):
                parts.append(f"(?P<g_{group}>{'|'.join(map(re.escape, piece.words))})")
                group += 1
            else:
                parts.append(".*" if piece.deep else "[^/]*")
        return re.compile("".join(parts), re.DOTALL)

    @cached_property
    def _head(self) -> str:
        return self.pieces[0] if self.pieces and isinstance(self.pieces[0], str) else ""

    def match(self, path: str) -> Match | None:
        """Return what `path` binds if all of it matches the pattern, else None."""
        if not path.startswith(self._head):  # excludes most paths without the regular expression
            return None
        found = self._regex.fullmatch(path)
        if found is None:
            return None
        texts = found.groups()
        indices, words = self._captures
        return Match(
            tuple([(name, value(texts[at])) for name, at, value in indices]),
            tuple([value(texts[at]) for at, value in words]),
        )

    def fill(self, indices: Mapping[str, int], choices: tuple[int, ...] = ()) -> str:
        """Return the path with these indices and choices; a wildcard stays as it is.

        Raises:
            KeyError: an index is missing.
        """
        if choices not in self._forms:
            self._forms[choices] = self._form(choices)
        form, named = self._forms[choices]
        return form % tuple([piece.spell(indices[piece.name]) for piece in named])

    @cached_property
    def _forms(self) -> dict[tuple[int, ...], tuple[str, list[Index]]]:
        return {}

    def _form(self, choices: tuple[int, ...]) -> tuple[str, list[Index]]:
        """Return the path with these choices and ``%s`` for each index, and the indices in this order."""
        left, form, named = iter(choices), "", []
        for piece in self.pieces:
            if isinstance(piece, Index):
                form += "%s"
                named.append(piece)
            elif isinstance(piece, Words):
                form += piece.words[next(left)].replace("%", "%%")
            elif isinstance(piece, Wild):
                form += "**" if piece.deep else "*"
            else:
                form += piece.replace("%", "%%")
        return form, named

    def all_choices(self) -> Iterator[tuple[int, ...]]:
        """Iterate over all combinations of alternatives, the last group fastest; without groups there is one, empty."""
        return itertools.product(*(range(len(words.words)) for words in self.groups))

    def __str__(self) -> str:
        return self.text


def _alternatives(listed: str, text: str) -> tuple[str, ...]:
    words = tuple(re.sub(r"\\(.)", r"\1", word.strip()) for word in _WORD.findall(listed))
    if len(words) < 2:
        raise ValueError(f"{{{listed}}} in {text!r} is neither an index such as {{i}} nor alternatives such as {{a,b}}")
    if len(set(words)) < len(words):
        raise ValueError(f"{{{listed}}} in {text!r} lists the same alternative twice")
    return words


@lru_cache(maxsize=4096)
def parse_pattern(text: str) -> Pattern:
    """Parse a pattern. The same text gives the same object, as the models of a family share many patterns.

    >>> parse_pattern("x_layers_{i}/{query,key}/w").match("x_layers_10/key/w")
    Match(indices=(('i', 10),), choices=(1,))

    Raises:
        ValueError: empty, an unbalanced brace, a group with one alternative or the same one twice.
    """
    if not text:
        raise ValueError("a path cannot be empty")
    pieces: list[Piece] = []
    for token in _TOKEN.finditer(text):
        kind = "index" if token["index"] else token.lastgroup
        value = token[kind or 0]
        if kind == "bad":
            raise ValueError(f"{text!r} has a stray '{value}'; write '\\{value}' for the character itself")
        if kind == "words":
            pieces.append(Words(_alternatives(value, text)))
        elif kind == "index":
            pieces.append(Index(value, _alternatives(token["spelt"], text) if token["spelt"] is not None else ()))
        elif kind in ("any", "star"):
            pieces.append(Wild(kind == "any"))
        elif pieces and isinstance(pieces[-1], str):
            pieces[-1] += value
        else:
            pieces.append(value)
    return Pattern(text, tuple(pieces))
