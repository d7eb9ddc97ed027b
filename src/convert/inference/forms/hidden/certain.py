"""Which elements of the values of a program no parameter changes, such as the zeros that a mask of the inputs makes, and which are
large with any parameters, such as a score to which a mask was added."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from convert.inference.forms.hidden.perturbed import HUGE, changes, others, run
from convert.programs.program import Array, Operation, Program, Value


@dataclass(frozen=True, eq=False)
class Certain:
    """What is certain of the elements of values that parameters take part in.

    Attributes:
        same: which elements no parameter changes, of values that have such and others.
        large: which elements hide what they are added to; a large activation does not.
    """

    same: dict[Value, Array] = field(default_factory=dict)
    large: dict[Value, Array] = field(default_factory=dict)

    def hide(self, value: Value) -> Array:
        """Return which elements of a value are as large as what hides a score."""
        if value.array.dtype.kind != "f" or (value.leaves and value not in self.large):
            return np.zeros((), bool)
        return self.large[value] if value.leaves else np.abs(value.array) >= HUGE

    def free(self, value: Value) -> Array:
        """Return which elements of a value other parameters may change."""
        if not value.leaves or value.array.dtype.kind != "f":
            return np.zeros((), bool)
        return ~self.same.get(value, np.zeros(value.array.shape, bool))


def certain_elements(program: Program) -> Certain:
    """Return what is certain of the values of a program."""
    found = Certain()
    for operation in program.operations:
        if not any(x.leaves for x in operation.operands):
            continue
        found.large.update(_large(operation, found))
        if not _may_be_certain(operation, found):
            continue
        before = run(operation, [x.array for x in operation.operands])
        ways = (*with_others(operation, found), with_small(operation, found))
        after = [run(operation, operands) for operands in ways]
        if before is None or any(made is None for made in after):
            continue
        for k, result in enumerate(operation.results):
            same = ~np.any([changes(before[k], made[k]) for made in after if made is not None], 0)
            if result.array.dtype.kind == "f" and same.any():
                found.same[result] = same
    return found


def _large(operation: Operation, certain: Certain) -> Iterator[tuple[Value, Array]]:
    """Yield the results with elements that are large with small numbers of the parameters, too."""
    if not any(certain.hide(x).any() for x in operation.operands):
        return
    made = run(operation, with_small(operation, certain))
    for result, array in zip(operation.results, made or (), strict=made is not None):
        if result.array.dtype.kind == "f" and (large := np.abs(array) >= HUGE).any():
            yield result, large


def with_others(operation: Operation, certain: Certain) -> Iterator[list[Array]]:
    """Yield the operands of an operation with other numbers where a parameter changes them."""
    ways = [others(x.array, certain.free(x), k, certain.hide(x)) for k, x in enumerate(operation.operands)]
    return (list(arrays) for arrays in zip(*ways, strict=True))


def with_small(operation: Operation, certain: Certain) -> list[Array]:
    """Return the operands of an operation with small numbers where a parameter changes them; in a softmax large ones hide others."""
    random = np.random.default_rng(3)
    found = []
    for x in operation.operands:
        here = certain.free(x) & ~certain.hide(x)
        small = np.where(x.array < 0, -1.0, 1.0) * random.uniform(0.1, 1.0, x.array.shape)
        found.append(np.where(here, small, x.array) if here.any() else x.array)
    return found


def hides(value: Value, certain: Certain) -> bool:
    """Whether a value may hide what it meets: by truth values, or zeros that no parameter changes."""
    if value.array.dtype.kind == "b":
        return True
    zeros = value.array == 0
    if value.leaves:
        zeros = zeros & certain.same.get(value, np.False_)
    return bool(zeros.any())


def _may_be_certain(operation: Operation, certain: Certain) -> bool:
    if any(x.leaves and x.array.dtype.kind != "f" for x in operation.operands):
        return False  # other numbers of a choice are none of it
    met = [x for x in operation.operands if x.data or not x.leaves]
    return any(x in certain.same or x in certain.large or hides(x, certain) for x in met)
