"""Operations whose effect no run shows: a limit that no value reaches, or each, and a choice of which one side is always taken.

The outputs of two programs agree although only one of them has the limit, or each has another one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from convert.inference.forms.elements import behind_moves
from convert.inference.grading.notes.reach import ANY, Interval, decided, reaches
from convert.programs.divergence.graph import root
from convert.programs.divergence.words import SOFTPLUS_LINES
from convert.programs.fingerprint import ValueTable
from convert.programs.program import Operation, Program, Value

Array = np.ndarray[Any, np.dtype[Any]]
LIMITS = {"clamp", "clamp_min", "clamp_max", "hardtanh", "max", "maximum", "min", "minimum", "fmax", "fmin"}
BENDS = {
    "relu": (0.0,),
    "leaky_relu": (0.0,),
    "elu": (0.0,),
    "abs": (0.0,),
    "hardsigmoid": (-3.0, 3.0),
    "hardswish": (-3.0, 3.0),
}
FLAT = {
    "erf": 6.0,
    "tanh": 20.0,
    "gelu": 9.0,
    "sigmoid": 40.0,
    "logistic": 40.0,
    "silu": 40.0,
    "softplus": 40.0,
}  # beyond which float64 has lines
OF_CURVES = "every value is beyond {size:g} on either side (from {least:.3g}), where the function is a line; give smaller inputs"
# position of the condition
CHOICES = {"where": 0, "select_n": 0, "masked_fill": 1, "index_put": 1, "masked_scatter": 1}
OF_NUMBERS = "every element takes the same side; give inputs that choose the other one, too"
OF_SIZES = "every element takes the same side, and no number of the inputs changes it; if larger inputs do, as beyond a window, give these"
OF_WEIGHTS = "every element takes the same side with all weights that were drawn, and no input changes it; compare this line in both"
LEAVES = {"renorm", "embedding_renorm"}  # shorten rows that are too long
OF_ROWS = "it leaves every number as it is, as no row is so long; give longer ones, or compare this line in both"
WRAPS = {"rem", "remainder", "fmod", "and", "bitwise_and"}  # may give a number as it is
OF_WRAPS = "it leaves every number as it is; give numbers that it changes"
STEPS = {
    *("floor", "ceil", "round", "trunc", "sign", "sgn", "heaviside"),
    *("bucketize", "searchsorted", "convert_element_type"),
}
LARGEST = 1e18  # that a step is tried with: whole numbers have no infinity
OF_STEPS = "every element gives {number:g}; give numbers that give others, too, or compare this line in both"
OF_SMALL = "no value is between {low:g} and {high:g}, where it gives 0; give inputs that reach it, or compare this line in both"
COMPARISONS = {"gt", "ge", "lt", "le", "eq", "ne"}
ANSWERS = {  # of a comparison: what makes one of several, turns it over, or makes a number of it
    *("any", "all", "reduce_or", "reduce_and", "not", "bitwise_not", "logical_not", "logical_not_"),
    *("convert_element_type", "_to_copy", "rsub", "sub"),
}
OF_FACTORS = "every element has one answer, and multiplies by it; give inputs that have the other one, too"
NOT_A_NUMBER = {"is_finite", "isnan", "isinf", "isfinite"}  # conditions that guard


@dataclass(frozen=True, eq=False)
class Unshown:
    """What an operation does not show.

    Attributes:
        operation: of the first run.
        problem: in words.
        number: the limit; None of a choice.
        above: whether it limits from above.
    """

    operation: Operation
    problem: str
    number: float | None = None
    above: bool = False


def notes(source: Sequence[Program], target: Sequence[Program], tolerance: float) -> tuple[str, ...]:
    """Return what neither run of the two programs shows, in words; a limit that both have at the same value is the same.

    Args:
        source, target: runs of one program with different weights and inputs; those with other operations than the first do not count.
    """
    sides = {"JAX function": list(_unshown(source)), "PyTorch module": list(_unshown(target))}
    said: dict[tuple[str, str], list[Unshown]] = {}
    for (side, own), other in zip(sides.items(), reversed(sides.values()), strict=True):
        for one in own:
            if one.number is None or not any(_same(one, two, tolerance) for two in other):
                what = f"`{one.operation.name}` of the {side}"
                limit = f"{one.operation.place} {one.number} {one.above}"
                said.setdefault((what, one.problem if one.number is None else limit), []).append(one)
    return tuple(_in_words(what, found) for (what, _), found in said.items())


def _in_words(what: str, found: Sequence[Unshown]) -> str:
    """Return one note for what is the same in several lines, or where a loop or a further layer runs one line again."""
    places = [place for place in dict.fromkeys(one.operation.place for one in found) if place]
    at = f" at {', '.join(places)}" if places else ""
    times = f", {len(found)} times" if len(found) > len(places) == 1 else ""
    return f"{what}{at}{times}: {found[0].problem}"


def _same(one: Unshown, two: Unshown, tolerance: float) -> bool:
    if (one.number, one.above) != (two.number, two.above):
        return False
    table: ValueTable[int] = ValueTable(tolerance, repeated=True)
    table.add(two.operation.results[0].array, 0)
    return bool(table.find(one.operation.results[0].array))


def _unshown(runs: Sequence[Program]) -> Iterator[Unshown]:
    """Yield what no run shows, and other inputs could."""
    first = runs[0]
    names = [operation.name for operation in first.operations]
    runs = [run for run in runs if [operation.name for operation in run.operations] == names]
    made, users = first.made_by, first.users
    reach = reaches(first)
    given = _whole_inputs(first, made)
    for index, operation in enumerate(first.operations):
        every = [run.operations[index] for run in runs]
        if operation.name in CHOICES:
            yield from _choice(every, _made_by(operation.operands[CHOICES[operation.name]], made), reach, given)
        elif operation.name in LIMITS or operation.name in BENDS:
            yield from _limits(every, reach, given)
        elif operation.name in FLAT:
            yield from _curve(every)
        elif operation.name in WRAPS:
            yield from _wraps(every, given)
        elif operation.name in LEAVES:
            yield from _leaves(every)
        elif operation.name in STEPS:
            yield from _step(every, reach)
        elif operation.name == "hardshrink":
            yield from _shrinks(every)
        elif operation.name == "logit":
            yield from _logit(every)
        elif operation.name in COMPARISONS and not decided(operation, reach):
            yield from _factor(every, _used_by(operation.results[0], users))


def _whole_inputs(program: Program, made: Mapping[Value, Operation]) -> set[Value]:
    """Return the inputs of whole numbers, such as tokens, in any layout."""
    inputs = {value for value in program.inputs.values() if value.array.dtype.kind in "iu"}
    every = (value for operation in program.operations for value in operation.results if value.array.dtype.kind in "iu")
    return inputs | {value for value in every if inputs and root(value, made) in inputs}


def _choice(
    runs: Sequence[Operation], condition: Operation | None, reach: Mapping[Value, Interval], given: set[Value]
) -> Iterator[Unshown]:
    operation = runs[0]
    of_tokens = any(x in given for x in operation.operands) and not _counts_from_the_end(condition)
    floats = operation.results[0].array.dtype.kind == "f"
    if not (floats or of_tokens) or operation.results[0].constant or _guards(condition):
        return
    if condition is not None and decided(condition, reach):
        return
    if condition is not None and _alike(operation, condition):
        return
    at = CHOICES[operation.name]
    if operation.name == "index_put" and operation.operands[at].array.dtype.kind != "b":
        return  # it has indices
    conditions = [run.operands[at].array for run in runs if run.operands[at].array.size]
    chosen = {int(number) for array in conditions for number in (array.min(), array.max())}
    if len(chosen) != 1:
        return
    sides = [k for k in range(len(operation.operands)) if k != at]
    (number,) = chosen
    taken = 1 - number if operation.name == "where" else number
    left = [operation.operands[k].array for k in sides if k != sides[taken]]
    if any(array.dtype.kind != "f" or not np.isnan(array).all() for array in left):
        asked = operation.operands[at]
        yield Unshown(operation, OF_SIZES if asked.constant else OF_NUMBERS if asked.data else OF_WEIGHTS)


def _counts_from_the_end(condition: Operation | None) -> bool:
    """Whether a condition asks for negative indices, which JAX counts from the end."""
    return (
        condition is not None
        and condition.name == "lt"
        and condition.operands[1].constant
        and not condition.operands[1].array.any()
    )


def _wraps(runs: Sequence[Operation], given: set[Value]) -> Iterator[Unshown]:
    operation = runs[0]
    value, *others = operation.operands
    wrapped = value in given or (value.data and value.array.dtype.kind == "f")
    of_inputs = wrapped and all(x.constant for x in others)
    if of_inputs and all(np.array_equal(run.results[0].array, run.operands[0].array) for run in runs):
        yield Unshown(operation, OF_WRAPS, next(iter(operation.numbers), 0.0))


def _leaves(runs: Sequence[Operation]) -> Iterator[Unshown]:
    if all(np.array_equal(run.results[0].array, run.operands[0].array) for run in runs):
        yield Unshown(runs[0], OF_ROWS)


def _step(runs: Sequence[Operation], reach: Mapping[Value, Interval]) -> Iterator[Unshown]:
    """Yield a step of which no run shows more than one side."""
    operation, value = runs[0], next((x for x in runs[0].operands if x.data), None)
    whole = operation.name != "convert_element_type" or operation.results[0].array.dtype.kind in "iu"
    if value is None or value.array.dtype.kind != "f" or not whole:
        return
    numbers = np.unique(np.concatenate([run.results[0].array.ravel() for run in runs]))
    if len(numbers) == 1 and not _is_one_step(operation, value, reach.get(value, ANY)):
        yield Unshown(operation, OF_STEPS.format(number=float(numbers[0])), float(numbers[0]))


def _is_one_step(operation: Operation, value: Value, reach: Interval) -> bool:
    """Whether a step gives the same at both ends of what a value can be."""
    at = operation.operands.index(value)
    arrays, ends = [x.array for x in operation.operands], list[Array]()
    for end in reach:
        arrays[at] = np.full(value.array.shape, np.clip(end, -LARGEST, LARGEST))
        ends.append(np.asarray(operation.again(arrays)[0]))
    return bool((ends[0] == ends[1]).all())


def _shrinks(runs: Sequence[Operation]) -> Iterator[Unshown]:
    """Yield the band in which a shrinking function gives zeros, where no value lies in it."""
    size = next(iter(runs[0].numbers), 0.5)  # torch's default
    if not any((np.abs(run.operands[0].array) <= size).any() for run in runs):
        yield Unshown(runs[0], OF_SMALL.format(low=-size, high=size), size)


def _used_by(value: Value, users: Mapping[Value, Sequence[Operation]]) -> set[str]:
    """Return the names of the operations that use an answer, or what is made of it as a number."""
    found, todo, seen = set[str](), [value], set[Value]()
    while todo:
        for user in behind_moves(todo.pop(), users):
            found.add(user.name)
            more = [x for x in user.results if x not in seen] if user.name in ANSWERS else []
            seen.update(more)
            todo += more
    return found


def _logit(runs: Sequence[Operation]) -> Iterator[Unshown]:
    """Yield the limits of a logit that keeps away from 0 and 1."""
    values = np.concatenate([run.operands[0].array.ravel() for run in runs])
    least = runs[0].settings.get("eps")
    if least is not None and values.size and least < values.min() and values.max() < 1 - least:
        span = f"from {values.min():.3g} up to {values.max():.3g}"
        problem = f"no value is below {least:g} or above {1 - least:g} ({span}); give inputs that reach it, or compare this line in both"
        yield Unshown(runs[0], problem, float(least))


def _curve(runs: Sequence[Operation]) -> Iterator[Unshown]:
    operation, size = runs[0], FLAT[runs[0].name]
    least = min((float(np.abs(run.operands[0].array).min(initial=np.inf)) for run in runs), default=np.inf)
    if operation.data and size < least < np.inf:
        yield Unshown(operation, OF_CURVES.format(size=size, least=least), size)
    largest = max((float(run.operands[0].array.max(initial=-np.inf)) for run in runs), default=-np.inf)
    for number in operation.numbers if operation.name == "softplus" else ():
        if operation.data and largest < number and number not in SOFTPLUS_LINES:
            problem = f"no value is above {number:g} (up to {largest:.3g}), where it is a line; give inputs that reach it, or compare this line in both"
            yield Unshown(operation, problem, number, True)


def _factor(runs: Sequence[Operation], used_by: Collection[str]) -> Iterator[Unshown]:
    operation = runs[0]
    answers = np.concatenate([run.results[0].array.ravel() for run in runs])
    if operation.data and "mul" in used_by and len(np.unique(answers)) == 1 and not _guards(operation):
        yield Unshown(operation, OF_FACTORS)


def _made_by(value: Value, made: Mapping[Value, Operation]) -> Operation | None:
    """Return the operation that computes a value, but for its layout and a negation."""
    operation = made.get(value)
    while operation is not None and len(operation.operands) == 1 and operation.name not in NOT_A_NUMBER:
        operation = made.get(operation.operands[0])
    return operation


def _guards(condition: Operation | None) -> bool:
    """Whether a condition asks whether something is a number."""
    if condition is None:
        return False
    one, *others = condition.operands
    infinite = any(other.array.dtype.kind == "f" and np.isinf(other.array).all() for other in others)
    return condition.name in NOT_A_NUMBER or infinite or any(other is one for other in others)


def _alike(operation: Operation, condition: Operation) -> bool:
    """Whether a choice gives the same on either side: between a value and the number that it is asked to be equal to, as JAX has it for a zero's sign."""
    at = CHOICES[operation.name]
    if condition.name != "eq" or operation.operands[at] not in condition.results:
        return False
    sides = [x for k, x in enumerate(operation.operands) if k != at]
    value, number = sorted(condition.operands, key=lambda x: x.constant)
    others = [x.array for x in sides if x is not value]
    return len(others) == 1 and number.constant and bool((others[0] == number.array).all())


