"""Compare a tied table with the tensor that it is tied to: the file holds it under each name, and the values must be equal.

``load_state_dict`` copies one after the other into the one parameter, so of two that differ the last one wins, without an error.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from convert.core.findings import Finding
from convert.numerics.bits import count_unequal
from convert.planning.plan import Plan
from convert.writing.written import Written

Array = np.ndarray[Any, np.dtype[Any]]
UNTIED = "an untied head"
BLOCK = 1 << 20  # values that are compared at once


def compare_tied(plan: Plan, written: Written) -> dict[str, Finding]:
    """Return a finding for each tied tensor that differs; the coverage level reports those that are missing."""
    findings = {}
    steps = {step.name: step for step in plan.steps}
    for step in plan.steps:
        if not step.tied or any(written.specs.get(name) != steps[name].spec for name in (step.name, step.tied)):
            continue
        transposed = step.name in plan.torch_tensors and plan.torch_tensors[step.name][0].transposed
        copy = written.read(step.name)
        count, size = compare_tensors(copy.T if transposed else copy, written.read(step.tied))
        if count:
            findings[step.name] = Finding(
                "tied-weights-differ",
                f"{UNTIED}: a model with one parameter for both computes with the tensor that is loaded last",
                step.rule.line_only,
                step.name,
                expected=f"the values of {step.tied}, to which the rule ties it",
                got=f"{count} of {step.spec.size} values differ, by at most {size:.1e}",
                fix=f"write the values of {step.tied} under both names, or give {step.name} its own rule, if the source has a "
                "leaf for it",
                data={"diagnosis": UNTIED, "values": count, "max_abs": size, "tied_to": step.tied},
            )
    return findings


def compare_tensors(a: Array, b: Array) -> tuple[int, float]:
    """Count the values that differ between two tensors of one shape, block by block; also return the largest difference."""
    a, b = np.atleast_1d(a), np.atleast_1d(b)  # a counter of a BatchNorm has no axes
    step = max(1, BLOCK // max(1, a[:1].size))
    count, size = 0, 0.0
    for k in range(0, len(a), step):
        x, y = a[k : k + step], b[k : k + step]
        if unequal := count_unequal(x, y):
            count += unequal
            size = max(size, float(np.nanmax(np.abs(x.astype(np.float64) - y.astype(np.float64)), initial=0.0)))
    return count, size
