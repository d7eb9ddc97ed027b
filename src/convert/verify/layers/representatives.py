"""Which layers stand for others: of a rule's layers that are made by the same operations, one is run."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from convert.layers.base import Part, Step
from convert.planning.plan import Plan
from convert.verify.layers.samples import rule_of
from convert.verify.report.report import Measure

IsEqual = Callable[[Step, Part], bool]


class Representatives:
    """The layers that are run, each for all that are made by the same operations.

    A layer stands for another one where both tensors are, bit for bit, what the plan makes of their leaves: the operations do not
    look at the values.
    """

    def __init__(self, plan: Plan, is_equal: IsEqual | None) -> None:
        """Begin with no layers.

        Args:
            is_equal: whether a part of a tensor is, bit for bit, what the plan makes of its leaf; it may wait until that is known.
                None: it is not known, and every layer is run.
        """
        self._plan, self._is_equal = plan, is_equal
        self._chosen: dict[Hashable, tuple[Step, Part]] = {}
        self._represented: dict[Hashable, list[str]] = {}
        self._measures: dict[Hashable, Measure] = {}

    def choose(self, step: Step, part: Part) -> bool:
        """Return whether this is the first layer with these operations, and choose it to be run."""
        if self._is_equal is None:
            return True
        layer = (step, part)
        return self._chosen.setdefault(self._key(step, part), layer) is layer

    def represents(self, step: Step, part: Part) -> bool:
        """Return whether the layer that was chosen stands for this one; otherwise this one is run, too."""
        key = self._key(step, part)
        if self._is_equal is None or not self._is_equal(step, part):
            return False
        if not self._is_equal(*self._chosen[key]):
            self._chosen[key] = step, part
            return False
        self._represented.setdefault(key, []).append(step.name)
        return True

    def note(self, step: Step, part: Part, measure: Measure) -> None:
        """Remember the measure of a layer that stands for others."""
        key = self._key(step, part)
        chosen = self._chosen.get(key, (None, None))
        if chosen[0] is step and chosen[1] is part:
            self._measures[key] = measure

    @property
    def represented(self) -> list[tuple[Measure, list[str]]]:
        """The measures of the layers that were run, and the names of the tensors that they stand for."""
        return [(measure, self._represented.get(key, [])) for key, measure in self._measures.items()]

    def _key(self, step: Step, part: Part) -> Hashable:
        """What is equal for tensors that are made by the same operations: only their places in a stack differ."""
        rule, spec = rule_of(part), self._plan.source.leaves[part.leaf].spec
        return id(rule), step.role, step.kind_name, part.ops[len(rule.stacked) :], spec, step.spec, part.rows
