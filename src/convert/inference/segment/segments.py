"""What the search finds: segments of the target between two values that both programs have, and the ways through them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from convert.inference.candidates.candidate import Choice
from convert.programs.program import Program, Value

Array = np.ndarray[Any, np.dtype[Any]]


class Level(NamedTuple):
    """How much is tried, and how soon it is refuted.

    Attributes:
        proposals: `Context.level`.
        attention: whether the products of attention must be values of the source.
        strict: whether what a scale or bias gives must be one even where it meets none. Where two layers meet the same data, the
            wrong one is refuted at the norm behind it, and not by every parameter that the norm may have; so is one whose gates stand in
            another order, at the function of a gate.
    """

    proposals: int
    attention: bool
    strict: bool = False


LEVELS = (
    Level(0, True, strict=True),
    Level(0, True),
    Level(0, False),
    Level(1, True, strict=True),
    Level(1, True),
    Level(2, False),
)


@dataclass(frozen=True, eq=False)
class Solution:
    """One way through a segment.

    Attributes:
        begin, end: operations of the target, `end` is not run.
        choices: what became known.
        values: of data that the segment computed.
        aside: operation of a choice -> the values that its branch ends with, where that leads to the outputs alone.
    """

    begin: int
    end: int
    choices: tuple[Choice, ...]
    values: dict[Value, Array]
    aside: Mapping[int, tuple[Value, ...]] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Given:
    """A value of the source that takes the place of one of the target, where the programs differ.

    Attributes:
        value: the target's, which is replaced.
        index, side: an operation of the source, and which operand of it takes the place.
        array: this operand, laid out as the target's value.
        order: of its axes, in which they have the target's order.
    """

    value: Value
    index: int
    side: int
    array: Array
    order: tuple[int, ...]

    def again(self, program: Program) -> Array:
        """Return the value of another run of the source, laid out in the same way."""
        array = program.operations[self.index].operands[self.side].array
        return array.transpose(self.order).reshape(self.array.shape)


@dataclass(eq=False)
class Segment:
    """A segment of the target between two values that both programs have.

    Attributes:
        begin: its first operation.
        solutions: all that were found; `chosen` is the one that led to the outputs.
        level: one of `LEVELS`.
        tried: how many candidates.
        refuted: operation of the target -> how many candidates ended there.
        exact: whether it ends at a value of the source that everything in it takes part in, and all solutions were looked for.
        given: what the target was given in front of it, instead of its own value.
    """

    begin: int
    solutions: list[Solution]
    level: Level
    tried: int
    refuted: dict[int, int]
    chosen: int = 0
    exact: bool = True
    given: Given | None = None

    @property
    def solution(self) -> Solution:
        """The solution that is followed."""
        return self.solutions[self.chosen]


@dataclass(frozen=True)
class Ways:
    """The solutions of a segment, told apart so that another layer's are recognised.

    Attributes:
        level: as one of `LEVELS`.
        signatures: of the choices of each solution, in order, in each of their forms.
    """

    level: Level
    signatures: tuple[tuple[tuple[Any, ...], ...], ...]


@dataclass(eq=False)
class Failure:
    """The deepest operation at which everything was refuted.

    Attributes:
        index: of the target's operation, or how many there are, for the outputs.
        problem: what did not fit.
        choices: what was assigned on the way to it.
    """

    index: int = -1
    problem: str = ""
    choices: tuple[Choice, ...] = field(default=(), repr=False)
