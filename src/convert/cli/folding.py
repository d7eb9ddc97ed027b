"""Fold texts that differ only in numbers: ``layers.{0..17}.norm.weight`` in place of eighteen lines."""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

_NUMBER = re.compile(r"\d+")


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
        groups.setdefault((key, tuple(_NUMBER.sub("#", line) for line in lines)), []).append(tuple(lines))
    return [folded for (key, _), group in groups.items() for folded in _fold_group(key, group)]


def _fold_group(key: Key, group: list[tuple[str, ...]]) -> list[Folded[Key]]:
    numbers = [[int(n) for line in lines for n in _NUMBER.findall(line)] for lines in group]
    columns = list(zip(*numbers, strict=True))
    varying = [column for column in columns if len(set(column)) > 1]
    axes = list(dict.fromkeys(varying))  # columns that are equal count the same thing
    if len(group) == 1 or math.prod(len(set(axis)) for axis in axes) != len(group):
        return [Folded(key, lines, 1) for lines in group]
    replacements = iter(_range(column) if len(set(column)) > 1 else None for column in columns)
    lines = tuple(_NUMBER.sub(lambda m: next(replacements) or m[0], line) for line in group[0])
    return [Folded(key, lines, len(group))]


def _range(values: Iterable[int]) -> str:
    """Write numbers as ranges: ``{0..4,6}``."""
    runs: list[list[int]] = []
    for value in sorted(set(values)):
        if runs and value == runs[-1][1] + 1:
            runs[-1][1] = value
        else:
            runs.append([value, value])
    return "{" + ",".join(f"{a}" if a == b else f"{a}..{b}" for a, b in runs) + "}"
