"""Give the states of a recurrence on: to the next step, or to the layer that begins with zeros."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from convert.programs.divergence.graph import on_the_way
from convert.programs.divergence.rerun import Change
from convert.programs.divergence.shared_values import FEW, same_numbers, tells
from convert.programs.program import Operation, Program, Value
from convert.programs.rewrites.rewrite import Goal, Rewrite, error_with, line

Array = np.ndarray[Any, np.dtype[Any]]
NOT_GIVEN, STALE = "state not given on", "stale state across steps"
MOST_OPERATIONS = 30_000  # that run again for the states of loops: seconds
MOST_RUNS = 128
MOST_STATES = 12  # values that may be the state, and zeros in whose place it may belong


def states(source: Program, target: Program, goal: Goal) -> Rewrite | None:
    """Return the state that restores the output when the target gives it on."""
    return _to_the_next_step(target, goal) or _in_place_of_zeros(source, target, goal)


# ---- each step begins from the first state


def _to_the_next_step(target: Program, goal: Goal) -> Rewrite | None:
    """Give each step of a loop what the step before computed, in place of a state that is the same in all steps."""
    program = on_the_way(target, goal.output)
    lines: dict[Any, list[int]] = {}
    for index, one in enumerate(program.operations):
        lines.setdefault((one.name, one.where, one.module, len(one.operands)), []).append(index)
    loops = {key: at for key, at in lines.items() if len(at) > 1}
    runs = 0  # operations that ran again
    for uses in _uses_of_one_state(program, list(loops.values())):
        shape, steps = program.operations[uses[0][0][0]].operands[uses[0][1]].array.shape, len(uses[0][0])
        for at in loops.values():
            for results in _each_step(at, steps):
                made = [program.operations[k].results[0] for k in results]
                follows = all(made_at < use[k + 1] for use, _ in uses for k, made_at in enumerate(results[:-1]))
                if runs >= MOST_OPERATIONS or made[0].array.shape != shape or not made[0].data or not follows:
                    continue
                error, count = _run_steps(program, uses, made, goal)
                runs += count
                if error <= goal.enough:
                    use, giving = program.operations[uses[0][0][1]], program.operations[results[0]]
                    problem = (
                        f"every step begins from the same state ({line(use)}); the outputs are equal when a step begins from what the "
                        f"one before computed ({line(giving)})"
                    )
                    return Rewrite(STALE, problem, f"give the state of {line(giving)} to the next step", error)
    return None


def _uses_of_one_state(program: Program, loops: Sequence[list[int]]) -> list[list[tuple[list[int], int]]]:
    """Return where each state is used that is the same in all steps of a loop, or in most: the operations of each step, and the operand."""
    found: dict[Any, list[tuple[list[int], int]]] = {}
    for at in loops:
        for place in range(len(program.operations[at[0]].operands)):
            given = [program.operations[k].operands[place] for k in at]
            if any(
                v.array.size < FEW or v.array.dtype.kind != "f" or v.array.shape != given[0].array.shape for v in given
            ):
                continue
            if 2 * len(_repeated(given)) >= len(at):
                found.setdefault(tuple(map(id, given)), []).append((at, place))
    return list(found.values())


def _repeated(given: Sequence[Value]) -> tuple[int, ...]:
    """Return the steps that are given what the step before was given."""
    return tuple(k for k in range(1, len(given)) if np.array_equal(given[k].array, given[k - 1].array))


def _each_step(at: Sequence[int], steps: int) -> Iterator[list[int]]:
    """Yield operations of one line, one of each step."""
    often = len(at) // steps
    if often and len(at) == steps * often:
        yield from (list(at[k::often]) for k in range(often))


def _run_steps(
    program: Program, uses: Sequence[tuple[list[int], int]], made: Sequence[Value], goal: Goal
) -> tuple[float, int]:
    """Return the error of the output, and how many operations ran again."""
    again = _repeated([program.operations[k].operands[uses[0][1]] for k in uses[0][0]])
    change = Change(earlier={(at[step], place): made[step - 1] for step in again for at, place in uses})
    return error_with(program, change, goal)


# ---- a layer, or a second call, begins with zeros


def _in_place_of_zeros(source: Program, target: Program, goal: Goal) -> Rewrite | None:
    """Put a state that the target computes and does not use, or does not compute, in the place of zeros."""
    program = on_the_way(target, goal.output)
    zeros = _zeros(program)
    lacking = _lacking(on_the_way(source, goal.output), target, program)
    values = [*_idle(target, program), *lacking][:MOST_STATES]
    runs = 0
    for many in (1, 2) if zeros else ():
        for places in zip(*(zeros[k:] for k in range(many)), strict=False):
            for chosen in itertools.permutations([*values, *_last_of_loops(program, places[0])], many):
                changes = {v: _laid_out(x.array, v.array) for v, (x, _) in zip(places, chosen, strict=True)}
                if any(x is None for x in changes.values()) or runs >= MOST_RUNS:
                    continue
                runs += 1
                change = Change({v: x for v, x in changes.items() if x is not None})
                error, _ = error_with(program, change, goal)
                if error <= goal.enough:
                    return _not_given(program, places, [said for _, said in chosen], error)
    return None


def _not_given(program: Program, places: Sequence[Value], said: Sequence[str], error: float) -> Rewrite:
    use = next(one for one in program.operations if places[0] in one.operands)
    what = " and ".join(said)
    problem = f"{line(use)}{f', in {use.module},' if use.module else ''} begins with zeros; the outputs are equal when it begins with {what}"
    return Rewrite(NOT_GIVEN, problem, f"give {what} to {use.module or line(use)} as the first state", error)


def _zeros(program: Program) -> list[Value]:
    """Return the zeros that the target's operations are given."""
    given = (v for one in program.operations for v in one.operands)
    found = {
        v: None for v in given if v.constant and v.array.size >= FEW and v.array.dtype.kind == "f" and not v.array.any()
    }
    made = program.made_by
    return [v for v in found if not any(x in found for x in (made[v].operands if v in made else ()))][:MOST_STATES]


