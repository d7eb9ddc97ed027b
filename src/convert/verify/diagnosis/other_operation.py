"""Search for the operations at which the target's code departs from the JAX model's, in the records of one run of both."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from convert.layers.activations import NUMPY_ACTIVATIONS
from convert.numerics.compare import difference
from convert.references.protocol import Reference
from convert.verify.diagnosis.compare import Explanation
from convert.verify.diagnosis.site import Site
from convert.verify.sides.records import NOT_RECORDED, record_source, record_target, too_large

if TYPE_CHECKING:
    import torch

    from convert.programs.divergence.search import Divergence
    from convert.programs.program import Operation, Program
    from convert.programs.rewrites.rewrite import Goal, Rewrite

Array = np.ndarray[Any, np.dtype[Any]]
FINEST, COARSEST = 1e-13, 1e-6  # relative errors up to which values inside the models may count as equal
SHARE = 1e-2  # of the error at the boundary: what a value inside may differ by and still be equal


@dataclass(frozen=True)
class OtherOperation:
    """The outcome.

    Attributes:
        explanation: the operations that differ, proven; None if none were found.
        order: whether they differ in operands or the order of elements alone, for which a rule may be the cause.
        known: what is known where nothing is proven, as a clause; empty if nothing is.
        partly: whether some operations were found that do not restore the output alone.
        idle: the parameters that no output of the target is computed from; None where that is not known.
    """

    explanation: Explanation | None = None
    order: bool = False
    known: str = ""
    partly: bool = False
    idle: frozenset[str] | None = None


def other_operation(site: Site, reference: Reference, names: Sequence[str]) -> OtherOperation:
    """Record both models and compare them operation by operation.

    Where the difference at the site has no cause in front of it (a layer of another name in another place), the outputs are
    compared.
    """
    evidence = site.evidence
    if reference.jax is None or not evidence.is_live or evidence.float64_values is None:
        return OtherOperation()
    if why := too_large(site.module, evidence):
        return OtherOperation(known=f"the two are not compared operation by operation: {why}")
    try:
        source, target = _records(site, reference, names)
    except NOT_RECORDED:
        return OtherOperation()
    idle = _idle(target, reference)
    told = OtherOperation()
    for name in _goals(site, reference, source, target):
        outcome = compared(site, reference, source, target, name)
        if outcome.explanation is not None:
            return replace(outcome, idle=idle)
        if not told.known or (outcome.partly and not told.partly):
            told = outcome
    return replace(told, idle=idle)


def _idle(target: Program, reference: Reference) -> frozenset[str]:
    """Return the parameters that no output is computed from."""
    from convert.programs.divergence.graph import on_the_way

    outputs = [name for name in reference.outputs if name in target.outputs]
    used = {v for name in outputs for one in on_the_way(target, name).operations for v in one.operands}
    return frozenset(
        name for name, value in target.parameters.items() if value not in used and name not in target.buffers
    )


def compared(site: Site, reference: Reference, source: Program, target: Program, name: str) -> OtherOperation:
    """Compare the records of both models on the way to an output."""
    from convert.programs.divergence.naming.operations import OTHER
    from convert.programs.divergence.wording import is_clear
    from convert.programs.rewrites.factors import with_factors_of
    from convert.programs.rewrites.positions.rope import PAIRS, rope
    from convert.programs.rewrites.positions.rows import rows

    if (rewrite := _rewritten(site, reference, source, target, name)) is not None:
        return OtherOperation(rewrite)
    if (taken := rows(source, target, _goal(site, source, name))) is not None:
        return OtherOperation(_explained(taken))
    turned = list(rope(source, target, _goal(site, source, name)))
    for one, _ in turned:
        if one.error <= site.enough:
            alone = replace(one, problem=f"{one.problem}; the outputs are equal with the JAX model's RoPE")
            return OtherOperation(_explained(alone), order=one.name == PAIRS)
    if (rewrite := _in_other_places(site, reference, source, target, name)) is not None:
        return OtherOperation(rewrite, order=True)
    outcome = _compared(site, source, target, name)
    unclear = outcome.explanation is None or not is_clear(outcome.explanation.name)
    if unclear and (rewrite := _where_unclear(site, source, target, name)) is not None:
        return OtherOperation(rewrite, order=True)
    if unclear and (taken := rows(source, target, _goal(site, source, name), chosen=True)) is not None:
        return OtherOperation(_explained(taken))
    if outcome.explanation is None or OTHER in outcome.explanation.name:
        for one, made in turned:
            behind = _compared(site, source, made, name)
            if behind.explanation is not None:
                return replace(behind, explanation=_both(one, behind.explanation))
    if outcome.explanation is not None:
        return outcome
    if (scaled := with_factors_of(source, target, name)) is not None:
        return _compared(site, source, scaled, name)
    return outcome


def moved_norm(site: Site, reference: Reference, names: Sequence[str]) -> Explanation | None:
    """Return what restores an output where a norm at the site is on the wrong side of RoPE: its own value shows only that RoPE is missing."""
    from convert.programs.rewrites.positions.norm_order import norm_order

    if reference.jax is None or not site.evidence.is_live or too_large(site.module, site.evidence):
        return None
    try:
        source, target = _records(site, reference, names)
    except NOT_RECORDED:
        return None
    goals = [_goal(site, source, name) for name in reference.outputs if name in source.outputs]
    return next((found for goal in goals if (found := _explained(norm_order(target, goal))) is not None), None)


def _records(site: Site, reference: Reference, names: Sequence[str]) -> tuple[Program, Program]:
    source = record_source(site.plan, reference, site.evidence)
    return source, record_target(reference, site.module, site.evidence, names)


def _goals(site: Site, reference: Reference, source: Program, target: Program) -> Iterator[str]:
    """Yield the site, and an output that differs if the site is none."""
    outputs = [name for name in reference.outputs if name != site.boundary]
    for name in (site.boundary, *outputs):
        one, two = source.outputs.get(name), target.outputs.get(name)
        if one is not None and two is not None and one.array.shape == two.array.shape:
            yield name
        if name in reference.outputs:
            return


def _rewritten(site: Site, reference: Reference, source: Program, target: Program, name: str) -> Explanation | None:
    """Return what other calls of the target's own code restore."""
    import torch

    from convert.programs.rewrites.positions.norm_order import norm_order
    from convert.programs.rewrites.recurrences.cut_states import cut_states
    from convert.programs.rewrites.recurrences.direction import direction
    from convert.programs.rewrites.recurrences.first_states import first_states
    from convert.programs.rewrites.recurrences.gates import complement, reset_side
    from convert.programs.rewrites.recurrences.given_out import given_out
    from convert.programs.rewrites.recurrences.states import states
    from convert.programs.rewrites.recurrences.updates import updates

    def own(operation: Operation) -> bool:
        layer = dict(site.module.named_modules()).get(operation.module)
        return not isinstance(layer, torch.nn.RNNBase | torch.nn.RNNCellBase)

    goal = _goal(site, source, name)
    found = norm_order(target, goal) or states(source, target, goal) or first_states(source, target, goal)
    found = (
        found
        or given_out(target, goal)
        or updates(target, goal)
        or cut_states(target, goal)
        or direction(target, goal)
        or reset_side(target, goal)
        or complement(target, goal, own)
    )
    if found is None and name not in reference.outputs:  # within RoPE, or a norm, the order of the two does not show
        goals = [_goal(site, source, output) for output in reference.outputs if output in source.outputs]
        found = next((one for one in (norm_order(target, goal) for goal in goals) if one is not None), None)
    return _explained(found)


