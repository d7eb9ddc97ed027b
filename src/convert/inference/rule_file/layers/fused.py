"""Tensors that are made of several leaves: in turns, side by side, or one below another, which is the form that rules describe."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from convert.inference.derivation import Part, Role, Tensor

Array = np.ndarray[Any, np.dtype[Any]]
MAX_BLOCKS = 8  # of a tensor, where a leaf has several


def in_turns(tensor: Tensor) -> tuple[int, ...] | None:
    """Return how many rows each leaf has of each head or group, if the leaves lie in the rows in turns; None if they do not, or all are one."""
    if len({part.leaf for part in tensor.parts}) < 2:
        return None
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
    """Return how many leaves stand side by side in a tensor, each as wide, and along which axis but the first; None if they do not."""
    leaves: dict[str, list[Array]] = {}
    for part in tensor.parts:
        leaves.setdefault(part.leaf, []).append(part.elements)
    if len(leaves) == 1 and len(tensor.shape) > 2:  # the taps of a kernel, found one by one
        return None
    whole = [np.concatenate(of) for of in leaves.values()]  # of a leaf that was found head by head
    axes = reversed(range(1, len(tensor.shape)))
    ways = ((axis, of) for axis in axes for of in ([part.elements for part in tensor.parts], whole))
    return next(((len(of), axis) for axis, of in ways if _are_beside(tensor, axis, of)), None)


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
    """Return the columns of a matrix, or the inputs of a kernel, that several leaves are, if they stand side by side; none if they do not."""
    blocks = _blocks(tensor, 1) if len(tensor.shape) > 1 else []
    several = len({part.leaf for part in tensor.parts}) > 1 and len(blocks) > 1
    return [cut(tensor, 1, *block) for block in blocks] if several else []


def one_below_another(tensor: Tensor, count: int, axis: int = -1, *, alternate: bool = False) -> Tensor:
    """Return a tensor whose leaves stand side by side, or alternate along the last axis, with its leaves below each other."""
    axis %= len(tensor.shape)
    first, *between = tensor.shape[: axis + 1]
    blocks = np.arange(math.prod(tensor.shape)).reshape(count, math.prod(tensor.shape[:axis]), -1)
    place = (np.moveaxis(blocks, 0, -1) if alternate else blocks.swapaxes(0, 1)).ravel()
    parts = tuple(replace(part, elements=place[part.elements]) for part in tensor.parts)
    shape = (count * first, *between[:-1], between[-1] // count, *tensor.shape[axis + 1 :])
    return replace(tensor, shape=shape, parts=parts)


def by_parts(tensors: Mapping[str, Tensor], *, runs: bool = False) -> list[dict[str, Tensor]]:
    """Return the tensors of a layer for each block of rows of the first one that comes from one leaf; none where the others have other blocks.

    Args:
        runs: whether the rows of a block follow each other in the leaf, too.
    """
    found = []
    for start, count in _blocks(next(iter(tensors.values())), 0, runs=runs):
        block = {role: cut(tensor, 0, start, count) for role, tensor in tensors.items()}
        if any(
            sum(len(p.elements) for p in t.parts) != math.prod(t.shape) or len(set(map(origin, t.parts))) > 1
            for t in block.values()
        ):
            return []
        found.append(block)
    return found


def in_blocks(tensor: Tensor) -> bool:
    """Whether each row of a tensor comes from one leaf."""
    return bool(_blocks(tensor, 0))


def origin(part: Part) -> tuple[Any, ...]:
    """Return what the elements of a tensor have in common that one rule makes."""
    return part.leaf, part.arithmetic, part.factor, part.number, part.term_axes, part.leaves


def _blocks(tensor: Tensor, axis: int, *, runs: bool = False) -> list[tuple[int, int]]:
    """Return start and length of each run along an axis that comes from one leaf; none where two leaves share a place, or some have none.

    Args:
        runs: whether the elements of a run follow each other in the leaf, too.
    """
    size, inner = tensor.shape[axis], math.prod(tensor.shape[axis + 1 :])
    owners = np.full(size, -1)
    for number, one in enumerate(dict.fromkeys(map(origin, tensor.parts))):
        elements = np.concatenate([part.elements for part in tensor.parts if origin(part) == one])
        counts = np.bincount(elements // inner % size, minlength=size)
        if not np.isin(counts, (0, math.prod(tensor.shape) // size)).all():
            return []
        owners[counts > 0] = number
    starts = np.flatnonzero(np.diff(owners, prepend=-2))
    if runs:
        starts = np.union1d(starts, _breaks(tensor, axis, starts))
    whole = (owners >= 0).all() and len(starts) <= max(MAX_BLOCKS, len(set(owners)))
    ends = [*starts[1:], size]
    return [(int(start), int(end - start)) for start, end in zip(starts, ends, strict=True)] if whole else []


def _breaks(tensor: Tensor, axis: int, starts: Array) -> Array:
    """Return where the elements along an axis do not follow each other in their leaf, beside the starts of others."""
    first = np.full(tensor.shape, -1)
    for part in tensor.parts:
        first.ravel()[part.elements[: len(part.positions)]] = part.positions
    along = np.moveaxis(first, axis, 0).reshape(tensor.shape[axis], -1)[:, 0]
    steps = np.diff(along)
    within = np.setdiff1d(np.arange(1, len(along)), starts)
    usual = np.bincount(np.abs(steps[within - 1])).argmax() if len(within) else 0
    found: Array = within[steps[within - 1] != usual]
    return found


def cut(tensor: Tensor, axis: int, start: int, count: int) -> Tensor:
    """Return some elements along an axis of a tensor."""
    size, inner = tensor.shape[axis], math.prod(tensor.shape[axis + 1 :])
    parts = []
    for part in tensor.parts:
        outer, rest = np.divmod(part.elements, size * inner)
        here = rest // inner - start
        kept = (here >= 0) & (here < count)
        positions = part.positions[kept] if len(part.positions) else part.positions
        elements = (outer * count * inner + rest - start * inner)[kept]
        parts += [replace(part, elements=elements, positions=positions)] if kept.any() else []
    return replace(tensor, shape=(*tensor.shape[:axis], count, *tensor.shape[axis + 1 :]), parts=tuple(parts))
