"""Put the two parts of complex tensors together again: the search knows them as two real numbers each, along a further last axis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from convert.inference.derivation import Arithmetic, Derivation, Part, Tensor

Array = np.ndarray[Any, np.dtype[Any]]
REAL_AND_COMPLEX = (
    "one side has complex numbers and the other real ones, and the rule language has no words for this yet"
)
OTHER_PARTS = "its complex numbers are computed from those of the leaf, and the rule language has no words for this"
OWN_NUMBERS = "it has complex numbers that the module computes itself, and the rule language has no words for them"


def in_complex_numbers(derivation: Derivation) -> tuple[Derivation, Mapping[str, str]]:
    """Return a derivation whose complex leaves and tensors have their own shapes, and the tensors without words, which it lacks.

    A leaf's numbers are put together where they are those of a complex tensor.
    """
    if not derivation.complex_leaves and not derivation.complex_tensors:
        return derivation, {}
    leaves = {
        name: shape[:-1] if name in derivation.complex_leaves else shape for name, shape in derivation.leaves.items()
    }
    found: list[Tensor] = []
    wordless: dict[str, str] = {}
    for tensor in derivation.tensors:
        own = tensor.name in derivation.complex_tensors
        of_complex = {
            leaf in derivation.complex_leaves for part in tensor.parts for leaf in (part.leaf, *part.leaves) if leaf
        }
        if not own and True not in of_complex:
            found.append(tensor)
            continue
        made = _whole(tensor, leaves) if own and of_complex <= {True} else None
        if made is not None:
            found.append(made)
        else:
            wordless[tensor.name] = (
                OWN_NUMBERS if tensor.is_own else REAL_AND_COMPLEX if of_complex != {own} else OTHER_PARTS
            )
    weights = {
        name: x[..., 0] + 1j * x[..., 1] if name in derivation.complex_leaves else x
        for name, x in derivation.weights.items()
    }
    return replace(derivation, tensors=tuple(found), leaves=leaves, weights=weights), wordless


def _whole(tensor: Tensor, leaves: Mapping[str, tuple[int, ...]]) -> Tensor | None:
    """Return a complex tensor whose elements are those of complex leaves; None if their parts are not the leaves' parts."""
    made = replace(tensor, shape=tensor.shape[:-1], alternatives={})
    if not tensor.parts:
        return made
    owner, position = (np.full(int(np.prod(tensor.shape)), -1) for _ in range(2))
    for part in tensor.parts:
        if part.arithmetic is not Arithmetic.SAME or part.factor != 1:
            return None
        owner[part.elements] = list(leaves).index(part.leaf)
        position[part.elements] = part.positions
    real, imaginary = slice(0, None, 2), slice(1, None, 2)
    together = (
        (owner[real] == owner[imaginary]) & (position[real] + 1 == position[imaginary]) & (position[real] % 2 == 0)
    )
    if not together[owner[real] >= 0].all() or ((owner[real] < 0) != (owner[imaginary] < 0)).any():
        return None
    return replace(made, parts=tuple(half for part in tensor.parts if len((half := _half(part, leaves)).elements)))


def _half(part: Part, leaves: Mapping[str, tuple[int, ...]]) -> Part:
    """Return a part without imaginary parts, which go where the real ones go."""
    real = part.elements % 2 == 0
    contracted = tuple(axis for axis in part.contracted if axis < len(leaves[part.leaf]))
    return replace(part, elements=part.elements[real] // 2, positions=part.positions[real] // 2, contracted=contracted)
