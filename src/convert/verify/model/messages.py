"""What the measures of the model level tell: where the models differ and in what, and which comparisons prove nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from convert.core.findings import Finding
from convert.verify.report.report import Measure
from convert.verify.sides.evidence import Evidence

Array = np.ndarray[Any, np.dtype[Any]]


def other_function(measure: Measure) -> bool:
    """Whether the two compute another function, as opposed to the same one with another rounding.

    Where lifted float64 is not known, the run in the precision that users run stands for it.
    """
    if measure.lifted is None or measure.lifted_tolerance is None:
        return not measure.passed
    return not measure.lifted.relative <= measure.lifted_tolerance.value


def absent(name: str, evidence: Evidence, got: Array | None) -> Finding:
    """A boundary or an output that cannot be compared: PyTorch's module does not have it, or has another shape there."""
    if got is None:
        said = "has a value here, and the PyTorch module has no submodule of this name, or does not call it"
    else:
        said = (
            f"has a value of shape {list(evidence.shape(name))} here, and the PyTorch module one of {list(got.shape)}"
        )
    return Finding("boundary-not-compared", f"the JAX model {said}", path=name)


def differences(measures: Sequence[Measure], precision: str) -> Iterator[Finding]:
    """The first difference of the functions, if there is one; else the first that only the run in `precision` shows."""
    wrong = [measure for measure in measures if not measure.passed]
    functions = [measure for measure in wrong if other_function(measure)]
    if not wrong:
        return
    first = functions[0] if functions else wrong[0]
    data = {"first": first.name, "differing": [measure.name for measure in wrong]}
    counted = f"{len(wrong)} of {len(measures)} boundaries and outputs differ"
    shown, bound, run = first.difference, first.tolerance, ""
    if functions and first.lifted is not None:
        shown, bound = first.lifted, first.lifted_tolerance
    elif first.lifted is not None:
        run = f", as run in {precision}"
        data["diagnosis"] = "another function in one precision"
        counted += (
            f". In lifted float64 the two agree here ({first.lifted.relative:.1e}), so that the weights are right, and rounding does not "
            f"explain it: the PyTorch model computes something else in {precision}. Look for code that depends on the dtype, and for "
            f"a kernel of its own; --backends tells who else does, and --precision whether other dtypes are right"
        )
    assert bound is not None
    yield Finding(
        "outputs-differ",
        f"first difference at {first.name}{run}: relative error {shown.relative:.1e} where {bound.value:.1e} is allowed "
        f"(PyTorch {shown.got:.6g}, JAX {shown.want:.6g} at {list(shown.at)}); {counted}",
        path=first.name,
        data=data,
    )


def undecided(measures: Sequence[Measure], outputs: Sequence[str], evidence: Evidence) -> Iterator[str]:
    """Why the outputs prove nothing although nothing differs, and what to do."""
    by_name = {measure.name: measure for measure in measures}
    for name in outputs:
        if name not in evidence.native_values:
            yield (
                f"the output {name} was not compared: {evidence.origin}, and it is not in there; record it again with "
                "`convert record`"
            )
        if name not in by_name:
            continue
        found = by_name[name]
        if nan := _nan(found):
            yield (
                f"{name} is NaN on both sides at {nan:,} of the {found.difference.size:,} numbers that count, so that nothing was "
                "compared there: see what makes them NaN (the weights level names tensors with NaN), or leave padding out by "
                "the reference's `masks`"
            )
        if found.lifted_tolerance is not None and not found.lifted_tolerance.conclusive:
            yield f"{name}: lifted float64 proves nothing, as rounding alone may change all of it (allowed {found.lifted_tolerance.value:.1e}: {found.lifted_tolerance.why})"
        if found.lifted is None and found.tolerance is not None and not found.tolerance.conclusive:
            yield (
                f"{name} is known as run in {evidence.precision} alone, where rounding may change all of it (allowed "
                f"{found.tolerance.value:.1e}: {found.tolerance.why}); check in a wider --precision, or against a recording "
                "with lifted float64"
            )


def silent(measures: Sequence[Measure], evidence: Evidence) -> Iterator[str]:
    """Notes on comparisons that say nothing: the bound is as large as the values, or both sides are NaN."""
    wide = [(m.name, m.tolerance.value) for m in measures if m.tolerance is not None and not m.tolerance.conclusive]
    if wide:
        name, bound = wide[0]
        yield (
            f"as run in {evidence.precision}, {len(wide)} of {len(measures)} comparisons say nothing: rounding alone may change all of "
            f"the values ({name}: {bound:.1e} is allowed)"
            + ("; there lifted float64 alone decides" if evidence.float64_values is not None else "")
        )
    nan = [measure.name for measure in measures if _nan(measure)]
    if nan:
        more = f" and {len(nan) - 1} more" if len(nan) > 1 else ""
        yield f"NaN on both sides, so that nothing was compared there: {nan[0]}{more}"


def _nan(measure: Measure) -> int:
    return max(measure.difference.nan, measure.lifted.nan if measure.lifted is not None else 0)
