"""Choices of a program: the largest of several numbers, the side of a limit on which one lies, the nearest whole one.

Of the numbers that a choice is made by, outputs may show the choice alone. The codebook of a VQ-VAE is such a choice: two programs may
have other values in front of it, as those of another epsilon or another distance, and give equal outputs for nearly all inputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any

import numpy as np

from convert.core.errors import ConvertError
from convert.numerics.magnitude import magnitudes, relative_error
from convert.programs.program import REFUSALS, Operation, Program, Value
from convert.programs.rerun import rerun

Array = np.ndarray[Any, np.dtype[Any]]
STEPS = {"round", "floor", "ceil", "trunc", "sign", "fix"}  # their results are numbers of floating point
CASTS = {"convert_element_type", "_to_copy"}
NOT_AMONG_SEVERAL = CASTS | {"bucketize", "searchsorted"}  # each number for itself
SMALL = 1e-7  # relative change of a parameter: it moves no choice, unless two elements are this close
NONE = 1e-13  # relative change of an output that is none


class Kind(StrEnum):
    """What is chosen."""

    PLACE = "a place among several numbers"
    SIDE = "a side of a limit"
    STEP = "a whole number"


def choices(program: Program) -> Iterator[Operation]:
    """Yield the operations that make integers, truth values or whole numbers of numbers that parameters are in."""
    moving = {*program.parameters.values()}  # with a parameter; numbers that are made of places that were chosen do not
    for operation in program.operations:
        kinds = {result.array.dtype.kind for result in operation.results}
        moves = any(operand in moving and operand.array.dtype.kind == "f" for operand in operation.operands)
        steps = name_of(operation) in STEPS
        if moves and (steps or not kinds.isdisjoint("iub")):
            yield operation
        if moves and not steps:
            moving |= {result for result in operation.results if result.array.dtype.kind == "f"}


def choices_of_inputs(program: Program) -> Iterator[Operation]:
    """Yield the operations that make truth values or places of numbers that inputs are in, and no parameter; whole numbers are tokens, or masks."""
    for operation in program.operations:
        given = [operand for operand in operation.data if operand.array.dtype.kind == "f"]
        made = {result.array.dtype.kind for result in operation.results}
        plain = operation.name in CASTS or any(operand.leaves for operand in operation.operands)
        if given and not plain and made <= set("iub") and any((x.array != np.round(x.array)).any() for x in given):
            yield operation


def name_of(choice: Operation) -> str:
    """Return the name of an operation, whether it changes its operand in place or not."""
    return choice.name.rstrip("_")


def kind_of(choice: Operation) -> Kind:
    """Return what an operation chooses."""
    name = name_of(choice)
    if name == "sign" or all(result.array.dtype.kind == "b" for result in choice.results):
        return Kind.SIDE
    return Kind.STEP if name in STEPS | NOT_AMONG_SEVERAL else Kind.PLACE


def numbers(choice: Operation) -> list[Value]:
    """Return the numbers that parameters are in, by which a choice is made."""
    return [operand for operand in choice.operands if operand.leaves and operand.array.dtype.kind == "f"]


def is_choice(name: str, *, places: bool) -> bool:
    """Whether an operator that is given numbers chooses among several, or gives whole ones.

    Args:
        places: whether it gives integers.
    """
    return name.rstrip("_") in STEPS or (places and name not in NOT_AMONG_SEVERAL)


def decisive(choice: Operation) -> list[Array]:
    """Return the numbers that parameters are in, by which a choice is made; of a comparison, what one side is larger by."""
    compared = rows(choice) if kind_of(choice) is Kind.SIDE else None
    return [value.array for value in numbers(choice)] if compared is None else [compared]


def rows(choice: Operation) -> Array | None:
    """Return what is compared in a choice, [rows, numbers of which one is chosen]; None where that is not known.

    Of a comparison it is what one side is larger by.
    """
    floats = [operand.array for operand in choice.operands if operand.array.dtype.kind == "f"]
    first = floats[0]
    kind = kind_of(choice)
    if kind is Kind.SIDE and len(floats) > 1:
        with np.errstate(invalid="ignore"):
            first = floats[0] - floats[1]
    if np.isnan(first).any() or (kind is Kind.STEP and len(floats) > 1):
        return None
    if kind is not Kind.PLACE:
        return np.atleast_2d(first).reshape(-1, first.shape[-1] if first.ndim else 1)
    if not first.size or first.ndim == 0:
        return None
    moved = np.moveaxis(first, _axis(choice.settings, first), -1)
    return moved.reshape(-1, moved.shape[-1])


def forms(choice: Operation) -> Iterator[Array]:
    """Yield what is compared in a choice, [rows, numbers], without what does not change it: an addend and a positive factor, a square or an exponential.

    Of distances, the square may be compared, or lack what is the same for all; of probabilities, their logarithms. Whole numbers are
    those of the numbers themselves. A number in place of a masked one counts as masked.
    """
    first, kind = rows(choice), kind_of(choice)
    if first is None or kind is Kind.STEP:
        return
    if kind is Kind.SIDE:
        if np.isfinite(first).all():
            yield _scaled(first)
            yield _scaled(-first)
        return
    left = ~masked(first)
    for array in (first, -first):
        yield _centred(array, left)
    seen = first[left]
    if (seen >= 0).all():
        first = np.where(left, first, 1)
        yield _centred(first**2, left)
        yield _centred(-(first**2), left)
        if seen.all():
            yield _centred(np.log(first), left)
            yield _centred(-np.log(first), left)


def masked(array: Array) -> Array:
    """Return where a number stands for a masked one: it is infinite, or far larger than the others."""
    finite = np.isfinite(array)
    sizes = magnitudes(array)
    found: Array = ~finite | (sizes > sizes.min(initial=np.inf, where=finite))
    return found


def is_hidden(choice: Operation, program: Program, users: Mapping[Value, Sequence[Operation]]) -> bool:
    """Whether no output shows the numbers that a choice is made by.

    Args:
        users: of the program's values.
    """
    return _is_alone(choice, users, program) or _hides(choice, program)


def hides_input(choice: Operation, program: Program) -> bool:
    """Whether an input in front of a choice can be moved a little, and no output moves."""
    given = {name: value.array for name, value in program.inputs.items()}
    weights = {name: value.array for name, value in program.parameters.items()}
    behind = {name for name, value in program.inputs.items() if choice in _operations_behind(value, program)}
    moving = [name for name in sorted(behind) if given[name].dtype.kind == "f"]
    return any(_moves_nothing(program, weights, {**given, name: _moved(given[name])}) for name in moving)


def _axis(settings: Mapping[str, Any], array: Array) -> int:
    """Return the axis along which an operation chooses; the last one where that is not said."""
    said = settings.get("axes", settings.get("dim", settings.get("dimension", -1)))
    axis = said[0] if isinstance(said, tuple | list) and said else said
    return axis if isinstance(axis, int) and -array.ndim <= axis < array.ndim else -1


def _centred(array: Array, left: Array) -> Array:
    """Return rows without an addend and a factor of each; of two numbers, any rows would be the same without a factor of each."""
    count = np.maximum(left.sum(-1, keepdims=True), 1)
    mean = np.where(left, array, 0).sum(-1, keepdims=True) / count
    return _scaled(np.where(left, array - mean, 0), -1 if array.shape[-1] > 2 else None)


def _scaled(array: Array, axis: int | None = None) -> Array:
    largest = np.abs(array).max(axis=axis, keepdims=True, initial=0)
    found: Array = array / np.where(largest == 0, 1, largest)
    return found


def _is_alone(choice: Operation, users: Mapping[Value, Sequence[Operation]], program: Program) -> bool:
    """Whether outputs depend on the place that is chosen among some numbers, or on the rounded ones, and on the numbers in no other way.

    Of a comparison, the numbers are often computed for it alone, as ``4 y > 1`` beside ``y``: `_hides` tells.
    """
    step = name_of(choice) in STEPS
    places = [result for result in choice.results if step or result.array.dtype.kind in "iu"]
    if not places or not any(_reaches(place, users, program, None) for place in places):
        return False
    others = [result for result in choice.results if result not in places]
    return not any(_reaches(value, users, program, choice) for value in (*numbers(choice), *others))


def _reaches(
    value: Value, users: Mapping[Value, Sequence[Operation]], program: Program, without: Operation | None
) -> bool:
    """Whether an output is computed from a value, other than by one of the operations."""
    outputs, todo, seen = {*program.outputs.values()}, [value], set[Value]()
    while todo:
        at = todo.pop()
        if at in outputs:
            return True
        if at not in seen:
            seen.add(at)
            todo += [result for user in users.get(at, ()) if user is not without for result in user.results]
    return False


def _hides(choice: Operation, program: Program) -> bool:
    """Whether a parameter in front of a choice can be moved a little, and no output moves."""
    weights = {name: value.array for name, value in program.parameters.items()}
    given = {name: value.array for name, value in program.inputs.items()}
    leaves = frozenset[str]().union(*(operand.leaves for operand in choice.operands))
    return any(_moves_nothing(program, {**weights, name: _moved(weights[name])}, given) for name in sorted(leaves))


def _moved(array: Array) -> Array:
    rng = np.random.default_rng(0)
    sizes = np.abs(array) if array.any() else np.ones_like(array)  # a parameter of zeros is moved, too
    moved: Array = array + SMALL * rng.normal(size=array.shape) * sizes
    return moved


def _moves_nothing(program: Program, weights: Mapping[str, Array], given: Mapping[str, Array]) -> bool:
    """Whether the outputs are the same with these parameters and inputs."""
    try:
        moved = rerun(program, weights, given)
    except (ConvertError, *REFUSALS):  # not a number, or other shapes
        return False
    outputs = zip(moved.outputs.values(), program.outputs.values(), strict=True)
    return all(relative_error(one.array, other.array) <= NONE for one, other in outputs)


def _operations_behind(value: Value, program: Program) -> set[Operation]:
    """Return the operations that a value has a part in."""
    reached, found = {value}, set[Operation]()
    for operation in program.operations:
        if not reached.isdisjoint(operation.operands):
            found.add(operation)
            reached.update(operation.results)
    return found
