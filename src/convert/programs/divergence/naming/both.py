"""A repair with the words of both programs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from convert.programs.divergence.kinds import LAYOUT, kind_of
from convert.programs.divergence.limits import is_limit
from convert.programs.divergence.naming.by_functions import (
    chain,
)
from convert.programs.divergence.naming.functions import Function
from convert.programs.divergence.repair import Repair
from convert.programs.divergence.shared_values import same_numbers
from convert.programs.divergence.words import Words, arithmetic, places, scalar, user_of
from convert.programs.program import Operation, Value

Array = np.ndarray[Any, np.dtype[Any]]
NEARLY = 1e-6  # relative; what numbers of a table are rounded to in float32 leaves about 1e-8


@dataclass(frozen=True)
class Both:
    """A repair, with what is needed to say it of both programs.

    Attributes:
        ours, theirs: the words of the target and of the source.
        activations: known ones by name.
        training: modules of the target that are in training mode.
    """

    repair: Repair
    ours: Words
    theirs: Words
    activations: Mapping[str, Function]
    training: Collection[str]

    @cached_property
    def given(self) -> str:
        """What the target's operations are given."""
        return " and ".join(dict.fromkeys(map(self.ours.value, self.repair.operands)))

    @cached_property
    def here(self) -> str:
        """Where the target computes."""
        return places(self.repair.target)

    @cached_property
    def there(self) -> str:
        """Where the JAX model computes."""
        return places(self.repair.source)

    @cached_property
    def does(self) -> str:
        """What the target computes."""
        return chain(self.ours, self.repair.target, self.repair.given, self.repair.got, self.activations)

    @cached_property
    def instead(self) -> str:
        """What the JAX model computes."""
        repair = self.repair
        if not repair.target and (pair := self.theirs.of_two(repair.source, repair.given)):
            return pair
        theirs = [x.array for x in repair.source_operands]
        if not repair.target:
            of_each = len(theirs) == len(repair.given)
            return self._chained(list(map(_or_nearly, repair.given, theirs)) if of_each else repair.given)
        return self._chained(theirs)

    def _chained(self, given: Sequence[Array]) -> str:
        repair = self.repair
        return chain(self.theirs, repair.source, given, repair.want, self.activations)

    @cached_property
    def user(self) -> list[Operation]:
        """The first operation of the target that uses what its operations would be given; nothing where none does."""
        return user_of(self.repair.operands[0], self.ours.operations, self.repair.index)

    @cached_property
    def limits(self) -> tuple[str, str] | None:
        """How each side limits the values, where both do that alone; None where one does more, or less."""
        sides = (self.ours, self.repair.target), (self.theirs, self.repair.source)
        if not all(operations and all(map(is_limit, arithmetic(operations))) for _, operations in sides):
            return None
        ours, theirs = (words.chain(operations) for words, operations in sides)
        return (ours, theirs) if ours != theirs else None

    @property
    def as_it_is(self) -> str:
        """That the target uses a value without what the JAX model computes of it, and where."""
        return f"the target uses it as it is{places(self.user)}"

    @property
    def sentence(self) -> str:
        """What both compute."""
        ours = self.ours.of_two_in(self.repair.target)
        if not ours:
            return f"of {self.given}, the target {self.does}{self.here}; the JAX model {self.instead}{self.there}"
        theirs = self.theirs.of_two_in(self.repair.source)
        theirs = f"the JAX model {theirs}" if theirs else f"of the same, the JAX model {self.instead}"
        return f"the target {ours}{self.here}; {theirs}{self.there}"

    @property
    def only_theirs(self) -> str:
        """What the JAX model alone computes."""
        return f"of {self.given}, the JAX model {self.instead}{self.there}"

    @cached_property
    def steps(self) -> tuple[list[tuple[str, float | None]], list[tuple[str, float | None]]]:
        """The arithmetic of the target and of the JAX model, with its constants."""
        return steps(self.repair.target), steps(self.repair.source)

    @property
    def same_kinds(self) -> bool:
        """Whether both compute by the same operations in the same order."""
        one, two = self.steps
        return [kind for kind, _ in one] == [kind for kind, _ in two]

    @cached_property
    def trained(self) -> str | None:
        """The module of the target in training mode that computes here."""
        return next((one.module for one in self.repair.target if one.module in self.training), None)


def unshared(repair: Repair) -> tuple[list[Value], list[Value]]:
    """Return what the target's operations are given and the source's are not, and the other way round."""
    pairs = list(zip(repair.operands, repair.given, strict=True))
    theirs = repair.source_operands
    mine = [value for value, x in pairs if not any(same_numbers(x, y.array) for y in theirs)]
    return mine, [y for y in theirs if not any(same_numbers(x, y.array) for _, x in pairs)]


def _or_nearly(ours: Array, theirs: Array) -> Array:
    """Return the source's numbers where the target has them but for rounding, in the same layout: a function is exact for these."""
    near = ours.shape == theirs.shape and np.allclose(ours, theirs, rtol=0, atol=NEARLY * np.abs(theirs).max(initial=0))
    return theirs if near else ours


def line(operations: Sequence[Operation]) -> str:
    """Return the first line of operations that is known, of one that computes something if there is any."""
    lines = [one.where for one in operations if one.where and kind_of(one) != LAYOUT]
    lines = lines or [one.where for one in operations if one.where]
    return lines[0] if lines else "an unknown line"


def steps(operations: Sequence[Operation]) -> list[tuple[str, float | None]]:
    """Return the kind of each operation that computes something, and its constant."""
    return [(kind_of(one), scalar(one)) for one in arithmetic(operations) if kind_of(one) != LAYOUT]
