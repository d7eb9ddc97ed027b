"""Take the moments of the target's norms over other axes, or within other groups, as the source does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from convert.programs.divergence.graph import on_the_way, root
from convert.programs.divergence.kinds import LAYOUT, kind_of
from convert.programs.divergence.naming.norms import Norm, is_small, norm_of, ways
from convert.programs.divergence.naming.operations import NORMED
from convert.programs.divergence.rerun import Change, Computed
from convert.programs.divergence.shared_values import FEW, same_numbers
from convert.programs.divergence.words import Words, names_of
from convert.programs.program import Operation, Program, Value
from convert.programs.rewrites.rewrite import Goal, Rewrite, error_with, line

REDUCES = ("mean", "sum", "var", "var_mean")
SCALES = ("divide", "multiply")
FARTHEST = 10  # operations from the value to the normalised one
MOST_NORMS = 64  # of a program


@dataclass(frozen=True)
class _Use:
    """A norm in a program: of which value, and the operation that gives the normalised one."""

    norm: Norm
    given: Value
    operation: Operation


@np.errstate(all="ignore")
def norm_axes(source: Program, target: Program, goal: Goal) -> Rewrite | None:
    """Return the axes and groups that restore the output where norms of one kind take their moments over others."""
    program = on_the_way(target, goal.output)
    ours, theirs = list(_norms(program)), list(_norms(on_the_way(source, goal.output)))
    number = {one: k for k, one in enumerate(program.operations)}
    for mine in ours:
        other = next((x for x in theirs if same_numbers(x.given.array, mine.given.array)), None)
        if other is None or same_numbers(mine.operation.results[0].array, other.operation.results[0].array):
            continue
        meant = _meant(mine, other)
        same_kind = [use for use in ours if use.norm.over == mine.norm.over] if meant else []
        computed = {number[use.operation]: _with(use, meant) for use in same_kind if meant is not None}
        error, _ = error_with(program, Change(computed=computed), goal) if computed else (float("inf"), 0)
        if meant is not None and error <= goal.enough:
            words = Words(program.operations, names_of(program))
            at, there = line(mine.operation), line(other.operation)
            problem = (
                f"of {words.value(mine.given)}, as {list(mine.given.array.shape)}, the target {mine.norm} ({at}); its outputs are equal when it {meant}, as the JAX model does "
                f"({there})"
            )
            return Rewrite(NORMED, problem, f"take the moments at {at} {meant.over}, or correct the reference", error)
    return None


def _meant(mine: _Use, other: _Use) -> Norm | None:
    """Return the norm of the target's value that gives what the source has, in any layout."""
    array, want = mine.given.array, other.operation.results[0].array
    for way in ways(array.shape):
        norm = replace(way, epsilon=other.norm.epsilon)
        if norm.centred == other.norm.centred and same_numbers(norm.of(array), want):
            return norm
    return None


def _with(use: _Use, norm: Norm) -> Computed:
    shape = use.operation.results[0].array.shape
    return lambda now: norm.of(now(use.given)).reshape(shape)


def _norms(program: Program) -> Iterator[_Use]:
    """Yield the norms of values, each value once."""
    producer = program.made_by
    users = program.users
    seen: set[Value] = set()
    for one in program.operations:
        if kind_of(one) not in REDUCES or len(one.data) != 1 or len(seen) > MOST_NORMS:
            continue
        for given in _normed(one.data[0], producer):
            if given in seen or given.array.size < FEW or not is_small(given.array):
                continue
            seen.add(given)
            for operation in _scaled(given, users):
                if (norm := norm_of(operation.results[0].array, given.array)) is not None:
                    yield _Use(norm, given, operation)
                    break


def _normed(value: Value, producer: Mapping[Value, Operation]) -> Iterator[Value]:
    """Yield what a reduction is taken of, as it is laid out for it and as it was computed, and what that is the square of."""
    yield from dict.fromkeys((value, root(value, producer)))
    made = producer.get(root(value, producer))
    if made is not None and kind_of(made) in ("power", "multiply") and len(set(made.data)) == 1:
        yield made.data[0]


def _scaled(given: Value, users: Mapping[Value, Sequence[Operation]]) -> Iterator[Operation]:
    """Yield the operations that divide or multiply, of as many elements, a few operations behind a value."""
    waiting, seen = [(given, 0)], {given}
    while waiting:
        value, depth = waiting.pop(0)
        for one in users.get(value, []):
            further = depth + (kind_of(one) != LAYOUT)
            new = [v for v in one.results if v not in seen and further <= FARTHEST]
            seen.update(new)
            waiting += [(v, further) for v in new]
            if new and kind_of(one) in SCALES and one.results[0].array.size == given.array.size:
                yield one
