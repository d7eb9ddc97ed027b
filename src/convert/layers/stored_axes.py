"""How probes take apart composite axes, and the axes of a target tensor. Nothing of the plan's operations is used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from convert.core.axis_groups import AxisGroup
from convert.core.ops import Take
from convert.layers.base import ProbeSample

Array = np.ndarray[Any, np.dtype[Any]]


def taken(sample: ProbeSample) -> dict[str, int]:
    """Return the axes of which the tensor has one element, and the element that its operations take."""
    part = sample.part
    takes = [op.index for op in part.ops[len(sample.rule.stacked) : part.opening] if isinstance(op, Take)]
    return dict(zip(part.taken, takes, strict=True))


def positions(letter: str, size: int, groups: Mapping[str, AxisGroup], sample: ProbeSample) -> tuple[Array, str]:
    """Return which elements of a stored axis the tensor has, with one axis for each letter, and the letters."""
    group, sizes, elements = groups.get(letter), sample.plan.sizes, taken(sample)
    places, letters = np.arange(size), letter
    if group is not None and group.letters is not None:
        letters = group.letters
        lengths = [int(np.prod([sizes[x] for x in part])) for part in group.parts]
        start = sum(lengths[: group.chosen or 0])
        outer = int(np.prod([sizes[x] for x in group.before]))
        all_parts = places.reshape(outer, sum(lengths), -1)
        places = all_parts[:, start : start + lengths[group.chosen or 0]].reshape([sizes[x] for x in letters])
    for x in [x for x in letters if x in elements]:
        places, letters = np.take(places, elements[x], letters.index(x)), letters.replace(x, "")
    return places, letters


def taken_apart(y: Array, axes: str, groups: Mapping[str, AxisGroup], sample: ProbeSample) -> tuple[Array, str]:
    """Take from a value of the source what belongs to the tensor, and return it with the letters of its axes."""
    letters = ""
    for letter in axes:
        places, more = positions(letter, y.shape[len(letters)], groups, sample)
        y = np.take(y, places, len(letters))
        letters += more
    return y, letters


def with_axes(y: Array, axes: Sequence[str], order: Sequence[str], sizes: Mapping[str, int]) -> Array:
    """Return an array with other axes.

    Args:
        axes: letters of each of its axes.
        order: letters of each axis of the result; letters that `axes` has not are axes of size 1.
        sizes: of the letters.
    """
    wanted, given = "".join(order), "".join(axes)
    apart = y.reshape([sizes[x] for x in given])
    apart = apart.reshape([*apart.shape, *[1] * sum(x not in given for x in wanted)])
    letters = given + "".join(x for x in wanted if x not in given)
    moved = apart.transpose([letters.index(x) for x in wanted])
    return moved.reshape([int(np.prod([sizes[x] for x in group])) for group in order])
