"""The axes of a leaf and of a tensor: their letters, and the operations that move the ones to the others."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import lru_cache

from convert.core.ops import Op, Permute, Reshape, Take
from convert.layers import TargetLayer


def group_shown(letters: str) -> str:
    """Format the letters that are flattened into one axis, in einops notation."""
    return letters if len(letters) == 1 else f"({' '.join(letters)})" if letters else "1"


@lru_cache(maxsize=4096)
def movement(letters: str, shape: tuple[int, ...], groups: tuple[str, ...]) -> tuple[Op, ...]:
    """Permute axes called `letters` into `groups`, each flattened into one axis; axes of no group have size 1 and are removed."""
    ops: list[Op] = []
    kept = "".join(groups)
    for axis in reversed(range(len(letters))):
        if letters[axis] not in kept:
            ops.append(Take(axis, 0))
    left = [(letter, size) for letter, size in zip(letters, shape, strict=True) if letter in kept]
    order = tuple("".join(letter for letter, _ in left).index(letter) for letter in kept)
    if order != tuple(range(len(order))):
        ops.append(Permute(order))
    sizes = dict(left)
    moved = tuple(sizes[letter] for letter in kept)
    flat = tuple(math.prod(sizes[letter] for letter in group) for group in groups)
    if flat != moved:
        ops.append(Reshape(flat))
    return tuple(ops)


def target_axes(
    layer: TargetLayer, role: str, letters: str, shape: tuple[int, ...], groups: tuple[str, ...]
) -> tuple[str, ...]:
    """Return the letters of each axis of the target tensor, by the `axes` of the target where it has them.

    Args:
        letters, shape: of the leaf.
        groups: the axes that the kind of layer gives the tensor.

    Raises:
        ValueError: the target leaves out an axis that has more than one element.
    """
    if layer.axes is None:
        return groups
    named = "".join(layer.axes)
    if role != "weight":  # a bias has the axes of the result, in the weight's order
        made = tuple(filter(None, ("".join(x for x in axis if x in "".join(groups)) for axis in layer.axes)))
        return made if made or layer.piece is None else ("",)  # one row among those of other leaves
    lost = [(x, size) for x, size in zip(letters, shape, strict=True) if x not in named and size != 1]
    if lost:
        raise ValueError(f"{lost[0][0]} has {lost[0][1]} elements, and the target's axes {axes_shown(layer.axes)} leave it out")  # fmt: skip
    return layer.axes


def axes_shown(axes: Iterable[str]) -> str:
    """Write the axes of a target as einops does."""
    return " ".join(map(group_shown, axes))


def taken_out(stacked: Iterable[tuple[str, int, int]], stack: Mapping[str, int]) -> list[Op]:
    """Select one element of each stacked axis."""
    return [Take(axis, stack[index]) for index, axis, _ in last_first(stacked)]


def last_first(stacked: Iterable[tuple[str, int, int]]) -> list[tuple[str, int, int]]:
    """Return stacked axes in the order in which their elements are taken: the numbers of the others stay valid."""
    return sorted(stacked, key=lambda s: -s[1])
