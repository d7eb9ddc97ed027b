"""``lora_A`` and ``lora_B`` of a pair: the plan's operations on the weight, applied to the two leaves of the pair.

What an operation does to the weight, it does to the sum of the weight and the product. The elements of the weight are followed to the
target's tensor by their numbers: those along its output axis are elements of B, those along its input axes are elements of A. So the
split of fused axes, the order of RoPE's pairs, heads and prescaled factors are those of the plan, and nothing is derived a second time.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np

from convert.core.ops import apply
from convert.core.tensor_spec import TensorSpec
from convert.core.value_ops import Cast, Multiply
from convert.layers.base import Part
from convert.planning.low_rank_source import Form, Merge
from convert.writing.scatter import MOVING, needed_box

Array = np.ndarray[Any, np.dtype[Any]]
BLOCK = 1 << 20  # elements of a weight whose numbers are compared at a time


@dataclass(frozen=True)
class Side:
    """Where the elements of A, or of B, go.

    Attributes:
        form: the axes of the leaf.
        rank: letters of the rank, and letters that only this leaf has, over which the source sums.
        index: letter (stacked axes: number) -> the element that each place along the target's axis takes.
        blocks: letters of batch axes that both leaves have and that become part of the rank, with their sizes.
        own: those of `blocks` whose element depends on the place: others are zero there.
    """

    form: Form
    rank: str
    alone: str
    index: Mapping[str | int, Array]
    blocks: Mapping[str, int]
    own: frozenset[str]

    @property
    def places(self) -> int:
        return next(iter(self.index.values())).size

    def gather(self, leaf: Array) -> Array:
        """Return the values, one row for each place and one column for each element of the rank; those of a sum in float32."""
        axes, opened = self.form.axes, self.form.opened(leaf)
        chosen = [axis for axis in axes if axis not in (*self.rank, *self.alone)]
        moved = opened.transpose([axes.index(axis) for axis in (*self.alone, *chosen, *self.rank)])
        for _ in self.alone:
            moved = np.asarray(reduce(np.add, moved.astype(np.float64)))
        moved = moved.reshape(*moved.shape[: len(chosen)], -1)
        columns = []
        for element in itertools.product(*map(range, self.blocks.values())):
            at = dict(zip(self.blocks, element, strict=True))
            where = [np.full(self.places, at[axis]) if axis in at else self.index[axis] for axis in chosen]
            values = moved[tuple(where)] if where else np.broadcast_to(moved, (self.places, moved.shape[-1]))
            for letter in self.own:
                values = np.where((self.index[letter] == at[letter])[:, None], values, np.zeros((), values.dtype))
            columns.append(values)
        made = np.concatenate(columns, axis=1)
        return np.asarray(made.astype(np.float32) if self.alone else made)


@dataclass(frozen=True)
class PairLayout:
    """How a pair becomes ``lora_A`` and ``lora_B`` of a part of a tensor.

    Attributes:
        first, second: of A and B.
        factor: what the weight is multiplied by on its way, which B carries.
        transposed: whether the tensor's first axis is the input's, as that of transformers' Conv1D is.
        inputs: shape of the tensor's input axes.
        rank: of the result.
    """

    first: Side
    second: Side
    factor: float
    transposed: bool
    inputs: tuple[int, ...]
    rank: int

    def down(self, leaf: Array) -> Array:
        """Compute ``lora_A``: rank, then the input axes."""
        return np.ascontiguousarray(self.first.gather(leaf).T).reshape(self.rank, *self.inputs)

    def up(self, leaf: Array, factor: float = 1.0) -> Array:
        """Compute ``lora_B``: outputs, then the rank."""
        made, total = self.second.gather(leaf), self.factor * factor
        return made if total == 1 else (made.astype(np.float64) * total).astype(np.float32)


def pair_layout(merge: Merge, part: Part, spec: TensorSpec, rank: Mapping[str, int]) -> PairLayout:
    """Follow the elements of a weight to a part of a tensor.

    Args:
        spec: of the weight.
        rank: sizes of the letters of the rank.

    Raises:
        ValueError: the operations do not keep inputs and outputs apart; the text is the reason.
    """
    other = [op for op in part.ops if not isinstance(op, (*MOVING, Cast, Multiply))]
    if other:
        raise ValueError(f"'{other[0]}' is no operation on the product alone")
    box, rest = needed_box(part.ops, spec)
    moves = tuple(op for op in rest if isinstance(op, MOVING))
    numbers = np.arange(box.size, dtype=np.int32 if box.size < 2**31 else np.int64).reshape(box.shape)
    whole = apply(moves, numbers)
    if whole.ndim < 2:
        raise ValueError("the tensor has no axis of inputs")
    shape, flat = whole.shape, whole.reshape(whole.shape[0], -1)
    for start in range(0, len(flat), max(1, BLOCK // flat.shape[1])):
        some = flat[start : start + max(1, BLOCK // flat.shape[1])]
        if not np.array_equal(some, some[:, :1] + (flat[0] - flat[0, 0])):
            raise ValueError("inputs and outputs are mixed in the target's tensor")
    names = Form(merge.letters, merge.stacked).axes
    along = [_elements(line, box.shape, box.origin, names) for line in (flat[:, 0], flat[0])]
    varies = [{name for name, at in index.items() if np.any(at != at[0])} for index in along]
    if varies[0] & varies[1]:
        raise ValueError("an axis of the weight is split between inputs and outputs of the target's tensor")
    product = merge.product
    inputs = {x for x in product.first if x in product.whole.weight and x not in product.second}
    outputs = {x for x in product.second if x in product.whole.weight and x not in product.first}
    transposed = bool(varies[0] & inputs or varies[1] & outputs)
    rows, columns = (1, 0) if transposed else (0, 1)  # of `along`: which has the outputs
    if varies[rows] & inputs or varies[columns] & outputs or (transposed and len(shape) > 2):
        raise ValueError("an axis of the target's tensor has inputs and outputs of the weight")
    both = [x for x in product.first if x in product.second and x in product.whole.weight]
    sizes = dict(zip(names, spec.shape, strict=True))
    blocks = {x: sizes[x] for x in both if x in varies[0] | varies[1]}
    sides = []
    for form, k in zip(merge.pair_forms, (columns, rows), strict=True):
        alone = "".join(x for x in form.letters if x not in names and x not in product.shared)
        own = frozenset(x for x in blocks if x in varies[k])
        sides.append(Side(form, product.shared, alone, along[k], blocks, own))
    factor = math.prod(op.value for op in part.ops if isinstance(op, Multiply))
    taken = (shape[0],) if transposed else shape[1:]
    count = math.prod(blocks.values()) * math.prod(rank[x] for x in product.shared)
    return PairLayout(sides[0], sides[1], factor, transposed, taken, count)


def _elements(
    numbers: Array, shape: tuple[int, ...], origin: tuple[int, ...], names: list[str | int]
) -> dict[str | int, Array]:
    """Return the element of each axis of the weight, from its number within a box."""
    return {
        name: index + start for name, index, start in zip(names, np.unravel_index(numbers, shape), origin, strict=True)
    }
