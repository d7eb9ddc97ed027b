"""Give the state of a loop on where it is set to zeros between the steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from convert.programs.divergence.graph import on_the_way
from convert.programs.divergence.rerun import Change
from convert.programs.divergence.shared_values import FEW
from convert.programs.program import Program, Value
from convert.programs.rewrites.rewrite import Goal, Rewrite, error_with, line

CUT = "state cut between steps"
FEWEST = 2  # cuts; a single one is found among the states that are not given on
MOST_OPERATIONS = 30_000  # that run again
Place = tuple[int, int]  # numbers of an operation and of its operand


def cut_states(target: Program, goal: Goal) -> Rewrite | None:
    """Return the line whose last value restores the output at all steps that begin from zeros."""
    program = on_the_way(target, goal.output)
    uses = _uses(program)
    zeros = _first_zeros(program, uses)
    lines: dict[tuple[str, str, str], list[int]] = {}
    for at, one in enumerate(program.operations):
        if one.results[0].data:
            lines.setdefault((one.name, one.where, one.module), []).append(at)
    ran = 0
    for steps in lines.values():
        earlier = dict(_given_on(program, steps, zeros, uses))
        cuts = [place for place in earlier if place == uses[program.operations[place[0]].operands[place[1]]][0]]
        if len(cuts) < FEWEST or ran >= MOST_OPERATIONS:
            continue
        error, count = error_with(program, Change(earlier=earlier), goal)
        ran += count
        if error <= goal.enough:
            use, giving = line(program.operations[cuts[0][0]]), line(program.operations[steps[0]])
            problem = (
                f"at {len(cuts)} of the steps of a loop, the target begins from zeros again ({use}); its outputs are equal when it goes on "
                f"from the state of the step before ({giving}), as the JAX model does"
            )
            fix = f"do not set the state to zeros in front of {use}, or correct the reference"
            return Rewrite(CUT, problem, fix, error)
    return None


def _uses(program: Program) -> Mapping[Value, list[Place]]:
    found: dict[Value, list[Place]] = {}
    for at, one in enumerate(program.operations):
        for k, value in enumerate(one.operands):
            found.setdefault(value, []).append((at, k))
    return found


def _first_zeros(program: Program, uses: Mapping[Value, list[Place]]) -> list[Value]:
    """Return the values that are zeros, without those that are computed of zeros."""
    zeros = {v for v in uses if v.array.size >= FEW and v.array.dtype.kind == "f" and not v.array.any()}
    made = program.made_by
    return [v for v in uses if v in zeros and not (v in made and zeros.intersection(made[v].operands))]


def _given_on(
    program: Program, steps: Sequence[int], zeros: Sequence[Value], uses: Mapping[Value, list[Place]]
) -> list[tuple[Place, Value]]:
    """Return where zeros are used, with what a line gave the last time before."""
    index = {v: k for k, one in enumerate(program.operations) for v in one.results}
    found = []
    for value in zeros:
        before = [k for k in steps if k < index.get(value, uses[value][0][0])]
        given = program.operations[before[-1]].results[0] if before else value
        if given is not value and given.array.shape == value.array.shape and given.array.any():
            found += [(place, given) for place in uses[value]]
    return found
