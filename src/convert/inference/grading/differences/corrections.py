"""What the source computes of a value that both programs have, in place of what the target computes of it.

A correction changes the record of the target at each place where its code does the same, so that the programs can be compared as a whole.
Functions without weights are exchanged, and numbers that are added to parameters, such as the epsilon of a BatchNorm.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from convert.inference.grading.differences.compensated import is_compensated, is_multiple, is_of_a_layer, only_hides
from convert.inference.grading.differences.functions import Function, functions_of
from convert.programs.divergence.constants import constant_of_parameters
from convert.programs.divergence.kinds import ELEMENTWISE, LAYOUT, kind_of
from convert.programs.divergence.knowledge import Knowledge
from convert.programs.divergence.layouts import layouts, same
from convert.programs.divergence.shared_values import FEW, same_numbers
from convert.programs.program import Operation, Program, Value

Array = np.ndarray[Any, np.dtype[Any]]
Compute = Callable[[Array, Mapping[str, Array]], Array]
MAX_RANK = 6  # of values whose axes are tried in all orders
BEFORE = 6  # operations in front of the difference at which a function may begin
ENTRIES = 2  # operations at which the target departs
PARTS = 3  # values of the source's with the same numbers


@dataclass(frozen=True, eq=False)
class Correction:
    """What the source computes of a value, where the target computes something else.

    Attributes:
        given: the value, of a record of the target.
        made: what the target computes of it; the value itself, if that is nothing.
        compute: (array as `given`, inputs) -> what the source computes of it.
        inputs: that it takes, by name.
        number: what the target should add to a parameter instead of another number; None where this is not the difference.
        tables: constants of the target -> what they should be; empty where these are not the difference.
        factor: whether the source computes a multiple of what the target does, for which multiples of weights may make up.
    """

    given: Value
    made: Value
    compute: Compute
    inputs: Sequence[str] = ()
    number: float | None = None
    tables: Mapping[Value, Array] = field(default_factory=dict)
    factor: bool = False


def corrections(known: Knowledge) -> Iterator[Correction]:
    """Yield what may correct the target, the likeliest first."""
    yield from _of_numbers(known)
    yield from _of_parameters(known)
    yield from _of_tables(known)
    region, present = known.region(), known.present()
    entries = [known.target.operations[k] for k in region if known.is_entry(k)]
    yield from _of_added(entries[:ENTRIES], known)
    for entry in entries[:ENTRIES]:
        for value in dict.fromkeys(v for operand in entry.data for v in _begins(operand, known)):
            yield from _of_value(value, known, present)


def _of_numbers(known: Knowledge) -> Iterator[Correction]:
    """Yield numbers that only the source adds to parameters, for those that only the target adds."""
    ours, theirs = (_added(program) for program in (known.target, known.source))
    for number, operation in ours.items():
        for other in theirs:
            if number not in theirs:
                given = next(x for x in operation.operands if x.of_parameters)
                yield Correction(given, operation.results[0], partial(_plus, other), (), other)


def _of_parameters(known: Knowledge) -> Iterator[Correction]:
    """Yield what the source computes of a leaf alone, in place of what the target computes of that parameter, as the log of a variance: functions of nearly the same steps first."""
    found: list[tuple[int, Correction]] = []
    theirs = [(x, _of_each_element(x, known.source)) for x in known.source.parameters.values()]
    for given in known.target.parameters.values():
        every = [other for x, functions in theirs if functions and same(x.array, given.array) for other in functions]
        for mine in _of_each_element(given, known.target) if every else ():
            if any(same(mine.made.array, other.made.array) for other in every):
                continue
            for other in every:
                steps, meant = (Counter(map(kind_of, function.steps)) for function in (mine, other))
                compute = partial(_computed, other, None, given.array.shape)
                apart = ((steps - meant) + (meant - steps)).total()
                found.append((apart, Correction(given, mine.made, compute)))
    yield from (correction for _, correction in sorted(found, key=lambda one: one[0]))


def _of_each_element(value: Value, program: Program) -> list[Function]:
    """Return the functions of a parameter that a program computes of each of its elements alone."""
    return [function for function in functions_of(value, program) if function.of_each and not function.inputs]


def _of_added(entries: Sequence[Operation], known: Knowledge) -> Iterator[Correction]:
    """Yield numbers that the source adds to a value that both have, or subtracts, in place of those of the target: the epsilon of a norm."""
    for entry in entries:
        ours = _value_and_number(entry)
        for part in known.found.get(ours[0], ()) if ours is not None else ():
            for user in known.source_users.get(part.value, ()) if part.axis is None else ():
                theirs = _value_and_number(user)
                if ours is None or theirs is None or kind_of(user) != kind_of(entry) or theirs[1] == ours[1]:
                    continue
                sign = 1 if kind_of(entry) == "add" else -1
                yield Correction(ours[0], entry.results[0], partial(_plus, sign * theirs[1]), (), theirs[1])


def _value_and_number(operation: Operation) -> tuple[Value, float] | None:
    """Return the value that an operation adds a number to, or takes it from, and the number; None where it does something else."""
    if kind_of(operation) not in ("add", "subtract") or len(operation.operands) != 2 or len(operation.data) != 1:
        return None
    (value,) = operation.data
    side = operation.operands.index(value)
    number = operation.operands[1 - side].number
    turned = kind_of(operation) == "subtract" and side == 1
    return None if number is None or turned else (value, number)


def _plus(number: float, array: Array, _: Mapping[str, Array]) -> Array:
    return array + number


def _of_tables(known: Knowledge) -> Iterator[Correction]:
    """Yield the correction of all tables that data is multiplied by or that are added to it, such as those of RoPE with another base.

    A table of other numbers is meant, not of the same in another order, which the weights of a layer may have as well.
    """
    ours, theirs = _tables(known.target), _tables(known.source)
    other = [x for x in ours if not any(same_numbers(x.array, y.array) for y in theirs)]
    meant = [y for y in theirs if not any(same_numbers(x.array, y.array) for x in ours)]
    tables: dict[Value, Array] = {}
    for x, y in zip(other, meant, strict=False):
        laid = next(layouts(y.array, x.array), None)
        if laid is None or is_compensated(x.array, x.array, laid, None):
            return
        tables[x] = laid
    if tables and len(other) == len(meant):
        yield Correction(other[0], other[0], lambda array, _: array, tables=tables)


def _tables(program: Program) -> list[Value]:
    """Return the constants of several numbers that operations with data are given, each once, in order."""
    found: list[Value] = []
    for operation in program.operations:
        for value in operation.operands if operation.data and kind_of(operation) in ("multiply", "add") else ():
            array = value.array
            new = (
                value.constant
                and array.dtype.kind == "f"
                and array.size >= FEW
                and not any(same(array, x.array) for x in found)
            )
            if new and not same_numbers(array, array.flat[:1]):
                found.append(value)
    return found


def _added(program: Program) -> dict[float, Operation]:
    """Return the numbers that a program adds to parameters, with the first operation that does."""
    found: dict[float, Operation] = {}
    for operation in program.operations:
        constant = constant_of_parameters(operation)
        if constant is not None and kind_of(operation) == "add":
            found.setdefault(constant[1], operation)
    return found


def _begins(value: Value, known: Knowledge) -> list[Value]:
    """Return the values of which a function may give this one, the first of them first."""
    found = [value]
    for _ in range(BEFORE):
        made = known.made_by.get(found[-1])
        if made is None or kind_of(made) not in (*ELEMENTWISE, LAYOUT) or len(made.data) != 1:
            break
        if any(x.leaves for x in made.operands if not x.data):
            break
        found.append(made.data[0])
    return [x for x in reversed(found) if known.is_known(x)]


def _of_value(given: Value, known: Knowledge, present: set[Value]) -> Iterator[Correction]:
    """Yield what the source computes of a value, for each function of it that the target computes, or for none."""
    ours: list[Function | None] = [*functions_of(given, known.target), None]
    for part in [x for x in known.found.get(given, ()) if x.axis is None][:PARTS]:
        order = _order(part.array, given.array)
        theirs: list[Function | None] = [*functions_of(part.value, known.source), None]
        pairs = sorted(itertools.product(ours, theirs), key=lambda pair: not _go_on_alike(pair[0], pair[1], known))
        for mine, other in pairs:
            unknown = mine is not None and not known.is_known(mine.made)
            lacking = other is not None and other.made not in present
            if not (unknown or lacking) or (order is None and other is not None and not other.of_each):
                continue
            made = _correction(given, mine, other, order, known)
            if made is not None:
                yield made


def _go_on_alike(mine: Function | None, other: Function | None, known: Knowledge) -> bool:
    """Whether operations of one kind use what two functions give."""
    if mine is None or other is None:
        return False
    kinds = [
        {kind_of(x) for x in users.get(f.made, ())} for f, users in ((mine, known.users), (other, known.source_users))
    ]
    return not kinds[0].isdisjoint(kinds[1])


def _order(theirs: Array, ours: Array) -> Array | None:
    """Return for each element of a value of the target its place in the source's value of the same numbers; None if axes do not give it."""
    kept = theirs.reshape([size for size in theirs.shape if size > 1])
    if kept.ndim > MAX_RANK or theirs.size != ours.size:
        return None
    numbers = np.arange(theirs.size).reshape(kept.shape)
    orders = itertools.permutations(range(kept.ndim))
    return next((numbers.transpose(x).ravel() for x in orders if same(kept.transpose(x), ours)), None)


