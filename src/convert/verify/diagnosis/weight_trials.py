"""What may be wrong where two models differ first, as trials: each gives the value that the boundary would have."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from convert.core.ops import Cast, is_float
from convert.planning.low_rank_source import in_float64
from convert.planning.plan import Plan
from convert.planning.step import Step
from convert.references.protocol import INPUT, Observed
from convert.verify.mistakes.catalogue import hypotheses
from convert.verify.mistakes.hypothesis import Hypothesis, expected
from convert.verify.mistakes.recurrent import cell_hypotheses
from convert.verify.model.level import Evidence
from convert.verify.numerics.compare import difference
from convert.verify.sides.replay import Call, Replay
from convert.writing.execute import computed

if TYPE_CHECKING:
    import torch

Array = np.ndarray[Any, np.dtype[Any]]
EXACT = 1e-9  # relative error of a layer that a hypothesis restores, in float64
RESTORED = 1e-6  # of the error before, or so much: what other tensors of the layer may have lost to float32
ROUGHLY = 1e-3  # the same where the JAX model is known from a run in float32 alone
NARROW = ("rounded", "folded")  # hypotheses about single bits: the weights level sees them, no output does
TOGETHER = (("weight", "bias"), ("running_mean", "running_var"))  # roles of which a rule is wrong in the same way
MAX_PAIRS = 64  # of one hypothesis about a weight and one about its bias


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
        plan: of the conversion, `widened`.
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


def widened(plan: Plan) -> Plan:
    """The plan with every tensor in float64: what a trial restores is then not hidden behind a last rounding."""
    return replace(plan, steps=tuple(_widened(step) for step in plan.steps), merges=in_float64(plan.merges))


def _widened(step: Step) -> Step:
    if not step.parts or not is_float(step.spec.dtype):
        return step
    parts = (replace(p, ops=(Cast("float64"), *(op for op in p.ops if not isinstance(op, Cast)))) for p in step.parts)
    return replace(step, spec=replace(step.spec, dtype="float64"), parts=tuple(parts), loses="")


def weight_trials(site: Site) -> Iterator[Trial]:
    """Mistakes in the tensors of the layer at the boundary, or in those of the module around it."""
    holders = (
        [site.name.rpartition(".")[0]] if site.boundary.endswith(INPUT) else [site.name, site.name.rpartition(".")[0]]
    )
    for holder in holders:
        replay = site.replay(holder)
        if replay is not None:
            yield from _of_holder(site, replay, site.steps(holder))


def _of_holder(site: Site, replay: Replay, steps: list[Step]) -> Iterator[Trial]:
    source = site.plan.source
    made = [step for step in steps if step.parts]
    for step in (step for step in steps if isinstance(step.value, float)):
        yield Trial(
            "another value in the file",
            f"{step.name} in the file is not the {step.value:g} everywhere that {step.rule.line_only} makes it",
            step.rule.line_only,
            "convert again; the weights level says which values differ",
            lambda step=step: replay.with_tensors({step.name: computed(step)}),  # type: ignore[misc]
        )
    for step in made:
        yield Trial(
            "another value in the file",
            f"{step.name} in the file is not what {step.rule.line_only} makes of the checkpoint",
            step.rule.line_only,
            "convert again; the weights level says which values differ",
            lambda step=step: replay.with_tensors({step.name: expected(step, source)}),  # type: ignore[misc]
        )
    if len(made) > 1:
        yield Trial(
            "other values in the file",
            f"{' and '.join(step.name for step in made)} in the file are not what {made[0].rule.line_only} makes of the checkpoint",
            made[0].rule.line_only,
            "convert again; the weights level says which values differ",
            lambda: replay.with_tensors({step.name: expected(step, source) for step in made}),
        )
    yield from _of_cells(replay, made, site.plan)
    for step in made:
        for h in _wide(step, site.plan):
            yield _of_rule(replay, {step: h})
    pairs = [(w, b) for one, two in TOGETHER for w in made if w.role == one for b in made if b.role == two]
    for weight, bias in pairs:
        # A rule that is wrong about a layer is wrong about both of its tensors, in the same way.
        others = list(_wide(bias, site.plan))
        alike = ((h, o) for h in _wide(weight, site.plan) for o in others if (h.name, h.key) == (o.name, o.key))
        for h, o in itertools.islice(alike, MAX_PAIRS):
            yield _of_rule(replay, {weight: h, bias: o})


def _of_cells(replay: Replay, steps: list[Step], plan: Plan) -> Iterator[Trial]:
    """A mistake that is true of all tensors of a recurrent layer together, in each of its directions alike."""
    groups: dict[tuple[str, str], dict[Step, Hypothesis]] = {}
    for step in steps:
        for h in cell_hypotheses(step, plan) if step.cell is not None else ():
            if h.key:
                groups.setdefault((h.name, h.key), {})[step] = h
    # A forget bias is in one tensor; any other mistake of a rule shows in several.
    yield from (_of_rule(replay, made) for (_, key), made in groups.items() if len(made) > 1 or key == "f")


def _wide(step: Step, plan: Plan) -> Iterator[Hypothesis]:
    return (h for h in hypotheses(step, plan) if not h.name.startswith(NARROW))


def _of_rule(replay: Replay, made: Mapping[Step, Hypothesis]) -> Trial:
    """The file is what the rule makes, and the rule is wrong."""
    (step, first), *_ = made.items()
    at = step.rule.line_only
    said = [f"{step.name} is {h.instead}; what the JAX model computes with is {h.gives}" for step, h in made.items()]
    return Trial(
        first.converse,
        f"by {at} {', and '.join(said)}",
        at,
        f"correct the rule at {at}: its words do not say what the source computes",
        lambda: replay.with_tensors({step.name: h.make() for step, h in made.items()}),
    )
