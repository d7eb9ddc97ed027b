"""The other ways to make some tensors, each run with fresh weights and inputs.

A unit that is zero for every row of the first run leaves all ways to take it the same there; the next draw has others.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from convert.inference.derivation import Grade, Part, Tensor

Array = np.ndarray[Any, np.dtype[Any]]


def numbers_of_ways(tensors: Sequence[Tensor]) -> list[int]:
    """Return the numbers of the other ways, each once."""
    return list(dict.fromkeys(way for tensor in tensors for way in tensor.alternatives))


def in_ways(tensors: Sequence[Tensor], ways: Collection[int]) -> list[Tensor]:
    """Return the tensors as other ways make them: the parts follow those in whose place they stand, as `proof.weights` reads them.

    Args:
        ways: of which no two change the same tensor.
    """
    others = [[part for way in ways for part in tensor.alternatives.get(way, ())] for tensor in tensors]
    return [replace(tensor, parts=(*tensor.parts, *of)) for tensor, of in zip(tensors, others, strict=True)]


def in_right_ways(
    tensors: Sequence[Tensor],
    errors_of: Callable[[Sequence[Tensor]], list[float]],
    errors: list[float],
    allowed: float,
) -> tuple[tuple[Tensor, ...], list[float]] | None:
    """Return the tensors with the other ways in place of those that fresh draws refute, and the errors that are left; None where no way is right.

    Args:
        tensors: that give the outputs of the first draw alone.
        errors_of: of the outputs of fresh draws.
        errors: of `tensors`.
        allowed: up to which outputs are equal.
    """
    right = tuple(tensors)
    for way in numbers_of_ways(tensors):
        made = in_other_way(right, way)
        if max(now := errors_of(made)) < max(errors):
            right, errors = made, now
        if max(errors) <= allowed:
            return right, errors
    return None


def in_other_way(tensors: Sequence[Tensor], way: int) -> tuple[Tensor, ...]:
    """Return the tensors as another way makes them; the way that they had is another one then."""
    return tuple(_taken(tensor, way) for tensor in tensors)


def _taken(tensor: Tensor, way: int) -> Tensor:
    """Return a tensor as another way makes it; the way that it had is another one then."""
    if way not in tensor.alternatives:
        return tensor
    taken = tensor.alternatives[way]
    elements = np.concatenate([part.elements for part in taken])
    kept = [some_of(part, ~np.isin(part.elements, elements)) for part in tensor.parts]
    left = tuple(some_of(part, np.isin(part.elements, elements)) for part in tensor.parts)
    parts = sorted((p for p in (*kept, *taken) if len(p.elements)), key=lambda part: int(part.elements.min()))
    before = tuple(part for part in left if len(part.elements))
    return replace(tensor, parts=tuple(parts), alternatives={**tensor.alternatives, way: before})


def some_of(part: Part, chosen: Array) -> Part:
    """Return a part for some of its elements; `chosen` are their places, or says which."""
    values = part.values if part.values is None else part.values[chosen]
    positions = part.positions[chosen] if len(part.positions) else part.positions
    terms = tuple((leaf, at[chosen]) for leaf, at in part.terms)
    return replace(part, elements=part.elements[chosen], positions=positions, values=values, terms=terms)


def with_ways_that_hold(tensors: Sequence[Tensor], holds: Callable[[Sequence[Tensor]], bool]) -> tuple[Tensor, ...]:
    """Return the tensors with the other ways that hold; those that are left without one are derived.

    Args:
        tensors: that hold themselves.
        holds: whether tensors give the outputs of fresh draws.
    """
    kept = {way for ways in _apart(tensors) for way in _that_hold(tensors, ways, holds)}
    return tuple(_with_ways(tensor, kept) for tensor in tensors)


def _apart(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Return the numbers of the other ways in groups of which no two change the same tensor: one run shows a whole group."""
    groups: list[tuple[list[int], set[str]]] = []
    for way in numbers_of_ways(tensors):
        changed = {tensor.name for tensor in tensors if way in tensor.alternatives}
        ways, names = next((group for group in groups if group[1].isdisjoint(changed)), ([], set()))
        if not ways:
            groups.append((ways, names))
        ways.append(way)
        names |= changed
    return [ways for ways, _ in groups]


def _that_hold(tensors: Sequence[Tensor], ways: Sequence[int], holds: Callable[[Sequence[Tensor]], bool]) -> list[int]:
    """Return the ways that hold, together with each other: halves of them are tried where all do not."""
    if not ways or holds(in_ways(tensors, ways)):
        return list(ways)
    half = len(ways) // 2
    halves = (ways[:half], ways[half:]) if half else ()
    return [way for part in halves for way in _that_hold(tensors, part, holds)]


def _with_ways(tensor: Tensor, kept: set[int]) -> Tensor:
    if not tensor.alternatives:  # interchangeable ones without another way have elements that no output shows
        return tensor
    alternatives = {way: parts for way, parts in tensor.alternatives.items() if way in kept}
    derived = tensor.grade is Grade.INTERCHANGEABLE and not alternatives and not tensor.unseen
    return replace(tensor, grade=Grade.DERIVED if derived else tensor.grade, alternatives=alternatives)
