"""Operations that follow one another: each segment computes one value of one other."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from convert.programs.divergence.kinds import LAYOUT, kind_of
from convert.programs.divergence.rerun import again
from convert.programs.program import Array, Operation, Program, Value

ROTATING = {LAYOUT, "part", "join", "multiply", "add", "subtract", "negate"}
LAYERS = ("product", "convolution", "attention")
LONGEST = 40  # operations of a norm, or of RoPE


@dataclass(frozen=True)
class Segment:
    """Operations that compute one value of one other and of parameters and constants alone."""

    before: Value
    operations: tuple[Operation, ...]
    after: Value

    @property
    def kinds(self) -> set[str]:
        return {kind_of(one) for one in self.operations}

    @property
    def rotates(self) -> bool:
        """Whether it is RoPE: features times tables, put together with others."""
        tables = [one for one in self.operations if kind_of(one) == "multiply" and _by_table(one)]
        return len(tables) > 1 and "join" in self.kinds and self.kinds <= ROTATING

    @property
    def norms(self) -> bool:
        own = any("norm" in one.name for one in self.operations)
        return (
            own
            or bool(self.kinds & {"sqrt", "rsqrt"})
            or ("power" in self.kinds and bool(self.kinds & {"mean", "sum"}))
        )

    @property
    def scales(self) -> bool:
        """Whether it multiplies by a parameter, or adds one: what belongs to the norm in front of it."""
        return all(
            kind_of(one) in ("multiply", "add") and any(v.of_parameters for v in one.operands)
            for one in self.operations
        )

    @property
    def leaves(self) -> set[str]:
        return {leaf for one in self.operations for v in one.operands if v.of_parameters for leaf in v.leaves}


def segment_to(value: Value, program: Program, order: Mapping[Value, int]) -> Segment | None:
    """Return the operations from the nearest value of which alone, with parameters and constants, this one is computed.

    Data that no parameter is in counts as constant where this value is computed with parameters: positions that leave padding out.
    """
    waiting: set[Value] = {value}
    operations: list[Operation] = []
    while len(operations) < LONGEST:
        last = max(waiting, key=lambda v: order.get(v, -1))
        if last not in order:  # an input
            return None
        operation = program.operations[order[last]]
        operations.append(operation)
        waiting = (waiting - set(operation.results)) | {v for v in operation.data if _on_the_chain(v, value)}
        if len(waiting) == 1:
            (before,) = waiting
            return Segment(before, tuple(operations[::-1]), value)
        if not waiting:
            return None
    return None


def segments_to(value: Value, program: Program, order: Mapping[Value, int], most: float = math.inf) -> list[Segment]:
    """Return the segments that follow one another up to a value, from behind the nearest layer on; the last `most` of them."""
    found: list[Segment] = []
    while len(found) < most and (one := segment_to(value, program, order)) is not None and not one.kinds & set(LAYERS):
        found.insert(0, one)
        value = one.before
    return found


def computed_by(segments: Sequence[Segment], given: Array) -> Array | None:
    """Return what segments give one after another; None if one does not take what the one before gives."""
    array: Array | None = given
    for one in segments:
        if array is None:
            return None
        array = again(one.operations, {one.before: array})
    return array


def _on_the_chain(operand: Value, value: Value) -> bool:
    return operand.data and bool(operand.leaves or not value.leaves)


def _by_table(operation: Operation) -> bool:
    return any(not v.leaves and v.array.size > 1 for v in operation.operands)
