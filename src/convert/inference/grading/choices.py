"""Values that only decide a choice: of them, outputs show which element is the largest, or on which side of a limit one lies."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from convert.inference.candidates.source import Source
from convert.programs.choices import choices, decisive, forms, is_hidden, name_of, numbers
from convert.programs.fingerprint import ValueTable
from convert.programs.program import Operation, Program, Value, users_of


def hidden_by_choice(source: Program, target: Program, tolerance: float) -> Operation | None:
    """Return the first choice of the target that hides parameters: it chooses by other numbers than the source, and no output shows them.

    Args:
        source: a run.
        target: a run with the same weights and inputs.
        tolerance: relative error up to which two values are equal.
    """
    made = list(choices(target))
    if not made:
        return None
    values, known = Source(source), ValueTable[int](tolerance)
    for operation in choices(source):
        for array in forms(operation):
            known.add(array, 0)
    unknown = (operation for operation in made if not _is_known(operation, values, known, tolerance))
    users = users_of(target.operations)
    return next((one for one in unknown if is_hidden(one, target, users)), None)


def choices_as_outputs(program: Program) -> Program:
    """Return a program whose outputs are the numbers that its choices are made by."""
    made = Counter[str]()
    outputs: dict[str, Value] = {}
    for operation in choices(program):
        name = name_of(operation)
        made[name] += 1
        number = f" ({made[name]})" if made[name] > 1 else ""
        outputs[f"{name}{number}"] = numbers(operation)[0]
    return replace(program, outputs=outputs)


def _is_known(operation: Operation, source: Source, known: ValueTable[int], tolerance: float) -> bool:
    """Whether the source has the numbers, or makes a choice by numbers that choose the same."""
    return all(source.has(array, tolerance) for array in decisive(operation)) or any(map(known.find, forms(operation)))
