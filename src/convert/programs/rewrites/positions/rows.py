"""Take the rows of a table that the source takes: positions that begin later, or tokens by other numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from convert.core.text import where_they_differ
from convert.programs.divergence.graph import on_the_way
from convert.programs.divergence.kinds import LAYOUT, kind_of
from convert.programs.divergence.layouts import same
from convert.programs.divergence.naming.both import Both
from convert.programs.divergence.naming.computed_tables import behind, describe_table
from convert.programs.divergence.naming.tables import off_by
from convert.programs.divergence.repair import Repair
from convert.programs.divergence.words import Words, names_of, places
from convert.programs.program import Operation, Program, Value
from convert.programs.rewrites.positions.relative_positions import by_distance
from convert.programs.rewrites.rewrite import Goal, Rewrite, line, rerun_with

Array = np.ndarray[Any, np.dtype[Any]]
OTHER = "other rows of a table"
EXCHANGED = "indices exchanged"
FEWEST = 2  # rows of a table, which must all be different
LISTED = 4  # rows that a sentence lists


@dataclass(frozen=True)
class Taken:
    """Rows that an operation takes of a parameter.

    Attributes:
        table: [rows, features].
        rows: their numbers, in the shape of the result without its last axis.
    """

    name: str
    operation: Operation
    table: Array
    rows: Array


@dataclass(frozen=True)
class Meant:
    """The rows that the source takes, in the shape of the target's, and where it takes them."""

    wanted: Array
    taken: Taken


@np.errstate(all="ignore")
def rows(source: Program, target: Program, goal: Goal, chosen: bool = False) -> Rewrite | None:
    """Return the source's rows that restore the output: those of one table, or of all.

    Args:
        chosen: whether to take rows whose numbers depend on values, such as the nearest code; what differs in front may explain these.
    """
    program = on_the_way(target, goal.output)
    theirs, ours = (
        [one for one in _taken(of) if chosen or not _is_chosen(one.operation, of)]
        for of in (on_the_way(source, goal.output), program)
    )
    moved: dict[str, list[tuple[Taken, Meant]]] = {}
    for name in dict.fromkeys(one.name for one in ours):
        mine = [one for one in ours if one.name == name]
        others = [one for one in theirs if one.table.shape == mine[0].table.shape and same(one.table, mine[0].table)]
        for one, other in zip(mine, others, strict=False):
            wanted = _laid_out(other.rows, one.rows.shape) if len(mine) == len(others) else None
            if wanted is not None and (wanted != one.rows).any():
                moved.setdefault(name, []).append((one, Meant(wanted, other)))
    every = [pair for pairs in moved.values() for pair in pairs]
    for rows_of in (*moved.values(), *([every] if len(moved) > 1 else [])):
        tried = rerun_with(program, {one.operation: _with(one, other.wanted) for one, other in rows_of}, goal)
        if tried is not None and tried[1] <= goal.enough:
            return _rewrite(source, target, rows_of, tried[1])
    return None


def _is_chosen(pick: Operation, program: Program) -> bool:
    """Whether numbers that the run computed decide which rows a pick takes."""
    producer = program.made_by
    waiting = [v for v in pick.operands if v.array.dtype.kind in "iu"]
    seen: set[Value] = set()
    while waiting:
        value = waiting.pop()
        if value.data and value.array.dtype.kind == "f":
            return True
        if value not in seen and value in producer:
            seen.add(value)
            waiting += producer[value].operands
    return False


def _with(one: Taken, wanted: Array) -> Operation:
    result = one.table[wanted].reshape(one.operation.results[0].array.shape)
    return replace(one.operation, again=lambda x: (result,))


