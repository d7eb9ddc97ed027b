"""Compute a value once, and use it again: keys and values that a layer shares with an earlier one."""

from __future__ import annotations

from collections.abc import Iterator

from convert.programs.divergence.graph import on_the_way, root
from convert.programs.divergence.kinds import kind_of
from convert.programs.divergence.rerun import Change
from convert.programs.divergence.shared_values import one_of
from convert.programs.divergence.words import Words, names_of
from convert.programs.program import Operation, Program
from convert.programs.rewrites.places.segments import LAYERS
from convert.programs.rewrites.rewrite import Goal, Rewrite, error_with, line

AGAIN = "layer applied again"
MOST_TIMES = 128  # that a layer is applied


def shared(source: Program, target: Program, goal: Goal) -> Rewrite | None:
    """Return the layers that restore the output when what they give the first time is used each time: alone, or all together."""
    program = on_the_way(target, goal.output)
    found = list(_applied_more_often(on_the_way(source, goal.output), program))
    for chosen in (*([one] for one in found), *([found] if len(found) > 1 else [])):
        index = {operation: at for at, operation in enumerate(program.operations)}
        earlier = {
            (at, k): uses[0].results[0]
            for uses in chosen
            for again in uses[1:]
            for at, operation in enumerate(program.operations)
            for k, v in enumerate(operation.operands)
            if v is again.results[0] and at > index[uses[0]]
        }
        error, _ = error_with(program, Change(earlier=earlier), goal)
        if error <= goal.enough:
            words = Words(program.operations, names_of(program))
            names = " and ".join(words.value(root(uses[0].results[0], words.producer)) for uses in chosen[:2])
            times = len(chosen[0])
            problem = (
                f"the target computes {names} {times} times ({line(chosen[0][1])}), of another input each time; its outputs are "
                "equal when each use takes what it gave the first time, as in the JAX model"
            )
            return Rewrite(AGAIN, problem, "use the value of the first time again, or correct the reference", error)
    return None


def _applied_more_often(source: Program, target: Program) -> Iterator[list[Operation]]:
    """Yield the operations that apply a parameter of the target more often than the source applies it, in order."""
    for value in target.parameters.values():
        uses = _uses(target, value.leaves)
        if not 1 < len(uses) <= MOST_TIMES or len({one.results[0].array.shape for one in uses}) > 1:
            continue
        theirs = [len(_uses(source, x.leaves)) for x in source.parameters.values() if one_of(value.array, x.array)]
        if any(0 < times < len(uses) for times in theirs):
            yield uses


def _uses(program: Program, leaves: frozenset[str]) -> list[Operation]:
    return [
        one
        for one in program.operations
        if kind_of(one) in LAYERS and one.data and any(v.of_parameters and v.leaves & leaves for v in one.operands)
    ]
