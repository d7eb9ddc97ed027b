"""Turn queries and keys as the source does: by its angles, or by its angles and with its pairs of features."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from convert.core.text import where_they_differ
from convert.programs.divergence.graph import on_the_way
from convert.programs.divergence.naming.tables import BACKWARDS, FREQUENCIES, Waves, literals, off_by, other_divisor
from convert.programs.divergence.words import Words, names_of
from convert.programs.program import Operation, Program
from convert.programs.rewrites.positions.rotations import Angles, Turn, angles, laid_out, turns
from convert.programs.rewrites.rewrite import Goal, Rewrite, line, rerun_with

Array = np.ndarray[Any, np.dtype[Any]]
Numbers = tuple[tuple[str, float], ...]
BASE, OTHER, PAIRS = "RoPE of another base", "RoPE of other frequencies", "RoPE of other pairs"
SIZE, POSITIONS, SIGNS = "RoPE of another size", "RoPE of other positions", "RoPE that is no rotation"
WIDTH = "RoPE of another width"
LISTED = 4  # pairs, frequencies or modules that a sentence lists
SAME = 1e-9


@dataclass(frozen=True)
class Both:
    """A rotation of the target, and the source's in its place.

    Attributes:
        wanted: the table of the source's, laid out for the target's value.
        pairs: whether it turns the source's pairs of features.
        numbers: constants that the angles of the target and of the source are computed from, with the kind of operation that takes them.
    """

    ours: Turn
    theirs: Turn
    wanted: Array
    pairs: bool
    numbers: tuple[Numbers, Numbers]


def rope(source: Program, target: Program, goal: Goal) -> Iterator[tuple[Rewrite, Program]]:
    """Yield what the target gives with the source's rotations, where these differ from its own, and the record of it."""
    program = on_the_way(target, goal.output)
    theirs = turns(on_the_way(source, goal.output))
    words = [Words(one.operations, names_of(one)) for one in (program, source)]
    ours = turns(program) if theirs else []
    if len(ours) != len(theirs):
        return
    for put_in in (_angles_of, laid_out):
        pairs = put_in is laid_out
        tables = [(mine, other, put_in(other, mine)) for mine, other in zip(ours, theirs, strict=True)]
        moved = [
            Both(mine, other, table, pairs, (_numbers(words[0], mine), _numbers(words[1], other)))
            for mine, other, table in tables
            if table is not None and np.abs(mine.table - table).max() > SAME
        ]
        others = any(one.ours.pairs != one.theirs.pairs or not one.ours.is_rotation for one in moved)
        if not moved or (pairs and not others) or any(table is None for _, _, table in tables):
            continue
        tried = rerun_with(program, _turned(program, moved), goal)
        if tried is not None:  # else the operations do not take the other axes
            made, error = tried
            yield _rewrite(moved, error), made


def _turned(program: Program, moved: Sequence[Both]) -> Mapping[Operation, Operation]:
    """Return the operations that end a rotation with those that are given its value and turn it as the source does."""
    tables = {one.ours.segment.after: replace(one.ours, table=one.wanted) for one in moved}

    def turned(operation: Operation, turn: Turn) -> Operation:
        given, shape = (turn.segment.before,), turn.segment.after.array.shape
        return replace(operation, name="rope", operands=given, again=lambda x: (turn.of(x[0]).reshape(shape),))

    return {one: turned(one, tables[v]) for one in program.operations for v in one.results if v in tables}


def _angles_of(theirs: Turn, ours: Turn) -> Array | None:
    """Return the target's table with the source's angles, pair by pair."""
    laid = laid_out(theirs, ours)
    pairs = ours.pairs
    if laid is None or not (ours.is_rotation and theirs.is_rotation) or len(pairs) != len(theirs.pairs):
        return None
    numbers = replace(theirs, table=laid).numbers
    one, two = (np.array(x) for x in zip(*pairs, strict=True))
    shape = np.broadcast_shapes(laid.shape, ours.table.shape)
    table = np.array(np.broadcast_to(ours.table, shape))
    table[..., one, one] = table[..., two, two] = numbers.real
    table[..., two, one], table[..., one, two] = numbers.imag, -numbers.imag
    return table


def _numbers(words: Words, turn: Turn) -> Numbers:
    return tuple(literals(words, [v for one in turn.segment.operations for v in one.operands if not v.data]))


# ---- words


