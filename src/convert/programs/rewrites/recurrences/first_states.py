"""Begin the target's recurrences from other states: from zeros, or from those of the source, and each sequence anew."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from convert.numerics.roots import factor_text
from convert.programs.divergence.graph import on_the_way
from convert.programs.divergence.kinds import kind_of
from convert.programs.divergence.rerun import Change
from convert.programs.divergence.shared_values import FEW
from convert.programs.divergence.words import Words, names_of
from convert.programs.program import Program, Value
from convert.programs.rewrites.rewrite import Goal, Rewrite, error_with, line

Array = np.ndarray[Any, np.dtype[Any]]
FIRST, NOT_RESET = "another first state", "state not reset"
MOST_RUNS = 48
APPLIES = ("product", "multiply")  # what a recurrence does with its weights
FEWEST = 3  # steps of a recurrence
MOST_OPERATIONS = 200_000  # that run again
Place = tuple[int, int]  # numbers of an operation and of its operand


@dataclass(frozen=True)
class _Uses:
    """Where the operations of one line are given a state: from the step before, or a first one.

    Attributes:
        steps: how often the line runs.
        first: step -> the place of a first state.
        given_on: step -> the place of a state of the step before.
    """

    steps: int
    first: Mapping[int, Place]
    given_on: Mapping[int, Place]


def first_states(source: Program, target: Program, goal: Goal) -> Rewrite | None:
    """Return the first states that restore the output: of all recurrences, of one state alone, or of each sequence of a batch."""
    program, theirs = on_the_way(target, goal.output), on_the_way(source, goal.output)
    uses = list(_uses(program))
    operations = 0
    for runs, (name, made, problem, fix) in enumerate((*_others(program, theirs, uses), *_resets(program, uses))):
        if runs >= MOST_RUNS or operations >= MOST_OPERATIONS:
            return None
        error, ran = error_with(program, Change(operands=made), goal)
        operations += ran
        if error <= goal.enough:
            return Rewrite(name, problem, fix, error)
    return None


def _others(
    program: Program, source: Program, uses: Sequence[_Uses]
) -> Iterator[tuple[str, dict[Place, Array], str, str]]:
    """Yield other first states: for all that are not zeros, for equal ones together, and the source's for each."""
    states = _by_numbers(program, uses)
    wrong = [places for key, places in states.items() if _array(program, places[0]).any()]
    for places in ([place for each in wrong for place in each], *(wrong if len(wrong) > 1 else ())):
        if places:
            made = {place: np.zeros_like(_array(program, place)) for place in places}
            yield FIRST, made, *_said(program, places[0], "zeros")
    theirs = _by_numbers(source, list(_uses(source)))
    for other in (_array(source, places[0]) for places in theirs.values()):
        if not other.any() or not (other == other.flat[0]).all():
            continue
        for places in states.values():
            made = {place: np.full_like(_array(program, place), other.flat[0]) for place in places}
            yield FIRST, made, *_said(program, places[0], f"{factor_text(float(other.flat[0]))} throughout")


