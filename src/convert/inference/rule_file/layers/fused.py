"""Tensors that are made of several leaves: in turns, side by side, or one below another, which is the form that rules describe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from convert.inference.derivation import Tensor

Array = np.ndarray[Any, np.dtype[Any]]


def in_turns(tensor: Tensor) -> tuple[int, int] | None:
    """Return how many leaves lie in the rows of a tensor head by head, and the rows of a head of one; None if they do not."""
    row = int(np.prod(tensor.shape[1:]))
    rows = [np.unique(part.elements // row) for part in sorted(tensor.parts, key=lambda part: int(part.elements.min()))]
    count, size = len(rows), len(rows[0])
    breaks = np.flatnonzero(np.diff(rows[0]) > 1)
    if count < 2 or not len(breaks) or any(len(other) != size for other in rows) or size % (breaks[0] + 1):
        return None
    head = int(breaks[0]) + 1
    every = np.arange(count * size).reshape(-1, count, head)
    same = all(np.array_equal(found, every[:, k].ravel()) for k, found in enumerate(rows))
    return (count, head) if same else None


def below_each_other(tensor: Tensor, count: int, head: int) -> Tensor:
    """Return a tensor whose leaves lie head by head with its leaves below each other."""
    row = int(np.prod(tensor.shape[1:]))
    moved = np.arange(int(np.prod(tensor.shape))).reshape(count, -1, head, row).swapaxes(0, 1).ravel()
    place = np.empty_like(moved)
    place[np.arange(len(moved))] = moved
    return replace(tensor, parts=tuple(replace(part, elements=place[part.elements]) for part in tensor.parts))


def side_by_side(tensor: Tensor) -> int:
    """Return how many leaves stand side by side along the last axis of a tensor, each as wide; 0 if they do not."""
    leaves: dict[str, list[Array]] = {}
    for part in tensor.parts:
        leaves.setdefault(part.leaf, []).append(part.elements)
    if len(leaves) == 1 and len(tensor.shape) > 2:  # the taps of a kernel, found one by one
        return 0
    whole = [np.concatenate(of) for of in leaves.values()]  # of a leaf that was found head by head
    return _beside(tensor, [part.elements for part in tensor.parts]) or _beside(tensor, whole)


def _beside(tensor: Tensor, blocks: list[Array]) -> int:
    count = len(blocks)
    if len(tensor.shape) < 2 or count < 2 or tensor.shape[-1] % count:
        return 0
    places = np.arange(int(np.prod(tensor.shape))).reshape(-1, tensor.shape[-1])
    blocks = sorted(blocks, key=lambda elements: int(elements.min()))
    wanted = np.split(places, count, axis=1)
    return count if all(np.array_equal(np.sort(x), y.ravel()) for x, y in zip(blocks, wanted, strict=True)) else 0


def in_columns(tensor: Tensor) -> list[Tensor]:
    """Return the columns of a matrix that each of several leaves is, if they stand side by side; none if they do not."""
    if len(tensor.shape) != 2 or len({part.leaf for part in tensor.parts}) < max(len(tensor.parts), 2):
        return []
    rows, width = tensor.shape
    found, start = [], 0
    for part in sorted(tensor.parts, key=lambda part: int(part.elements.min())):
        count = len(part.elements) // rows
        places = np.arange(rows * width).reshape(rows, width)[:, start : start + count]
        if not np.array_equal(np.sort(part.elements), places.ravel()):
            return []
        elements = part.elements // width * count + part.elements % width - start
        found.append(replace(tensor, shape=(rows, count), parts=(replace(part, elements=elements),)))
        start += count
    return found if start == width else []


def one_below_another(tensor: Tensor, count: int) -> Tensor:
    """Return a tensor whose leaves stand side by side with its leaves below each other."""
    first, *between, width = tensor.shape
    place = np.arange(int(np.prod(tensor.shape))).reshape(count, -1, width // count).swapaxes(0, 1).ravel()
    parts = tuple(replace(part, elements=place[part.elements]) for part in tensor.parts)
    return replace(tensor, shape=(count * first, *between, width // count), parts=parts)


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
