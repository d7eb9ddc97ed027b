"""``lora_A`` and ``lora_B`` of a pair: the plan's operations on the weight, applied to the two leaves of the pair.

What an operation does to the weight, it does to the sum of the weight and the product. The elements of the weight are followed to the
target's tensor by their numbers: those along its output axis are elements of B, those along its input axes are elements of A. So the
split of fused axes, the order of RoPE's pairs, heads and prescaled factors are those of the plan, and nothing is derived a second time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from convert.core.ops import Op, Permute, Reshape, Take, apply, out_spec
from convert.core.tensor_spec import TensorSpec
from convert.core.value_ops import Cast, Multiply
from convert.layers.base import Part, PartLayout
from convert.peft.gathered import Array, Gathered
from convert.planning.low_rank_source import Form, Merge
from convert.writing.scatter import MOVING, needed_box

BLOCK = 1 << 20  # elements of a weight whose numbers are compared at a time


@dataclass(frozen=True)
class Factor:
    """How a leaf of a pair becomes rows of ``lora_A``, or columns of ``lora_B``.

    Attributes:
        leaf: A or B.
        ops: operations on the leaf.
        layout: its axes and the result's.
    """

    leaf: str
    ops: tuple[Op, ...]
    layout: PartLayout

    @property
    def sums(self) -> bool:
        """Whether the source sums over an axis of the leaf."""
        return any(op.rounds for op in self.ops)


@dataclass(frozen=True)
class PairLayout:
    """How a pair becomes ``lora_A`` and ``lora_B`` of a part of a tensor.

    Attributes:
        down, up: of A and B.
        factor: what the weight is multiplied by on its way, which B carries.
        transposed: whether the tensor's first axis is the input's, as that of transformers' Conv1D is.
        rank: of the result.
        blocks: how often the rank of the pair is in it.
    """

    down: Factor
    up: Factor
    factor: float
    transposed: bool
    rank: int
    blocks: int


def pair_layout(merge: Merge, part: Part, weight: TensorSpec, tensor: TensorSpec, pair: tuple[TensorSpec, TensorSpec]) -> PairLayout:  # fmt: skip
    """Follow the elements of a weight to a part of a tensor.

    Args:
        weight, tensor: specs of the two.
        pair: specs of the leaves A and B.

    Raises:
        ValueError: the operations do not keep inputs and outputs apart; the text is the reason.
    """
    other = [op for op in part.ops if not isinstance(op, (*MOVING, Cast, Multiply))]
    if other:
        raise ValueError(f"'{other[0]}' is no operation on the product alone")
    box, rest = needed_box(part.ops, weight)
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
    if any(isinstance(name, int) for name in varies[0] | varies[1]):
        raise ValueError("an axis of the target's tensor has layers of the weight")
    product = merge.product
    inputs = {x for x in product.first if x in product.whole.weight and x not in product.second}
    outputs = {x for x in product.second if x in product.whole.weight and x not in product.first}
    transposed = bool(varies[0] & inputs or varies[1] & outputs)
    rows, columns = (1, 0) if transposed else (0, 1)  # of `along`: which has the outputs
    if varies[rows] & inputs or varies[columns] & outputs or (transposed and len(shape) > 2):
        raise ValueError("an axis of the target's tensor has inputs and outputs of the weight")
    both = [x for x in product.first if x in product.second and x in product.whole.weight]
    sizes = dict(zip(names, weight.shape, strict=True))
    blocks = {x: sizes[x] for x in both if x in varies[0] | varies[1]}
    layers = {k: int(along[0][k][0]) for k in range(len(merge.stacked))}
    given = slice(None) if part.rows is None else slice(*part.rows, part.every)
    taken = (tensor.shape[0],) if transposed else tensor.shape[1:]
    totals = (math.prod(taken), tensor.shape[-1] if transposed else tensor.shape[0])
    along_outputs = (part.axis == 0) != transposed  # the part is some of the outputs, and all of the inputs
    if not along_outputs and given != slice(None) and len(taken) > 1:
        raise ValueError("the tensor is made of leaves along its last axis")
    cuts = (slice(None), given) if along_outputs else (given, slice(None))
    factors = []
    for form, name, k, size, cut in zip(merge.pair_forms, (merge.first, merge.second), (columns, rows), totals, cuts, strict=True):  # fmt: skip
        own = frozenset(x for x in blocks if x in varies[k])
        alone = "".join(x for x in form.letters if x not in names and x not in product.shared)
        index = {str(x): at for x, at in along[k].items()}
        gathered = Gathered(form.letters, product.shared, alone, index, blocks, own, size, cut)
        seen = [x for x in form.letters if x not in (*product.shared, *alone)]
        written = (*product.shared, *seen) if name == merge.first else (*seen, *product.shared)
        layout = PartLayout(" ".join(form.letters), " ".join(written))
        factors.append(Factor(name, (*_opening(form, layers), gathered), layout))
    count = factors[0].ops[-1].out_spec(out_spec(factors[0].ops[:-1], pair[0])).shape[1]
    down, up = factors
    tail: tuple[Op, ...] = (Reshape((totals[1], count, *(1 for _ in taken[1:]))),) if len(taken) > 1 else ()
    return PairLayout(
        Factor(down.leaf, (*down.ops, Permute((1, 0)), Reshape((count, *taken))), down.layout),
        Factor(up.leaf, (*up.ops, *tail), up.layout),
        math.prod(op.value for op in part.ops if isinstance(op, Multiply)),
        transposed,
        count,
        math.prod(blocks.values()),
    )


def _opening(form: Form, layers: dict[int, int]) -> tuple[Op, ...]:
    """Return the operations that take one layer of a leaf, and split the axes that it has flattened."""
    places = form.stacked if form.shape is None else form.places
    takes = tuple(Take(axis, layers[k]) for axis, k in sorted(((axis, k) for k, axis in enumerate(places)), reverse=True))  # fmt: skip
    if form.shape is None:
        return takes
    return (*takes, Reshape(tuple(n for k, n in enumerate(form.shape) if k not in form.stacked)))


def _elements(
    numbers: Array, shape: tuple[int, ...], origin: tuple[int, ...], names: list[str | int]
) -> dict[str | int, Array]:
    """Return the element of each axis of the weight, from its number within a box."""
    return {
        name: index + start for name, index, start in zip(names, np.unravel_index(numbers, shape), origin, strict=True)
    }
