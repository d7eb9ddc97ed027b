"""Tensors that no row met, such as those of an expert without tokens: other weights and inputs send some to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from convert.inference.derivation import Arithmetic, Grade, Tensor
from convert.inference.grading.grades import tensors
from convert.inference.grading.proof import weights
from convert.inference.search import Search

Array = np.ndarray[Any, np.dtype[Any]]


def found_by_others(
    found: Sequence[Tensor], searches: Sequence[Callable[[Sequence[Tensor]], Search]]
) -> tuple[Tensor, ...]:
    """Return the tensors; those that are open are searched in other runs, in which the others are known.

    Args:
        found: of a search that led to the outputs.
        searches: what makes a search in another run, one after the other, from what is known.
    """
    made = tuple(found)
    for search_of in searches:
        if all(tensor.grade is not Grade.OPEN for tensor in made):
            break
        search = search_of(made)
        _tell(search, made)
        if search.solve():
            more = tensors(search, {tensor.name: tensor.also for tensor in made}, True, [])
            made = tuple(two if one.grade is Grade.OPEN else one for one, two in zip(made, more, strict=True))
    return made


def _tell(search: Search, found: Sequence[Tensor]) -> None:
    values = weights(found, search.source.program)
    for tensor in found:
        flat = values[tensor.name].ravel()
        for part in tensor.parts if tensor.grade is not Grade.OPEN else ():
            plain = part.leaf and part.arithmetic not in (Arithmetic.CONSTANT, Arithmetic.OWN, Arithmetic.COMPUTED)
            start = search.source.program.first_element[part.leaf] if plain else 0
            numbers = start + part.positions if plain else np.zeros(0, int)
            search.know(tensor.name, part.elements, flat[part.elements], numbers)
