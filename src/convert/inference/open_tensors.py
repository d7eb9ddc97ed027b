"""What an open tensor may be made of, in words: the summary and the file say the same."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import combinations
from math import prod

from convert.inference.derivation import Derivation, Grade, Tensor

Shape = Sequence[int]
NOT_PROVEN = "the search ended before it was proven"
LISTED = 8  # leaves
STACKED = 2  # axes that a leaf may be stacked along, such as layers and queries, keys and values


def is_candidate(tensor: Shape, leaf: Shape, tensors: int) -> bool:
    """Whether a leaf, or one part of it, has the size of a tensor.

    >>> is_candidate((5, 3), (2, 15), 1), is_candidate((5, 3), (2, 15), 2)
    (False, True)

    Args:
        tensors: how many tensors of this shape the target has: a stack has no more parts than these.
    """
    stacked = stacked_along(tensor, leaf)
    return prod(leaf) == prod(tensor) or (bool(stacked) and prod(leaf[axis] for axis in stacked) <= tensors)


def stacked_along(tensor: Shape, leaf: Shape) -> tuple[int, ...]:
    """Return the axes along which a leaf has parts of the size of a tensor; those that leave its shape come first, then the first ones.

    >>> stacked_along((1, 1, 5), (3, 4, 5)), stacked_along((5, 3), (5, 3)), stacked_along((5, 3), (3, 7))
    ((0, 1), (), ())
    """
    size, wanted = prod(tensor), lengths(tensor)
    if size < 2 or prod(leaf) == size:  # any leaf has parts of one number
        return ()
    ways = (axes for count in range(1, STACKED + 1) for axes in combinations(range(len(leaf)), count))
    fitting = [axes for axes in ways if size * prod(leaf[axis] for axis in axes) == prod(leaf)]
    return min(fitting, key=lambda axes: (lengths(_left(leaf, axes)) != wanted, axes), default=())


def rest(tensor: Shape, leaf: Shape) -> list[int]:
    """Return the lengths of a leaf's part, or of the whole leaf."""
    return lengths(_left(leaf, stacked_along(tensor, leaf)))


def lengths(shape: Shape) -> list[int]:
    """Return the sizes of a shape in order, without the ones."""
    return sorted(size for size in shape if size > 1)


def _left(leaf: Shape, axes: Collection[int]) -> list[int]:
    return [size for axis, size in enumerate(leaf) if axis not in axes]


def part_of(tensor: Shape, leaf: Shape) -> str:
    """Say which part of a leaf has the size of a tensor; empty where it is the whole leaf, or none is known.

    >>> part_of((1, 1, 5), (3, 4, 5)), part_of((5,), (3, 5)), part_of((5,), (5,))
    ('one part of axes 0 and 1', 'one part of axis 0', '')
    """
    axes = stacked_along(tensor, leaf)
    many = "axes" if len(axes) > 1 else "axis"
    return f"one part of {many} {' and '.join(map(str, axes))}" if axes else ""


def may_be_made_of(tensor: Tensor, derivation: Derivation) -> str:
    """Say what an open tensor may be made of; leaves and parts of its size are alternatives, unless the nearest guess has parts of several."""
    names, leaves = tensor.candidates or tensor.nearest, derivation.leaves
    if tensor.unread or not names:
        return tensor.lack
    parts = {name: part_of(tensor.shape, leaves.get(name, ())) for name in names}
    of_its_size = all(parts[name] or prod(leaves.get(name, ())) == prod(tensor.shape) for name in names)
    guessed = {part.leaf for part in tensor.parts}
    several = len(names) > 1 and len(guessed) < 2 and of_its_size
    kinds = "leaves or parts of leaves" if any(parts.values()) else "leaves"
    which = f"any of {len(names)} {kinds} of its size, which nothing tells apart so far: " if several else ""
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    said = f"may be made of {which}{_listed(names[:LISTED], parts)}{more}"
    return f"{said}; {NOT_PROVEN}" if tensor.nearest and derivation.differences and not several else said


def _listed(names: Sequence[str], parts: Mapping[str, str]) -> str:
    """List leaves, those of which it is the same part together."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(parts[name], []).append(name)
    return "; ".join(f"{part} of {', '.join(of)}" if part else ", ".join(of) for part, of in groups.items())


def equal_widths(derivation: Derivation) -> int:
    """Return how many leaves that are open in whole or in part have two axes of one size: other widths would tell more ways apart."""
    claimed = (part for t in derivation.tensors if t.grade is not Grade.OPEN for part in t.parts if part.leaf)
    known: dict[str, int] = {}
    for part in claimed:
        known[part.leaf] = known.get(part.leaf, 0) + len(part.elements)
    return sum(known.get(leaf, 0) < prod(shape) and _has_equal(shape) for leaf, shape in derivation.leaves.items())


def _has_equal(shape: Shape) -> bool:
    return len(lengths(shape)) > len({*lengths(shape)})


def by_likeness(tensor: Shape, leaves: Mapping[str, Shape], begun: Collection[str]) -> Iterator[str]:
    """Yield leaves in the order in which they are offered: those of the tensor's shape first, and of these such of which another part was found.

    Args:
        begun: leaves of which a part was found.
    """
    wanted = lengths(tensor)
    yield from sorted(leaves, key=lambda name: (rest(tensor, leaves[name]) != wanted, name not in begun))
