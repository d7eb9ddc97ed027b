"""What makes a proof weaker than it seems: inputs that ignore the seed, and outputs that ignore the inputs or the weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from convert.programs.program import Program

Array = np.ndarray[Any, np.dtype[Any]]
DRAW = "draw them from np.random.default_rng(seed)"


def same_inputs(inputs: Sequence[Mapping[str, Array]]) -> bool:
    """Whether the inputs of all seeds are the same."""
    first, *others = inputs
    return all(
        first.keys() == other.keys() and all(np.array_equal(first[name], other[name], equal_nan=True) for name in first)
        for other in others
    )


def notes(runs: Sequence[Program], same: bool) -> tuple[str, ...]:
    """Return what the proof lacks, in words.

    Args:
        runs: of the source, with the weights and inputs of the search and of the proof.
        same: whether their inputs are the same.
    """
    found = []
    if same:
        found.append(f"the inputs are the same for every seed, and the proof has no others; {DRAW}")
    first, *others = ([value.array for value in run.outputs.values()] for run in runs)
    if all(np.array_equal(*pair, equal_nan=True) for other in others for pair in zip(first, other, strict=True)):
        found.append(
            "the outputs are the same for all weights and inputs, so that they prove nothing; return values in front of them, too"
        )
    elif not any(value.data for value in runs[0].outputs.values()):
        found.append("no output depends on the inputs: the outputs are compared as functions of the weights alone")
    return tuple(found)
