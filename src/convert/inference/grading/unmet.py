"""Elements that no row met, such as those of an expert without tokens: other weights and inputs send some to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from convert.inference.derivation import Arithmetic, Grade, Tensor
from convert.inference.grading.grades import tensors, with_more
from convert.inference.grading.proof import weights
from convert.inference.recorded import PATHS
from convert.inference.search import Search

MOST_RUNS = 64  # each may show one expert more
Array = np.ndarray[Any, np.dtype[Any]]


def found_by_others(found: Sequence[Tensor], again: Callable[[int, Sequence[Tensor]], Search]) -> tuple[Tensor, ...]:
    """Return the tensors; what is open of them is searched in other runs, in which the rest is known.

    It ends where some runs, one after the other, show nothing more.

    Args:
        found: of a search that led to the outputs.
        again: what makes a search in another run, from its number and what is known.
    """
    made = tuple(found)
    last = 0  # run that showed something
    for run in range(1, MOST_RUNS + 1):
        if all(tensor.grade is not Grade.OPEN for tensor in made) or run > last + PATHS:
            break
        search, before = again(run, made), _known(made)
        _tell(search, made)
        if search.solve():
            more = tensors(search, {tensor.name: tensor.also for tensor in made}, True, [])
            made = tuple(
                with_more(one, two, search.source) if one.grade is Grade.OPEN else one
                for one, two in zip(made, more, strict=True)
            )
        if _known(made) > before:
            last = run
    return made


def _known(found: Sequence[Tensor]) -> int:
    return sum(len(part.elements) for tensor in found for part in tensor.parts)


def _tell(search: Search, found: Sequence[Tensor]) -> None:
    values = weights(found, search.source.program)
    for tensor in found:
        flat = values[tensor.name].ravel()
        for part in tensor.parts if not tensor.guessed else ():
            plain = part.leaf and part.arithmetic not in (Arithmetic.CONSTANT, Arithmetic.OWN, Arithmetic.COMPUTED)
            start = search.source.program.first_element[part.leaf] if plain else 0
            numbers = start + part.positions if plain else np.zeros(0, int)
            search.know(tensor.name, part.elements, flat[part.elements], numbers)
