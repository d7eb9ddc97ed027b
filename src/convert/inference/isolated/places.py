"""Where a part of a leaf may lie: in which tensor, in which rows of it, in which order."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from enum import StrEnum
from math import prod
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
Place = tuple[Any, ...]  # an index of an array
HIDDEN = -1  # stands for the number of an element that is not known
OTHER = -2  # the same, of an element that has a second number for a while
MOST_BLOCKS = 16  # that a tensor or a leaf is cut into


class Fills(StrEnum):
    """What of a tensor a part of a leaf fills; what is most usual is first."""

    ALL = "all of it"
    ROWS = "rows that follow one another, or columns"
    HEADS = "as many rows of each head"


def places(size: int, tensors: Mapping[str, Array], fills: Fills) -> Iterator[tuple[str, Place]]:
    """Yield (tensor, where in it) for tensors that have room for a part of a leaf.

    Args:
        size: how many elements the part has.
        tensors: for each element the number of the leaf's element, or `HIDDEN`.
        fills: what the part fills.
    """
    for name, known in tensors.items():
        if (known.size == size) is not (fills is Fills.ALL):
            continue
        in_heads = fills is Fills.HEADS
        for axis, rows in [(0, slice(None))] if fills is Fills.ALL else blocks(known.shape, size, in_heads=in_heads):
            place = (*(slice(None),) * axis, rows) if known.ndim else ()
            if (known[place] == HIDDEN).all():
                yield name, place


def cuts(leaf: Array, sizes: Sequence[int]) -> Iterator[Sequence[Array]]:
    """Yield the ways to cut a leaf into equal parts of one of these sizes: along one of its axes, or each of a stack along another.

    The fewest parts are first.
    """
    for size in sorted({n for n in sizes if 0 < n < leaf.size and leaf.size % n == 0}, reverse=True):
        count = leaf.size // size
        yield from _along_one(leaf, count)
        for stack in range(leaf.ndim):
            layers = leaf.shape[stack]
            if 1 < layers < count and count % layers == 0:
                each = [list(_along_one(layer, count // layers)) for layer in np.split(leaf, layers, stack)]
                yield from ([part for cut in ways for part in cut] for ways in zip(*each, strict=True))


def _along_one(leaf: Array, count: int) -> Iterator[Sequence[Array]]:
    if count <= MOST_BLOCKS:
        for axis in (k for k in range(leaf.ndim) if leaf.shape[k] % count == 0):
            yield np.split(leaf, count, axis)


def blocks(shape: Sequence[int], size: int, *, in_heads: bool) -> Iterator[tuple[int, list[int]]]:
    """Yield (axis, its rows) of the blocks of an array that have so many elements: rows that follow one another, or as many of each head.

    >>> list(blocks((4, 3), 6, in_heads=False))
    [(0, [0, 1]), (0, [2, 3])]
    >>> list(blocks((4, 3), 6, in_heads=True))
    [(0, [0, 2]), (0, [1, 3])]
    """
    total = prod(shape)
    if not size < total <= size * MOST_BLOCKS:
        return
    for axis, length in enumerate(shape):
        for heads in (k for k in range(2 if in_heads else 1, length if in_heads else 2) if length % k == 0):
            each, rest = divmod(size * length, total * heads)
            rows = np.arange(length).reshape(heads, -1)
            if each and not rest:
                for first in dict.fromkeys((*range(0, length // heads - each + 1, each), length // heads - each)):
                    yield axis, rows[:, first : first + each].ravel().tolist()


def layouts(numbers: Array, sizes: Collection[int] = (), *, kernel: bool = False) -> Iterator[Array]:
    """Yield the elements of a part of a leaf in each order that a layout may give them, the most usual first.

    These are the orders of the leaf's axes, then those in which axes of space run backwards, then those in which an axis is two: heads
    and their features, or three: the two axes of channels and that of space of a kernel.

    Args:
        numbers: of the elements.
        kernel: whether the tensor may be a kernel with axes of space; the order of heads is never turned.
        sizes: those that an axis may have of which another axis is made; for two axes, all are tried.

    >>> [order.tolist() for order in layouts(np.array([[0, 1], [2, 3]]))]
    [[0, 2, 1, 3], [0, 1, 2, 3]]
    """
    seen: set[bytes] = set()
    for order in itertools.chain(
        _orders(numbers), _backwards(numbers) if kernel else (), _split(numbers), _split_in_three(numbers, sizes)
    ):
        flat = np.ascontiguousarray(order).ravel()
        if flat.tobytes() not in seen:
            seen.add(flat.tobytes())
            yield flat


def _orders(numbers: Array) -> Iterator[Array]:
    """Yield each order of the axes; first that in which the last axis, of what a layer gives, stands in front."""
    numbers = numbers.squeeze()
    axes = range(numbers.ndim)
    for order in dict.fromkeys((tuple(reversed(axes)), tuple(axes), *itertools.permutations(axes))):
        yield numbers.transpose(order)


def _backwards(numbers: Array) -> Iterator[Array]:
    numbers = numbers.squeeze()
    for count in range(1, numbers.ndim - 1):
        for axes in itertools.combinations(range(numbers.ndim), count):
            yield from _orders(np.flip(numbers, axes))


def _split(numbers: Array) -> Iterator[Array]:
    """Yield the orders of a matrix or a vector one of whose axes is two."""
    numbers = numbers.squeeze()
    if numbers.ndim > 2:
        return
    for axis, size in enumerate(numbers.shape):
        for first in (k for k in range(2, size) if size % k == 0):
            split = numbers.reshape(*numbers.shape[:axis], first, size // first, *numbers.shape[axis + 1 :])
            yield from _orders(split.swapaxes(axis, axis + 1).reshape(numbers.shape))


def _split_in_three(numbers: Array, sizes: Collection[int]) -> Iterator[Array]:
    numbers = numbers.squeeze()
    if numbers.ndim > 2:
        return
    grown = {one * other for one in sizes for other in (1, one)} - {0, 1}
    for axis, size in enumerate(numbers.shape):
        for first, second in itertools.product(sorted(grown), repeat=2):
            if size % (first * second) == 0 and size // (first * second) in grown:
                parts = numbers.reshape(*numbers.shape[:axis], first, second, -1, *numbers.shape[axis + 1 :])
                for order in itertools.permutations(range(axis, axis + 3)):
                    moved = parts.transpose(*range(axis), *order, *range(axis + 3, parts.ndim))
                    yield from _orders(moved.reshape(numbers.shape))
