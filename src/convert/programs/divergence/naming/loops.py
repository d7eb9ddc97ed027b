"""How the two programs begin a loop: at which end of a value, and with which numbers."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping

from convert.programs.divergence.graph import root
from convert.programs.divergence.kinds import kind_of
from convert.programs.divergence.shared_values import same_numbers
from convert.programs.divergence.words import Words, places, takes_one
from convert.programs.program import Operation, Program, Value

Turns = list[tuple[int, int]]  # (axis, index) of the parts that a line of code takes of a value, one after another


def other_end(source: Program, target: Program, ours: Words, theirs: Words) -> str:
    """Say that the target takes the parts of an input from the other end; empty if it does not."""
    for name, value in target.inputs.items():
        if name not in source.inputs or not same_numbers(value.array, source.inputs[name].array):
            continue
        mine, other = (_turns(p, x, w) for p, x, w in ((target, value, ours), (source, source.inputs[name], theirs)))
        for turns, operation in mine:
            backwards = [one for of, one in other if of == turns[::-1]]
            if backwards and not any(of == turns for of, _ in other):
                said = f"takes the indices {turns[0][1]} to {turns[-1][1]} of axis {turns[0][0]} one after another"
                begins, ends = turns[-1][1], turns[0][1]
                return (
                    f"of the input {name}, the target {said}{places([operation])}; "
                    f"the JAX model takes the indices {begins} to {ends}{places(backwards[:1])}"
                )
    return ""


def _turns(program: Program, value: Value, words: Words) -> list[tuple[Turns, Operation]]:
    """Return the parts that each line takes of a value, in the order in which it does, with its first operation."""
    by_line: dict[str, list[tuple[tuple[int, int], Operation]]] = {}
    for one in program.operations:
        of_it = kind_of(one) == "part" and one.data and root(one.data[0], words.producer) is value
        if of_it and (taken := takes_one(one)) is not None:
            by_line.setdefault(one.where, []).append((taken, one))
    return [
        ([taken for taken, _ in ones], ones[0][1])
        for ones in by_line.values()
        if len(ones) > 2
        and len({axis for (axis, _), _ in ones}) == 1
        and len({taken for taken, _ in ones}) == len(ones)
    ]


def other_start(source: Program, target: Program, lacking: Collection[str]) -> str:
    """Say with which number a loop of the target begins where the JAX model begins with another one.

    The first step multiplies it by parameters, for which nothing is found then.
    """
    mine, other = (_states(program) for program in (target, source))
    for leaf, (number, one) in mine.items():
        meant = {n for n, _ in other.values()}
        if leaf in lacking and number and meant == {0.0}:
            first = next(x for _, x in other.values())
            return (
                f"the target multiplies {leaf} by a value that is {number:g} throughout{places([one])}; "
                f"where the JAX model begins with a constant, it is 0{places([first])}"
            )
    return ""


def _states(program: Program) -> Mapping[str, tuple[float, Operation]]:
    """Return, by parameter, the number of a constant value that is multiplied by it first, with the operation."""
    found: dict[str, tuple[float, Operation]] = {}
    for one in program.operations:
        if kind_of(one) != "product":
            continue
        for x, y in itertools.permutations(one.operands[:2]):
            array = x.array
            if not x.leaves and len(y.leaves) == 1 and array.size > 1 and (array == array.flat[0]).all():
                found.setdefault(next(iter(y.leaves)), (float(array.flat[0]), one))
    return found
