"""Exchange the parts of one value, what a value is joined of, or two inputs, that the target takes for each other."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from convert.programs.divergence.graph import on_the_way, root
from convert.programs.divergence.kinds import kind_of
from convert.programs.divergence.layouts import layouts
from convert.programs.divergence.rerun import Change, Rerun
from convert.programs.divergence.words import Words, names_of
from convert.programs.program import Program, Value
from convert.programs.rewrites.rewrite import Goal, Rewrite, error_with, line

Array = np.ndarray[Any, np.dtype[Any]]
STATES = "states exchanged"
FEWEST = 3  # steps of a loop
EXACT = 1e-9  # relative error up to which a value is one of the source's
EXCHANGED, JOINED = "parts exchanged", "parts joined in another order"
IN_THE_RULE = "or, if both are right, say both orders in the rule of the layer with `concatenated`"
MOST_PARTS = 4  # of one value
MOST_RUNS = 64
MOST_OPERATIONS = 100_000  # that run again


@dataclass(frozen=True)
class Parts:
    """Values of one shape that the target takes of another one, or inputs of one shape.

    Attributes:
        of: what they are taken of, in words.
        values: in the order of execution.
        where: the lines that take them; empty for inputs.
    """

    of: str
    values: tuple[Value, ...]
    where: tuple[str, ...]


def exchange(source: Program, target: Program, goal: Goal) -> Rewrite | None:
    """Return the order of parts that restores the output, of all values that the same lines take apart."""
    program = on_the_way(target, goal.output)
    by_line: dict[tuple[tuple[str, ...], int, str], list[Parts]] = {}
    for one in _parts(program):
        by_line.setdefault((one.where, len(one.values), "" if one.where else one.of), []).append(one)
    runs = operations = 0
    for together in by_line.values():
        for order in _orders(len(together[0].values)):
            if runs >= MOST_RUNS or operations >= MOST_OPERATIONS:
                return None
            runs += 1
            error, ran = error_with(program, _in_order(program, together, order), goal)
            operations += ran
            if error <= goal.enough:
                return _rewrite(together[0], order, error)
    return _joined(source, program, goal, runs) or _of_a_loop(program, goal)


def _joined(source: Program, program: Program, goal: Goal, runs: int) -> Rewrite | None:
    """Return the order of what the same line joins that restores the output.

    A parameter, such as a class token, must then stand where the source has it: another part of what is joined may restore the output,
    too.
    """
    meant = [value.array for one in on_the_way(source, goal.output).operations for value in one.results]
    by_line: dict[tuple[str, int], list[int]] = {}
    for at, one in enumerate(program.operations):
        told = all(v.data or v.leaves for v in one.operands) and any(v.data for v in one.operands)
        if kind_of(one) == "join" and 1 < len(one.operands) <= MOST_PARTS and told:
            by_line.setdefault((one.where, len(one.operands)), []).append(at)
    for (where, n), together in by_line.items():
        for order in _orders(n):
            if runs >= MOST_RUNS:
                return None
            runs += 1
            operands = {at: program.operations[at].operands for at in together}
            earlier = {(at, k): own[j] for at, own in operands.items() for k, j in enumerate(order) if k != j}
            rerun = Rerun(program)
            try:
                list(rerun.put(Change(earlier=earlier)))
            except ValueError:  # they are joined along another axis than the one in which they differ
                continue
            error = goal.error(rerun.array(program.outputs[goal.output]))
            joins = (program.operations[at] for at in together)
            learned = (one.results[0] for one in joins if not all(v.data for v in one.operands))
            if error <= goal.enough and all(any(_is(rerun.array(v), y) for y in meant) for v in learned):
                words = Words(program.operations, names_of(program))
                own = [words.value(v) for v in operands[together[0]]]
                problem = (
                    f"the target joins {' and '.join(own)} in this order ({where}); its outputs are equal with "
                    f"{' and '.join(own[k] for k in order)}"
                )
                return Rewrite(
                    JOINED,
                    problem,
                    f"join them in this order at {where}, or correct the reference; {IN_THE_RULE}",
                    error,
                )
    return None


def _is(one: Array, two: Array) -> bool:
    """Whether two values have the same numbers in the same places, in one layout or another."""
    return one.size == two.size and any(np.allclose(laid, one, rtol=EXACT, atol=EXACT) for laid in layouts(two, one))


def _of_a_loop(program: Program, goal: Goal) -> Rewrite | None:
    """Return two states of a loop that the next step takes for each other."""
    lines: dict[tuple[str, str, str], list[int]] = {}
    for at, one in enumerate(program.operations):
        if len(one.results) == 1 and one.results[0].data and one.results[0].array.dtype.kind == "f":
            lines.setdefault((one.name, one.where, one.module), []).append(at)
    users: dict[Value, list[tuple[int, int]]] = {}
    for at, one in enumerate(program.operations):
        for k, v in enumerate(one.operands):
            users.setdefault(v, []).append((at, k))
    loops = [at for at in lines.values() if len(at) >= FEWEST]
    second = {
        n: min(at[1] for at in loops if len(at) == n) for n in {len(at) for at in loops}
    }  # where the next step begins
    carried = [
        at
        for at in loops
        if any(second[len(at)] <= place < at[1] for place, _ in users.get(program.operations[at[0]].results[0], ()))
    ]
    pairs = [(one, two) for one, two in itertools.combinations(carried, 2) if len(one) == len(two)]
    for runs, ((here, there), outside) in enumerate(itertools.product(pairs, (False, True))):
        results = [[program.operations[at].results[0] for at in series] for series in (here, there)]
        if results[0][0].array.shape != results[1][0].array.shape or runs >= MOST_RUNS:
            continue
        last = len(program.operations) if outside else max(here[-1], there[-1])
        earlier: dict[tuple[int, int], Value] = {}
        for x, y, *steps in zip(*results, here, there, strict=True):
            for value, other in ((x, y), (y, x)):
                earlier |= {at: other for at in users.get(value, ()) if max(steps) < at[0] <= last}
        error, _ = error_with(program, Change(earlier=earlier), goal)
        if error <= goal.enough:
            places = [line(program.operations[series[0]]) for series in (here, there)]
            problem = (
                f"a step of the target takes the values of {places[0]} and {places[1]} of the step before for each other; the outputs "
                "are equal with the two exchanged"
            )
            return Rewrite(
                STATES, problem, "exchange the two where a step is given them, or correct the reference", error
            )
    return None


def _rewrite(parts: Parts, order: Sequence[int], error: float) -> Rewrite:
    at = f" ({', '.join(dict.fromkeys(parts.where))})" if parts.where else ""
    n = len(order)
    moved = [k for k in range(n) if order[k] != k]
    if len(moved) == 2:
        which = "the two" if n == 2 else f"the parts {moved[0]} and {moved[1]}"
        how = f"with {which} exchanged"
    else:
        how = f"with these parts in the order {', '.join(map(str, order))}"
    problem = f"the target takes {n} {'parts of ' if parts.where else ''}{parts.of} for each other{at}: its outputs are equal {how}"
    place = parts.where[0] if parts.where else "the target's code"
    fix = f"exchange them at {place}, or correct the reference" + (f"; {IN_THE_RULE}" if parts.where else "")
    return Rewrite(EXCHANGED, problem, fix, error)


def _orders(n: int) -> list[tuple[int, ...]]:
    """Return the orders of n parts, exchanges of two first."""
    every = list(itertools.permutations(range(n)))[1:]
    return sorted(every, key=lambda order: sum(k != place for k, place in enumerate(order)))


def _parts(program: Program) -> Iterator[Parts]:
    """Yield the values of one shape that are taken of the same value, and the inputs of one shape."""
    words = Words(program.operations, names_of(program))
    found: dict[Value, list[tuple[Value, str]]] = {}
    for one in program.operations:
        if kind_of(one) == "part" and one.operands[0].data:
            whole = root(one.operands[0], words.producer)
            found.setdefault(whole, []).extend((value, one.where) for value in one.results)
    for whole, taken in found.items():
        shapes: dict[tuple[int, ...], list[tuple[Value, str]]] = {}
        for value, where in taken:
            if value.array.size > 1 and not any(
                np.array_equal(value.array, x.array) for x, _ in shapes.get(value.array.shape, ())
            ):
                shapes.setdefault(value.array.shape, []).append((value, where))
        for same in shapes.values():
            if 1 < len(same) <= MOST_PARTS:
                yield Parts(words.value(whole), tuple(x for x, _ in same), tuple(where for _, where in same))
    for (first, x), (second, y) in itertools.combinations(program.inputs.items(), 2):
        if x.array.shape == y.array.shape and x.array.dtype == y.array.dtype and not np.array_equal(x.array, y.array):
            yield Parts(f"inputs, {first} and {second},", (x, y), ())


def _in_order(program: Program, together: Sequence[Parts], order: Sequence[int]) -> Change:
    """Return the change in which each operation is given another part, as it is when the operation runs."""
    other = {one.values[k]: one.values[place] for one in together for k, place in enumerate(order) if k != place}
    return Change(
        earlier={
            (at, k): other[v]
            for at, operation in enumerate(program.operations)
            for k, v in enumerate(operation.operands)
            if v in other
        }
    )
