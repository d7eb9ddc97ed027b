"""Exchange the axes of what the target lays out, or split an axis into the same parts in another order, and join axes so."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from convert.programs.divergence.graph import on_the_way
from convert.programs.divergence.kinds import LAYOUT, kind_of
from convert.programs.divergence.rerun import FAILS, Change, Computed, Now
from convert.programs.divergence.words import Words, names_of
from convert.programs.program import Operation, Program
from convert.programs.rewrites.rewrite import Goal, Rewrite, error_with, line

Array = np.ndarray[Any, np.dtype[Any]]
Move = Callable[[Array], Array]
AXES, SPLIT = "axes exchanged", "axis split in another order"
MOST_RUNS = 96
MOST_OPERATIONS = 200_000  # that run again
MOST_PARTS = 4  # of one axis
RESHAPES = ("reshape", "view", "_unsafe_view", "unflatten", "flatten", "_reshape_copy", "_reshape_alias")


@dataclass(frozen=True)
class Moved:
    """What one line lays out, in another order.

    Attributes:
        at: the numbers of the operations.
        move: their result as it is -> with its elements in the other order.
        name: of the mistake.
        said: what differs, as a clause behind "its outputs are equal".
    """

    at: tuple[int, ...]
    move: Move
    name: str
    said: str


def axes(source: Program, target: Program, goal: Goal) -> Rewrite | None:
    """Return the order of axes that restores the output, of all operations of one line at once."""
    program = on_the_way(target, goal.output)
    runs = operations = 0
    seen: set[tuple[Any, ...]] = set()
    for moved in _moves(program, _factors(source)):
        order = moved.move(
            np.arange(program.operations[moved.at[0]].results[0].array.size).reshape(_shape(program, moved))
        )
        key = (moved.at, order.tobytes())
        if key in seen:
            continue
        seen.add(key)
        if runs >= MOST_RUNS or operations >= MOST_OPERATIONS:
            return None
        runs += 1
        made = {at: _computed(program.operations[at], moved.move) for at in moved.at}
        error, ran = error_with(program, Change(computed=made), goal)
        operations += ran
        if error <= goal.enough:
            return _rewrite(program, moved, error)
    return None


def _shape(program: Program, moved: Moved) -> tuple[int, ...]:
    return tuple(program.operations[moved.at[0]].results[0].array.shape)


def _computed(operation: Operation, move: Move) -> Computed:
    def now(array: Now) -> Array:
        given = [np.require(array(v), requirements=["C", "W"]) for v in operation.operands]
        try:
            return np.ascontiguousarray(move(np.asarray(operation.again(given)[0])))
        except FAILS as error:
            raise ValueError("not in this order") from error

    return now


def _rewrite(program: Program, moved: Moved, error: float) -> Rewrite:
    operation = program.operations[moved.at[0]]
    words = Words(program.operations, names_of(program))
    at = f"{line(operation)}{f', in {operation.module},' if operation.module else ''}"
    problem = f"{at} lays out {words.value(operation.operands[0])}: the target's outputs are equal {moved.said}"
    return Rewrite(moved.name, problem, f"lay it out so at {line(operation)}, or correct the reference", error)


def _moves(program: Program, factors: dict[int, set[tuple[int, ...]]]) -> Iterator[Moved]:
    """Yield the other orders for the operations of each line, exchanges of axes first."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    for index, one in enumerate(program.operations):
        lays_out = kind_of(one) == LAYOUT and len(one.data) == 1 and one.where
        if lays_out and one.operands[0].array.size == one.results[0].array.size > 1:
            shapes = one.operands[0].array.shape, one.results[0].array.shape
            if shapes[0] != shapes[1] or one.name in ("permute", "transpose", "t"):
                groups.setdefault((one.where, one.name, *shapes), []).append(index)
    for at in groups.values():
        yield from _exchanges(program.operations[at[0]], tuple(at))
    for at in groups.values():
        yield from _splits(program.operations[at[0]], tuple(at))
    by_line: dict[tuple[Any, ...], list[int]] = {}
    producer = {v: k for k, one in enumerate(program.operations) for v in one.results}
    for one in program.operations:
        given = one.operands[0] if one.operands else None
        if kind_of(one) == "part" and given is not None and given.data and given in producer:
            by_line.setdefault((one.where, given.array.shape), []).append(producer[given])
    for (_, shape), at in by_line.items():
        for axis, size in enumerate(shape):
            for parts in sorted(factors.get(size, ())):
                yield from _regrouped(shape, axis, parts, tuple(dict.fromkeys(at)))


