"""Weights that are no leaf: those that the source computes, and those that the target keeps as two tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from convert.drafting.like.target import TargetModel, TargetModule
from convert.inference.derivation import Arithmetic, Tensor

PARAMETRIZED = ".parametrizations.weight"


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
