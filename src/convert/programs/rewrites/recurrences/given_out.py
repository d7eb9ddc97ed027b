"""Give out the states of a loop in front of each step, or behind it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from convert.programs.divergence.graph import on_the_way, root
from convert.programs.divergence.kinds import kind_of
from convert.programs.divergence.rerun import Change
from convert.programs.program import Program, Value
from convert.programs.rewrites.rewrite import Goal, Rewrite, error_with, line

LATE, EARLY = "states given out a step late", "states given out a step early"
FEWEST = 3  # steps
MOST_RUNS = 16


@dataclass(frozen=True)
class Join:
    """The states that are joined, and those of one step later or earlier.

    Attributes:
        at: index of the operation that joins them.
        name: of the mistake if the other ones are meant.
        other: where an operation is given a state -> which one instead.
        step: index of the operation that computes the first state.
    """

    at: int
    name: str
    other: Mapping[tuple[int, int], Value]
    step: int


def given_out(target: Program, goal: Goal) -> Rewrite | None:
    """Return the states that restore the output where the same lines join them: those before each step for those behind it, or the reverse."""
    used = {one.results[:1] for one in on_the_way(target, goal.output).operations}
    together: dict[tuple[str, str], list[Join]] = {}
    for join in _joins(target):
        if target.operations[join.at].results[:1] in used:
            together.setdefault((join.name, line(target.operations[join.at])), []).append(join)
    for (name, where), joins in list(together.items())[:MOST_RUNS]:
        change = Change(earlier={place: v for join in joins for place, v in join.other.items()})
        error, _ = error_with(target, change, goal)  # the first state may have another shape
        if error <= goal.enough:
            before, behind = "in front of each step", "behind each step"
            has, meant = (before, behind) if name == LATE else (behind, before)
            step = line(target.operations[joins[0].step])
            problem = f"the target joins the states {has} ({where}); the outputs are equal with those {meant} ({step})"
            return Rewrite(name, problem, f"give the state out {meant} of the loop, or correct the reference", error)
    return None


def _joins(program: Program) -> Iterator[Join]:
    """Yield what joins the states of a loop, with the states of the step before, and of the step behind."""
    index = {v: k for k, one in enumerate(program.operations) for v in one.results}
    producer = {v: program.operations[k] for v, k in index.items()}
    places = {v: (one.name, one.where, one.module, k) for one in program.operations for k, v in enumerate(one.results)}
    lines: dict[tuple[str, str, str, int], list[Value]] = {}  # the last: which result of its operation, as of a split
    for value, place in places.items():
        lines.setdefault(place, []).append(value)
    for at, one in enumerate(program.operations):
        if kind_of(one) != "join" or len(one.operands) < FEWEST:
            continue
        roots = [root(v, producer) for v in one.operands]
        if roots[1] not in places or any(v.array.shape != roots[1].array.shape for v in roots):
            continue
        series = lines[places[roots[1]]]
        begins = series.index(roots[1])
        before = series[begins - 1 : begins - 1 + len(roots)] if begins else []
        if roots == before and (first := _first_state(program, before[0], index)) is not None:
            yield Join(at, EARLY, dict(_moved(at, program, roots, [first, *before[:-1]], index)), index[before[0]])
        if roots[1:] == (steps := series[begins : begins + len(roots)])[:-1] and index[steps[-1]] < at:
            yield Join(at, LATE, dict(_moved(at, program, roots, steps, index)), index[steps[0]])


def _moved(
    at: int, program: Program, roots: Sequence[Value], others: Sequence[Value], index: Mapping[Value, int]
) -> Iterator[tuple[tuple[int, int], Value]]:
    """Yield the operations that take the joined values, as they are or laid out otherwise, with the other value."""
    for k, (value, meant, other) in enumerate(zip(program.operations[at].operands, roots, others, strict=True)):
        if value is meant:
            yield (at, k), other
        elif meant in program.operations[first := index[value]].operands:
            yield (first, program.operations[first].operands.index(meant)), other


def _first_state(program: Program, state: Value, index: Mapping[Value, int]) -> Value | None:
    """Return what the first step is given where the second is given its state."""
    uses = ((k, one) for k, one in enumerate(program.operations) if state in one.operands and k > index[state])
    for k, one in uses:
        same = (one.name, one.where, one.module)
        earlier = [x for x in program.operations[:k] if (x.name, x.where, x.module) == same]
        at = one.operands.index(state)
        if earlier and at < len(earlier[-1].operands):  # a list of states grows
            return earlier[-1].operands[at]
    return None