def _rewrite(moved: Sequence[Both], error: float) -> Rewrite:
    groups: dict[tuple[str, str], list[Both]] = {}
    for one in moved:
        groups.setdefault(_difference(one), []).append(one)
    said = [f"{_where(group)}, {words}" for (_, words), group in groups.items()]
    more = f"; and {len(said) - 2} more" if len(said) > 2 else ""
    name = " and ".join(list(dict.fromkeys(name for name, _ in groups))[:2])
    problem = f"{'; '.join(said[:2])}{more}"
    at = line(moved[0].ours.segment.operations[-1])
    return Rewrite(name, problem, f"compute RoPE at {at} as the JAX model does, or correct the reference", error)


def _where(group: Sequence[Both]) -> str:
    """Say where rotations are."""
    modules, lines = (
        list(dict.fromkeys(text for text in of if text))
        for of in zip(
            *((last.module, last.where) for last in (one.ours.segment.operations[-1] for one in group)), strict=True
        )
    )
    said = ", ".join(modules[:LISTED]) + (", ..." if len(modules) > LISTED else "")
    at = f" ({', '.join(lines[:LISTED])})" if lines else ""
    return f"in {said or 'the target'}{at}"


def _difference(one: Both) -> tuple[str, str]:
    """Name what two rotations differ in, and say it."""
    ours, theirs = one.ours, one.theirs
    if len(ours.pairs) != len(theirs.pairs):
        width = [2 * len(turn.pairs) for turn in (ours, theirs)]
        return WIDTH, f"the target turns {width[0]} features of each head, and the JAX model {width[1]}"
    if one.pairs and ours.pairs != theirs.pairs:
        pairs = where_they_differ(ours.pairs, theirs.pairs, LISTED)
        return PAIRS, f"the target turns the features {pairs[0]} with each other, and the JAX model {pairs[1]}"
    if not ours.is_rotation:
        return SIGNS, "the target turns the features of a pair by no angle: a sign or a factor differs within the pair"
    return _of_angles(angles(ours), angles(theirs), one.numbers)


def _of_positions(ours: Angles, theirs: Angles) -> str:
    """Say how positions differ that do not begin together in all series."""
    mine, other = ours.positions, theirs.positions
    if mine is not None and other is not None and mine.shape == other.shape and not np.ptp(mine - other):
        return f"the target's positions begin at {mine.min():g}, and the JAX model's at {other.min():g}"
    which = ["begin anew within a series" if one.first is None else "go on" for one in (ours, theirs)]
    if which[0] == which[1]:
        last = [["unknown"] if p is None else [f"{x:g}" for x in p[-1]] for p in (mine, other)]
        shown = where_they_differ(last[0], last[1], 2 * LISTED)
        return f"the positions of the last series are {shown[0]} in the target, and {shown[1]} in the JAX model"
    return f"the positions of the target {which[0]}, and those of the JAX model {which[1]}"


def _of_angles(ours: Angles | None, theirs: Angles | None, numbers: tuple[Numbers, Numbers]) -> tuple[str, str]:
    if ours is None or theirs is None:
        return OTHER, "the target turns by other angles than the JAX model"
    mine, other = ours.frequencies, theirs.frequencies
    if abs(ours.size - theirs.size) > SAME:
        said = f"the target multiplies by {ours.size:.7g}, too, and the JAX model by {theirs.size:.7g}"
        if np.allclose(mine, other, rtol=1e-6):
            return SIZE, said
        return OTHER, f"{said}; {_of_angles(replace(ours, size=theirs.size), theirs, numbers)[1]}"
    if np.allclose(mine, other, rtol=1e-6):
        if ours.first is None or theirs.first is None:
            return POSITIONS, _of_positions(ours, theirs)
        by = ours.first - theirs.first
        name = off_by(int(by)) if by == round(by) else POSITIONS
        return name, f"the target's positions begin at {ours.first:g}, and the JAX model's at {theirs.first:g}"
    if np.allclose(mine, -other, rtol=1e-6):
        return BACKWARDS, "the target's angles are those of the JAX model with the other sign"
    waves = [Waves(x, None, of) for x, of in zip((mine, other), numbers, strict=True)]
    if divisors := other_divisor(*waves):
        return FREQUENCIES, divisors
    if ours.base and theirs.base:
        return BASE, f"base {ours.base:.7g} in the target, and {theirs.base:.7g} in the JAX model"
    ratio = mine / other
    if np.ptp(ratio) <= 1e-6 * abs(ratio[0]):
        return OTHER, f"the angles are {ratio[0]:.7g} times those of the JAX model"
    shown = where_they_differ([f"{x:.5g}" for x in mine], [f"{x:.5g}" for x in other], LISTED)
    return OTHER, f"the angles of a position are {shown[0]} in the target, and {shown[1]} in the JAX model"
