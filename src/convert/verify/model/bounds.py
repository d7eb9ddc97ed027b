"""How far two runs may be apart when both models compute the same function."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from convert.numerics.compare import difference
from convert.numerics.tolerances import Tolerance, float64_tolerance, rounded_tolerance
from convert.planning.plan import Plan
from convert.references.protocol import Reference
from convert.verify.sides.evidence import Evidence
from convert.verify.sides.run_torch import TorchInFloat64

# Above what the shapes of the weights show, `reduction` and `depth` may be larger by these factors: sums over positions, iterations.
REDUCTION, DEPTH = 16, 256


def within_bounds(reference: Reference, plan: Plan, evidence: Evidence) -> tuple[Reference, list[str]]:
    """Return the reference with `reduction` and `depth` that the model can have, and notes on what was corrected.

    A sum has no more terms than a tensor has elements. Large ones make the tolerances so wide that they hide a difference.
    """
    sizes = [np.size(x) for x in evidence.inputs.values()]
    longest = REDUCTION * max(step.spec.size for step in plan.steps)
    deepest = DEPTH * (len(plan.steps) + max((n for x in evidence.inputs.values() for n in np.shape(x)), default=0))
    bounds = {"reduction": max(longest, *sizes) if sizes else longest, "depth": deepest}
    wrong = {name: bound for name, bound in bounds.items() if getattr(reference, name) > bound}
    notes = [
        f"`{name}` = {getattr(reference, name):,} of the reference is more than this model can have; the tolerances are derived from "
        f"{bound:,}"
        for name, bound in wrong.items()
    ]
    return replace(reference, **wrong), notes  # type: ignore[arg-type]


def bound_of_weights(name: str, reference: Reference, evidence: Evidence, torch_side: TorchInFloat64) -> Tolerance:
    """Derive the bound of two float64 runs from the rounding of JAX's native run, and of the weights if they were rounded.

    Args:
        name: a boundary or output with float64 values on both sides.
    """
    exact, mask = evidence.best_values[name], evidence.masks.get(name)
    drift = difference(evidence.native_values[name], exact, mask=mask).relative
    bound = float64_tolerance(drift, evidence.precision, reference.reduction, reference.depth)
    if not evidence.rounded:
        return bound
    perturbed, ours = (evidence.pick(name, values[name]) for values in (torch_side.perturbed, torch_side.exact))
    return rounded_tolerance(bound, difference(perturbed, ours, mask=mask).relative, evidence.rounded)


def with_rounded_tables(bound: Tolerance, name: str, evidence: Evidence, torch_side: TorchInFloat64) -> Tolerance:
    """Add what is unknown of the numbers that the code of a side rounded before it ran, as NumPy does with a table.

    Args:
        bound: as `bound_of_weights` returns it.
        name: as it takes it.
    """
    moved = {"JAX": evidence.moved[name]} if name in evidence.moved else {}
    if torch_side.shaken is not None:
        there, here = (evidence.pick(name, run[name]) for run in (torch_side.shaken, torch_side.exact))
        moved["PyTorch"] = difference(there, here, mask=evidence.masks.get(name)).relative
    for side, change in moved.items():
        said = f"numbers of the {side} code were rounded before it ran, and are known"
        bound = rounded_tolerance(bound, change, "float32", said)
    return bound
