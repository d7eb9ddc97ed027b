"""What may be wrong where two models differ first, as trials: each gives the value that the boundary would have."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from convert.layers.base import Step
from convert.layers.hypothesis import Hypothesis
from convert.planning.plan import Plan
from convert.references.protocol import INPUT
from convert.verify.diagnosis.site import Site, Trial
from convert.verify.mistakes.catalogue import hypotheses
from convert.verify.mistakes.hypothesis import expected
from convert.verify.mistakes.recurrent import cell_hypotheses
from convert.verify.sides.replay import Replay
from convert.writing.execute import computed

Array = np.ndarray[Any, np.dtype[Any]]
NARROW = ("rounded", "folded")  # hypotheses about single bits: the weights level sees them, no output does
TOGETHER = (("weight", "bias"), ("running_mean", "running_var"))  # roles of which a rule is wrong in the same way
MAX_PAIRS = 64  # of one hypothesis about a weight and one about its bias


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
        for h in cell_hypotheses(step, plan) if step.group is not None and step.group.sizes else ():
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
