"""Run the same operations in another order: one of those that follow one another in front of another one, or behind it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from convert.programs.divergence.graph import on_the_way
from convert.programs.divergence.kinds import LAYOUT, kind_of
from convert.programs.divergence.rerun import Change, Rerun
from convert.programs.divergence.shared_values import SharedValues
from convert.programs.divergence.words import Words, arithmetic, names_of, places
from convert.programs.program import Program
from convert.programs.rewrites.places.segments import LAYERS, Segment, computed_by, segments_to
from convert.programs.rewrites.rewrite import Goal, Rewrite

Array = np.ndarray[Any, np.dtype[Any]]
MOVED = "operations in another order"
MOST = 12  # segments of a chain in which one is moved
REDUCES = {"sum", "mean", "largest"}  # a softmax over another axis has a name of its own
EXACT = 1e-9  # relative error up to which a value is one of the source's


def order(source: Program, target: Program, goal: Goal) -> Rewrite | None:
    """Return the place of an operation that restores the output, in all chains of the same lines.

    The first chain that departs from the source tells which place: what it gives then must be a value of the source.
    """
    program = on_the_way(target, goal.output)
    shared = SharedValues(on_the_way(source, goal.output), EXACT)
    tried: set[tuple[Any, ...]] = set()
    chains = list(_chains(program))
    for chain in chains:
        if _lines(chain) in tried or shared.find(chain[-1].after.array):
            continue
        tried.add(_lines(chain))
        for at, to in _moves(chain):
            made = computed_by(_moved(chain, at, to), chain[0].before.array)
            if made is None or not shared.find(made):
                continue
            error = _error(program, [one for one in chains if _lines(one) == _lines(chain)], (at, to), goal)
            if error <= goal.enough:
                return _rewrite(program, chain, at, to, error)
    return None


def _rewrite(program: Program, chain: Sequence[Segment], at: int, to: int, error: float) -> Rewrite:
    words = Words(program.operations, names_of(program))

    def does(segments: Sequence[Segment]) -> tuple[str, str]:
        every = [one for each in segments for one in each.operations]
        operations = arithmetic(every)
        if not operations:
            return f"lays it out as {list(every[-1].results[0].array.shape)}", places(every)
        return words.chain(operations), places(operations)

    one, two = (chain[at : at + 1], chain[at + 1 : to + 1]) if at < to else (chain[to:at], chain[at : at + 1])
    (first, here), (then, there) = does(one), does(two)
    given = words.value(one[0].before)
    problem = f"of {given}, the target {first}{here}, and then {then}{there}; its outputs are equal when it does the second first"
    return Rewrite(MOVED, problem, f"exchange the two in the target{here}, or correct the reference", error)


def _chains(program: Program) -> Iterator[tuple[Segment, ...]]:
    """Yield the segments that follow one another, as many as there are in front of each layer and of the output."""
    order_of = {value: k for k, one in enumerate(program.operations) for value in one.results}
    ends = {v: None for one in program.operations if kind_of(one) in LAYERS for v in one.data}
    for end in (*ends, *program.outputs.values()):
        found = segments_to(end, program, order_of, MOST)
        while found and found[-1].kinds <= {LAYOUT} and not any(one.kinds & REDUCES for one in found):
            found.pop()
        if len(found) > 1:
            yield tuple(found)


def _lines(chain: Sequence[Segment]) -> tuple[Any, ...]:
    """Return what chains of the same code have in common."""
    return tuple((one.name, one.where) for each in chain for one in each.operations)


def _moves(chain: Sequence[Segment]) -> list[tuple[int, int]]:
    """Return the ways to move a segment to the place of another, the shortest first.

    Past a layout alone, only what puts features together moves, and only where an axis is split: a norm of each head, or of all.
    """
    n, computes = len(chain), [not one.kinds <= {LAYOUT} for one in chain]
    ways = [(at, to) for at in range(n) for to in range(n) if at != to and to != at - 1]  # the latter is (to, at)
    reduces = [bool(one.kinds & REDUCES) for one in chain]
    ways = [
        (at, to)
        for at, to in ways
        if computes[at]
        and (
            any(computes[k] for k in _passed(at, to)) or (reduces[at] and _splits([chain[k] for k in _passed(at, to)]))
        )
    ]
    return sorted(ways, key=lambda way: abs(way[0] - way[1]))


def _splits(layouts: Sequence[Segment]) -> bool:
    """Whether these give the elements another number of axes."""
    return layouts[0].before.array.ndim != layouts[-1].after.array.ndim


def _passed(at: int, to: int) -> range:
    """Return the segments past which one is moved."""
    return range(at + 1, to + 1) if at < to else range(to, at)


def _moved(chain: Sequence[Segment], at: int, to: int) -> list[Segment]:
    rest = [one for k, one in enumerate(chain) if k != at]
    return [*rest[:to], chain[at], *rest[to:]]


def _error(program: Program, chains: Sequence[Sequence[Segment]], move: tuple[int, int], goal: Goal) -> float:
    """Return the error of the output with the move in each of these chains."""
    rerun = Rerun(program)
    for chain in chains:
        made = computed_by(_moved(chain, *move), rerun.array(chain[0].before))
        if made is None or made.size != chain[-1].after.array.size:
            return float("inf")
        try:
            list(rerun.put(Change({chain[-1].after: made.reshape(chain[-1].after.array.shape)})))
        except ValueError:
            return float("inf")
    return goal.error(rerun.array(program.outputs[goal.output]))
