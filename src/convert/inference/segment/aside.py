"""Branches of the target that lead to its outputs alone, as a head, or the prior of each level of a flow. What follows them in the record meets other data."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from convert.programs.program import Operation, Value


class Aside:
    """The branches of a program behind which no new parameter is met.

    Args:
        order: its operations.
        outputs: its outputs.
    """

    def __init__(self, order: Sequence[Operation], outputs: Collection[Value]) -> None:
        self._order, self._outputs = order, set(outputs)
        self._ends: dict[tuple[int, int], tuple[Value, ...]] = {}
        self._users: dict[Value, list[int]] = {}
        for k, operation in enumerate(order):
            for value in operation.data:
                self._users.setdefault(value, []).append(k)
        meets, known = list[bool](), set[str]()
        for operation in order:
            met = [x for x in operation.operands if x.of_parameters] if operation.data else []
            names = {name for x in met for name in x.leaves}
            meets.append(not names <= known)  # the sum of a norm's logarithms, which a flow adds, says no more of it
            known |= names
        # operation -> the last one that meets a new parameter and a value computed from it
        self._last = [-1] * len(order)
        for k in reversed(range(len(order))):
            for user in {user for value in order[k].results for user in self._users.get(value, ())}:
                self._last[k] = max(self._last[k], self._last[user], user if meets[user] else -1)

    def ends(self, index: int, at: int) -> tuple[Value, ...]:
        """Return the values that are computed from an operation in front of another one, and are outputs or used from there on.

        None where something that is computed from it meets a new parameter there, and is on the way; nor where they are functions of what
        the operation gives, and of no other data: as of the queries alone, the source has such values of any layer.
        """
        if self._last[index] >= at:
            return ()
        if (index, at) not in self._ends:
            self._ends[index, at] = self._found(index, at)
        return self._ends[index, at]

    def _found(self, index: int, at: int) -> tuple[Value, ...]:
        found: dict[Value, bool] = {}  # whether it is computed with other data
        used: list[Value] = []
        for k in range(index, at):
            operation = self._order[k]
            if k != index and found.keys().isdisjoint(operation.data):
                continue
            joined = k != index and any(found.get(x, True) for x in operation.data)
            found |= dict.fromkeys(operation.results, joined)
            used += [x for x in operation.results if x in self._outputs or max(self._users.get(x, [-1])) >= at]
        return tuple(used) if any(found[x] for x in used) else ()
