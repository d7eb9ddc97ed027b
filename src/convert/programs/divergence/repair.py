"""A repair: a value of the target that is replaced by one of the source's, and whether the operations that it stands for are a fault."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from convert.programs.divergence.kinds import LAYOUT, kind_of
from convert.programs.divergence.knowledge import Knowledge
from convert.programs.divergence.rerun import Change
from convert.programs.divergence.shared_values import contains, one_of, same_numbers
from convert.programs.program import Operation, Value

Array = np.ndarray[Any, np.dtype[Any]]
LONGEST = 16  # operations that a repair may stand for, on each side
# That may be too much in the target, such as an adapter: with more of them it is a value of another place.
FEW_LAYERS = 2
LAYERS = ("product", "convolution")


@dataclass(frozen=True)
class Repair:
    """A value of the target that is replaced by one of the source's.

    Attributes:
        target: the operations from known values to the replaced one, in order; empty: a known value is replaced as it is.
        source: those of the source from values that the target has to the one that replaces it; empty: the target has it, too.
        operands: the known values that the target's operations are given, or the known value that is replaced.
        given: what these values are, with the repairs before.
        source_operands: the source's values that its operations are given.
        got: the target's value.
        want: the source's, laid out as the target's.
        index: number of the entry in the target.
        change: what is put in.
        layer: the operation of a layer's weights that is given another value than the source gives it; None for none.
        taken: (axis, index) of the elements that the source takes of its value; None for all.
        made: how the source computes what it gives a layer, where that is a layer's own output and a little more; empty otherwise.
        settings: with which the target's last operation gives what the source has; None where it is not a setting.
    """

    target: tuple[Operation, ...]
    source: tuple[Operation, ...]
    operands: tuple[Value, ...]
    given: tuple[Array, ...] = field(repr=False)
    source_operands: tuple[Value, ...]
    got: Array = field(repr=False)
    want: Array = field(repr=False)
    index: int
    change: Change = field(repr=False)
    layer: Operation | None = None
    taken: tuple[int, int] | None = None
    made: tuple[Operation, ...] = ()
    settings: Mapping[str, Any] | None = None


def place_of(repair: Repair) -> str:
    """Return the line of the code at which a repair is made."""
    return min((one.where for one in repair.target or repair.source), default="")


def few(operations: tuple[Operation, ...]) -> tuple[Operation, ...]:
    """Return operations that may be missing; none where they are many, or a layer: then it is a value of another place."""
    steps = [one for one in operations if kind_of(one) != LAYOUT]
    of_layer = any(kind_of(one) in LAYERS for one in steps)
    return () if of_layer or len(steps) > LONGEST else operations


def is_local(repair: Repair, known: Knowledge) -> bool:
    """Whether the operations that a repair stands for are few, and take parameters that both sides have.

    Put in far behind the entry, any value of the source's restores the output, and tells nothing. Parameters that the target
    does not have are not a fault of its code.
    """
    one, two = ([one for one in ones if kind_of(one) != LAYOUT] for ones in (repair.target, repair.source))
    if max(len(one), len(two)) > LONGEST:
        return False
    if not one or not two:
        return sum(kind_of(x) in LAYERS and bool(_parameters([x])) for x in one) <= FEW_LAYERS
    mine, others = ([x for x in ones if kind_of(x) in LAYERS and _parameters([x])] for ones in (one, two))
    if (mine or others) and not _same_kernel(mine, others) and not _same_leaves(one, two, known):
        return False
    theirs = _parameters(two)
    if all(any(same_numbers(x.array, y.array) for y in theirs) for x in _parameters(one)):
        return True
    leaves = {leaf for y in theirs for leaf in y.leaves}
    return bool(leaves) and all(map(known.has_leaf, leaves))


def _same_kernel(one: Sequence[Operation], two: Sequence[Operation]) -> bool:
    """Whether both are one convolution with the same kernel, which may read its input in other steps, or padded otherwise."""
    if len(one) != 1 or len(two) != 1 or {kind_of(x) for x in (*one, *two)} != {"convolution"}:
        return False
    return same_numbers(_parameters(one)[0].array, _parameters(two)[0].array)


def _same_leaves(one: Sequence[Operation], two: Sequence[Operation], known: Knowledge) -> bool:
    """Whether both apply the same parameters, which the code of either may turn, scale, norm or take apart before.

    A convolution may be a sum of shifted products in the other.
    """
    if sum(kind_of(x) in LAYERS for x in one) > 1 or sum(kind_of(x) in LAYERS for x in two) > 1:
        return False
    ours, theirs = (sorted({leaf for v in _parameters(x) for leaf in v.leaves}) for x in (one, two))
    if not ours or len(ours) != len(theirs):
        return False
    mine = [known.target.parameters[leaf].array for leaf in ours]
    others = [known.source.parameters[leaf].array for leaf in theirs]
    pairs = ((mine, others), (others, mine))
    if all(all(any(one_of(x, y) for y in b) for x in a) for a, b in pairs):
        return True
    return len(mine) == 1 and contains(mine[0], others[0])  # a part of what a fused matrix gives


def _parameters(operations: Sequence[Operation]) -> list[Value]:
    """Return what operations are given that is computed from parameters alone."""
    return [v for one in operations for v in one.operands if v.of_parameters and v.array.size > 1]
