"""Weights that are no leaf: those that the source computes, those of several leaves, and those that the target keeps as two tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from convert.drafting.like.target import TargetModel, TargetModule
from convert.inference.derivation import Arithmetic, Tensor
from convert.layers.weight_keys import PARAMETRIZATIONS

Array = np.ndarray[Any, np.dtype[Any]]
PARAMETRIZED = ".parametrizations.weight"
SCALES = tuple(by_role["weight_norm"] for by_role in PARAMETRIZATIONS.values())


def main_leaf(tensor: Tensor, shapes: Mapping[str, tuple[int, ...]]) -> tuple[Tensor, tuple[str, ...]] | None:
    """Return a computed tensor as if it were the leaf that has its elements, and the other leaves; None if no leaf has them."""
    if any(part.arithmetic is not Arithmetic.COMPUTED for part in tensor.parts):
        return None
    leaves = {leaf for part in tensor.parts for leaf in part.leaves}
    whole = [leaf for leaf in leaves if len(shapes[leaf]) > 1 and np.prod(shapes[leaf]) == np.prod(tensor.shape)]
    if len(whole) != 1:
        return None
    parts = tuple(replace(part, leaf=whole[0], arithmetic=Arithmetic.SAME) for part in tensor.parts)
    return replace(tensor, parts=parts), tuple(sorted(leaves - set(whole)))


@dataclass(frozen=True)
class LowRankWords:
    """How a rule says that a weight is, or has added, a product of two leaves.

    Attributes:
        left, right: their names.
        letters: of their axes as stored: ``DR,RE`` for [in, rank] and [rank, out].
        scale: what the product is multiplied by.
        base: the weight without the product, as a tensor of one leaf; None where there is none.
    """

    left: str
    right: str
    letters: str
    scale: float
    base: Tensor | None


def low_rank_words(tensor: Tensor, shapes: Mapping[str, tuple[int, ...]]) -> LowRankWords | None:
    """Return how a rule says a weight of low rank; None if it is none, or laid out in another way."""
    found = tensor.parts[0].low_rank
    if found is None or len(tensor.parts) > 1 or len(tensor.shape) != 2:
        return None
    part, letters = tensor.parts[0], []
    for (leaf, at), word in ((found.left, "DR"), (found.right, "RE")):
        axes = _axes(at, shapes[leaf])
        if axes is None:
            return None
        letters.append("".join(word[axis] for axis in axes))
    order = np.argsort(part.elements)
    if found.base is None:
        size = tensor.shape[::-1]
        if not np.array_equal(part.positions[order], np.arange(np.prod(size)).reshape(size).T.ravel()):
            return None
        return LowRankWords(found.left[0], found.right[0], ",".join(letters), found.scale, None)
    leaf, at = found.base
    axes = _axes(at, shapes[leaf])
    if axes is None:
        return None
    same = replace(
        part,
        leaf=leaf,
        positions=at.ravel()[part.positions],
        arithmetic=Arithmetic.SAME,
        contracted=(axes.index(0),),
        low_rank=None,
        values=None,
    )
    base = replace(tensor, parts=(same,))
    return LowRankWords(found.left[0], found.right[0], ",".join(letters), found.scale, base)


def _axes(positions: Array, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return which axis of a matrix each axis of the leaf is; None if the leaf is no matrix."""
    stored = np.arange(positions.size)
    if len(shape) == 2 and np.array_equal(positions, stored.reshape(positions.shape)):
        return (0, 1)
    if len(shape) == 2 and np.array_equal(positions, stored.reshape(positions.shape[::-1]).T):
        return (1, 0)
    return None


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


def is_norm_of_rows(tensors: Mapping[str, Tensor]) -> bool:
    """Whether the scale of a weight norm, if there is one, has a number for each row of the weight, as a rule has it."""
    scales = [t.shape for name, t in tensors.items() if name in SCALES]
    return all(size == 1 for shape in scales for size in shape[1:])


def with_parametrizations(target: TargetModel) -> list[TargetModule]:
    """Return the modules; the tensors of a parametrized weight are those of its layer."""
    own = {module.name: module for module in target.modules}
    for name, module in own.copy().items():
        if f".{name}".endswith(PARAMETRIZED):
            del own[name]
            layer = f".{name}".removesuffix(PARAMETRIZED).removeprefix(".")
            found = own.get(layer, TargetModule(layer, "", {}))
            tensors = {f"{PARAMETRIZED[1:]}.{tensor}": shape for tensor, shape in module.tensors.items()}
            own[layer] = replace(found, tensors={**tensors, **found.tensors})
    return list(own.values())