def _limits(runs: Sequence[Operation], reach: Mapping[Value, Interval], given: set[Value]) -> Iterator[Unshown]:
    operation = runs[0]
    limited = [k for k, x in enumerate(operation.operands) if not x.constant]
    if len(limited) != 1:
        return
    if operation.operands[limited[0]].array.dtype.kind != "f" and operation.operands[limited[0]] not in given:
        return
    (at,) = limited
    values = np.concatenate([run.operands[at].array.ravel() for run in runs])
    low, high = reach.get(operation.operands[at], ANY)
    for number in BENDS.get(operation.name) or operation.numbers:  # the slope of a leaky ReLU is no limit
        for is_above, reached, ever, all_beyond in (
            (True, (values > number).any(), high > number, (values < number).all()),
            (False, (values < number).any(), low < number, (values > number).all()),
        ):
            bends = operation.name in BENDS or _flat(operation, at, number, is_above)
            if ever and not reached and (bends or (all_beyond and _flat(operation, at, number, not is_above))):
                span = "no row comes here"  # as where no token is sent to an expert
                if values.size:
                    span = f"up to {values.max():.3g}" if is_above else f"from {values.min():.3g}"
                problem = f"no value is {'above' if is_above else 'below'} {number:g} ({span}); give inputs that reach it, or compare this line in both"
                yield Unshown(operation, problem, number, is_above)


def _flat(operation: Operation, at: int, number: float, above: bool) -> bool:
    """Whether everything above (below) a number becomes that number."""
    operands = [operand.array for operand in operation.operands]
    step = 1.0 if above else -1.0
    operands[at] = np.full(operands[at].shape, number + step, operands[at].dtype)
    return bool((np.asarray(operation.again(operands)[0]) == number).all())
