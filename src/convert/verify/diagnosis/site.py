"""The first place where the two models differ, and a trial of what may be wrong there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from convert.layers.base import Step
from convert.planning.plan import Plan
from convert.references.protocol import INPUT, Observed
from convert.verify.numerics.compare import difference
from convert.verify.sides.evidence import Evidence
from convert.verify.sides.replay import Call, Replay

if TYPE_CHECKING:
    import torch

Array = np.ndarray[Any, np.dtype[Any]]
EXACT = 1e-9  # relative error of a layer that a hypothesis restores, in float64
RESTORED = 1e-6  # of the error before, or so much: what other tensors of the layer may have lost to float32
ROUGHLY = 1e-3  # the same where the JAX model is known from a run in float32 alone


@dataclass(frozen=True)
class Trial:
    """A hypothesis about a layer: what the layer gives if it is true.

    Attributes:
        name: short and stable.
        said: what is wrong, in words.
        rule: ``file:line`` of the rule that made the layer, if one did.
        repair: what to do.
        run: computes the value at the boundary.
    """

    name: str
    said: str
    rule: str
    repair: str
    run: Callable[[], Array]


def holder_of(tensor: str) -> str:
    """The submodule that a tensor belongs to; torch keeps those of a parametrization deeper than that."""
    outer, inside, _ = tensor.partition(".parametrizations.")
    return outer if inside else tensor.rpartition(".")[0]


@dataclass(frozen=True)
class Site:
    """The first place where two models differ.

    Attributes:
        plan: of the conversion, in float64 (`float64_plan`).
        module: the PyTorch model, in float64.
        boundary: the place.
        seen: what the PyTorch model computed up to there.
        calls: arguments of the submodule at the boundary and of those around it.
        evidence: what the JAX model gave.
        allowed: the relative error that is still allowed there.
    """

    plan: Plan
    module: torch.nn.Module = field(repr=False)
    boundary: str
    seen: Observed = field(repr=False)
    calls: Mapping[str, Call] = field(repr=False)
    evidence: Evidence = field(repr=False)
    allowed: float

    @property
    def name(self) -> str:
        """Of the submodule at the boundary."""
        return self.boundary.removesuffix(INPUT)

    @property
    def mask(self) -> Array | None:
        """Where values count."""
        return self.evidence.masks.get(self.boundary)

    @cached_property
    def want(self) -> Array:
        """What the JAX model gives there, or the part of it that is known."""
        known = self.evidence.exact if self.evidence.exact is not None else self.evidence.drifted
        return known[self.boundary]

    @cached_property
    def got(self) -> Array:
        """What the PyTorch model gives there, likewise."""
        return self.evidence.pick(self.boundary, self.seen.values[self.boundary])

    @cached_property
    def before(self) -> float:
        """Relative error."""
        return self.error(self.seen.values[self.boundary])

    @property
    def enough(self) -> float:
        """The error at or below which a hypothesis explains the difference."""
        if not np.isfinite(self.before):
            return EXACT
        if self.evidence.exact is not None:
            return max(EXACT, RESTORED * self.before)
        return max(EXACT, ROUGHLY * self.before, min(self.allowed, self.before / 10))

    def error(self, value: Array, against: Array | None = None) -> float:
        """Relative error of a whole value against the JAX model's, or the PyTorch model's; infinite for another shape."""
        against = self.want if against is None else against
        try:
            picked = self.evidence.pick(self.boundary, value)
        except ValueError:  # not of the shape of which a sample was recorded
            return float("inf")
        if picked.shape != against.shape:
            return float("inf")
        return difference(picked, against, mask=self.mask).relative

    def steps(self, name: str) -> list[Step]:
        """The plan's steps for a submodule's own tensors."""
        return [step for step in self.plan.steps if holder_of(step.name) == name]

    def rule(self, name: str) -> str:
        """``file:line`` of the rule that made a submodule; empty when none did."""
        return next((step.rule.line_only for step in self.steps(name)), "")

    def replay(self, holder: str) -> Replay | None:
        """The submodule `holder`, to be run again; None when it was not run, or the boundary is no submodule but an output."""
        known = {name for name, _ in self.module.named_modules()}
        if holder not in self.calls or self.name not in known:
            return None
        return Replay(self.module, holder, self.calls[holder], self.boundary)
