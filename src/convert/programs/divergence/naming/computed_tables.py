"""What two tables, or two functions of parameters, are computed of, as a repair of its own: the operations behind them that differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from convert.programs.divergence.kinds import LAYOUT, kind_of
from convert.programs.divergence.layouts import layouts, same
from convert.programs.divergence.naming.both import Both
from convert.programs.divergence.naming.operations import (
    CONSTANT,
    Described,
    constants,
    extra,
    known_functions,
    longer,
    missing,
    missing_function,
    one_for_another,
    other_functions,
    other_power,
    side_of_the_root,
    sign,
)
from convert.programs.divergence.naming.selections import MOVES
from convert.programs.divergence.repair import Repair
from convert.programs.divergence.rerun import Change
from convert.programs.divergence.shared_values import FEW, same_numbers
from convert.programs.divergence.words import Words
from convert.programs.program import Operation, Value

Array = np.ndarray[Any, np.dtype[Any]]
MOST = 200  # operations behind a table
LONGEST = 16  # that differ


def of_tables(both: Both) -> Both | None:
    """Return the operations behind the one table of each side that the other side lacks; None if there are several, or none differ."""
    mine, other = (
        _tables(operations, [x for ops in others for one in ops for x in one.operands])
        for operations, others in (
            (both.repair.target, [both.repair.source]),
            (both.repair.source, [both.repair.target]),
        )
    )
    if len(mine) != 1 or len(other) != 1:
        return None
    repair = behind(mine[0], other[0], both.ours, both.theirs)
    return None if repair is None else replace(both, repair=repair)


def behind(mine: Value, other: Value, ours: Words, theirs: Words) -> Repair | None:
    """Return the operations that make two values of what both sides have; None where no operation is known, or too many differ."""
    mine, other = (_before_layout(value, words) for value, words in ((mine, ours), (other, theirs)))
    wanted = next(layouts(other.array, mine.array), None)
    every = [_all_behind(words, value) for words, value in ((ours, mine), (theirs, other))]
    if wanted is None or any(len(values) > MOST for values in every):
        return None
    (target, operands), (source, source_operands) = (
        _up_to(words, value, shared) for words, value, shared in ((ours, mine, every[1]), (theirs, other, every[0]))
    )
    for operations, value, theirs_of in ((target, mine, every[1]), (source, other, every[0])):
        if not operations and not any(_equal(value.array, x.array) for x in theirs_of):
            return None  # a table that a library computed: not known how
    if max(len(target), len(source)) > LONGEST or not operands or not source_operands:
        return None
    given = tuple(value.array for value in operands)
    return Repair(target, source, operands, given, source_operands, mine.array, wanted, 0, Change())


def _tables(operations: Sequence[Operation], others: Sequence[Value]) -> list[Value]:
    """Return the tables that operations are given, and the other side is not."""
    found = {v: None for one in operations for v in one.operands if not v.data and v.array.size > 1}
    return [v for v in found if not any(_equal(v.array, x.array) for x in others if not x.data)]


def _before_layout(value: Value, words: Words) -> Value:
    """Return the value that has the same elements in front of operations that only lay out."""
    while (one := words.producer.get(value)) is not None and kind_of(one) == LAYOUT:
        if one.operands[0].array.size != value.array.size:
            break
        value = one.operands[0]
    return value


def _all_behind(words: Words, value: Value) -> list[Value]:
    """Return a value and all that it is computed of."""
    found, waiting = {value: None}, [value]
    while waiting and len(found) <= MOST:
        one = words.producer.get(waiting.pop())
        new = [v for v in one.operands if v not in found] if one is not None else []
        found |= dict.fromkeys(new)
        waiting += new
    return list(found)


def _up_to(words: Words, value: Value, shared: Sequence[Value]) -> tuple[tuple[Operation, ...], tuple[Value, ...]]:
    """Return the operations, in order, that make a value of what the other side has, and these values; numbers are left out."""
    operations: set[Operation] = set()
    ends: dict[Value, None] = {}
    waiting = [value]
    while waiting:
        one = waiting.pop()
        operation = words.producer.get(one)
        if operation is None or counts(one) or any(_equal(one.array, x.array) for x in shared):
            varies = one.array.size > 1 and (one.leaves or (one.array != one.array.flat[0]).any())
            if varies and not any(_equal(one.array, x.array) for x in ends):
                ends[one] = None
        elif operation not in operations:
            operations.add(operation)
            waiting += operation.operands
    return tuple(one for one in words.operations if one in operations), tuple(ends)


def counts(value: Value) -> tuple[float, float] | None:
    """Return the first number and the step of a constant that counts; None where it does not."""
    flat = value.array.astype(np.float64).ravel() if value.constant and value.array.dtype.kind in "iuf" else np.empty(0)
    if flat.size < FEW or not np.isfinite(flat).all():
        return None
    step = flat[1] - flat[0]
    return (float(flat[0]), float(step)) if step and np.allclose(np.diff(flat), step, rtol=1e-9, atol=0) else None


def _equal(one: Array, two: Array) -> bool:
    """Whether two arrays have the same numbers in the same order, or one has an axis along which they repeat."""
    if one.dtype.kind not in "fiub" or two.dtype.kind not in "fiub":
        return False
    return same(one, two) if one.size == two.size else bool(min(one.size, two.size) > 1 and same_numbers(one, two))


# ---- their names


def of_other_tables(both: Both) -> Described | None:
    """Name what differs in how two tables, or two functions of parameters, are computed; None where that has no clear name."""
    made = of_tables(both)
    if made is None:
        return None
    said = describe_table(made)
    return None if said is None else (said[0], f"{both.sentence}; {said[1]}")


def _counted(both: Both) -> Described | None:
    """Tables that are computed in the same way, of numbers that count from another one."""
    mine, other = (
        [x for v in of if (x := counts(v)) is not None] for of in (both.repair.operands, both.repair.source_operands)
    )
    if len(mine) != 1 or len(other) != 1 or mine == other:
        return None
    (first, step), (their_first, their_step) = mine[0], other[0]
    by = first - their_first
    name = f"counts off by {'one' if abs(by) == 1 else f'{abs(by):g}'}" if step == their_step else CONSTANT
    said = f"the table counts from {first:g} by {step:g} in the target, and from {their_first:g} by {their_step:g} in the JAX model"
    return name, f"{said}{both.here}"


def describe_table(both: Both) -> Described | None:
    """Name what differs in the operations behind two tables; None where that has no clear name."""
    repair = both.repair
    if both.steps[0] == both.steps[1]:  # other numbers to begin from, or their elements are in another order
        return _counted(both) or other_functions(both)
    if all(kind_of(one) in MOVES for one in (*repair.target, *repair.source)):
        return None
    if not both.steps[0]:
        return missing_function(both) or missing(both)
    side = OF_TABLES if both.steps[1] else (extra,)
    return next((said for question in side if (said := question(both)) is not None), None)


OF_TABLES = (other_power, other_functions, constants, side_of_the_root, sign, longer, known_functions, one_for_another)
