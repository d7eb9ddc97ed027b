"""Try hypotheses one by one at the first place where the two models differ; the one that restores parity is the diagnosis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from convert.numerics.real_numbers import tensor_in_float64
from convert.planning.plan import Plan
from convert.references.protocol import INPUT, Observed, Reference
from convert.verify.diagnosis.calls import other_call
from convert.verify.diagnosis.compare import Explanation, Search
from convert.verify.diagnosis.found_boundaries import find_boundaries
from convert.verify.diagnosis.norm import FEATURE_NORMS, any_norm, declared_norm
from convert.verify.diagnosis.other_operation import moved_norm, other_operation
from convert.verify.diagnosis.other_order import other_order
from convert.verify.diagnosis.padding import other_padding
from convert.verify.diagnosis.recurrence import other_recurrence
from convert.verify.diagnosis.site import Site
from convert.verify.diagnosis.unused import unused_inputs, unused_tensors
from convert.verify.diagnosis.variants import other_variant
from convert.verify.diagnosis.weight_trials import wrong_tensor
from convert.verify.diagnosis.what_is_known import what_is_known
from convert.verify.diagnosis.whole_model import exchanged, wrong_file, wrong_rule
from convert.verify.diagnosis.wrong_reference import State, wrong_reference
from convert.verify.sides.evidence import Evidence
from convert.verify.sides.float64_plan import float64_plan
from convert.verify.sides.replay import calls
from convert.verify.sides.run_torch import input_tensors, observed

if TYPE_CHECKING:
    import torch

MAX_SITES = 4  # places that differ at which a mistake is looked for


@dataclass(frozen=True)
class Diagnosis:
    """What explains the first difference.

    Attributes:
        boundary: where the models differ first.
        name: the hypothesis that restores parity; empty when none does.
        problem: what is wrong, as a sentence.
        rule: ``file:line`` of the rule that made the layer; empty when no rule did.
        fix: the next step. Where no hypothesis restores parity: how to locate the difference, if there is a way.
        error_before, error_after: relative error at the boundary without and with the hypothesis.
        ruled_out: hypotheses that do not restore parity.
    """

    boundary: str
    name: str
    problem: str
    rule: str
    fix: str
    error_before: float
    error_after: float
    ruled_out: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON-able values."""
        return {
            "boundary": self.boundary,
            "name": self.name,
            "problem": self.problem,
            "rule": self.rule,
            "fix": self.fix,
            "error_before": self.error_before,
            "error_after": self.error_after,
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
    differing: Sequence[str],
    state: State,
) -> Diagnosis:
    """Find the mistake at `boundary`.

    Args:
        module: the PyTorch model in float64.
        boundary: the first place, in the order of the data, where the models differ.
        evidence: what the JAX model computed.
        allowed: the relative error that is allowed there.
        names: all boundaries and outputs.
        differing: those that differ.
        state: gives the weights of which the module was built.
    """
    site = _site(plan, reference, module, boundary, evidence, allowed, names)
    if own := wrong_reference(site, reference, state, differing).explanation:
        return _diagnosis(site, own, ())
    found, ruled_out = _search(site, reference, names)
    if found is not None and found.target_known:
        return _diagnosis(site, found, ruled_out)
    generic = (site, found, ruled_out) if found is not None else None
    called = other_call(site, reference)
    if called.explanation is not None:
        return _diagnosis(site, called.explanation, ruled_out)
    ruled_out += called.ruled_out
    ignored = unused_inputs(site, reference)
    if ignored.explanation is not None:
        return _diagnosis(site, ignored.explanation, ruled_out)
    ruled_out += ignored.ruled_out
    boundaries = find_boundaries(plan, reference, module, evidence, allowed) if boundary in reference.outputs else None
    between: list[Site] = []
    if boundaries is not None:
        known = list(boundaries.evidence.native_values)
        for name in boundaries.differing[:MAX_SITES]:
            nearer = _site(plan, reference, module, name, boundaries.evidence, allowed, known)
            between.append(nearer)
            found, more = _search(nearer, reference, known)
            if found is not None and found.target_known:
                return _diagnosis(nearer, found, more)
            generic = generic or ((nearer, found, more) if found is not None else None)
            ruled_out += more
    operation = other_operation(site, reference, names)
    unused = unused_tensors(site, reference, operation.idle)
    if operation.explanation is not None and not operation.order:
        clauses = (operation.explanation.problem, unused.clause)
        problem = "; ".join(clause for clause in clauses if clause)
        return _diagnosis(site, replace(operation.explanation, problem=problem), ruled_out)
    if unused.explanation is not None:
        return _diagnosis(site, unused.explanation, ruled_out)
    # Boundaries that are found follow the rules: modules that these exchange have equal values there.
    right = {name for name in names[: names.index(boundary)] if name in site.seen.values}
    swapped = exchanged(site, reference, right)
    if swapped.explanation is not None:
        both = swapped.explanation
        if operation.explanation is not None:  # the code does what exchanged weights would do
            both = replace(both, problem=f"{both.problem}; in the code, {operation.explanation.problem}")
        return _diagnosis(site, both, [*ruled_out, *swapped.ruled_out])
    ruled_out += swapped.ruled_out
    outcome = wrong_rule(site, reference, right)
    if outcome.explanation is not None:
        return _diagnosis(site, outcome.explanation, [*ruled_out, *outcome.ruled_out])
    if operation.explanation is not None:
        problem = "; ".join(clause for clause in (unused.clause, operation.explanation.problem) if clause)
        return _diagnosis(site, replace(operation.explanation, problem=problem), [*ruled_out, *outcome.ruled_out])
    if generic is not None:
        nearer, unknown, excluded = generic
        problem = f"{unknown.problem}; {operation.known}" if operation.known else unknown.problem
        return _diagnosis(nearer, replace(unknown, problem=problem), excluded)
    ruled_out += outcome.ruled_out
    first = between[0] if between else site
    said = (what_is_known(first, boundaries, list(names)), unused.clause, operation.known)
    problem = "; ".join(clause for clause in said if clause)
    fix = _add_boundaries(reference, module, boundary, names) if boundaries is None else ""
    return _diagnosis(first, Explanation("", problem, first.rule(first.name), fix, first.before), ruled_out)