def _correction(
    given: Value, mine: Function | None, other: Function | None, order: Array | None, known: Knowledge
) -> Correction | None:
    """Return the correction that two functions are; None if they are the same, or if other weights would make up for the difference."""
    inputs = {name: value.array for name, value in known.target.inputs.items()}
    compute = partial(_computed, other, order, given.array.shape)
    array = given.array
    try:
        want = compute(array, inputs)
    except ValueError:
        return None
    got = array if mine is None else mine.made.array.reshape(array.shape)
    if got.dtype.kind != "f" or want.dtype.kind != "f" or np.array_equal(got, want) or same(got, want):
        return None
    own: Callable[[Array], Array] | None = None
    if is_of_a_layer(given, known.made_by):
        if any(f is not None and f.inputs for f in (mine, other)) and not only_hides(got, want):
            return None  # the layer may give what is computed of inputs, too
        own = (lambda x: x) if mine is None else partial(_of_each, mine, inputs) if mine.of_each else None
    factor = is_multiple(got, want)
    if not factor and is_compensated(array, got, want, own):
        return None
    made = given if mine is None else mine.made
    return Correction(given, made, compute, () if other is None else tuple(other.inputs), factor=factor)


def _of_each(function: Function, inputs: Mapping[str, Array], array: Array) -> Array:
    return function(array, inputs)


def _computed(
    function: Function | None, order: Array | None, shape: tuple[int, ...], array: Array, inputs: Mapping[str, Array]
) -> Array:
    """Return what the source computes of an array that is laid out as the target's.

    Raises:
        ValueError: its operations do not take it.
    """
    if function is None:
        return array
    if function.of_each:
        return function(array, inputs)
    if array.shape != shape or order is None:
        raise ValueError("expected the shape of the value of which a mask was found")
    theirs = np.empty(array.size, array.dtype)
    theirs[order] = array.ravel()
    return np.asarray(function(theirs, inputs).ravel()[order].reshape(shape))
