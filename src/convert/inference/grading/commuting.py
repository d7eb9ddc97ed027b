"""Parameters that may exchange places along one path: a scale in front of a mean and one behind it, two depthwise convolutions in a row.

``mean(x a) b`` is ``mean(x b) a``. That it is, is seen in numbers: the operations from the first of the two to the second one give the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from convert.programs.divergence.graph import on_the_way
from convert.programs.program import REFUSALS, Array, Operation, Program, Value, times_used

MOST_STEPS = 12  # operations from one to the other
EQUAL = 1e-9  # relative


def commuting(target: Program) -> Iterator[tuple[Value, Value]]:
    """Yield two values of parameters, each of which may stand where the other one does: nothing but the path between them depends on the first."""
    target = on_the_way(target, *target.outputs)  # the others are as views that are taken back
    uses, users = times_used(target), target.users
    for operation in target.operations:
        for side in _weights(operation):
            path = [operation]
            for following in _path(operation, uses, users):
                path.append(following)
                for other in _weights(following):
                    one, two = operation.operands[side], following.operands[other]
                    if _may_exchange(one, two) and _same(path, side, other):
                        yield one, two


def _weights(operation: Operation) -> list[int]:
    """Return the positions of operands of parameters whose elements nothing mixes, where data meets them."""
    if not operation.data or len(operation.results) != 1:
        return []
    return [k for k, x in enumerate(operation.operands) if x.of_parameters and len(x.elements) == 1]


def _path(
    operation: Operation, uses: Mapping[Value, int], users: Mapping[Value, Sequence[Operation]]
) -> Iterator[Operation]:
    """Yield the operations behind one, as long as each alone uses what the one before it gives."""
    for _ in range(MOST_STEPS):
        value = operation.results[0]
        if len(operation.results) != 1 or uses[value] != 1 or value not in users:
            return
        (operation,) = users[value]
        yield operation


def _may_exchange(one: Value, two: Value) -> bool:
    """Whether two values have as many elements along each axis, and no element in common."""
    sizes = [[n for n in x.array.shape if n > 1] for x in (one, two)]
    return sizes[0] == sizes[1] and not np.isin(one.elements[0], two.elements[0]).any()


def _same(path: Sequence[Operation], side: int, other: int) -> bool:
    """Whether the last operation of a path gives the same if its parameter and that of the first one exchange places."""
    first, last = path[0], path[-1]
    one, two = first.operands[side].array, last.operands[other].array
    made: Array | None = None
    try:
        for k, operation in enumerate(path):
            arrays = [made if made is not None and x in path[k - 1].results else x.array for x in operation.operands]
            if operation is first:
                arrays[side] = two.reshape(one.shape)
            if operation is last:
                arrays[other] = one.reshape(two.shape)
            made = np.asarray(operation.again(arrays)[0])
    except REFUSALS:
        return False
    want = last.results[0].array
    return (
        made is not None
        and made.shape == want.shape
        and np.allclose(made, want, rtol=0, atol=EQUAL * np.abs(want).max(initial=0))
    )
