"""The other ways to make some tensors, each run with fresh weights and inputs.

A unit that is zero for every row of the first run leaves all ways to take it the same there; the next draw has others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from convert.inference.derivation import Grade, Part, Tensor

Array = np.ndarray[Any, np.dtype[Any]]


def numbers_of_ways(tensors: Sequence[Tensor]) -> list[int]:
    """Return the numbers of the other ways, each once."""
    return list(dict.fromkeys(way for tensor in tensors for way in tensor.alternatives))


def in_way(tensors: Sequence[Tensor], way: int) -> list[Tensor]:
    """Return the tensors as another way makes them: its parts follow those in whose place they stand, as `proof.weights` reads them."""
    return [replace(tensor, parts=(*tensor.parts, *tensor.alternatives.get(way, ()))) for tensor in tensors]


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
        made = tuple(_taken(tensor, way) for tensor in right)
        if max(now := errors_of(made)) < max(errors):
            right, errors = made, now
        if max(errors) <= allowed:
            return right, errors
    return None


def _taken(tensor: Tensor, way: int) -> Tensor:
    """Return a tensor as another way makes it; the way that it had is another one then."""
    if way not in tensor.alternatives:
        return tensor
    taken = tensor.alternatives[way]
    elements = np.concatenate([part.elements for part in taken])
    kept = [_some(part, ~np.isin(part.elements, elements)) for part in tensor.parts]
    left = tuple(_some(part, np.isin(part.elements, elements)) for part in tensor.parts)
    parts = sorted((p for p in (*kept, *taken) if len(p.elements)), key=lambda part: int(part.elements.min()))
    before = tuple(part for part in left if len(part.elements))
    return replace(tensor, parts=tuple(parts), alternatives={**tensor.alternatives, way: before})


def _some(part: Part, chosen: Array) -> Part:
    """Return a part for some of its elements."""
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
    kept = {way for way in numbers_of_ways(tensors) if holds(in_way(tensors, way))}
    return tuple(_with_ways(tensor, kept) for tensor in tensors)


def _with_ways(tensor: Tensor, kept: set[int]) -> Tensor:
    if not tensor.alternatives:  # interchangeable ones without another way have elements that no output shows
        return tensor
    alternatives = {way: parts for way, parts in tensor.alternatives.items() if way in kept}
    derived = tensor.grade is Grade.INTERCHANGEABLE and not alternatives and not tensor.unseen
    return replace(tensor, grade=Grade.DERIVED if derived else tensor.grade, alternatives=alternatives)