def _resets(program: Program, uses: Sequence[_Uses]) -> Iterator[tuple[str, dict[Place, Array], str, str]]:
    """Yield the trials in which the state is zeros again after a number of steps."""
    for steps in dict.fromkeys(one.steps for one in uses):
        of_length = [one for one in uses if one.steps == steps]
        for length in (n for n in range(steps // 2, 1, -1) if steps % n == 0):
            places = [place for one in of_length for k, place in one.given_on.items() if k % length == 0]
            if places:
                made = {place: np.zeros_like(_array(program, place)) for place in places}
                here = _here(program, places[0])
                problem = (
                    f"of {steps} steps of the recurrence ({here}), each begins from the state of the one before; the outputs are equal when "
                    f"the state is zeros again after every {length} steps: it goes on from one sequence, direction or layer to the next"
                )
                yield NOT_RESET, made, problem, f"begin with zeros after every {length} steps at {here}"


def _said(program: Program, place: Place, instead: str) -> tuple[str, str]:
    here = _here(program, place)
    value = program.operations[place[0]].operands[place[1]]
    began = Words(program.operations, names_of(program)).value(value)
    if value.constant:
        same = (value.array == value.array.flat[0]).all()
        began = f"{factor_text(float(value.array.flat[0]))} throughout" if same else "a table of constants"
        began = began if value.array.any() else "zeros"
    problem = f"the target's recurrence ({here}) begins with {began}; the outputs are equal when it begins with {instead}, as the JAX model's does"
    return problem, f"begin with {instead} at {here}, or correct the reference"


def _here(program: Program, place: Place) -> str:
    one = program.operations[place[0]]
    return f"{line(one)}{f', in {one.module}' if one.module else ''}"


def _array(program: Program, place: Place) -> Array:
    return program.operations[place[0]].operands[place[1]].array


def _by_numbers(program: Program, uses: Sequence[_Uses]) -> dict[Any, list[Place]]:
    """Return the places of first states, those with the same numbers together."""
    found: dict[Any, list[Place]] = {}
    for place in (place for one in uses for place in one.first.values()):
        array = _array(program, place)
        found.setdefault((array.size, np.sort(array, axis=None).tobytes()), []).append(place)
    return found


def _uses(program: Program) -> Iterator[_Uses]:
    """Yield the uses of states: of what a step of a recurrence gives to the next one, where the same weights are applied again."""
    applied: dict[Any, list[int]] = {}
    for at, one in enumerate(program.operations):
        weights = frozenset(leaf for v in one.operands if v.of_parameters for leaf in v.leaves)
        if weights and kind_of(one) in APPLIES:
            applied.setdefault((one.name, one.where, weights, len(one.operands)), []).append(at)
    made = {v: k for k, one in enumerate(program.operations) for v in one.results}
    loops: list[list[int]] = []
    for steps in sorted(at for at in applied.values() if len(at) >= FEWEST):
        if any(len(one) == len(steps) and one[0] < steps[0] < one[1] for one in loops):
            continue  # within the steps of another one: what it is given may come from the same step
        uses = list(_of_steps(program, steps, made))
        loops += [steps] if uses else []
        yield from uses


def _of_steps(program: Program, at: Sequence[int], made: Mapping[Value, int]) -> Iterator[_Uses]:
    """Yield the operands that are given what the step before gave, where all steps have the same operations."""
    carried: list[set[Place]] = [set(), *(_carried(program, at, step, made) for step in range(1, len(at)))]
    ends = [*at[1:], 2 * at[-1] - at[-2]]
    for offset, k in sorted(carried[1]):
        name = program.operations[at[1] + offset].name
        uses = [(start + offset, k) for start, end in zip(at, ends, strict=True) if start + offset < end]
        if len(uses) != len(at) or any(
            j >= len(program.operations) or program.operations[j].name != name for j, _ in uses
        ):
            continue
        given_on = [(offset, k) in carried[step] for step in range(len(at))]
        first = {step: use for step, use in enumerate(uses) if not given_on[step] and _may_be_state(program, use)}
        rest = {step: use for step, use in enumerate(uses) if given_on[step]}
        if 0 in first and len(first) + len(rest) == len(at):
            yield _Uses(len(at), first, rest)


def _carried(program: Program, at: Sequence[int], step: int, made: Mapping[Value, int]) -> set[Place]:
    """Return where a step uses what the step before has computed of its state, counted from the step's first operation."""
    before, begin = at[step - 1], at[step]
    end = at[step + 1] if step + 1 < len(at) else min(2 * begin - before, len(program.operations))
    moved = set(program.operations[before].results)
    for one in program.operations[before + 1 : begin]:
        if moved.intersection(one.operands):
            moved.update(one.results)
    return {
        (j - begin, k)
        for j in range(begin, end)
        for k, v in enumerate(program.operations[j].operands)
        if v in moved and before <= made.get(v, -1) < begin
    }


def _may_be_state(program: Program, use: Place) -> bool:
    value = program.operations[use[0]].operands[use[1]]
    return not value.of_parameters and value.array.size >= FEW and value.array.dtype.kind == "f"