def _idle(target: Program, program: Program) -> Iterator[tuple[Value, str]]:
    """Yield values that the target computes and does not use, with words for them; the last of each line only."""
    used = {v for one in program.operations for v in one.operands} | set(program.outputs.values())
    on_way = set(program.operations)
    idle = {v: one for one in target.operations for v in one.results if v not in used}
    given = {v for one in target.operations if one not in on_way for v in one.operands}
    for value, one in idle.items():
        if value not in given and tells(value.array):
            yield value, f"the value of {line(one)}, which the target does not use"


def _last_of_loops(program: Program, zeros: Value) -> Iterator[tuple[Value, str]]:
    """Yield what the last steps of loops in front of zeros computed, in their shape."""
    lines: dict[tuple[str, str, str], list[Operation]] = {}
    for one in program.operations:
        if zeros in one.operands:
            break
        lines.setdefault((one.name, one.where, one.module), []).append(one)
    for steps in lines.values():
        last = steps[-1].results[0]
        if len(steps) > 1 and last.data and last.array.shape == zeros.array.shape:
            yield last, f"the last value of {line(steps[-1])}"


def _lacking(source: Program, target: Program, program: Program) -> Iterator[tuple[Value, str]]:
    """Yield what the source computes of parameters that the target does not use."""
    used = {leaf for one in program.operations for v in one.operands for leaf in v.leaves}
    left = [v.array for name, v in target.parameters.items() if name not in used]
    leaves = {name for name, v in source.parameters.items() if any(_equal(v.array, x) for x in left)}
    for name in sorted(leaves):
        yield source.parameters[name], f"{name}, which the target does not use"
    for one in source.operations:
        for value in one.results:
            if tells(value.array) and any(leaves & v.leaves for v in one.operands):
                yield value, f"the JAX model's value of {line(one)}"


def _equal(one: Array, two: Array) -> bool:
    return one.size == two.size and same_numbers(one, two)


def _laid_out(array: Array, like: Array) -> Array | None:
    """Return a state in the shape of zeros, the same for all series where it has no batch axis; None if it does not fit."""
    if array.size == like.size:
        return array.reshape(like.shape)
    if array.size > FEW and like.ndim and array.size == like.shape[-1]:
        return np.broadcast_to(array.reshape(-1), like.shape).copy()
    return None
