"""Both sides compute in the same way, of other values: one of them had what it computed of its value before, for another use.

Of x * (1 + a) and x * (1 + b), the target may have 1 + a already. That the JAX model adds 1 is then no difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from convert.programs.divergence.kinds import LAYOUT, kind_of
from convert.programs.divergence.naming.both import steps, unshared
from convert.programs.divergence.repair import Repair
from convert.programs.divergence.words import Words
from convert.programs.program import Operation, Value

MOST = 8  # operations that one side has before


def with_same_steps(repair: Repair, ours: Words, theirs: Words) -> Repair:
    """Return the repair with what one side has computed before, where it then computes as the other side does.

    Args:
        ours, theirs: the words of the target and of the source.
    """
    if not repair.target or not repair.source:
        return repair
    missing = len(steps(repair.source)) - len(steps(repair.target))
    if missing > 0:
        for value in unshared(repair)[0]:
            target = _with(value, repair.target, repair.source, ours)
            if target:
                operands = _operands(target, repair.operands)
                return replace(repair, target=target, operands=operands, given=tuple(v.array for v in operands))
    elif missing < 0:
        for value in unshared(repair)[1]:
            source = _with(value, repair.source, repair.target, theirs)
            if source:
                return replace(repair, source=source, source_operands=_operands(source, repair.source_operands))
    return repair


def _with(
    value: Value, operations: Sequence[Operation], others: Sequence[Operation], words: Words
) -> tuple[Operation, ...]:
    """Return operations with those that compute a value they are given, if these are the steps of others; nothing if they are not."""
    before: list[Operation] = []
    wanted = steps(others)
    while len(before) < MOST and (one := words.producer.get(value)) is not None and len(one.data) == 1:
        before.insert(0, one)
        value = one.data[0]
        found = [*before, *operations]
        if kind_of(one) != LAYOUT and steps(found) == wanted:
            return tuple(found)
    return ()


def _operands(operations: Sequence[Operation], first: Sequence[Value]) -> tuple[Value, ...]:
    """Return the data that operations are given from elsewhere, some of them first."""
    made = {v for one in operations for v in one.results}
    given = dict.fromkeys(v for one in operations for v in one.data if v not in made)
    return tuple(sorted(given, key=lambda v: v not in first))
