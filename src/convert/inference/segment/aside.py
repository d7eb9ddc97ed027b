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
        self._users: dict[Value, list[int]] = {}
        for k, operation in enumerate(order):
            for value in operation.data:
                self._users.setdefault(value, []).append(k)
        meets, known = list[bool](), set[str]()
        for operation in order:
            names = (
                {name for x in operation.operands if x.of_parameters for name in x.leaves} if operation.data else set()
            )
            meets.append(not names <= known)  # the sum of a norm's logarithms, which a flow adds, says no more of it
            known |= names
        self._last = [-1] * len(
            order
        )  # operation -> the last one that meets a new parameter and a value computed from it
        for k in reversed(range(len(order))):
            for user in {user for value in order[k].results for user in self._users.get(value, ())}:
                self._last[k] = max(self._last[k], self._last[user], user if meets[user] else -1)

    def has(self, index: int, at: int) -> bool:
        """Whether nothing that is computed from an operation meets a new parameter from another operation on."""
        return self._last[index] < at

    def ends(self, index: int, at: int) -> tuple[Value, ...]:
        """Return the values that are computed from an operation in front of another one, and are outputs or used from there on.

        None where they are functions of what the operation gives, and of no other data: as of the queries alone, the source has such
        values of any layer.
        """
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