def _in_other_places(
    site: Site, reference: Reference, source: Program, target: Program, name: str
) -> Explanation | None:
    """Return what the target's operations restore in another order, or with other parts of the same values."""
    from convert.programs.rewrites.places.copies import copies
    from convert.programs.rewrites.places.exchange import exchange
    from convert.programs.rewrites.places.order import order
    from convert.programs.rewrites.places.residual import residual

    goal = _goal(site, source, name)
    found = (
        copies(target, goal) or exchange(source, target, goal) or order(source, target, goal) or residual(target, goal)
    )
    if found is None and name not in reference.outputs:  # in front of a norm, its place does not show
        goals = [_goal(site, source, output) for output in reference.outputs if output in source.outputs]
        found = next((one for one in (residual(target, goal) for goal in goals) if one is not None), None)
    return _explained(found)


def _where_unclear(site: Site, source: Program, target: Program, name: str) -> Explanation | None:
    """Return what explains a difference at once that the comparison of operations explains in parts, or not at all."""
    from convert.programs.rewrites.norm_axes import norm_axes
    from convert.programs.rewrites.paddings import paddings
    from convert.programs.rewrites.places.axes import axes
    from convert.programs.rewrites.places.shared import shared

    goal = _goal(site, source, name)
    found = norm_axes(source, target, goal) or shared(source, target, goal)
    return _explained(found or paddings(target, goal) or axes(source, target, goal))


def _goal(site: Site, source: Program, name: str) -> Goal:
    from convert.programs.rewrites.rewrite import Goal

    want, mask = source.outputs[name].array, site.evidence.masks.get(name)

    def error(got: Array) -> float:
        return difference(got, want, mask=mask).relative if got.shape == want.shape else float("inf")

    return Goal(name, error, site.enough)


def _explained(found: Rewrite | None) -> Explanation | None:
    return None if found is None else Explanation(found.name, found.problem, "", found.fix, found.error)


def _both(one: Rewrite, other: Explanation) -> Explanation:
    """Return what both restore together."""
    return replace(
        other,
        name=f"{one.name} and {other.name}",
        problem=f"{one.problem}; {other.problem}",
        fix=f"{one.fix}; {other.fix}",
    )


def _compared(site: Site, source: Program, target: Program, name: str) -> OtherOperation:
    return departs(site.module, source, target, name, _goal(site, source, name).error, site.enough)


def _faults(found: Divergence | None) -> int:
    """Return how many different repairs explain a difference, as the same in each layer is one; 0 where none do."""
    if found is None or not found.proven:
        return 0
    return len({tuple((one.where, one.name) for one in (*repair.target, *repair.source)) for repair in found.repairs})


def departs(
    module: torch.nn.Module,
    source: Program,
    target: Program,
    name: str,
    error: Callable[[Array], float],
    enough: float,
) -> OtherOperation:
    """Search for the operation at which an output of the target departs from the JAX model's.

    Args:
        module: of the target.
        error: of a value as this output.
        enough: the error up to which the outputs are equal.
    """
    from convert.programs.divergence.search import diverge
    from convert.programs.divergence.wording import named

    before = error(target.outputs[name].array)
    tolerance = min(max(SHARE * before, FINEST), COARSEST)
    search = partial(diverge, source, target, name, error, min(enough, SHARE * before))
    found = search(tolerance)
    faults = _faults(found)
    if faults > 1 and SHARE * tolerance >= FINEST:  # the error of an epsilon may be small at first, and grow
        finer = search(SHARE * tolerance)
        found = finer if 0 < _faults(finer) < faults else found
    if found is None:
        return OtherOperation()
    training = [path for path, module in module.named_modules() if module.training]
    said = named(found, source, target, NUMPY_ACTIVATIONS, training)
    if not found.proven:
        return OtherOperation(known=said.problem, partly=bool(found.repairs))
    return OtherOperation(Explanation(said.name, said.problem, "", said.fix, found.error), said.order)
