"""A table that the target has under several names: the file holds it under each, and all of them must be equal.

``load_state_dict`` copies one after the other into the one parameter that the names share, so of two that differ the last one
wins: the model computes with a table that is not the embedding's, and no loader says so.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from convert.core.findings import Finding
from convert.planning.plan import Plan
from convert.verify.numerics.bits import count_unequal
from convert.verify.written import Written

Array = np.ndarray[Any, np.dtype[Any]]
UNTIED = "an untied head"
BLOCK = 1 << 20  # values that are compared at once


def untied(plan: Plan, written: Written) -> dict[str, Finding]:
    """Name of a tied tensor -> that it differs from the one that it is tied to; those that the file lacks are coverage's."""
    found = {}
    steps = {step.name: step for step in plan.steps}
    for step in plan.steps:
        if not step.tied or any(written.specs.get(name) != steps[name].spec for name in (step.name, step.tied)):
            continue
        turned = step.name in plan.holders and plan.holders[step.name][0].turned
        other = written.read(step.name)
        count, size = apart(other.T if turned else other, written.read(step.tied))
        if count:
            found[step.name] = Finding(
                "tied-weights-differ",
                f"{UNTIED}: {step.name} differs from {step.tied}, to which {step.rule.line_only} ties it, in {count} of "
                f"{step.spec.size} values, by {size:.1e} at most: a model that has one parameter for both computes with whichever "
                f"is loaded last; write the values of {step.tied} under both names, or give {step.name} a rule of its own, if the "
                "source has a leaf for it",
                rule=step.rule.line_only,
                path=step.name,
                data={"diagnosis": UNTIED, "values": count, "max_abs": size, "tied_to": step.tied},
            )
    return found


def apart(a: Array, b: Array) -> tuple[int, float]:
    """How many values differ between two tensors of one shape, and by how much at most; piece by piece."""
    step = max(1, BLOCK // max(1, a[:1].size))
    count, size = 0, 0.0
    for k in range(0, len(a), step):
        x, y = a[k : k + step], b[k : k + step]
        if found := count_unequal(x, y):
            count += found
            size = max(size, float(np.nanmax(np.abs(x.astype(np.float64) - y.astype(np.float64)), initial=0.0)))
    return count, size
