"""Move a norm, or another function of one value, to the other side of the addition of a residual."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from convert.programs.divergence.graph import on_the_way, root
from convert.programs.divergence.kinds import LAYOUT, kind_of
from convert.programs.divergence.rerun import again
from convert.programs.divergence.words import Words, arithmetic, names_of, places
from convert.programs.program import Operation, Program, Value
from convert.programs.rewrites.places.segments import Segment, segment_to
from convert.programs.rewrites.rewrite import Goal, Rewrite, line, rerun_with

Array = np.ndarray[Any, np.dtype[Any]]
BEHIND, IN_FRONT = "norm behind the addition, not in front of it", "norm in front of the addition, not behind it"
POST_NORM = "norm behind the addition, not in front of the layer"
FUNCTION_BEHIND, FUNCTION_IN_FRONT = "function behind the addition", "function in front of the addition"
LONGEST = 3  # segments that are a norm with its scale and bias
MOST_RUNS = 24


@dataclass(frozen=True)
class Move:
    """Another place of a function.

    Attributes:
        name: of the mistake.
        addition: of the residual.
        function: what is moved.
        at: the operation that gives something else then; made: which gives that.
        meant: where the outputs are equal, in words.
    """

    name: str
    addition: Operation
    function: tuple[Operation, ...]
    at: Operation
    made: Operation
    meant: str


def residual(target: Program, goal: Goal) -> Rewrite | None:
    """Return the side of the addition that restores the output: of all functions of one kind, or of those of one line."""
    program = on_the_way(target, goal.output)
    kinds: dict[tuple[str, int], list[Move]] = {}
    for move in _moves(program):
        kinds.setdefault((move.name, len(arithmetic(move.function))), []).append(move)
    runs = 0
    for moves in kinds.values():
        lines = dict.fromkeys(line(move.addition) for move in moves)
        every = [[move for move in moves if line(move.addition) == one] for one in lines]
        for chosen in (moves, *(every if len(every) > 1 else ())):
            if runs >= MOST_RUNS:
                return None
            runs += 1
            tried = rerun_with(program, {move.at: move.made for move in chosen}, goal)
            if tried is not None and tried[1] <= goal.enough:
                return _rewrite(program, chosen, tried[1])
    return None


def _rewrite(program: Program, moves: Sequence[Move], error: float) -> Rewrite:
    words, move = Words(program.operations, names_of(program)), moves[0]
    does, steps = words.chain(move.function), arithmetic(move.function)
    leaves = sorted({leaf for one in steps for v in one.operands if v.of_parameters for leaf in v.leaves})
    of = f", with {' and '.join(leaves[:2])}," if leaves else ""
    at = line(move.addition)
    given = "what it adds to the residual" if move.at is move.addition else "a sum with the residual"
    problem = f"of {given} ({at}), the target {does}{of}{places(steps)}: its outputs are equal {move.meant}"
    return Rewrite(
        move.name, problem, f"exchange the two at {at} and {line(steps[-1])}, or correct the reference", error
    )


def _moves(program: Program) -> Iterator[Move]:
    order = {value: k for k, one in enumerate(program.operations) for value in one.results}
    producer = program.made_by
    users = program.users
    for addition in program.operations:
        if kind_of(addition) != "add" or len(addition.data) != 2 or len(addition.operands) != 2:
            continue
        if addition.operands[0].array.shape != addition.operands[1].array.shape:
            continue
        for residual, branch in (addition.operands, addition.operands[::-1]):
            layer = _between(residual, branch, program, producer, users)
            if layer:
                yield from _behind(addition, residual, branch, layer, program, order, users)
                yield from _in_front(addition, residual, branch, program, order)


def _behind(
    addition: Operation,
    residual: Value,
    branch: Value,
    layer: Sequence[Operation],
    program: Program,
    order: Mapping[Value, int],
    users: Mapping[Value, Sequence[Operation]],
) -> Iterator[Move]:
    """Yield the moves of what the target computes of the sum."""
    total = addition.results[0]
    for segments in _functions_of(total, program, order, users):
        ones, last = _operations(segments), segments[-1].operations[-1]
        norms, run = any(one.norms for one in segments), _function(segments)
        name = BEHIND if norms else FUNCTION_BEHIND
        new = replace(last, operands=(residual, branch), again=_sum_of(run))
        yield Move(name, addition, ones, last, new, "when it adds the residual behind that")
        if norms:
            inner = _operations_run(layer, residual, branch)
            new = replace(last, operands=(residual, residual), again=_sum_of(run, inner))
            yield Move(
                POST_NORM,
                addition,
                ones,
                last,
                new,
                "when it does so with what the layer is given, and not with the sum",
            )


def _in_front(
    addition: Operation, residual: Value, branch: Value, program: Program, order: Mapping[Value, int]
) -> Iterator[Move]:
    """Yield the moves of what the target computes of the branch alone."""
    segments: list[Segment] = []
    value = branch
    while len(segments) < LONGEST and (one := segment_to(value, program, order)) is not None:
        segments.insert(0, one)
        value = one.before
        if one.norms or not one.scales:
            break
    if not segments or all(kind_of(one) == LAYOUT for one in _operations(segments)):
        return
    if segments[0].before.array.shape != residual.array.shape:
        return
    run, name = _function(segments), IN_FRONT if segments[0].norms else FUNCTION_IN_FRONT
    new = replace(addition, operands=(residual, segments[0].before), again=lambda x: (run(x[0] + x[1]),))
    yield Move(name, addition, _operations(segments), addition, new, "when it does so with the sum")


def _functions_of(
    value: Value, program: Program, order: Mapping[Value, int], users: Mapping[Value, Sequence[Operation]]
) -> Iterator[tuple[Segment, ...]]:
    """Yield what is computed of one value alone, if nothing else is given it: a norm with its scale, or one function."""
    segments: list[Segment] = []
    while len(segments) < LONGEST:
        found = _next(value, program, order, users)
        if found is None or (segments and not found.scales):
            break
        segments.append(found)
        value = found.after
        if not segments[0].norms:
            break
    if segments and any(kind_of(one) != LAYOUT for one in _operations(segments)):
        for n in range(len(segments), 0, -1):
            yield tuple(segments[:n])


def _next(
    value: Value, program: Program, order: Mapping[Value, int], users: Mapping[Value, Sequence[Operation]]
) -> Segment | None:
    """Return the segment that is given a value, if no operation outside of it is."""
    seen: set[Value] = set()
    waiting = [value]
    while waiting and len(seen) < 20:
        one = min(waiting, key=lambda v: order.get(v, -1))
        waiting.remove(one)
        seen.add(one)
        if one is not value:
            segment = segment_to(one, program, order)
            if (
                segment is not None
                and segment.before is value
                and all(user in segment.operations for user in users.get(value, ()))
            ):
                return segment
        waiting += [v for user in users.get(one, ()) for v in user.results if v not in seen and v not in waiting]
    return None


def _between(
    first: Value,
    last: Value,
    program: Program,
    producer: Mapping[Value, Operation],
    users: Mapping[Value, Sequence[Operation]],
) -> list[Operation]:
    """Return the operations through which one value goes into another one; none if it does not."""
    behind: set[Operation] = set()
    waiting = [root(last, producer)]
    while waiting:
        value = waiting.pop()
        operation = producer.get(value)
        if operation is not None and value is not first and operation not in behind:
            behind.add(operation)
            waiting.extend(operation.operands)
    reached: set[Operation] = set()
    waiting = [first]
    while waiting:
        for user in users.get(waiting.pop(), ()):
            if user in behind and user not in reached:
                reached.add(user)
                waiting.extend(user.results)
    return [one for one in program.operations if one in reached]


def _operations(segments: Sequence[Segment]) -> tuple[Operation, ...]:
    return tuple(one for segment in segments for one in segment.operations)


def _function(segments: Sequence[Segment]) -> Callable[[Array], Array]:
    return _operations_run(_operations(segments), segments[0].before, segments[-1].after)


def _sum_of(*functions: Callable[[Array], Array]) -> Callable[[Sequence[Array]], Sequence[Array]]:
    """Return what adds a residual to what these make of another value, one after another."""

    def run(given: Sequence[Array]) -> Sequence[Array]:
        made = given[1]
        for function in functions:
            made = function(made)
        return (given[0] + made,)

    return run


def _operations_run(operations: Sequence[Operation], before: Value, after: Value) -> Callable[[Array], Array]:
    def run(given: Array) -> Array:
        made = again(operations, {before: given.reshape(before.array.shape)})
        if made is None:
            raise ValueError("the operations do not take the other value")
        return made.reshape(after.array.shape)

    return run
