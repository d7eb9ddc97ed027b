"""Tensors that are made of several leaves: in turns, side by side, or one below another, which is the form that rules describe."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from convert.inference.derivation import Role, Tensor

Array = np.ndarray[Any, np.dtype[Any]]


def in_turns(tensor: Tensor) -> tuple[int, ...] | None:
    """Return how many rows each leaf has of each head or group, if the leaves lie in the rows in turns; None if they do not."""
    row = int(np.prod(tensor.shape[1:]))
    rows = [np.unique(part.elements // row) for part in sorted(tensor.parts, key=lambda part: int(part.elements.min()))]
    if len(rows) < 2 or len(np.unique(rows[0])) == 1 or not (np.diff(rows[0]) > 1).any():
        return None
    widths = [int(np.append(np.flatnonzero(np.diff(of) > 1), len(of) - 1)[0]) + 1 for of in rows]
    groups, rest = divmod(len(rows[0]), widths[0])
    if rest or any(len(of) != groups * width for of, width in zip(rows, widths, strict=True)):
        return None
    every = np.split(np.arange(groups * sum(widths)).reshape(groups, -1), np.cumsum(widths)[:-1], axis=1)
    same = all(np.array_equal(found, wanted.ravel()) for found, wanted in zip(rows, every, strict=True))
    return tuple(widths) if same else None


def below_each_other(tensor: Tensor, widths: Sequence[int]) -> Tensor:
    """Return a tensor whose leaves lie in turns with its leaves below each other."""
    row = int(np.prod(tensor.shape[1:]))
    turns = np.arange(int(np.prod(tensor.shape))).reshape(-1, sum(widths), row)
    moved = np.concatenate([of.ravel() for of in np.split(turns, np.cumsum(widths)[:-1], axis=1)])
    place = np.argsort(moved)
    return replace(tensor, parts=tuple(replace(part, elements=place[part.elements]) for part in tensor.parts))


def side_by_side(tensor: Tensor) -> tuple[int, int] | None:
    """Return how many leaves stand side by side in a tensor, each as wide, and along which axis: the last, or that of a kernel's inputs; None if they do not."""
    leaves: dict[str, list[Array]] = {}
    for part in tensor.parts:
        leaves.setdefault(part.leaf, []).append(part.elements)
    if len(leaves) == 1 and len(tensor.shape) > 2:  # the taps of a kernel, found one by one
        return None
    whole = [np.concatenate(of) for of in leaves.values()]  # of a leaf that was found head by head
    ways = ((axis, of) for axis in _columns_of(tensor) for of in ([part.elements for part in tensor.parts], whole))
    return next(((len(of), axis) for axis, of in ways if _are_beside(tensor, axis, of)), None)


def _columns_of(tensor: Tensor) -> tuple[int, ...]:
    """Return the axes along which leaves may stand side by side."""
    last = len(tensor.shape) - 1
    return () if last < 1 else (1,) if last == 1 else (last, 1)


def _are_beside(tensor: Tensor, axis: int, blocks: list[Array]) -> bool:
    count = len(blocks)
    if count < 2 or tensor.shape[axis] % count:
        return False
    blocks = sorted(blocks, key=lambda elements: int(elements.min()))
    wanted = np.split(_rows_and_columns(tensor, axis), count, axis=1)
    return all(np.array_equal(np.sort(x), y.ravel()) for x, y in zip(blocks, wanted, strict=True))


def _rows_and_columns(tensor: Tensor, axis: int) -> Array:
    """Return the positions of a tensor's elements as a matrix, whose columns are the elements of an axis and of those behind it."""
    return np.arange(math.prod(tensor.shape)).reshape(math.prod(tensor.shape[:axis]), -1)


def alternating(tensor: Tensor) -> int:
    """Return how many leaves alternate one by one along the last axis of a table; 0 if they do not."""
    leaves = sorted(tensor.parts, key=lambda part: int(part.elements.min()))
    if len(tensor.shape) < 2 or len(leaves) < 2 or leaves[0].evidence.role is not Role.LOOKUP:
        return 0
    places = np.arange(int(np.prod(tensor.shape))).reshape(-1, tensor.shape[-1])
    wanted = [places[:, k :: len(leaves)].ravel() for k in range(len(leaves))]
    same = all(np.array_equal(np.sort(part.elements), of) for part, of in zip(leaves, wanted, strict=True))
    return len(leaves) if same else 0


def in_columns(tensor: Tensor) -> list[Tensor]:
    """Return the columns of a matrix, or the inputs of a kernel, that each of several leaves is, if they stand side by side; none if they do not."""
    if len(tensor.shape) < 2 or len({part.leaf for part in tensor.parts}) < max(len(tensor.parts), 2):
        return []
    rows, size, *taps = tensor.shape
    width = size * math.prod(taps)
    found, start = [], 0
    for part in sorted(tensor.parts, key=lambda part: int(part.elements.min())):
        count = len(part.elements) // rows
        places = _rows_and_columns(tensor, 1)[:, start : start + count]
        if count % math.prod(taps) or not np.array_equal(np.sort(part.elements), places.ravel()):
            return []
        elements = part.elements // width * count + part.elements % width - start
        shape = (rows, count // math.prod(taps), *taps)
        found.append(replace(tensor, shape=shape, parts=(replace(part, elements=elements),)))
        start += count
    return found if start == width else []


def one_below_another(tensor: Tensor, count: int, axis: int = -1, *, alternate: bool = False) -> Tensor:
    """Return a tensor whose leaves stand side by side, or alternate along the last axis, with its leaves below each other."""
    axis %= len(tensor.shape)
    first, *between = tensor.shape[: axis + 1]
    blocks = np.arange(math.prod(tensor.shape)).reshape(count, math.prod(tensor.shape[:axis]), -1)
    place = (np.moveaxis(blocks, 0, -1) if alternate else blocks.swapaxes(0, 1)).ravel()
    parts = tuple(replace(part, elements=place[part.elements]) for part in tensor.parts)
    shape = (count * first, *between[:-1], between[-1] // count, *tensor.shape[axis + 1 :])
    return replace(tensor, shape=shape, parts=parts)


def by_parts(tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Return the tensors of a layer for each part of the first one, which is a block of its rows; none where the others have other blocks."""
    first, found = next(iter(tensors.values())), []
    width = int(np.prod(first.shape[1:]))
    for part in sorted(first.parts, key=lambda part: int(part.elements.min())):
        start, count = int(part.elements.min()) // width, len(part.elements) // width
        block = {role: _rows(tensor, start, count) for role, tensor in tensors.items()}
        if any(sum(len(p.elements) for p in t.parts) != np.prod(t.shape) or len(t.parts) > 1 for t in block.values()):
            return []
        found.append(block)
    return found


def _rows(tensor: Tensor, start: int, count: int) -> Tensor:
    """Return some rows of a tensor."""
    width = int(np.prod(tensor.shape[1:]))
    parts = []
    for part in tensor.parts:
        here = part.elements // width - start
        kept = (here >= 0) & (here < count)
        positions = part.positions[kept] if len(part.positions) else part.positions
        elements = part.elements[kept] - start * width
        parts += [replace(part, elements=elements, positions=positions)] if kept.any() else []
    return replace(tensor, shape=(count, *tensor.shape[1:]), parts=tuple(parts))
