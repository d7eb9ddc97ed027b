"""Read a state of a loop before its update, or behind it: the output of a step, or a gate of it, that is computed of the other one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from convert.programs.divergence.graph import root
from convert.programs.divergence.shared_values import FEW
from convert.programs.divergence.words import Words, names_of
from convert.programs.program import Operation, Program, Value, producers_of
from convert.programs.rewrites.rewrite import Goal, Rewrite, line, rerun_of

OLD, NEW = "state read before its update", "state read behind its update"
FEWEST = 3  # steps
MOST_RUNS = 48
MOST_OPERATIONS = 300_000  # that all trials run
Place = tuple[int, int]  # numbers of an operation and of its operand


@dataclass(frozen=True)
class _Reads:
    """Where each step of a loop reads a state, and what it reads instead.

    Attributes:
        name: of the mistake if the other one is meant.
        other: place -> the value to read.
        update: the first step's operation that gives the new state.
    """

    name: str
    other: Mapping[Place, Value]
    update: Operation


def updates(target: Program, goal: Goal) -> Rewrite | None:
    """Return the state, old or new, that restores the output where the same line reads it in each step."""
    runs = 0
    for runs, reads in enumerate(_all_reads(target)):
        if runs >= MOST_RUNS or runs * len(target.operations) >= MOST_OPERATIONS:
            return None
        made = _with(target, reads.other)
        if made is None:
            continue
        error = goal.error(made.outputs[goal.output].array)
        if error <= goal.enough:
            return _rewrite(target, reads, error)
    return None


def _rewrite(target: Program, reads: _Reads, error: float) -> Rewrite:
    words = Words(target.operations, names_of(target))
    use = target.operations[list(reads.other)[1][0]]  # the first step may begin from zeros
    has, meant = ("before", "behind") if reads.name == OLD else ("behind", "before")
    problem = (
        f"in each step of a loop, the target {words.verb(use)} ({line(use)}) the state {has} its update ({line(reads.update)}); its outputs "
        f"are equal when that reads the state {meant} the update, as in the JAX model"
    )
    what = "new" if reads.name == OLD else "old"
    return Rewrite(reads.name, problem, f"read the {what} state at {line(use)}, or correct the reference", error)


def _all_reads(program: Program) -> Iterator[_Reads]:
    """Yield the reads of old states, and of new ones, by one operand of one line in all steps."""
    producer = program.made_by
    index = {one: k for k, one in enumerate(program.operations)}
    series = list(_series(program))
    made_in: dict[Value, tuple[int, int]] = {}  # state -> number of its series, and step
    for n, at in enumerate(series):
        for step, k in enumerate(at):
            made_in.setdefault(program.operations[k].results[0], (n, step))
    firsts: dict[int, Value] = {}  # series -> what its first step begins from
    olds: list[tuple[int, list[Place]]] = []
    news: list[tuple[int, list[Place]]] = []
    for at in series:
        for k in range(len(program.operations[at[0]].operands)):
            given = [root(program.operations[j].operands[k], producer) for j in at]
            steps = [made_in.get(v) for v in given]
            if steps[1] is None:
                continue
            n = steps[1][0]
            if len(series[n]) != len(at):
                continue
            places = [(j, k) for j in at]
            if steps[1:] == [(n, step) for step in range(len(at) - 1)] and steps[0] != steps[1]:
                firsts.setdefault(n, program.operations[at[0]].operands[k])
                olds.append((n, places))
            elif steps == [(n, step) for step in range(len(at))] and all(index[producer[v]] < j for v, j in zip(given, at, strict=True)):  # fmt: skip
                news.append((n, places))
    for n, places in olds:
        states = [program.operations[j].results[0] for j in series[n]]
        yield _Reads(OLD, dict(zip(places, states, strict=True)), program.operations[series[n][0]])
    for n, places in news:
        if n in firsts:
            states = [firsts[n], *(program.operations[j].results[0] for j in series[n][:-1])]
            yield _Reads(NEW, dict(zip(places, states, strict=True)), program.operations[series[n][0]])


def _series(program: Program) -> Iterator[list[int]]:
    """Yield the operations of one line that run once in each step, as often as any; where a line runs several times a step, each by itself."""
    lines: dict[tuple[str, str, str, int], list[int]] = {}
    for at, one in enumerate(program.operations):
        if one.results[0].array.dtype.kind == "f" and one.results[0].array.size >= FEW:
            lines.setdefault((one.name, one.where, one.module, len(one.operands)), []).append(at)
    lengths = [len(every) for every in lines.values() if len(every) >= FEWEST]
    for every in lines.values():
        for steps in dict.fromkeys(n for n in lengths if len(every) % n == 0):
            often = len(every) // steps
            yield from (every[k::often] for k in range(often))


def _with(program: Program, other: Mapping[Place, Value]) -> Program | None:
    """Return the record with other operands, in an order in which each is computed before it is used; None if there is none."""
    operations: list[Operation] = []
    for at, one in enumerate(program.operations):
        given = tuple(other.get((at, k), v) for k, v in enumerate(one.operands))
        if any(a.array.size != b.array.size for a, b in zip(given, one.operands, strict=True)):
            return None
        operations.append(one if given == one.operands else replace(one, operands=_laid_out(given, one.operands)))
    ordered = _in_order(operations)
    return None if ordered is None else rerun_of(program, ordered)


def _laid_out(given: Sequence[Value], like: Sequence[Value]) -> tuple[Value, ...]:
    return (
        tuple(given) if all(a.array.shape == b.array.shape for a, b in zip(given, like, strict=True)) else tuple(like)
    )


def _in_order(operations: Sequence[Operation]) -> list[Operation] | None:
    """Return operations so that each is behind what it is computed of, otherwise in their order; None where that is a circle."""
    producer = producers_of(operations)
    done: set[Operation] = set()
    open_: set[Operation] = set()
    ordered: list[Operation] = []
    for first in operations:
        waiting = [(first, False)]
        while waiting:
            one, ready = waiting.pop()
            if ready:
                ordered.append(one)
                done.add(one)
                open_.discard(one)
            elif one in open_:
                return None
            elif one not in done:
                open_.add(one)
                waiting.append((one, True))
                waiting += [(producer[v], False) for v in one.operands if v in producer and producer[v] not in done]
    return ordered
