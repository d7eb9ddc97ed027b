"""Repeat the parts of a value in another order: keys and values of a group of heads in a row, or all of them in turns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from convert.core.text import where_they_differ
from convert.programs.divergence.graph import on_the_way
from convert.programs.divergence.kinds import LAYOUT, kind_of
from convert.programs.divergence.words import Words, names_of
from convert.programs.program import Operation, Program, Value
from convert.programs.rewrites.places.segments import LAYERS
from convert.programs.rewrites.rewrite import Goal, Rewrite, line, rerun_with

Array = np.ndarray[Any, np.dtype[Any]]
COPIES = "heads repeated in another order"
MOVES = (LAYOUT, "join", "pick")
MOST = 64  # parts along an axis
LISTED = 6  # of which a sentence writes out the order


@dataclass(frozen=True)
class Copies:
    """A value in which each of a few parts of an axis stands several times.

    Attributes:
        operation: that gives it; before: the value with each part once, or more that leads to it.
        parts: how many are different.
        in_turns: whether all stand one after another before the first comes again.
    """

    operation: Operation
    before: Value
    axis: int
    parts: int
    in_turns: bool

    @property
    def value(self) -> Value:
        return self.operation.results[0]

    @property
    def order(self) -> Array:
        """The index that stands at each place, for the other order."""
        n = self.value.array.shape[self.axis]
        times = n // self.parts
        turns = np.arange(n).reshape((times, self.parts) if self.in_turns else (self.parts, times))
        return turns.T.ravel()


def copies(target: Program, goal: Goal) -> Rewrite | None:
    """Return the order of repeated parts that restores the output: of all that go into products, or of those of one line."""
    program = on_the_way(target, goal.output)
    found = list(_copies(program))
    lines = dict.fromkeys(line(one.operation) for one in found)
    by_line = [[one for one in found if line(one.operation) == at] for at in lines]
    for chosen in ([found] if found else []) + (by_line if len(by_line) > 1 else []):
        tried = rerun_with(program, {one.operation: _reordered(one) for one in chosen}, goal)
        if tried is not None and tried[1] <= goal.enough:
            return _rewrite(program, chosen, tried[1])
    return None


def _reordered(one: Copies) -> Operation:
    def run(given: Sequence[Array]) -> Sequence[Array]:
        return (np.take(one.operation.again(given)[0], one.order, one.axis),)

    return replace(one.operation, again=run)


def _rewrite(program: Program, chosen: Sequence[Copies], error: float) -> Rewrite:
    words = Words(program.operations, names_of(program))
    one = chosen[0]
    n, at = one.value.array.shape[one.axis], line(one.operation)
    ours = np.arange(n) % one.parts if one.in_turns else np.arange(n) * one.parts // n
    shown = where_they_differ(ours.tolist(), ours[one.order].tolist(), LISTED)
    others = list(dict.fromkeys(line(other.operation) for other in chosen))[1:3]
    problem = (
        f"the target repeats the {one.parts} heads, or other parts, of {words.value(one.before)} in the order {shown[0]} "
        f"({', '.join((at, *others))}); the outputs are equal with the order {shown[1]}"
    )
    how = "torch.repeat_interleave" if one.in_turns else "torch.Tensor.repeat"
    return Rewrite(COPIES, problem, f"repeat them as {how} does at {at}, or correct the reference", error)


def _copies(program: Program) -> Iterator[Copies]:
    """Yield the repeated values from which operations that move elements lead to products of two values, each once."""
    producer = program.made_by
    seen: set[Value] = set()
    for operation in program.operations:
        for value in operation.data if kind_of(operation) in LAYERS and len(operation.data) > 1 else ():
            for one in _behind(value, producer):
                if one.value not in seen:
                    seen.add(one.value)
                    yield one
                break


def _behind(value: Value, producer: Mapping[Value, Operation]) -> Iterator[Copies]:
    made = producer.get(value)
    while made is not None and kind_of(made) in MOVES and len(made.results) == 1 and made.data:
        before = made.data[0]
        if not _repeated(before.array):
            for axis, parts, in_turns in _repeated(made.results[0].array):
                yield Copies(made, before, axis, parts, in_turns)
        made = producer.get(before)


def _repeated(array: Array) -> list[tuple[int, int, bool]]:
    """Return the axis along which a few parts are repeated, how many are different, and whether they stand in turns."""
    found = []
    for axis, n in enumerate(array.shape[:-1]):
        for parts in range(2, min(n // 2, MOST) + 1):
            if n % parts:
                continue
            whole = np.moveaxis(array, axis, 0)
            turns = whole.reshape(n // parts, parts, *whole.shape[1:])
            rows = whole.reshape(parts, n // parts, *whole.shape[1:])
            first = turns[0]
            if (first == first[:1]).all():
                continue
            if (turns == turns[:1]).all():
                found.append((axis, parts, True))
            elif (rows == rows[:, :1]).all():
                found.append((axis, parts, False))
    return found
