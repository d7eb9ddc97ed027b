"""Fold texts that differ only in numbers: ``layers.{0..17}.norm.weight`` in place of eighteen lines."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from convert.core.text import one_line

_NUMBER = re.compile(r"(?<![0-9])([0-9]{1,18})(?![0-9])")  # longer ones count no layers
_BETWEEN = "\0"  # lines; `one_line` escapes it in names

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Folded(Generic[Key]):
    """Lines that stand for one or several entries.

    Attributes:
        key: what all entries have in common.
        lines: the text, with ranges such as ``{0..17}`` where the entries differ.
        count: how many entries it stands for.
    """

    key: Key
    lines: tuple[str, ...]
    count: int


def fold(entries: Iterable[tuple[Key, Sequence[str]]]) -> list[Folded[Key]]:
    """Fold entries that have the same key and whose lines differ only in numbers that count layers.

    >>> [f.lines[0] for f in fold([(0, ["layers.0.w"]), (0, ["layers.1.w"]), (0, ["norm.w"])])]
    ['layers.{0..1}.w', 'norm.w']

    Args:
        entries: for each entry a key, which must be equal for entries to be folded, and its lines.
    """
    groups: dict[tuple[Key, tuple[str, ...]], list[tuple[str, ...]]] = {}
    for key, lines in entries:
        pieces = _NUMBER.split(
            _BETWEEN.join(map(one_line, lines))
        )  # text, number, text, ...: one search, as there may be 50,000 entries
        groups.setdefault((key, tuple(pieces[::2])), []).append(tuple(pieces[1::2]))
    return [folded for (key, texts), group in groups.items() for folded in _fold_group(key, texts, group)]


def _fold_group(key: Key, texts: tuple[str, ...], group: list[tuple[str, ...]]) -> list[Folded[Key]]:
    """Fold entries with the same texts, which differ in the numbers between them."""
    columns = list(zip(*group, strict=True))
    varying = [len(set(column)) > 1 for column in columns]
    axes = set(itertools.compress(columns, varying))  # columns that are equal count the same thing
    if len(group) == 1 or math.prod(len(set(axis)) for axis in axes) != len(group):
        return [Folded(key, _lines(texts, numbers), 1) for numbers in group]
    numbers = [
        _range(map(int, column)) if varies else column[0] for column, varies in zip(columns, varying, strict=True)
    ]
    return [Folded(key, _lines(texts, numbers), len(group))]


def _lines(texts: Sequence[str], numbers: Sequence[str]) -> tuple[str, ...]:
    between = itertools.zip_longest(texts, numbers, fillvalue="")
    return tuple("".join(itertools.chain.from_iterable(between)).split(_BETWEEN))


def _range(values: Iterable[int]) -> str:
    """Write numbers as ranges: ``{0..4,6}``."""
    runs: list[list[int]] = []
    for value in sorted(set(values)):
        if runs and value == runs[-1][1] + 1:
            runs[-1][1] = value
        else:
            runs.append([value, value])
    return "{" + ",".join(f"{a}" if a == b else f"{a}..{b}" for a, b in runs) + "}"
