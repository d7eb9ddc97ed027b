"""Tensors that are one leaf as a whole, with its axes in some order, although the search found it in parts.

A product of joined columns, as an edge's ``[h_i, h_j, r]``, is taken apart where the other program multiplies each in another way; each part
says which rows of the leaf it has, and together they are the leaf.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod

import numpy as np

from convert.inference.derivation import Arithmetic, Part, Tensor

OF_NO_LEAF = (Arithmetic.CONSTANT, Arithmetic.OWN, Arithmetic.COMPUTED)  # as it is stored


def with_whole_leaves(tensors: Sequence[Tensor], leaves: Mapping[str, Sequence[int]]) -> tuple[Tensor, ...]:
    """Return the tensors; several parts of one are one part where they are a leaf as a whole.

    Args:
        leaves: shapes of the leaves by name.
    """
    return tuple(_as_whole(tensor, leaves) for tensor in tensors)


def _as_whole(tensor: Tensor, leaves: Mapping[str, Sequence[int]]) -> Tensor:
    if len(tensor.parts) < 2 or tensor.alternatives or tensor.ties or tensor.unseen:
        return tensor
    first = tensor.parts[0]
    if first.arithmetic in OF_NO_LEAF or first.low_rank or any(_way(part) != _way(first) for part in tensor.parts):
        return tensor
    shape, elements = leaves[first.leaf], np.concatenate([part.elements for part in tensor.parts])
    if len(elements) != prod(tensor.shape) or prod(tensor.shape) != prod(shape):
        return tensor
    positions = np.concatenate([part.positions for part in tensor.parts])[np.argsort(elements)]
    numbers = np.arange(prod(shape)).reshape(shape)
    orders = itertools.permutations(range(len(shape)))
    if not any(np.array_equal(numbers.transpose(order).ravel(), positions) for order in orders):
        return tensor  # in another order, which rules say part by part
    contracted = {axis for part in tensor.parts for axis in part.contracted}  # one row alone is not summed over
    whole = replace(first, elements=np.sort(elements), positions=positions, contracted=tuple(sorted(contracted)))
    return replace(tensor, parts=(whole,))


def _way(part: Part) -> tuple[object, ...]:
    """Return what is the same of parts that one part can stand for."""
    return part.leaf, part.arithmetic, part.factor, part.number, part.evidence.role
