"""Put the two parts of complex tensors together again: the search knows them as two real numbers each, along a further last axis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from convert.inference.derivation import Arithmetic, Derivation, Part, Tensor
from convert.layers.leaf_sums import PLUS, TIMES_J, complex_name

Array = np.ndarray[Any, np.dtype[Any]]
REAL_AND_COMPLEX = (
    "one side has complex numbers and the other real ones, and the rule language has no words for this yet"
)
OTHER_PARTS = "its complex numbers are computed from those of the leaf, and the rule language has no words for this"
OWN_NUMBERS = "it has complex numbers that the module computes itself, and the rule language has no words for them"


def in_complex_numbers(derivation: Derivation) -> tuple[Derivation, Mapping[str, str]]:
    """Return a derivation whose complex leaves and tensors have their own shapes, and the tensors without words, which it lacks.

    A leaf's numbers are put together where they are those of a complex tensor. Of two real leaves, a complex tensor is made of one
    that a rule names ``real + 1j * imaginary``; such leaves are float32, as no file holds wider complex numbers.
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
        made = None
        if own and len(of_complex) <= 1:
            made = _of_pairs(tensor, leaves) if False in of_complex else _whole(tensor, leaves)
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
    whole = replace(derivation, tensors=tuple(found), leaves=leaves, weights=weights)
    pairs = of_two_leaves(whole)
    halves = {leaf for tensor in found if tensor.name in pairs for part in tensor.parts for leaf in part.leaves}
    single = {name: x.astype(np.float32) if name in halves else x for name, x in weights.items()}
    return replace(whole, weights=single), wordless


def _whole(tensor: Tensor, leaves: Mapping[str, tuple[int, ...]]) -> Tensor | None:
    """Return a complex tensor whose elements are those of complex leaves; None if their parts are not the leaves' parts."""
    made = replace(tensor, shape=tensor.shape[:-1], alternatives={})
    if not tensor.parts:
        return made
    origin = _origin(tensor, list(leaves))
    if origin is None:
        return None
    owner, position = origin
    real, imaginary = slice(0, None, 2), slice(1, None, 2)
    together = (
        (owner[real] == owner[imaginary]) & (position[real] + 1 == position[imaginary]) & (position[real] % 2 == 0)
    )
    if not together[owner[real] >= 0].all() or ((owner[real] < 0) != (owner[imaginary] < 0)).any():
        return None
    return replace(made, parts=tuple(half for part in tensor.parts if len((half := _half(part, leaves)).elements)))


def _origin(tensor: Tensor, leaves: list[str]) -> tuple[Array, Array] | None:
    """Return the number of the leaf, and the place in it, of each element; -1 where no part has it; None where one is not a leaf's number."""
    owner, position = (np.full(int(np.prod(tensor.shape)), -1) for _ in range(2))
    for part in tensor.parts:
        if part.arithmetic is not Arithmetic.SAME or part.factor != 1:
            return None
        owner[part.elements] = leaves.index(part.leaf)
        position[part.elements] = part.positions
    return owner, position


def _of_pairs(tensor: Tensor, leaves: Mapping[str, tuple[int, ...]]) -> Tensor | None:
    """Return a complex tensor each element of which has its real part in one real leaf, and its imaginary part at the same place of another; None if it is none."""
    names = list(leaves)
    origin = _origin(tensor, names)
    if origin is None or (origin[0] < 0).any():
        return None
    (real, imaginary), (place, other) = ((of[0::2], of[1::2]) for of in origin)
    if (real == imaginary).any() or (place != other).any():
        return None
    parts = []
    for part in tensor.parts:
        elements = part.elements[part.elements % 2 == 0] // 2
        for k in np.unique(imaginary[elements]):
            at = elements[imaginary[elements] == k]
            pair = (part.leaf, names[k])
            if leaves[pair[0]] != leaves[pair[1]]:
                return None
            parts.append(replace(part, elements=at, positions=place[at], leaf=complex_name(*pair), leaves=pair))
    return replace(tensor, shape=tensor.shape[:-1], alternatives={}, parts=tuple(parts))


def of_two_leaves(derivation: Derivation) -> set[str]:
    """Return the complex tensors that two real leaves make, which no rule of a layer has, as its weight is one leaf."""
    return {tensor.name for tensor in derivation.tensors for part in tensor.parts if f"{PLUS}{TIMES_J}" in part.leaf}


def _half(part: Part, leaves: Mapping[str, tuple[int, ...]]) -> Part:
    """Return a part without imaginary parts, which go where the real ones go."""
    real = part.elements % 2 == 0
    contracted = tuple(axis for axis in part.contracted if axis < len(leaves[part.leaf]))
    return replace(part, elements=part.elements[real] // 2, positions=part.positions[real] // 2, contracted=contracted)
