"""Values that only decide a choice: of them, outputs show which element is the largest, or on which side of a limit one lies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from convert.inference.candidates.source import Source
from convert.numerics.magnitude import relative_error
from convert.programs.choices import (
    choices,
    choices_of_inputs,
    decisive,
    forms,
    hides_input,
    is_hidden,
    name_of,
    numbers,
)
from convert.programs.fingerprint import ValueTable
from convert.programs.program import Array, Operation, Program, Value


def hidden_by_choice(source: Program, target: Program, tolerance: float) -> Operation | None:
    """Return the first choice of the target that hides parameters or inputs: it chooses by other numbers than the source, and no output shows them.

    Args:
        source: a run.
        target: a run with the same weights and inputs.
        tolerance: relative error up to which two values are equal.
    """
    made, of_inputs = list(choices(target)), list(choices_of_inputs(target))
    if not made and not of_inputs:
        return None
    values, known = Source(source), _known_forms(source, tolerance)
    limits = [x.array for operation in source.operations for x in operation.operands if _is_number(x) and x.constant]
    users = target.users

    def differs(choice: Operation) -> bool:
        own = frozenset[str]().union(*(operand.leaves for operand in choice.operands)) <= target.buffers
        same = own and _has_all(choice, values, limits, tolerance)
        return not same and not _is_known(choice, values, known, tolerance)

    hidden = (one for one in made if differs(one) and is_hidden(one, target, users))
    return next(hidden, None) or next((one for one in of_inputs if differs(one) and hides_input(one, target)), None)


def unlike_choices_as_outputs(source: Program, target: Program, tolerance: float) -> tuple[Program, Program]:
    """Return both programs with the numbers as outputs that their choices are made by, without those that choose the same as ones of the source."""
    known = _known_forms(source, tolerance)
    of_source, of_target = _by_name(source), _by_name(target)
    unlike = {name for name, choice in of_target.items() if not any(map(known.find, forms(choice)))}
    one, other = (
        replace(program, outputs={name: numbers(choice)[0] for name, choice in found.items() if name in unlike})
        for program, found in ((source, of_source), (target, of_target))
    )
    return one, other


def _by_name(program: Program) -> dict[str, Operation]:
    """Return the choices of a program; those of one kind are numbered."""
    made, found = Counter[str](), dict[str, Operation]()
    for operation in choices(program):
        name = name_of(operation)
        made[name] += 1
        found[f"{name} ({made[name]})" if made[name] > 1 else name] = operation
    return found


def _known_forms(source: Program, tolerance: float) -> ValueTable[int]:
    """Return what a program compares in its choices; also what it sorts, of which it may take no places."""
    known = ValueTable[int](tolerance)
    sorts = (operation for operation in source.operations if name_of(operation) == "sort" and numbers(operation))
    for operation in (*choices(source), *choices_of_inputs(source), *sorts):
        for array in forms(operation):
            known.add(array, 0)
    return known


def _is_known(operation: Operation, source: Source, known: ValueTable[int], tolerance: float) -> bool:
    """Whether the source has the numbers, also as rows of others, or makes a choice by numbers that choose the same."""
    by = decisive(operation)
    has = all(source.has(array, tolerance) or source.has_each_row(array, tolerance) for array in by)
    return bool(by and has) or any(map(known.find, forms(operation)))


def _has_all(choice: Operation, source: Source, limits: Sequence[Array], tolerance: float) -> bool:
    """Whether the source has the data of a choice as it is, and its other numbers as constants, such as the limits of bins."""

    def is_limit(array: Array) -> bool:
        same_size = (other for other in limits if other.size == array.size)
        return any(relative_error(array.ravel(), other.ravel()) <= tolerance for other in same_size)

    compared = filter(_is_number, choice.operands)
    return all(source.has(x.array, tolerance) if x.data else is_limit(x.array) for x in compared)


def _is_number(value: Value) -> bool:
    return value.array.dtype.kind == "f"