def _exchanges(operation: Operation, at: tuple[int, ...]) -> Iterator[Moved]:
    shape = operation.results[0].array.shape
    for one, two in itertools.combinations(range(len(shape)), 2):
        if shape[one] == shape[two] > 1:
            said = f"with the axes {one} and {two} of the result, {list(shape)}, exchanged"
            yield Moved(at, lambda x, one=one, two=two: x.swapaxes(one, two), AXES, said)  # type: ignore[misc]


def _splits(operation: Operation, at: tuple[int, ...]) -> Iterator[Moved]:
    """Yield the other orders in which a reshape splits an axis into its parts, or joins parts to an axis."""
    given, made = operation.operands[0].array.shape, operation.results[0].array.shape
    if operation.name.rstrip("_") not in RESHAPES:
        return
    for before, after in _blocks(given, made):
        start, here = after.start, [made[k] for k in after]
        there = [given[k] for k in before]
        if len(there) == 1 and 1 < sum(n > 1 for n in here) <= MOST_PARTS:
            for order in list(itertools.permutations(range(len(here))))[1:]:
                parts = [here[k] for k in order]
                said = f"when it splits axis {before.start}, {there[0]}, into {_by(parts)} and not into {_by(here)}"
                yield Moved(at, _split(made, start, here, order), SPLIT, said)
        if len(here) == 1 and 1 < sum(n > 1 for n in there) <= MOST_PARTS:
            for order in list(itertools.permutations(range(len(there))))[1:]:
                parts = [there[k] for k in order]
                said = f"when it joins the axes {before.start} to {before.stop - 1}, {_by(there)}, in the order {_by(parts)}"
                yield Moved(at, _join(made, start, there, order), SPLIT, said)


def _regrouped(shape: Sequence[int], axis: int, parts: Sequence[int], at: tuple[int, ...]) -> Iterator[Moved]:
    """Yield the orders of the parts in which the source splits an axis as long as one that the target takes parts of."""
    for order in list(itertools.permutations(range(len(parts))))[1:]:
        other = [parts[k] for k in order]
        said = f"when axis {axis}, {shape[axis]}, is {_by(parts)} and its parts are taken in the order {_by(other)}"
        yield Moved(at, _join(shape, axis, parts, order), SPLIT, said)


def _split(shape: Sequence[int], start: int, parts: Sequence[int], order: Sequence[int]) -> Move:
    """Return the result of a split as that in another order would have given it."""
    n, back = len(parts), np.argsort(order)

    def move(x: Array) -> Array:
        other = x.reshape(*shape[:start], *(parts[k] for k in order), *shape[start + n :])
        return other.transpose(*range(start), *(start + back), *range(start + n, len(shape)))

    return move


def _join(shape: Sequence[int], axis: int, parts: Sequence[int], order: Sequence[int]) -> Move:
    """Return an axis with its parts in another order."""
    n = len(parts)

    def move(x: Array) -> Array:
        apart = x.reshape(*shape[:axis], *parts, *shape[axis + 1 :])
        ends = (range(axis), range(axis + n, len(shape) + n - 1))
        return apart.transpose(*ends[0], *(axis + k for k in order), *ends[1]).reshape(shape)

    return move


def _factors(source: Program) -> dict[int, set[tuple[int, ...]]]:
    """Return the parts into which the source splits axes of each length, and those that it joins to such axes."""
    found: dict[int, set[tuple[int, ...]]] = {}
    for one in source.operations:
        if kind_of(one) != LAYOUT or len(one.data) != 1 or one.name != "reshape":
            continue
        for before, after in _blocks(one.operands[0].array.shape, one.results[0].array.shape):
            sides = [one.operands[0].array.shape[k] for k in before], [one.results[0].array.shape[k] for k in after]
            for whole, parts in (sides, sides[::-1]):
                if len(whole) == 1 and 1 < len(parts) <= MOST_PARTS and min(parts) > 1:
                    found.setdefault(whole[0], set()).add(tuple(parts))
    return found


def _blocks(one: Sequence[int], two: Sequence[int]) -> Iterator[tuple[range, range]]:
    """Yield the axes of two shapes of one size that hold the same elements, the fewest together."""
    i = j = 0
    while i < len(one) and j < len(two):
        a, b = i + 1, j + 1
        while (sizes := (math.prod(one[i:a]), math.prod(two[j:b]))) and sizes[0] != sizes[1]:
            if sizes[0] < sizes[1]:
                a += 1
            else:
                b += 1
            if a > len(one) or b > len(two):
                return
        yield range(i, a), range(j, b)
        i, j = a, b


def _by(sizes: Sequence[int]) -> str:
    return " x ".join(map(str, sizes))
