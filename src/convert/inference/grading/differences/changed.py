"""Change a record of the target by a correction, at each place where its code does what the correction corrects."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from convert.inference.forms.elements import without_idle
from convert.inference.grading.differences.corrections import Correction
from convert.programs.divergence.layouts import same
from convert.programs.program import Operation, Program, Value
from convert.programs.rerun import rerun

Array = np.ndarray[Any, np.dtype[Any]]
NAME = "function_of_the_source"
NEAR = 2  # operations in front of a value that tell it from others of its line
_Places = Mapping[Value, Value]  # what the target computes -> of which value
_Like = Callable[[Operation, Operation], bool]


def changed(correction: Correction, record: Program, program: Program) -> Iterator[Program]:
    """Yield records with a correction: everywhere, then where the same line runs.

    Args:
        record: that the correction was found in.
        program: another record of the same code, which is changed.

    Raises:
        ConvertError: an output has NaN.
    """
    if correction.tables:
        yield _with_tables(correction.tables, program)
        return
    before: list[set[Value]] = []
    for like in (_same_operation, _same_line):
        if correction.made is correction.given and like is _same_operation:
            continue  # something is missing behind it, and operations of its name are everywhere
        places = dict(_places(correction, record, program, like))
        if places and set(places) not in before:
            before.append(set(places))
            yield _with(correction, places, program)


def _same_operation(one: Operation, other: Operation) -> bool:
    return one.name == other.name


def _same_line(one: Operation, other: Operation) -> bool:
    return one.name == other.name and one.where == other.where


def _places(correction: Correction, record: Program, program: Program, like: _Like) -> Iterator[tuple[Value, Value]]:
    """Yield the values that take the place of `made` in a record, with what takes that of `given`."""
    made_by, own = record.made_by, program.made_by
    if correction.made is correction.given:
        yield from _same_values(correction.given, record, program)
        return
    for operation in program.operations:
        for value in operation.results:
            bound: set[Value] = set()
            if _matches(correction.made, value, correction.given, made_by, own, like, bound) and len(bound) == 1:
                yield value, bound.pop()


def _matches(
    one: Value,
    other: Value,
    given: Value,
    made_by: Mapping[Value, Operation],
    own: Mapping[Value, Operation],
    like: _Like,
    bound: set[Value],
) -> bool:
    """Whether a value is computed as another one is of `given`; `bound` gets what takes the place of that."""
    if one is given:
        bound.add(other)
        return True
    if one.constant or other.constant:
        return one.constant and other.constant and _same_constant(one.array, other.array)
    mine, theirs = made_by.get(one), own.get(other)
    if mine is None or theirs is None:
        return mine is theirs
    if not like(mine, theirs) or len(mine.operands) != len(theirs.operands):
        return False
    pairs = zip(mine.operands, theirs.operands, strict=True)
    return all(_matches(x, y, given, made_by, own, like, bound) for x, y in pairs)


def _same_constant(one: Array, other: Array) -> bool:
    if one.shape == other.shape:
        return bool(np.array_equal(one, other, equal_nan=True))
    return one.size > 0 and other.size > 0 and len(np.unique(np.concatenate([one.ravel(), other.ravel()]))) == 1


def _same_values(given: Value, record: Program, program: Program) -> Iterator[tuple[Value, Value]]:
    """Yield the values that the same operations compute as one, each with itself."""
    made_by, own = record.made_by, program.made_by
    users, own_users = record.users, program.users
    if given not in made_by:
        yield from ((program.inputs[name],) * 2 for name, value in record.inputs.items() if value is given)
        return

    def around(value: Value, made_by: Mapping[Value, Operation], users: Mapping[Value, Sequence[Operation]]) -> Any:
        return _behind(value, made_by, NEAR), sorted((one.name, one.where) for one in users.get(value, ()))

    wanted = around(given, made_by, users)
    for operation in program.operations:
        for value in operation.results:
            if around(value, own, own_users) == wanted:
                yield value, value


def _behind(value: Value, made_by: Mapping[Value, Operation], depth: int) -> Any:
    operation = made_by.get(value)
    if operation is None or not depth:
        return None
    return operation.name, operation.where, tuple(_behind(x, made_by, depth - 1) for x in operation.operands)


def _with(correction: Correction, places: _Places, program: Program) -> Program:
    """Return a record with what a correction computes in its places; what nothing uses then is left out."""
    new: dict[Value, Value] = {}
    operations: list[Operation] = []
    names = list(correction.inputs)
    inputs = tuple(program.inputs[name] for name in names)
    for value in program.inputs.values():
        if value in places:
            operations.append(_operation(correction, value, value, names, inputs, "", ""))
            new[value] = operations[-1].results[0]
    for operation in program.operations:
        own = replace(operation, operands=tuple(new.get(x, x) for x in operation.operands))
        put_in = [value for value in operation.results if value in places]
        if put_in and correction.number is not None:
            operations.append(_with_number(own, correction.number))
            continue
        operations.append(own)
        for value in put_in:
            given = value if places[value] is value else new.get(places[value], places[value])
            operations.append(_operation(correction, given, value, names, inputs, operation.where, operation.module))
            new[value] = operations[-1].results[0]
    outputs = {name: new.get(value, value) for name, value in program.outputs.items()}
    changed = replace(program, outputs=outputs)
    return _again(replace(changed, operations=tuple(without_idle(operations, changed))))


def _operation(
    correction: Correction,
    given: Value,
    made: Value,
    names: list[str],
    inputs: tuple[Value, ...],
    where: str,
    module: str,
) -> Operation:
    shape = made.array.shape

    def again(arrays: Any) -> list[Array]:
        made = correction.compute(arrays[0], dict(zip(names, arrays[1:], strict=True)))
        return [np.require(made.reshape(shape), requirements=["C", "W"])]  # torch takes no others

    result = replace(made) if made.of_parameters else Value(made.array, data=True, leaves=given.leaves)
    return Operation(NAME, (given, *inputs), (result,), {}, again, where, module)


def _with_tables(tables: Mapping[Value, Array], program: Program) -> Program:
    """Return a record with other constants, wherever operations take them."""

    def meant(value: Value) -> Value:
        found = (
            new
            for old, new in tables.items()
            if value.constant and value.array.shape == old.array.shape and same(value.array, old.array)
        )
        array = next(found, None)
        return value if array is None else replace(value, array=array)

    operations = [
        replace(one, operands=tuple(map(meant, one.operands)) if one.data else one.operands)
        for one in program.operations
    ]
    return _again(replace(program, operations=tuple(operations)))


def _again(program: Program) -> Program:
    """Return a record with the values that its operations give now."""
    weights = {name: value.array for name, value in program.parameters.items()}
    return rerun(program, weights, {name: value.array for name, value in program.inputs.items()})


def _with_number(operation: Operation, number: float) -> Operation:
    operands = tuple(
        replace(x, array=np.full(x.array.shape, number, np.result_type(x.array, np.float64))) if x.constant else x
        for x in operation.operands
    )
    return replace(operation, operands=operands)
