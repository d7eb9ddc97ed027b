"""Weights that are no leaf: those that the source computes, and those that the target keeps as two tensors."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from convert.drafting.like.target import TargetModel, TargetModule
from convert.inference.derivation import Arithmetic, Tensor
from convert.inference.rule_file.layers.rule import COMPUTED
from convert.layers.weight_keys import PARAMETRIZATIONS

Array = np.ndarray[Any, np.dtype[Any]]
PARAMETRIZED = ".parametrizations.weight"
SCALES = tuple(by_role["weight_norm"] for by_role in PARAMETRIZATIONS.values())
OF_VECTORS, VECTORS = "weight_orig", ("weight_u", "weight_v")  # of torch.nn.utils.spectral_norm
VECTOR = re.compile(r"\.parametrizations\.\w+\.\d+\._[uv]$|\.weight_[uv]$")


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
        letters: of their axes as stored: ``DR,RE`` for [in, rank] and [rank, out], ``DR,REE`` where the outputs have two axes.
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
    part = tensor.parts[0]
    words = [_letters(at, shapes[leaf], of) for (leaf, at), of in ((found.left, "DR"), (found.right, "RE"))]
    letters, order = ",".join(words), np.argsort(part.elements)
    if not all(words):
        return None
    if found.base is None:
        size = tensor.shape[::-1]
        stored = np.array_equal(part.positions[order], np.arange(np.prod(size)).reshape(size).T.ravel())
        return LowRankWords(found.left[0], found.right[0], letters, found.scale, None) if stored else None
    leaf, at = found.base
    own = _letters(at, shapes[leaf], "DE")
    if not own:
        return None
    same = replace(
        part,
        leaf=leaf,
        positions=at.ravel()[part.positions],
        arithmetic=Arithmetic.SAME,
        contracted=tuple(axis for axis, letter in enumerate(own) if letter == "D"),
        low_rank=None,
        values=None,
    )
    base = replace(tensor, parts=(same,))
    return LowRankWords(found.left[0], found.right[0], letters, found.scale, base)


def _letters(positions: Array, shape: tuple[int, ...], letters: str) -> str:
    """Return the letter of each axis of a leaf that is a matrix, such as ``DEE`` where its columns have two axes; empty if it is none."""
    stored = np.arange(positions.size)
    if len(shape) == 2 and np.array_equal(positions, stored.reshape(positions.shape[::-1]).T):
        return letters[::-1]
    rows = [k for k in range(1, len(shape)) if prod(shape[:k]) == len(positions)]
    if not rows or not np.array_equal(positions, stored.reshape(positions.shape)):
        return ""
    return letters[0] * rows[0] + letters[1] * (len(shape) - rows[0])


def is_norm_of_rows(tensors: Mapping[str, Tensor]) -> bool:
    """Whether the scale of a weight norm, if there is one, has a number for each row of the weight, as a rule has it."""
    scales = [t.shape for name, t in tensors.items() if name in SCALES]
    return all(len(shape) > 1 and set(shape[1:]) == {1} for shape in scales)


def words_for_vector(name: str, why: str) -> str:
    """Return why a tensor has no rule; of a vector of torch's spectral norm that the source computes, also what to do."""
    if not VECTOR.search(name) or not why.startswith(COMPUTED):
        return why
    old = name.rpartition(".")[2] in VECTORS
    remove = "remove_spectral_norm" if old else "parametrize.remove_parametrizations"
    return (
        "the JAX model computes it at every call from the vector that it keeps, and a rule computes no vector; build the module without "
        f"its spectral norm, or remove it (torch.nn.utils.{remove}), and run again: a rule then divides the weight"
    )


def with_parametrizations(target: TargetModel) -> list[TargetModule]:
    """Return the modules; the tensors of a parametrized weight are those of its layer, the vectors of a spectral norm have rules of their own."""
    own = {module.name: module for module in target.modules}
    for name, module in own.copy().items():
        if f".{name}".endswith(PARAMETRIZED):
            del own[name]
            layer = f".{name}".removesuffix(PARAMETRIZED).removeprefix(".")
            found = own.get(layer, TargetModule(layer, "", {}))
            tensors = {f"{PARAMETRIZED[1:]}.{tensor}": shape for tensor, shape in module.tensors.items()}
            own[layer] = replace(found, tensors={**tensors, **found.tensors})
    return [part for module in own.values() for part in _without_vectors(module)]


def _without_vectors(module: TargetModule) -> Iterator[TargetModule]:
    """Yield a module, and the vectors of its old spectral norm apart."""
    vectors = {
        name: shape for name, shape in module.tensors.items() if name in VECTORS and OF_VECTORS in module.tensors
    }
    rest = {name: shape for name, shape in module.tensors.items() if name not in vectors}
    yield replace(module, tensors=rest) if vectors else module
    if vectors:
        yield TargetModule(module.name, "parameter", vectors)
