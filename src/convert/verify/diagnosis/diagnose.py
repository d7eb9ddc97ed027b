"""Why two models differ: hypotheses are tried one by one on the first layer that differs; the one that restores parity is
the diagnosis. When none does, what was ruled out is listed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from convert.core.errors import ConvertError
from convert.planning.plan import Plan
from convert.references.protocol import INPUT, Observed, Reference
from convert.verify.diagnosis.site import Site
from convert.verify.diagnosis.variants import Found, functions, norms, paddings, recurrences
from convert.verify.diagnosis.weight_trials import weight_trials
from convert.verify.sides.evidence import Evidence
from convert.verify.sides.float64_plan import float64_plan
from convert.verify.sides.replay import calls
from convert.verify.sides.run_torch import input_tensors, observed

if TYPE_CHECKING:
    import torch

NONE = "no known mistake explains it"


@dataclass(frozen=True)
class Diagnosis:
    """What was found out about the first layer that differs.

    Attributes:
        boundary: where the models differ first.
        name: the hypothesis that restores parity; empty when none does.
        said: what is wrong, in words.
        rule: ``file:line`` of the rule that made the layer, if one did.
        repair: what to do; where no hypothesis restores parity, how to come to know more, if there is a way.
        before, after: relative error of the layer without and with the hypothesis.
        ruled_out: hypotheses that do not restore parity.
    """

    boundary: str
    name: str
    said: str
    rule: str
    repair: str
    before: float
    after: float
    ruled_out: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        return {
            "boundary": self.boundary,
            "name": self.name,
            "said": self.said,
            "rule": self.rule,
            "repair": self.repair,
            "error_before": self.before,
            "error_after": self.after,
            "ruled_out": list(self.ruled_out),
        }


def diagnose(
    plan: Plan,
    reference: Reference,
    module: torch.nn.Module,
    boundary: str,
    evidence: Evidence,
    allowed: float,
    names: Sequence[str],
) -> Diagnosis:
    """Tries what may be wrong at `boundary`.

    Args:
        module: the PyTorch model in float64.
        boundary: the first place, in the order of the data, where the models differ.
        evidence: what the JAX model gave.
        allowed: the relative error that is allowed there.
        names: all boundaries and outputs.
    """
    site = make_site(plan, reference, module, boundary, evidence, allowed, names)
    ruled_out: list[str] = []
    found = norms(site, ruled_out, declared=True) or recurrences(site, ruled_out)
    found = found or paddings(site, ruled_out) or _weights(site, ruled_out)
    found = found or functions(site, reference, ruled_out) or norms(site, ruled_out)
    untrue = tuple(dict.fromkeys(name for name in ruled_out if found is None or name != found.name))
    if found is None:
        more = _closer(reference, module, boundary, names)
        return Diagnosis(boundary, "", NONE, site.rule(site.name), more, site.before, site.before, untrue)
    return Diagnosis(boundary, found.name, found.said, found.rule, found.repair, site.before, found.after, untrue)


def _closer(reference: Reference, module: torch.nn.Module, boundary: str, names: Sequence[str]) -> str:
    """How to locate a difference that shows at an output alone, where layers lie in between that are no boundaries."""
    if boundary not in reference.outputs:
        return ""
    given = {name.removesuffix(INPUT) for name in names}
    layers = [
        name
        for name, layer in module.named_modules()
        if name and name not in given and next(layer.parameters(recurse=False), None) is not None
    ]
    if not layers:
        return ""
    return (
        f"let the reference's `jax` give values at boundaries as well, called as PyTorch calls the layers ({', '.join(layers[:3])}"
        f"{', ...' if len(layers) > 3 else ''}), in the order of the data: then the first layer that differs is found, and what is known "
        "to go wrong there is tried"
    )


def _weights(site: Site, ruled_out: list[str]) -> Found | None:
    for trial in weight_trials(site):
        try:
            after = site.error(trial.run())
        except (
            RuntimeError,
            ValueError,
            TypeError,
            KeyError,
            ConvertError,
        ):  # a shape that the layer does not take: not this
            continue
        if after <= site.enough:
            return Found(trial.name, trial.said, trial.rule, trial.repair, after)
        ruled_out.append(trial.name)
    return None


def make_site(
    plan: Plan,
    reference: Reference,
    module: torch.nn.Module,
    boundary: str,
    evidence: Evidence,
    allowed: float,
    names: Sequence[str],
) -> Site:
    """Runs the PyTorch model once more, keeping what the trials need."""
    import torch

    from convert.verify.numerics.lift_torch import lifted

    name = boundary.removesuffix(INPUT)
    with torch.no_grad(), lifted(), calls(module, _around(name)) as made:
        inputs = input_tensors(evidence.inputs, "float64", next(module.parameters()).device)
        values = observed(reference, module, inputs, dict.fromkeys((*names, name + INPUT)))
    weights = {key: np.asarray(value.detach().double().cpu().numpy()) for key, value in module.state_dict().items()}
    return Site(
        float64_plan(plan), module, boundary, Observed(values, evidence.inputs, weights), made, evidence, allowed
    )


def _around(name: str) -> tuple[str, ...]:
    """The submodule and the one that it is part of."""
    return (name, name.rpartition(".")[0])
