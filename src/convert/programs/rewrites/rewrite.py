"""A hypothesis about the target's code that was run in its record."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from convert.core.errors import ConvertError
from convert.programs.divergence.rerun import Change, Rerun
from convert.programs.program import Operation, Program
from convert.programs.rerun import rerun

Array = np.ndarray[Any, np.dtype[Any]]
FAILS = (ValueError, RuntimeError, TypeError, IndexError)  # operations that do not take other values


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


def error_with(program: Program, change: Change, goal: Goal) -> tuple[float, int]:
    """Return the error of the output with a change, infinite where an operation does not take it; and how many operations ran again."""
    changed = Rerun(program)
    try:
        count = len(list(changed.put(change)))
    except ValueError:
        return float("inf"), 0
    return goal.error(changed.array(program.outputs[goal.output])), count


def rerun_with(program: Program, made: Mapping[Operation, Operation], goal: Goal) -> tuple[Program, float] | None:
    """Return the record of a run in which some operations are others, with the same results, and the error of its output.

    None where an operation does not take what they give.
    """
    found = rerun_of(program, [made.get(one, one) for one in program.operations])
    return None if found is None else (found, goal.error(found.outputs[goal.output].array))


def rerun_of(program: Program, operations: Sequence[Operation]) -> Program | None:
    """Return the record of a run of other operations; None where one does not take what others give."""
    inputs = {name: value.array for name, value in program.inputs.items()}
    parameters = {name: value.array for name, value in program.parameters.items()}
    try:
        return rerun(replace(program, operations=tuple(operations)), parameters, inputs)
    except (*FAILS, ConvertError):
        return None
