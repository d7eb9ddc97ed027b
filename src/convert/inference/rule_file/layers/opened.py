"""Open the axes of leaves of which tensors have runs in turns, such as ``anchors x (4 + 1)`` columns, of which one layer has 4 of each 5 and another one has the rest."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from convert.inference.derivation import Derivation, Part
from convert.inference.rule_file.layers.fused import origin
from convert.inference.rule_file.layers.layout import runs_of
from convert.inference.rule_file.layers.rule import LayerRule

Array = np.ndarray[Any, np.dtype[Any]]
Opened = Mapping[str, tuple[int, ...]]  # leaf -> how many axes each axis that is stored is opened into


def with_opened_axes(derivation: Derivation) -> tuple[Derivation, Opened]:
    """Return a derivation in which such an axis is several, as one that is [anchors, 5]; and which leaves have them."""
    sizes = {
        leaf: [_sizes(size, used) for size, used in zip(derivation.leaves[leaf], zip(*of, strict=True), strict=True)]
        for leaf, of in _used(derivation).items()
    }
    opened = {leaf: tuple(map(len, of)) for leaf, of in sizes.items() if any(len(axis) > 1 for axis in of)}
    shapes = {leaf: tuple(size for axis in sizes[leaf] for size in axis) for leaf in opened}
    tensors = (
        replace(tensor, parts=tuple(_with_axes(part, opened.get(part.leaf, ())) for part in tensor.parts))
        for tensor in derivation.tensors
    )
    return replace(derivation, leaves={**derivation.leaves, **shapes}, tensors=tuple(tensors)), opened


def _used(derivation: Derivation) -> dict[str, list[list[Array]]]:
    """Return for each leaf which elements of its axes each tensor has a part of.

    Leaves that are computed with are left out, and those of which a tensor of several leaves has runs.
    """
    found: dict[str, list[list[Array]]] = defaultdict(list)
    left_out: set[str] = set()
    for tensor in derivation.tensors:
        several = len(set(map(origin, tensor.parts))) > 1
        for leaf in dict.fromkeys(part.leaf for part in tensor.parts if derivation.leaves.get(part.leaf)):
            positions = np.concatenate([part.positions for part in tensor.parts if part.leaf == leaf])
            used = _along_axes(positions, derivation.leaves[leaf])
            found[leaf].append(used)
            left_out |= {leaf} if several and any(len(runs_of(of)) > 1 for of in used) else set()
        computed = (part for part in tensor.parts if part.term_axes or part.leaves)
        left_out |= {leaf for part in computed for leaf in (part.leaf, *part.leaves)}
    return {leaf: of for leaf, of in found.items() if leaf not in left_out}


def _along_axes(positions: Array, shape: Sequence[int]) -> list[Array]:
    """Return which elements of each axis some elements of a leaf have."""
    if len(positions) == math.prod(shape):
        return [np.arange(size) for size in shape]
    places = zip(np.unravel_index(positions, tuple(shape)), shape, strict=True)
    return [np.flatnonzero(np.bincount(of, minlength=size)) for of, size in places]


def as_stored(layer: LayerRule, opened: Opened) -> LayerRule:
    """Return a layer whose layouts know which axes of a leaf are one as it is stored."""
    sources = (
        (key, tuple(replace(s, layout=replace(s.layout, joined=opened.get(s.leaf, ()))) for s in of))
        for key, of in layer.sources
    )
    return replace(layer, sources=tuple(sources))


def _sizes(size: int, used: Sequence[Array]) -> tuple[int, ...]:
    """Return the sizes of the axes that an axis is made of, the slowest first: itself, where each tensor has one run or the runs are not in turns.

    >>> _sizes(10, [np.array([0, 1, 2, 3, 5, 6, 7, 8]), np.array([4, 9])])
    (2, 5)
    >>> _sizes(12, [np.array([0, 1, 6, 7]), np.array([2, 3, 8, 9]), np.array([4, 5, 10, 11])])
    (2, 3, 2)

    Args:
        used: the elements that each tensor has of it.
    """
    turns = {_turn(one, size) for one in used if len(one) < size}
    periods, runs = {period for period, _, _ in turns}, sorted((start, length) for _, start, length in turns)
    (period,) = periods if len(periods) == 1 else (0,)
    ends = [start + length for start, length in runs]
    if not period or [0, *ends] != [*(start for start, _ in runs), period]:
        return (size,)
    lengths = {length for _, length in runs}
    within = (period // lengths.pop(), runs[0][1]) if len(lengths) == 1 else (period,)
    return (size // period, *(n for n in within if n > 1))


def _turn(used: Array, size: int) -> tuple[int, int, int]:
    """Return after how many elements of an axis the runs of a tensor come again, where the first one starts, and its length; zeros: they are not in turns."""
    runs = np.array(runs_of(used))
    starts, lengths = runs.T
    period = int(starts[1] - starts[0]) if len(runs) > 1 else 0
    wanted = np.arange(starts[0], size, period) if period else starts[:0]
    in_turns = size % (period or 1) == 0 and np.array_equal(starts, wanted) and len(set(lengths)) == 1
    return (period, int(starts[0]), int(lengths[0])) if in_turns else (0, 0, 0)


def _with_axes(part: Part, opened: Sequence[int]) -> Part:
    """Return a part whose product sums over the axes that its axis is opened into."""
    ends = np.cumsum(opened, dtype=int)
    axes = (axis for one in part.contracted for axis in range(ends[one] - opened[one], ends[one])) if opened else ()
    return replace(part, contracted=tuple(map(int, axes)) if opened else part.contracted)
