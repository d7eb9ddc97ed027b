"""Patterns for tree paths: ``layers_{i}/{query,key,value}/w``, ``opt_state/**``.

``{i}`` captures an index (digits), ``{i+12}`` one whose numbers start at 12, ``{p:local,global}`` an index that is written as words (numbered from 0), ``{a,b,c}``
lists alternatives, ``*`` is any text within one key, ``**`` any text. A backslash escapes the next character. The same
name twice must capture the same index.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

_TOKEN = re.compile(
    r"\\(?P<escaped>.)|(?P<any>\*\*)|(?P<star>\*)|\{(?P<index>[A-Za-z_][A-Za-z0-9_]*)(?:\+(?P<offset>[0-9]{1,9}))?(?::(?P<spelt>(?:[^{}\\]|\\.)*))?\}|\{(?P<words>(?:[^{}\\]|\\.)*)\}|(?P<bad>[{}\\])|(?P<text>[^{}*\\]+)"
)

MAX_DIGITS = 18  # of an index; they fit 64 bits
MAX_PIECES = 100  # of a pattern; real ones have about ten
MAX_AMBIGUOUS = 4  # indices that have no text after them, which would end them
MAX_TRIES = 300_000  # tries that the regular expression may need; `_search` matches with more of them
_DIGITS = re.compile(f"[0-9]{{1,{MAX_DIGITS}}}")
_WORD = re.compile(r"(?:^|,)((?:[^,\\]|\\.)*)")  # an escaped comma does not separate


@dataclass(frozen=True)
class Words:
    """Alternatives ``{a,b,c}``; one of them may be empty."""

    words: tuple[str, ...]


class NoNameError(ValueError):
    """An index that is written as words has more values than words."""


@dataclass(frozen=True)
class Index:
    """A captured index ``{i}``; with `words`, the k-th word has the value k; the number `offset` has the value 0."""

    name: str
    words: tuple[str, ...] = ()
    offset: int = 0

    @property
    def regex(self) -> str:
        return "|".join(map(re.escape, self.words)) or f"[0-9]{{1,{MAX_DIGITS}}}"  # a longer key is not an index

    def value(self, text: str) -> int:
        return self.words.index(text) if self.words else int(text) - self.offset

    def spell(self, value: int) -> str:
        if not self.words:
            return str(value + self.offset)
        if value >= len(self.words):
            raise NoNameError(
                f"{{{self.name}}} has names for {len(self.words)} elements, {', '.join(self.words)}, and none for element {value}"
            )
        return self.words[value]


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
                indices.setdefault(piece.name, (piece.name, at, piece.value if piece.words or piece.offset else int))
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
    def _counts_from(self) -> bool:
        """Whether the numbers of an index start above 0, so that smaller ones are no match."""
        return any(isinstance(piece, Index) and piece.offset for piece in self.pieces)

    @cached_property
    def _head(self) -> str:
        return self.pieces[0] if self.pieces and isinstance(self.pieces[0], str) else ""

    @cached_property
    def _ways(self) -> tuple[int, int]:
        """The number of wildcards, and in how many ways the other pieces can match at fixed places."""
        ways = 1
        for piece, after in itertools.zip_longest(self.pieces, self.pieces[1:]):
            if isinstance(piece, Index) and not piece.words:
                ways *= MAX_DIGITS if _may_start_with_digit(after) else 1
            elif isinstance(piece, Index | Words):
                ways *= max(sum(word.startswith(other) for other in piece.words) for word in piece.words)
        return sum(isinstance(piece, Wild) for piece in self.pieces), ways

    @cached_property
    def _simple(self) -> bool:
        wild, ways = self._ways
        return wild < 2 and ways == 1

    def is_quick(self, length: int) -> bool:
        """Whether a regular expression of these pieces needs few tries for a text of this length."""
        wild, ways = self._ways
        return self._simple or length**wild * ways < MAX_TRIES

    def match(self, path: str) -> Match | None:
        """Return what `path` binds if all of it matches the pattern, else None."""
        if not path.startswith(self._head):  # excludes most paths without the regular expression
            return None
        if self._simple or self.is_quick(len(path)):
            found = self._regex.fullmatch(path)
            texts = found.groups() if found is not None else None
        else:
            texts = _search(self.pieces, path)
        if texts is None:
            return None
        indices, words = self._captures
        bound = tuple([(name, value(texts[at])) for name, at, value in indices])
        if self._counts_from and any(value < 0 for _, value in bound):
            return None
        return Match(bound, tuple([value(texts[at]) for at, value in words]))

    def fill(self, indices: Mapping[str, int], choices: tuple[int, ...] = ()) -> str:
        """Return the path with these indices and choices; a wildcard stays as it is.

        Raises:
            KeyError: an index is missing.
        """
        if choices not in self._forms:
            self._forms[choices] = self._form(choices)
        spelt = {one.name: one.spell(indices[one.name]) for one in self._spelt}
        return self._forms[choices] % ({**indices, **spelt} if spelt else indices)

    def fill_each(
        self,
        indices: Mapping[str, int],
        names: Sequence[str],
        elements: Sequence[tuple[int, ...]],
        choices: tuple[int, ...] = (),
    ) -> list[str]:
        """Return the path for each element of some indices: as `fill` with these too, in a fraction of its time.

        Args:
            indices: the others, which are the same for all.
            names: of the indices that differ; each element has their values.

        Raises:
            KeyError: an index is missing.
        """
        spell = {one.name: one.spell for one in self._spelt}
        known = {name: spell[name](k).replace("%", "%%") if name in spell else k for name, k in indices.items()}
        form = self._form(choices).replace("%%", "%%%%") % {**known, **dict.fromkeys(names, "%s")}
        places = [names.index(piece.name) for piece in self.pieces if isinstance(piece, Index) and piece.name in names]
        if not places:
            return [form % ()] * len(elements)
        numbers = [[element[k] for element in elements] for k in places]
        spelt = [map(spell.get(names[k], str), column) for k, column in zip(places, numbers, strict=True)]
        return [form % texts for texts in zip(*spelt, strict=True)]

    @cached_property
    def _spelt(self) -> list[Index]:
        """The indices that are not written as they are."""
        return [piece for piece in self.pieces if isinstance(piece, Index) and (piece.words or piece.offset)]

    @cached_property
    def _forms(self) -> dict[tuple[int, ...], str]:
        return {}

    def _form(self, choices: tuple[int, ...]) -> str:
        """Return the path with these choices and ``%(i)s`` for each index."""
        left, form = iter(choices), ""
        for piece in self.pieces:
            if isinstance(piece, Index):
                form += f"%({piece.name})s"
            elif isinstance(piece, Words):
                form += piece.words[next(left)].replace("%", "%%")
            elif isinstance(piece, Wild):
                form += "**" if piece.deep else "*"
            else:
                form += piece.replace("%", "%%")
        return form

    def all_choices(self) -> Iterator[tuple[int, ...]]:
        """Iterate over all combinations of alternatives, the last group fastest; without groups there is one, empty."""
        return itertools.product(*(range(len(words.words)) for words in self.groups))

    def __str__(self) -> str:
        return self.text


def escape_path(text: str) -> str:
    """Return a pattern that matches only this text, also where a rule may add paths up, as in ``a + b``."""
    return re.sub(r"([\\{}*]|(?<= )[+-](?= ))", r"\\\1", text)


def _may_start_with_digit(piece: Piece | None) -> bool:
    """Whether the text that this piece matches may be empty or start with a digit; None is the end of the pattern."""
    if isinstance(piece, str):
        return piece[0].isdecimal()
    if isinstance(piece, Words) or (isinstance(piece, Index) and piece.words):
        return any(not word or word[0].isdecimal() for word in piece.words)
    return piece is not None


def _search(pieces: Sequence[Piece], path: str) -> tuple[str, ...] | None:
    """Return the groups of the regular expression; find them in polynomial time, as no failure is tried twice.

    The search tries what the regular expression tries, in the same order.
    """
    uses = Counter(piece.name for piece in pieces if isinstance(piece, Index))
    failed: set[tuple[object, ...]] = set()
    lowest: dict[tuple[object, ...], int] = {}  # wildcard and its furthest end -> all ends from here on have failed

    def search(k: int, at: int, bound: tuple[tuple[str, str], ...]) -> tuple[str, ...] | None:
        """Match the pieces from `k` on with the path from `at` on; `bound` has the indices that occur again."""
        if k == len(pieces):
            return () if at == len(path) else None
        if (k, at, bound) in failed:
            return None
        piece = pieces[k]
        found = None
        if isinstance(piece, Wild):
            end = len(path) if piece.deep else _key_end(path, at)
            key = (k, end, bound)
            for stop in range(min(end, lowest.get(key, end + 1) - 1), at - 1, -1):
                if (found := search(k + 1, stop, bound)) is not None:
                    return found
                lowest[key] = stop
        elif isinstance(piece, str):
            if path.startswith(piece, at):
                found = search(k + 1, at + len(piece), bound)
        elif isinstance(piece, Index) and (again := dict(bound).get(piece.name)) is not None:
            if path.startswith(again, at):
                found = search(k + 1, at + len(again), bound)
        else:
            for text in _candidates(piece, path, at):
                more = isinstance(piece, Index) and uses[piece.name] > 1
                now = (*bound, (piece.name, text)) if isinstance(piece, Index) and more else bound
                if (rest := search(k + 1, at + len(text), now)) is not None:
                    found = (text, *rest)
                    break
        if found is None:
            failed.add((k, at, bound))
        return found

    return search(0, 0, ())


def _key_end(path: str, at: int) -> int:
    end = path.find("/", at)
    return len(path) if end < 0 else end


def _candidates(piece: Index | Words, path: str, at: int) -> Iterator[str]:
    """Yield the texts that an index or alternatives can match here, in the order of the regular expression."""
    if piece.words:
        yield from (word for word in piece.words if path.startswith(word, at))
        return
    digits = _DIGITS.match(path, at)
    for length in range(len(digits[0]) if digits else 0, 0, -1):
        yield path[at : at + length]


def _alternatives(listed: str, text: str, distinct: bool = False) -> tuple[str, ...]:
    words = tuple(re.sub(r"\\(.)", r"\1", word.strip()) for word in _WORD.findall(listed))
    if len(words) < 2:
        raise ValueError(f"{{{listed}}} in {text!r} is neither an index such as {{i}} nor alternatives such as {{a,b}}")
    if len(set(words)) < (len(words) if distinct else 2):
        raise ValueError(f"{{{listed}}} in {text!r} lists the same alternative twice")
    return words


@lru_cache(maxsize=4096)
def parse_pattern(text: str) -> Pattern:
    """Parse a pattern. The same text gives the same object, as the models of a family share many patterns.

    >>> parse_pattern("x_layers_{i}/{query,key}/w").match("x_layers_10/key/w")
    Match(indices=(('i', 10),), choices=(1,))

    Raises:
        ValueError: empty, an unbalanced brace, a group with one alternative, an index with the same word twice, or too many parts.
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
            words = _alternatives(token["spelt"], text, distinct=True) if token["spelt"] is not None else ()
            offset = int(token["offset"] or 0)
            if words and offset:
                raise ValueError(f"{{{value}+{offset}}} in {text!r} has words; words are counted from 0")
            other = next((piece.offset for piece in pieces if isinstance(piece, Index) and piece.name == value), offset)
            if other != offset:
                raise ValueError(f"{{{value}}} is counted from {other} and from {offset} in {text!r}")
            pieces.append(Index(value, words, offset))
        elif kind in ("any", "star"):
            pieces.append(Wild(kind == "any"))
        elif pieces and isinstance(pieces[-1], str):
            pieces[-1] += value
        else:
            pieces.append(value)
    if len(pieces) > MAX_PIECES:
        raise ValueError(f"{text[:40]!r}... has {len(pieces)} parts; write at most {MAX_PIECES}")
    pairs = itertools.pairwise(pieces)
    if sum(isinstance(one, Index) and _may_start_with_digit(two) for one, two in pairs) > MAX_AMBIGUOUS:
        raise ValueError(f"{text!r} has too many indices without text between them; it is unclear where each ends")
    return Pattern(text, tuple(pieces))
