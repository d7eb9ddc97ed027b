"""Find a product of two leaves in the numbers of a matrix that the source computes before data meets it, alone or added to a third leaf."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np

from convert.inference.derivation import Arithmetic, Derivation, LowRank, Part, Tensor

Array = np.ndarray[Any, np.dtype[Any]]
EXACT = 1e-10  # relative to the largest element
LEAVES = (2, 3)  # the two factors; and the leaf that their product is added to


def with_products(derivation: Derivation) -> Derivation:
    """Return a derivation in which a computed matrix is known as a product of two leaves, where it is one, alone or added to a third.

    Where data meets the factors one by one, the search knows that already.
    """
    tensors = tuple(_with_product(tensor, derivation.weights) for tensor in derivation.tensors)
    return replace(derivation, tensors=tensors)


def _with_product(tensor: Tensor, weights: Mapping[str, Array]) -> Tensor:
    if len(tensor.shape) != 2:
        return tensor
    return replace(tensor, parts=tuple(_known(part, tensor.shape[1], weights) for part in tensor.parts))


def _known(part: Part, width: int, weights: Mapping[str, Array]) -> Part:
    """Return a part that is whole rows of a matrix with the product that it is; the part itself where it is none."""
    computed = part.arithmetic is Arithmetic.COMPUTED and part.low_rank is None and part.values is not None
    leaves = [weights[name] for name in part.leaves if name in weights]
    if not computed or len(leaves) not in LEAVES or any(leaf.ndim < 2 for leaf in leaves):
        return part
    order = np.argsort(part.elements)
    first, count = int(part.elements[order[0]]), len(order)
    if first % width or count % width or not np.array_equal(part.elements[order], np.arange(first, first + count)):
        return part
    assert part.values is not None
    matrix = part.values[order].reshape(-1, width).T  # [in, out]
    for low_rank in _products(part.leaves, weights, matrix):
        if np.allclose(low_rank.value(weights), matrix, rtol=0, atol=EXACT * np.abs(matrix).max()):
            positions = np.arange(matrix.size).reshape(matrix.shape).T.ravel()[part.elements - first]
            return replace(part, positions=positions, low_rank=low_rank)
    return part


def _products(names: tuple[str, ...], weights: Mapping[str, Array], matrix: Array) -> Iterator[LowRank]:
    """Yield the products of two leaves that have the shape of a matrix, with the third, and the number that the product is multiplied by."""
    for left, right, *others in itertools.permutations(names):
        bases = _as_matrix(others[0], weights) if others else [None]
        ways = itertools.product(_as_matrix(left, weights), _as_matrix(right, weights), bases)
        for first, second, base in ways:
            if (len(first[1]), second[1].shape[1]) != matrix.shape or first[1].shape[1] != len(second[1]):
                continue
            if base is not None and base[1].shape != matrix.shape:
                continue
            product = LowRank(first, second).value(weights)
            rest = matrix - (0 if base is None else np.ravel(weights[base[0]])[base[1]])
            scale = (rest * product).sum() / (product * product).sum()
            yield LowRank(first, second, float(f"{scale:.14g}"), base)


def _as_matrix(name: str, weights: Mapping[str, Array]) -> list[tuple[str, Array]]:
    """Return the ways to read a leaf as a matrix: as it is stored, with the first axes as rows; of two axes also turned."""
    shape = weights[name].shape
    positions = np.arange(prod(shape))
    ways = [positions.reshape(prod(shape[:k]), -1) for k in range(1, len(shape))]
    return [(name, way) for way in (*ways, *(way.T for way in ways if len(shape) == 2))]
