"""The first place where the two models differ, and trials: hypotheses about the mistake there."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from convert.layers.base import Step
from convert.numerics.compare import difference
from convert.planning.plan import Plan
from convert.references.protocol import INPUT, Observed
from convert.verify.sides.evidence import Evidence
from convert.verify.sides.replay import Call, Replay, replay_call

if TYPE_CHECKING:
    import torch

Array = np.ndarray[Any, np.dtype[Any]]
FLOAT64_ERROR = 1e-9  # relative error at a boundary that a hypothesis restores, in float64
FLOAT32_SHARE = 1e-6  # of the error before: what float32 may have taken from other tensors of the layer
LESS = 0.1  # of the error before: what leaves more does not explain it
NATIVE_SHARE = 1e-3  # of the error before, where only a run of the JAX model in native precision is known


@dataclass(frozen=True)
class Trial:
    """A hypothesis about the tensors of a layer.

    Attributes:
        name: of the mistake, short and stable.
        problem: what is wrong, as a sentence.
        rule: ``file:line`` of the rule that made the layer; empty when no rule did.
        fix: the next step.
        run: computes the value at the boundary without the mistake.
        tensors: those that it changes, where a trial in one layer is not all that is known.
    """

    name: str
    problem: str
    rule: str
    fix: str
    run: Callable[[], Array]
    tensors: Collection[str] = ()


def holder_of(tensor: str) -> str:
    """Return the submodule that a tensor belongs to; torch keeps those of a parametrization one level below it."""
    outer, parametrized, _ = tensor.partition(".parametrizations.")
    return outer if parametrized else tensor.rpartition(".")[0]


@dataclass(frozen=True)
class Site:
    """The first place where the two models differ.

    Attributes:
        plan: of the conversion, in float64 (`float64_plan`).
        module: the PyTorch model, in float64.
        boundary: name of the place.
        seen: what the PyTorch model computed at all boundaries.
        calls: arguments of the submodule at the boundary and of the one around it.
        evidence: what the JAX model computed.
        allowed: the relative error that is still allowed there.
        places: names of written tensors that have another name in the module -> that name.
    """

    plan: Plan
    module: torch.nn.Module = field(repr=False)
    boundary: str
    seen: Observed = field(repr=False)
    calls: Mapping[str, Call] = field(repr=False)
    evidence: Evidence = field(repr=False)
    allowed: float
    places: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name of the submodule at the boundary."""
        return self.boundary.removesuffix(INPUT)

    @cached_property
    def want(self) -> Array:
        """The JAX model's value, or the recorded sample of it."""
        return self.evidence.best_values[self.boundary]

    @cached_property
    def got(self) -> Array:
        """The PyTorch model's value, or the same sample of it."""
        return self.evidence.pick(self.boundary, self.seen.values[self.boundary])

    @cached_property
    def before(self) -> float:
        """The relative error without a hypothesis."""
        return self.error(self.seen.values[self.boundary])

    @property
    def enough(self) -> float:
        """The error up to which a hypothesis explains the difference: less than a tenth of it."""
        if not np.isfinite(self.before):
            return FLOAT64_ERROR
        if self.evidence.float64_values is not None:
            return min(max(FLOAT64_ERROR, FLOAT32_SHARE * self.before), LESS * self.before)
        return max(
            min(FLOAT64_ERROR, LESS * self.before), NATIVE_SHARE * self.before, min(self.allowed, LESS * self.before)
        )

    def error(self, value: Array, against: Array | None = None) -> float:
        """Return the relative error of a whole value, against the JAX model's by default; infinite for another shape."""
        against = self.want if against is None else against
        try:
            picked = self.evidence.pick(self.boundary, value)
        except ValueError:  # not of the shape of which a sample was recorded
            return float("inf")
        if picked.shape != against.shape:
            return float("inf")
        return difference(picked, against, mask=self.evidence.masks.get(self.boundary)).relative

    def steps(self, module: str) -> list[Step]:
        """Return the plan's steps for a submodule's direct tensors."""
        return [step for step in self.plan.steps if module in {holder_of(name) for name in self._names_of(step.name)}]

    def _names_of(self, tensor: str) -> tuple[str, ...]:
        """Return all names of a tensor in the module: a tied table is in several."""
        own = self.places.get(tensor, tensor)
        return self._shared.get(own, (own,))

    @cached_property
    def _shared(self) -> Mapping[str, tuple[str, ...]]:
        """Name of a parameter -> the names of all that share its memory."""
        named = list(self.module.named_parameters(remove_duplicate=False))
        names: dict[int, tuple[str, ...]] = {}
        for name, parameter in named:
            names[parameter.data_ptr()] = (*names.get(parameter.data_ptr(), ()), name)
        return {name: names[parameter.data_ptr()] for name, parameter in named if parameter.numel()}

    def rule(self, module: str) -> str:
        """Return ``file:line`` of the rule that made a submodule; empty when no rule did."""
        return next((step.rule.line_only for step in self.steps(module)), "")

    def replay(self, holder: str) -> Replay | None:
        """Return the submodule `holder` with its arguments; None if it did not run, or the boundary is an output."""
        modules = {name for name, _ in self.module.named_modules(remove_duplicate=False)}
        if holder not in self.calls or self.name not in modules:
            return None
        return replay_call(self.module, holder, self.calls[holder], self.boundary, self.places)
