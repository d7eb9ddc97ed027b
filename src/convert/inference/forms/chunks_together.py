"""Take chunks of a value together that a program computes one after the other in one way: what it computes of them is a part of what it computes of the whole.

A ghost batch norm cuts the batch into small ones, and a large model its sequence, to save memory. The same operations are applied to
each chunk, and what they give is joined again. They are applied to the whole here; that it gives the same is seen in numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from convert.inference.forms.elements import JOINS, MOVES, SPLITS, are_same, with_instead
from convert.programs.program import REFUSALS, Array, Operation, Program, Value

MAX_DEPTH = 64  # operations on each chunk


@dataclass(frozen=True, eq=False)
class _Chunks:
    """What is computed of chunks, up to where they are joined.

    Attributes:
        join: the operation that joins them.
        whole: the value that was cut.
        chunks: of it.
        steps: the operations, each on every chunk, in order.
    """

    join: Operation
    whole: Value
    chunks: tuple[Value, ...]
    steps: tuple[tuple[Operation, ...], ...]


def chunks_in_one_way(program: Program) -> int:
    """Return how often a program applies the same operations to chunks of a value, and joins what they give."""
    return sum(bool(_of_whole(found)) for found in _chunked(program))


def chunks_together(program: Program, *, keep: bool) -> Program:
    """Return the program with these operations on the whole.

    Args:
        keep: whether those on the chunks stay in the program as well.
    """
    instead = {found.join: made for found in _chunked(program) if (made := _of_whole(found))}
    return with_instead(program, lambda operation: instead.get(operation, ()), keep=keep)


def _chunked(program: Program) -> Iterator[_Chunks]:
    made_by = program.made_by
    places = {operation: k for k, operation in enumerate(program.operations)}
    for join in program.operations:
        if join.name in JOINS and join.operands == join.data and len(set(join.operands)) == len(join.operands) > 1:
            steps: dict[tuple[Operation, ...], None] = {}
            found = _traced(join.operands, made_by, steps)
            if found is not None and steps:
                in_order = sorted(steps, key=lambda step: places[step[0]])
                yield _Chunks(join, *found, tuple(in_order))


def _traced(
    values: tuple[Value, ...], made_by: Mapping[Value, Operation], steps: dict[tuple[Operation, ...], None]
) -> tuple[Value, tuple[Value, ...]] | None:
    """Return the value of which others are made, chunk by chunk, and its chunks; None if there is none. `steps` gets the operations."""
    todo, seen = [values], {values}
    found: tuple[Value, tuple[Value, ...]] | None = None
    while todo:
        at = todo.pop()
        whole = _cut(at, made_by)
        if whole is not None:
            if found is not None and found != (whole, at):
                return None
            found = whole, at
            continue
        made = [made_by.get(x) for x in at]
        step = tuple(one for one in made if one is not None)
        if len(step) < len(at) or len(set(step)) < len(step) or not _are_the_same_step(step) or len(steps) == MAX_DEPTH:
            return None
        steps[step] = None
        for operands in zip(*(one.operands for one in step), strict=True):
            if operands in seen or _is_one(operands):
                continue
            if not all(x.data for x in operands):
                return None
            seen.add(operands)
            todo.append(operands)
    return found


def _cut(values: Sequence[Value], made_by: Mapping[Value, Operation]) -> Value | None:
    """Return the value whose chunks are these, one after the other; None if there is none."""
    made = [made_by.get(x) for x in values]
    first = made[0]
    if first is None or any(
        one is None or one.name not in MOVES or one.operands[:1] != first.operands[:1] for one in made
    ):
        return None
    cuts = first.name in SPLITS and first.results == tuple(values)
    pieces = all(one is not None and one.name in ("slice", "narrow", "dynamic_slice") for one in made)
    whole = first.operands[0]
    return whole if (cuts or pieces) and whole.data and _are_joined(values, whole.array) else None


def _are_the_same_step(step: Sequence[Operation]) -> bool:
    first = step[0]
    return all(
        (one.name, one.where, one.module, len(one.operands), len(one.results))
        == (first.name, first.where, first.module, len(first.operands), 1)
        for one in step
    )


def _is_one(operands: Sequence[Value]) -> bool:
    """Whether operands of all chunks are the same value, or are made of the same elements of parameters."""
    first = operands[0]
    return all(x is first for x in operands) or all(
        not x.data
        and x.leaves == first.leaves
        and x.array.dtype == first.array.dtype
        and np.array_equal(x.array, first.array)
        and len(x.elements) == len(first.elements)
        and all(map(np.array_equal, x.elements, first.elements))
        for x in operands
    )


def _are_joined(values: Sequence[Value], whole: Array) -> bool:
    """Whether values give a whole, one after the other along one of its axes."""
    for axis in range(whole.ndim):
        try:
            joined = np.concatenate([x.array for x in values], axis)
        except ValueError:
            continue
        if joined.shape == whole.shape and are_same(joined, whole):
            return True
    return False


def _of_whole(found: _Chunks) -> list[Operation]:
    """Return the operations on the whole, the last of which gives what the chunks' were joined to; none if a chunk's hangs on the others."""
    now = {found.chunks[0]: found.whole}
    made: list[Operation] = []
    for step in found.steps:
        first, results = step[0], tuple(one.results[0] for one in step)
        operands = tuple(now.get(x, x) for x in first.operands)
        try:
            with np.errstate(all="ignore"):
                array = np.asarray(first.again([x.array for x in operands])[0])
        except REFUSALS:
            return []
        if not _are_joined(results, array):
            return []
        last = results == found.join.operands
        if last and (
            array.shape != found.join.results[0].array.shape or not are_same(found.join.results[0].array, array)
        ):
            return []
        value = found.join.results[0] if last else replace(results[0], array=array)
        now[results[0]] = value
        made.append(replace(first, operands=operands, results=(value,)))
    return made
