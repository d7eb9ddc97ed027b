"""Layers, experts and other numbered modules that hold what belongs to another number."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

LAYERS = frozenset(
    (
        "layers",
        "layer",
        "blocks",
        "block",
        "h",
        "stages",
        "stage",
        "cells",
        "resblocks",
        "units",
        "encoders",
        "decoders",
    )
)


@dataclass(frozen=True)
class Move:
    """One number of a tensor's name, and the number whose values the tensor holds.

    Attributes:
        place: the name up to the number, earlier numbers included: ``blocks.2.moe.experts``.
        here: the number.
        of: the number whose values it holds.
    """

    place: str
    here: int
    of: int

    @property
    def template(self) -> str:
        """The place without its numbers: ``blocks.#.moe.experts``."""
        return without_numbers(self.place)

    @property
    def word(self) -> str:
        """What is numbered: ``expert``; a layer, unless the name says otherwise."""
        word = self.place.rpartition(".")[2]
        return word[:-1] if len(word) > 2 and word.endswith("s") and word not in LAYERS and word.isalpha() else "layer"


def find_move(name: str, other: str) -> Move | None:
    """Return the number in which the names of two tensors differ; None if they differ in more, or in words.

    >>> find_move("blocks.2.moe.experts.1.up.weight", "blocks.2.moe.experts.3.up.weight")
    Move(place='blocks.2.moe.experts', here=1, of=3)
    """
    ours, theirs = name.split("."), other.split(".")
    if len(ours) != len(theirs):
        return None
    differ = [k for k, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b]
    if len(differ) != 1 or not (ours[differ[0]].isdecimal() and theirs[differ[0]].isdecimal()):
        return None
    (k,) = differ
    return Move(".".join(ours[:k]), int(ours[k]), int(theirs[k]))


def find_word_move(name: str, other: str) -> tuple[str, str, str] | None:
    """Return the place without its numbers, the word and the other's word, where two names differ in one word.

    >>> find_word_move("layer.1.self.query.weight", "layer.1.self.key.weight")
    ('layer.#.self', 'query', 'key')
    """
    ours, theirs = name.split("."), other.split(".")
    differ = [k for k, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b]
    if len(ours) != len(theirs) or len(differ) != 1 or ours[differ[0]].isdecimal() or theirs[differ[0]].isdecimal():
        return None
    (k,) = differ
    return without_numbers(".".join(ours[:k])), ours[k], theirs[k]


def without_numbers(name: str) -> str:
    """Replace the numbers of a name.

    >>> without_numbers("blocks.2.moe.experts.1.up")
    'blocks.#.moe.experts.#.up'
    """
    return ".".join("#" if part.isdecimal() else part for part in name.split("."))


def sources_of(moves: Iterable[Move]) -> dict[int, int] | None:
    """Return which number holds the values of which; None if two tensors of a number have different ones."""
    found: dict[int, int] = {}
    for move in moves:
        if found.setdefault(move.here, move.of) != move.of:
            return None
    return found


def order_of(sources: Mapping[int, int]) -> tuple[int, ...] | None:
    """Return the numbers as a permutation of all numbers from 0; None if some occur twice."""
    if sorted(sources) != sorted(sources.values()):
        return None
    return tuple(sources.get(k, k) for k in range(max(sources) + 1))
