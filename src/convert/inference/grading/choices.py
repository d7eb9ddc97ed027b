"""Values that only decide a choice: of them, outputs show which element is the largest, or on which side of a limit one lies.

The codebook of a VQ-VAE is such a choice. Two programs may have other values in front of it, as those of another epsilon or another distance,
and give equal outputs for nearly all inputs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from convert.core.errors import ConvertError
from convert.inference.candidates.source import Source
from convert.numerics.magnitude import relative_error
from convert.programs.fingerprint import ValueTable
from convert.programs.program import Operation, Program, Value, users_of
from convert.programs.rerun import rerun

Array = np.ndarray[Any, np.dtype[Any]]
STEPS = {"round", "floor", "ceil", "trunc", "sign", "fix"}  # their results are numbers of floating point
SMALL = 1e-7  # relative change of a parameter: it moves no choice, unless two elements are this close
NONE = 1e-13  # relative change of an output that is none


def choices(program: Program) -> Iterator[Operation]:
    """Yield the operations that make integers, truth values or whole numbers of numbers that parameters are in."""
    moving = {*program.parameters.values()}  # with a parameter; numbers that are made of places that were chosen do not
    for operation in program.operations:
        kinds = {result.array.dtype.kind for result in operation.results}
        moves = any(operand in moving and operand.array.dtype.kind == "f" for operand in operation.operands)
        steps = operation.name.rstrip("_") in STEPS
        if moves and (steps or not kinds.isdisjoint("iub")):
            yield operation
        if moves and not steps:
            moving |= {result for result in operation.results if result.array.dtype.kind == "f"}


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
    values, forms = Source(source), ValueTable[int](tolerance)
    for operation in choices(source):
        for array in _forms(operation):
            forms.add(array, 0)
    unknown = (operation for operation in made if not _is_known(operation, values, forms, tolerance))
    users = users_of(target.operations)
    return next((one for one in unknown if _is_alone(one, users, target) or _hides(one, target)), None)


def choices_as_outputs(program: Program) -> Program:
    """Return a program whose outputs are the numbers that its choices are made by."""
    made = Counter[str]()
    outputs: dict[str, Value] = {}
    for operation in choices(program):
        name = operation.name.rstrip("_")
        made[name] += 1
        number = f" ({made[name]})" if made[name] > 1 else ""
        outputs[f"{name}{number}"] = _numbers(operation)[0]
    return replace(program, outputs=outputs)


def _numbers(choice: Operation) -> list[Value]:
    """Return the numbers that parameters are in, by which a choice is made."""
    return [operand for operand in choice.operands if operand.leaves and operand.array.dtype.kind == "f"]


def _is_known(operation: Operation, source: Source, forms: ValueTable[int], tolerance: float) -> bool:
    """Whether the source has the numbers, or makes a choice by numbers that choose the same."""
    numbers = [operand.array for operand in operation.operands if operand.leaves]
    return all(source.has(array, tolerance) for array in numbers) or any(map(forms.find, _forms(operation)))


def _forms(operation: Operation) -> Iterator[Array]:
    """Yield what is compared in a choice, without what does not change it: an addend and a positive factor, a square or an exponential.

    Of distances, the square may be compared, or lack what is the same for all; of probabilities, their logarithms. A number that is
    rounded is none of these.
    """
    if operation.name.rstrip("_") in STEPS:
        return
    first, *others = (operand.array for operand in operation.operands if operand.array.dtype.kind == "f")
    if not all(np.isfinite(array).all() for array in (first, *others)):
        return  # the numbers themselves may be those of the source
    if others and first.shape == np.broadcast_shapes(first.shape, others[0].shape):
        yield _scaled(first - others[0])
        yield _scaled(others[0] - first)
        return
    if first.ndim == 0:
        return
    axis = _axis(operation.settings, first)
    for array in (first, -first):
        yield _centred(array, axis)
    if (first >= 0).all():
        for array in (first**2, -(first**2), *((np.log(first), -np.log(first)) if first.all() else ())):
            yield _centred(array, axis)


def _axis(settings: Mapping[str, Any], array: Array) -> int:
    """Return the axis along which an operation chooses; the last one where that is not said."""
    said = settings.get("axes", settings.get("dim", settings.get("dimension", -1)))
    axis = said[0] if isinstance(said, tuple | list) and said else said
    return axis if isinstance(axis, int) and -array.ndim <= axis < array.ndim else -1


def _centred(array: Array, axis: int) -> Array:
    return _scaled(array - array.mean(axis, keepdims=True), axis)


def _scaled(array: Array, axis: int | None = None) -> Array:
    largest = np.abs(array).max(axis=axis, keepdims=True, initial=0)
    found: Array = array / np.where(largest == 0, 1, largest)
    return found


def _is_alone(operation: Operation, users: Mapping[Value, Sequence[Operation]], target: Program) -> bool:
    """Whether outputs depend on the place that is chosen among some numbers, or on the rounded ones, and on the numbers in no other way.

    Of a comparison, the numbers are often computed for it alone, as ``4 y > 1`` beside ``y``: `_hides` tells.
    """
    step = operation.name.rstrip("_") in STEPS
    places = [result for result in operation.results if step or result.array.dtype.kind in "iu"]
    if not places or not any(_reaches(place, users, target, None) for place in places):
        return False
    others = [result for result in operation.results if result not in places]
    return not any(_reaches(value, users, target, operation) for value in (*_numbers(operation), *others))


def _reaches(
    value: Value, users: Mapping[Value, Sequence[Operation]], target: Program, without: Operation | None
) -> bool:
    """Whether an output is computed from a value, other than by one of the operations."""
    outputs, todo, seen = {*target.outputs.values()}, [value], set[Value]()
    while todo:
        at = todo.pop()
        if at in outputs:
            return True
        if at not in seen:
            seen.add(at)
            todo += [result for user in users.get(at, ()) if user is not without for result in user.results]
    return False


def _hides(operation: Operation, target: Program) -> bool:
    """Whether a parameter in front of a choice can be moved a little, and no output moves."""
    weights = {name: value.array for name, value in target.parameters.items()}
    given = {name: value.array for name, value in target.inputs.items()}
    for name in sorted(frozenset[str]().union(*(operand.leaves for operand in operation.operands))):
        rng = np.random.default_rng(0)
        step = SMALL * rng.normal(size=weights[name].shape) * np.abs(weights[name])
        try:
            moved = rerun(target, {**weights, name: weights[name] + step}, given)
        except ConvertError:  # not a number
            continue
        outputs = zip(moved.outputs.values(), target.outputs.values(), strict=True)
        if all(relative_error(one.array, other.array) <= NONE for one, other in outputs):
            return True
    return False
