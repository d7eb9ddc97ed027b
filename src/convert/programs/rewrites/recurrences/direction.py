"""Turn the loops of the target round: the order in which they read a sequence, and in which they give what their steps compute."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from convert.programs.divergence.graph import on_the_way
from convert.programs.divergence.kinds import LAYOUT, kind_of
from convert.programs.divergence.rerun import Change, Rerun
from convert.programs.divergence.words import Words, names_of
from convert.programs.program import Operation, Program, Value
from convert.programs.rewrites.rewrite import Goal, Rewrite, line

Array = np.ndarray[Any, np.dtype[Any]]
REVERSED = "sequence in the reverse order"
FEWEST = 3  # steps of a loop: two values in the other order are seldom a sequence
WORK = 300_000  # operations that all trials may run
MOST_NAMED = 3  # values that a loop reads


@dataclass(frozen=True)
class Read:
    """One index of a value, which a step of a loop takes.

    Attributes:
        at: number of the operation.
        taken: its result; of: the whole value.
    """

    at: int
    taken: Value
    of: Value
    axis: int
    index: int


@dataclass(frozen=True)
class Loop:
    """The reads of values of one length, and the places at which as many values are put together.

    Attributes:
        reads: those of each value together, in the order of execution.
        writes: the (operation, operand) of each index.
    """

    reads: tuple[tuple[Read, ...], ...]
    writes: tuple[tuple[tuple[int, int], ...], ...]


def direction(target: Program, goal: Goal) -> Rewrite | None:
    """Return the direction in which the target's loops restore the output."""
    program = on_the_way(target, goal.output)
    work = 0
    for loop in _loops(program):
        ways = [(loop.reads, loop.writes), (loop.reads, ()), ((), loop.writes)]
        for reads, writes in ways if loop.writes else ways[:1]:
            rerun = Rerun(program)
            try:
                work += _turned(rerun, reads, writes)
            except ValueError:  # the steps do not take each other's values
                continue
            error = goal.error(rerun.array(program.outputs[goal.output]))
            if error <= goal.enough:
                return _rewrite(program, loop, bool(reads), bool(writes), error)
            if work > WORK:
                return None
    return None


def _rewrite(program: Program, loop: Loop, reads: bool, writes: bool, error: float) -> Rewrite:
    first = loop.reads[0][0]
    here = line(program.operations[first.at])
    ends = ("first", "last") if first.index == 0 else ("last", "first")
    words = Words(program.operations, names_of(program))
    given = list(dict.fromkeys(words.value(one[0].of) for one in loop.reads))[:MOST_NAMED]
    does = [
        *([f"reads {' and '.join(given)}"] if reads else []),
        *(["puts together what its steps give"] if writes else []),
    ]
    what = " and ".join(does)
    problem = (
        f"the target's loop ({here}) {what} from the {ends[0]} of {len({one.index for one in loop.reads[0]})} steps on; the outputs are "
        f"equal when it does so from the {ends[1]} on"
    )
    return Rewrite(REVERSED, problem, f"turn the loop at {here} round, or the JAX model's", error)


def _turned(rerun: Rerun, reads: Sequence[Sequence[Read]], writes: Sequence[Sequence[tuple[int, int]]]) -> int:
    """Run the program with the opposite indices, in the order of execution; return how many operations ran."""
    program = rerun.program
    events: list[tuple[int, Sequence[Read], Sequence[tuple[int, int]]]] = [(one[0].at, one, ()) for one in reads]
    events += [(max(at for at, _ in one), (), one) for one in writes]
    ran = 0
    for _, read, write in sorted(events, key=lambda event: event[0]):
        if read:
            last = read[0].of.array.shape[read[0].axis] - 1
            values = {
                one.taken: np.take(rerun.array(one.of), last - one.index, one.axis).reshape(one.taken.array.shape)
                for one in read
            }
            change = Change(values)
        else:
            given = [rerun.array(program.operations[at].operands[k]) for at, k in write]
            change = Change(operands=dict(zip(write, given[::-1], strict=True)))
        ran += len(list(rerun.put(change)))
    return ran


def _loops(program: Program) -> Iterator[Loop]:
    """Yield the loops over each length: all of them, then those of each module and line."""
    reads: dict[int, list[tuple[Read, ...]]] = {}
    for one in _reads(program):
        reads.setdefault(one[0].of.array.shape[one[0].axis], []).append(one)
    for length, of_length in reads.items():
        if length < FEWEST or not _recurs(program, of_length[0][0].at, length):
            continue
        writes = list(_writes(program, length))
        yield Loop(tuple(of_length), tuple(writes))
        places = dict.fromkeys(_place(program.operations[one[0].at]) for one in of_length)
        for place in places if len(places) > 1 else ():
            mine = [one for one in of_length if _place(program.operations[one[0].at]) == place]
            module = [one for one in writes if program.operations[one[0][0]].module == place[0]]
            yield Loop(tuple(mine), tuple(module))


def _recurs(program: Program, first: int, steps: int) -> bool:
    """Whether a line behind an operation runs as often, each time with something of what it gave before."""
    lines: dict[tuple[str, str, str], list[int]] = {}
    for at, one in enumerate(program.operations[first:], first):
        if one.data and kind_of(one) != LAYOUT:
            lines.setdefault((one.name, one.where, one.module), []).append(at)
    return any(len(at) >= steps and _leads(program, at[0], at[1]) for at in lines.values())


def _leads(program: Program, first: int, second: int) -> bool:
    """Whether something of what an operation gives goes into another one."""
    moved = set(program.operations[first].results)
    for one in program.operations[first + 1 : second]:
        if moved.intersection(one.operands):
            moved.update(one.results)
    return bool(moved.intersection(program.operations[second].operands))


def _place(operation: Operation) -> tuple[str, str]:
    return operation.module, operation.where if not operation.module else ""


def _reads(program: Program) -> Iterator[tuple[Read, ...]]:
    """Yield the values of which each index of an axis is taken by itself."""
    found: dict[tuple[Value, int], list[Read]] = {}
    for at, one in enumerate(program.operations):
        if kind_of(one) == "part" and len(one.data) == 1 and one.operands[0].data:
            for read in _indices(at, one):
                found.setdefault((read.of, read.axis), []).append(read)
    for (value, axis), reads in found.items():
        if len({one.index for one in reads}) == value.array.shape[axis] > 1:
            yield tuple(reads)


def _indices(at: int, operation: Operation) -> Iterator[Read]:
    """Yield the single indices that an operation takes of a value."""
    of, settings = operation.operands[0], operation.settings
    axis = int(settings.get("dim", 0)) % max(1, of.array.ndim)
    if operation.name == "select":
        yield Read(at, operation.results[0], of, axis, int(settings.get("index", 0)) % of.array.shape[axis])
    elif operation.name == "slice":
        taken = range(of.array.shape[axis])[settings.get("start") : settings.get("end") : settings.get("step")]
        if len(taken) == 1:
            yield Read(at, operation.results[0], of, axis, taken[0])
    elif len(operation.results) == of.array.shape[axis] > 1:  # unbind, or parts of one index each
        for index, value in enumerate(operation.results):
            yield Read(at, value, of, axis, index)


def _writes(program: Program, length: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """Yield the places at which values of as many steps are joined."""
    for at, one in enumerate(program.operations):
        if kind_of(one) != "join" or len(one.data) != len(one.operands) or len(set(one.operands)) != length:
            continue
        if len(one.operands) == length and len({v.array.shape for v in one.operands}) == 1:
            yield tuple((at, k) for k in range(length))
