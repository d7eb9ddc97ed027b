"""An entry of the table: facts, their source, and the sizes that they hold for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Every:
    """A list that repeats: layer k has word k modulo the length."""

    period: tuple[str, ...]

    def __str__(self) -> str:
        return f"({', '.join(self.period)}) again and again"


@dataclass(frozen=True)
class OneOf:
    """Several published values."""

    values: tuple[Any, ...]

    def __str__(self) -> str:
        return " or ".join(map(str, self.values))


@dataclass(frozen=True)
class Published:
    """Facts of a family, or of one of its sizes.

    Attributes:
        facts: by their names in the rules.
        source: where upstream states them.
        sizes: axis letters -> sizes of the models that the facts hold for; empty: all models of the family.
        binding: whether a model of these sizes with another value contradicts the source. Otherwise other models exist.
    """

    facts: Mapping[str, Any]
    source: str
    sizes: Mapping[str, int] = field(default_factory=dict)
    binding: bool = True


def by_letter(letters: str, *numbers: int) -> dict[str, int]:
    """Return the sizes of a model by the letters of its axes."""
    return dict(zip(letters, numbers, strict=True))


def without(entries: tuple[Published, ...], *names: str) -> tuple[Published, ...]:
    """Return the entries without facts that another model has otherwise."""
    return tuple(
        Published({k: v for k, v in e.facts.items() if k not in names}, e.source, e.sizes, e.binding) for e in entries
    )


def known_heads(names: tuple[str, ...], source: str, **by_width: int) -> tuple[Published, ...]:
    """Return the published numbers of heads by the width of the model, ``D768=12``."""
    return tuple(
        Published(dict.fromkeys(names, heads), source, {"D": int(width[1:])}, binding=False)
        for width, heads in by_width.items()
    )


def known_contexts(source: str, lengths: Mapping[int, int]) -> Iterator[Published]:
    """Yield the context of each number of layers; a longer one of a fine-tuned model contradicts nothing."""
    for layers, length in lengths.items():
        yield Published({"context_length": length}, source, {"i": layers}, binding=False)