def _search(site: Site, reference: Reference, names: Sequence[str]) -> tuple[Explanation | None, list[str]]:
    """Run one search after another; return the explanation, if one has any, and what was ruled out before."""
    searches: tuple[Callable[[Site], Search], ...] = (
        declared_norm,
        other_recurrence,
        other_padding,
        wrong_tensor,
        partial(wrong_file, reference=reference),
        partial(_variant, reference=reference, names=names),
        any_norm,
        other_order,
    )
    ruled_out: list[str] = []
    for search in searches:
        outcome = search(site)
        ruled_out += outcome.ruled_out
        if outcome.explanation is not None:
            return outcome.explanation, ruled_out
    return None, ruled_out


def _variant(site: Site, reference: Reference, names: Sequence[str]) -> Search:
    """Search among the reference's variants; where the site is a norm, a norm on the other side of RoPE comes first."""
    search = other_variant(site, reference)
    norms = any(step.kind_name in FEATURE_NORMS for step in site.steps(site.name))
    if search.explanation is None or not norms:
        return search
    return Search(moved_norm(site, reference, names) or search.explanation, search.ruled_out)


def _diagnosis(site: Site, found: Explanation, ruled_out: Sequence[str]) -> Diagnosis:
    excluded = tuple(name for name in dict.fromkeys(ruled_out) if name != found.name)
    return Diagnosis(
        site.boundary, found.name, found.problem, found.rule, found.fix, site.before, found.error, excluded
    )


def _add_boundaries(reference: Reference, module: torch.nn.Module, boundary: str, names: Sequence[str]) -> str:
    """Say how to locate a difference that shows only at an output, if some layers with weights are no boundaries."""
    if boundary not in reference.outputs:
        return ""
    observed_modules = {name.removesuffix(INPUT) for name in names}
    layers = [
        name
        for name, layer in module.named_modules()
        if name and name not in observed_modules and next(layer.parameters(recurse=False), None) is not None
    ]
    if not layers:
        return ""
    return (
        "to locate the difference, return values at boundaries from the reference's `jax` as well, in the order of the data, under "
        f"the names of the PyTorch submodules ({', '.join(layers[:3])}{', ...' if len(layers) > 3 else ''})"
    )


def _site(
    plan: Plan,
    reference: Reference,
    module: torch.nn.Module,
    boundary: str,
    evidence: Evidence,
    allowed: float,
    names: Sequence[str],
) -> Site:
    """Run the PyTorch model once more and keep what the searches need."""
    import torch

    from convert.numerics.lift_torch import lifted

    name = boundary.removesuffix(INPUT)
    with torch.no_grad(), lifted(), calls(module, (name, name.rpartition(".")[0])) as recorded_calls:
        inputs = input_tensors(evidence.inputs, "float64", next(module.parameters()).device)
        values = observed(reference, module, inputs, dict.fromkeys((*names, name + INPUT)))
    weights = {key: tensor_in_float64(value) for key, value in module.state_dict().items()}
    places = dict(reference.places(module))
    weights |= {name: weights[own] for name, own in places.items() if own in weights}
    seen = Observed(values, evidence.inputs, weights)
    return Site(float64_plan(plan), module, boundary, seen, recorded_calls, evidence, allowed, places)