def _rewrite(source: Program, target: Program, chosen: Sequence[tuple[Taken, Meant]], error: float) -> Rewrite:
    one, meant = chosen[0]
    at = places([one.operation])
    for other, theirs in chosen[1:]:
        if not (same(other.rows, meant.wanted) and same(theirs.wanted, one.rows)):
            continue
        said = f"the target takes rows of {one.name} by the indices of {other.name}{places([one.operation, other.operation])}, and the other way round"
        return Rewrite(
            EXCHANGED, f"{said}; the outputs are equal with each by its own", "exchange the indices there", error
        )
    shown = where_they_differ(one.rows.ravel().tolist(), meant.wanted.ravel().tolist(), LISTED)
    said = f"of {one.name}, the target takes the rows {shown[0]}{at}, and the JAX model {shown[1]}{places([meant.taken.operation])}"
    name = OTHER
    if by := _shift(one.rows, meant.wanted, len(one.table)):
        name = off_by(by) if _are_positions(meant.wanted) else f"rows off by {'one' if abs(by) == 1 else abs(by)}"
    else:
        ours, theirs_of = (Words(program.operations, names_of(program)) for program in (target, source))
        made = _behind(one, meant.taken, ours, theirs_of)
        by_name, distances = by_distance(one.rows, meant.wanted, made)
        told = None if made is None else describe_table(Both(made, ours, theirs_of, {}, ()))
        name = by_name or (f"{OTHER}: {told[0]}" if told else OTHER)
        said = "; ".join(clause for clause in (said, distances, told[1] if told else "") if clause)
    fix = f"take the rows at {line(one.operation)} that the JAX model takes, or correct the reference"
    return Rewrite(name, f"{said}; the outputs are equal with the JAX model's rows", fix, error)


def _behind(one: Taken, other: Taken, ours: Words, theirs: Words) -> Repair | None:
    """Return the operations that differ behind the numbers of two rows; None where these are not computed, or no operation differs."""
    found = [_numbers_of(taken, words) for taken, words in ((one, ours), (other, theirs))]
    return None if found[0] is None or found[1] is None else behind(found[0], found[1], ours, theirs)


def _numbers_of(taken: Taken, words: Words) -> Value | None:
    """Return the first value that has the numbers of the rows: JAX computes others of them, in which negative ones count from the end."""
    waiting = [v for v in taken.operation.operands if v.array.dtype.kind in "iu"]
    found = None
    while waiting:
        value = waiting.pop()
        if value.array.size != taken.rows.size:
            continue
        found = value if same(value.array, taken.rows) else found
        waiting += words.producer[value].operands if value in words.producer else ()
    return found


def _are_positions(rows: Array) -> bool:
    """Return whether the numbers rise by one from step to step, from any first number (BART's begin at 2)."""
    return rows.ndim > 0 and rows.shape[-1] > 1 and bool((np.diff(rows, axis=-1) == 1).all())


def _shift(ours: Array, theirs: Array, n: int) -> int:
    """Return by how much all numbers are larger, but those that a limit holds back, or that begin anew behind n; 0 if they are not."""
    values, counts = np.unique(ours - theirs, return_counts=True)
    by = int(values[counts.argmax()])
    limit = ours.max() if by > 0 else ours.min()
    right = ((ours - theirs - by) % n == 0) | (ours == limit)
    return by if right.all() and 2 * counts.max() > ours.size else 0


def _taken(program: Program) -> Iterator[Taken]:
    """Yield the rows that operations take of parameters, in the order of execution."""
    producer = program.made_by
    names = {value: name for name, value in program.parameters.items()}
    for operation in program.operations:
        if kind_of(operation) != "pick":
            continue
        table = next((v for operand in operation.operands if (v := _root(operand, producer)) in names), None)
        if table is None or table.array.ndim != 2 or len(table.array) < FEWEST:
            continue
        found = _numbers(table.array, operation.results[0].array)
        if found is not None:
            yield Taken(names[table], operation, table.array, found)


def _root(value: Value, producer: Mapping[Value, Operation]) -> Value:
    while (one := producer.get(value)) is not None and kind_of(one) == LAYOUT and len(one.operands) == 1:
        value = one.operands[0]
    return value


def _numbers(table: Array, result: Array) -> Array | None:
    """Return which rows of a table a value consists of; None if it holds others, or rows are equal."""
    if not result.ndim or result.shape[-1] != table.shape[1]:
        return None
    known = {row.tobytes(): k for k, row in enumerate(np.ascontiguousarray(table))}
    flat = np.ascontiguousarray(result).reshape(-1, table.shape[1])
    found = [known.get(row.tobytes(), -1) for row in flat]
    return None if len(known) < len(table) or -1 in found else np.array(found).reshape(result.shape[:-1])


def _laid_out(taken: Array, shape: tuple[int, ...]) -> Array | None:
    """Return numbers in a shape, repeated for each series where it has more; None if they do not fit."""
    size = int(np.prod(shape))
    if taken.size == size:
        return taken.reshape(shape)
    if taken.size and size % taken.size == 0:
        return np.tile(taken.ravel(), size // taken.size).reshape(shape)
    if size and taken.size % size == 0 and (taken.reshape(-1, size) == taken.ravel()[:size]).all():
        return taken.ravel()[:size].reshape(shape)
    return None
