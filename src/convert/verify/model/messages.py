"""Describe the outcome of the model level: where the models differ, and which comparisons prove nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from convert.core.findings import Finding
from convert.verify.report.report import Measure
from convert.verify.sides.built_module import Built
from convert.verify.sides.evidence import Evidence

if TYPE_CHECKING:
    import torch

Array = np.ndarray[Any, np.dtype[Any]]
ONE_PRECISION, ROUNDED = "another function in one precision", "rounded to a narrower dtype"
CAST = "module cast to another dtype"


def is_other_function(measure: Measure) -> bool:
    """Whether the two sides compute different functions, and not the same function with different rounding.

    Float64 decides; where it is unknown, native precision does.
    """
    if measure.float64 is None or measure.float64_tolerance is None:
        return not measure.passed
    return not measure.float64.relative <= measure.float64_tolerance.value


def not_compared(name: str, evidence: Evidence, got: Array | None) -> Finding:
    """Report a boundary or output that PyTorch's module does not have, or that has another shape there."""
    return Finding(
        "boundary-not-compared",
        "the PyTorch module has no such value at this boundary",
        path=name,
        expected=f"a value of shape {list(evidence.shape(name))}",
        got="no submodule of this name, or one that is never run" if got is None else f"shape {list(got.shape)}",
    )


def differences(
    measures: Sequence[Measure],
    precision: str,
    built: Built,
    state: Mapping[str, torch.Tensor],
    rounding: Callable[[Measure], str],
) -> Iterator[Finding]:
    """Report the first difference in float64; if there is none, the first one in native precision.

    Args:
        rounding: says which casts in the target's code make the difference; empty if none do.
    """
    wrong = [measure for measure in measures if not measure.passed]
    functions = [measure for measure in wrong if is_other_function(measure)]
    if not wrong:
        return
    first = functions[0] if functions else wrong[0]
    data: dict[str, Any] = {"first": first.name, "differing": [measure.name for measure in wrong]}
    count = f"{len(wrong)} of {len(measures)} boundaries and outputs differ"
    shown, tolerance, where, fix = first.difference, first.tolerance, "", ""
    if functions and first.float64 is not None:
        shown, tolerance, where = first.float64, first.float64_tolerance, " in float64"
    elif first.float64 is not None:
        data["diagnosis"] = ONE_PRECISION
        where = f" in {precision}, but not in float64 ({first.float64.relative:.1e})"
        fix = (
            f"the weights are right, and the PyTorch model computes another function in {precision}: look for code that depends on "
            "the dtype or for a custom kernel; --backends and --precision show who else differs"
        )
        if built.dtypes:
            data["diagnosis"], fix = CAST, f"{built.cast}; return it from `build` in the dtype of the weights"
        elif (changed := built.finding(state)) is not None:
            data["diagnosis"], fix = changed.data["diagnosis"], f"{changed.problem}; {changed.fix}"
        elif casts := rounding(first):
            data["diagnosis"], fix = (
                ROUNDED,
                f"the weights are right; the outputs are equal when the target does not round: {casts}",
            )
    assert tolerance is not None
    yield Finding(
        "outputs-differ",
        f"first difference{where}, at {list(shown.at)}: PyTorch {shown.got:.6g}, JAX {shown.want:.6g}; {count}",
        path=first.name,
        expected=f"a relative error of at most {tolerance.value:.1e}",
        got=f"{shown.relative:.1e}",
        fix=fix,
        data=data,
    )


def inconclusive(measures: Sequence[Measure], outputs: Sequence[str], evidence: Evidence) -> Iterator[str]:
    """Yield the reasons why the outputs prove nothing although nothing differs, with the next step."""
    by_name = {measure.name: measure for measure in measures}
    values = [evidence.native_values[name] for name in outputs if name in by_name]
    if values and all(value.size > 1 and np.all(value == value.flat[0]) for value in values):
        yield (
            f"all numbers of the outputs are the same ({values[0].flat[0]}), so they depend on no weight and no input; give other "
            "inputs, or return outputs of the reference that depend on the weights"
        )
    for name in outputs:
        if name not in evidence.native_values:
            yield f"the output {name} was not compared ({evidence.origin}, without it); record it again with `convert record`"
        if name not in by_name:
            continue
        measure = by_name[name]
        if nan := _nan_count(measure):
            yield (
                f"{name} is NaN on both sides at {nan:,} of the {measure.difference.size:,} numbers that count, which cannot be "
                "compared; find the cause (the weights level names tensors with NaN), or exclude padding with the reference's `masks`"
            )
        if measure.float64_tolerance is not None and not measure.float64_tolerance.conclusive:
            yield (
                f"{name} in float64 proves nothing, because rounding alone may change all of it (tolerance "
                f"{measure.float64_tolerance.value:.1e}: {measure.float64_tolerance.why})"
            )
        if measure.float64 is None and measure.tolerance is not None and not measure.tolerance.conclusive:
            yield (
                f"{name} is known only in {evidence.precision}, where rounding alone may change all of it (tolerance "
                f"{measure.tolerance.value:.1e}: {measure.tolerance.why}); check with a wider --precision, or against a recording "
                "with float64 values"
            )


def inconclusive_notes(measures: Sequence[Measure], evidence: Evidence) -> Iterator[str]:
    """Yield notes on comparisons that prove nothing: the tolerance is as large as the values, or both sides are NaN."""
    wide = [(m.name, m.tolerance.value) for m in measures if m.tolerance is not None and not m.tolerance.conclusive]
    if wide:
        name, tolerance = wide[0]
        yield (
            f"in {evidence.precision}, {len(wide)} of {len(measures)} comparisons prove nothing, because rounding alone may change all "
            f"of the values ({name}: tolerance {tolerance:.1e})"
            + ("; there only float64 decides" if evidence.float64_values is not None else "")
        )
    nan = [measure.name for measure in measures if _nan_count(measure)]
    if nan:
        more = f" and {len(nan) - 1} more" if len(nan) > 1 else ""
        yield f"NaN on both sides cannot be compared: {nan[0]}{more}"


def _nan_count(measure: Measure) -> int:
    """Count the numbers that are NaN on both sides."""
    return max(measure.difference.nan, measure.float64.nan if measure.float64 is not None else 0)
