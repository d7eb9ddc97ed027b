"""A hypothesis about the target's code that was run in its record."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from convert.programs.program import Operation

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Goal:
    """What a hypothesis must restore.

    Attributes:
        output: name of the output.
        error: of an array as this output.
        enough: the error up to which it is equal.
    """

    output: str
    error: Callable[[Array], float]
    enough: float


@dataclass(frozen=True)
class Rewrite:
    """A hypothesis that restores the output.

    Attributes:
        name: of the mistake, short and stable.
        problem: what is wrong, as a sentence.
        fix: the next step.
        error: of the output under the hypothesis.
    """

    name: str
    problem: str
    fix: str
    error: float


def line(operation: Operation) -> str:
    """Return where an operation is, for a sentence."""
    return operation.where or "a line that is not known"
