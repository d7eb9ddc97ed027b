"""Level 4: compare the JAX model with the PyTorch model at every boundary and output, in float64 and in native precision."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from convert.core.tensor_spec import is_float
from convert.numerics.compare import Difference, agreement, difference
from convert.numerics.precision import gpu_name
from convert.numerics.real_numbers import in_float64
from convert.numerics.tolerances import run_tolerance
from convert.planning.plan import Plan
from convert.references.protocol import Reference
from convert.verify.diagnosis.diagnose import Diagnosis, diagnose
from convert.verify.model.bounds import bound_of_weights, with_rounded_tables, within_bounds
from convert.verify.model.messages import differences, inconclusive, inconclusive_notes, is_other_function, not_compared
from convert.verify.report.report import LevelReport, Measure, Verdict
from convert.verify.sides.built_module import built_with
from convert.verify.sides.evidence import Evidence, Values
from convert.verify.sides.run_jax import jax_weights, native_values
from convert.verify.sides.run_torch import TorchInFloat64, exact_state, run_torch, torch_in_float64, written_state
from convert.verify.sides.second_call import second_call
from convert.verify.stopped import REPORT, Remaining, or_stopped
from convert.writing.written import Written

if TYPE_CHECKING:
    import torch

SECOND_CALL = "the second call"
SWITCHES = (
    "the target's code lets PyTorch round the factors of float32 products (TF32, or bfloat16 on a CPU); this check multiplies at full "
    "precision wherever it can, so that runs on a GPU may differ more"
)
MOST_CASTS = 3  # that a finding lists


def check_model(
    plan: Plan,
    written: Written,
    reference: Reference,
    evidence: Evidence,
    *,
    device: str = "cpu",
    proves_nothing: Callable[[], str] | None = None,
) -> LevelReport:
    """Compare the PyTorch model with the evidence at every boundary and output.

    Each has two measures: in float64 (is it the same function?) and in `evidence.precision` (how far do the two drift apart?).
    The level is inconclusive when an output was not compared, or when its comparison proves nothing.

    Args:
        proves_nothing: says why a difference from the evidence proves nothing; empty where it does. Called where there is one.
    """
    started = time.monotonic()
    reference, corrected = within_bounds(reference, plan, evidence)
    names = list(evidence.best_values)
    torch_side = torch_in_float64(plan, written, reference, evidence, names, device, finest=evidence.precision)
    exact, inputs, precision = torch_side.exact, evidence.inputs, evidence.precision
    state = written_state(written, device, precision)
    native = run_torch(reference, state, inputs, names, lift=False, precision=precision, device=device)
    drifted, built = native.values, built_with(native.module, state)
    measures, missing = [], []
    drifting = _where_code_casts(plan, reference, evidence) if torch_side.casts == {"float32"} else evidence
    drift = 0.0  # the largest of JAX's native run so far
    for name in names:
        if name in exact and exact[name].shape == evidence.shape(name):
            drift = max(drift, _jax_drift(name, drifting))
            measures.append(_measure(name, reference, evidence, torch_side, drifted, drift, drifting.precision))
        else:
            missing.append(not_compared(name, evidence, exact.get(name)))
    diagnosis = None
    wrong = {measure.name for measure in measures if is_other_function(measure)}
    wrong |= {found.path for found in missing if found.path in exact and found.path not in evidence.samples}
    first = next((name for name in names if name in wrong), None)
    remaining = Remaining()
    nothing = ""
    if first is not None and proves_nothing is not None:
        nothing = remaining("the run with other weights", proves_nothing, "")
    if first is not None and not nothing:
        bounds = {m.name: m.tolerance if m.float64 is None else m.float64_tolerance for m in measures}
        bound = bounds.get(first)
        allowed = bound.value if bound is not None else 0.0
        differing = [name for name in names if name in wrong]
        given = partial(exact_state, plan, written, device)
        module = torch_side.module
        error = next(((m.float64 or m.difference).relative for m in measures if m.name == first), math.inf)
        diagnosis = or_stopped(
            lambda: diagnose(plan, reference, module, first, evidence, allowed, names, differing, given),
            lambda why: Diagnosis(first, "", why, "", REPORT, error, error, ()),
        )
    compared = "1 boundary or output" if len(measures) == 1 else f"{len(measures)} boundaries and outputs"
    notes = [f"{compared}, {evidence.origin}", *evidence.notes, *corrected]
    if gpu := gpu_name(device):
        notes.append(f"PyTorch ran on {device}, {gpu}, with float32 products at full precision (no TF32)")
    if native.switches:
        notes.append(SWITCHES)
    for side, what in (("JAX", evidence.unlifted), ("torch", (*torch_side.unlifted, *torch_side.rounded))):
        if what:
            notes.append(f"could not be computed in float64 in {side}: {', '.join(what)}")
    notes += [*inconclusive_notes(measures, evidence), *built.notes(precision), *_of_two_dtypes(written)]

    def rounding(measure: Measure) -> str:
        casts = partial(_rounding, reference, evidence, state, device, measure)
        return remaining("the search for casts", casts, "")

    findings = [*missing, *differences(measures, evidence.precision, built, state, rounding)]
    if not findings and (changed := built.finding(state)) is not None:
        findings.append(changed)
    if not findings:
        limits = {
            m.name: m.tolerance.value for m in measures if m.tolerance is not None and m.name in reference.outputs
        }
        again = partial(second_call, reference, native.module, evidence, drifted, limits, device)
        kept = remaining(SECOND_CALL, again, None)
        findings += [] if kept is None else [kept]
    reasons = list(inconclusive(measures, reference.outputs, evidence))
    reasons += [why for what, why in remaining.errors.items() if what == SECOND_CALL]
    if nothing:
        findings, reasons = [], [nothing]
    verdict = Verdict.FAILED if findings else Verdict.INCONCLUSIVE if reasons else Verdict.PASSED
    undecided = verdict is Verdict.INCONCLUSIVE
    return LevelReport(
        "model",
        verdict,
        "; ".join(reasons) if undecided else "",
        tuple(findings),
        tuple(measures),
        (*notes, *remaining.notes, *(() if undecided else reasons)),
        time.monotonic() - started,
        diagnosis.to_dict() if diagnosis else None,
    )


def _rounding(
    reference: Reference, evidence: Evidence, state: Mapping[str, torch.Tensor], device: str, measure: Measure
) -> str:
    """Return the casts to narrower floats without which the native run of the target is within its bounds; empty if none are."""
    from convert.verify.sides.no_narrow_cast import without_narrow_casts

    name, precision = measure.name, evidence.precision
    with without_narrow_casts(precision) as casts:
        run = run_torch(reference, state, evidence.inputs, [name], lift=False, precision=precision, device=device)
    got = evidence.pick(name, run.values[name])
    left = difference(got, evidence.native_values[name], precision=precision, mask=evidence.masks.get(name)).relative
    if not casts or measure.tolerance is None or not left <= measure.tolerance.value:
        return ""
    return "; ".join(f"{line} rounds {what}" for line, what in list(casts.items())[:MOST_CASTS])


def _where_code_casts(plan: Plan, reference: Reference, evidence: Evidence) -> Evidence:
    """Return the evidence with a JAX run that rounds as code does that casts to float32, also when all else is in float64.

    The JAX code may have no such cast; its float64 run then says nothing about how much the model amplifies rounding in float32.
    """
    if evidence.precision != "float64" or not evidence.is_live:
        return evidence
    values = native_values(reference.jax_side(), jax_weights(plan), evidence.inputs, "float32")
    return replace(
        evidence, native_values={name: in_float64(value) for name, value in values.items()}, precision="float32"
    )


def _of_two_dtypes(written: Written) -> Iterator[str]:
    """Yield that the file has float64 beside narrower floats: the module may refuse it as it is, and both runs here have all in one dtype."""
    narrower = sorted({spec.dtype for spec in written.specs.values() if is_float(spec.dtype)} - {"float64"})
    wide = [name for name, spec in written.specs.items() if spec.dtype == "float64"]
    if narrower and wide:
        more = f" and {len(wide) - 1} more" if len(wide) > 1 else ""
        yield (
            f"the file has {wide[0]}{more} in float64, and other tensors in {', '.join(narrower)}; both models ran with one dtype, and "
            "PyTorch multiplies no two: convert with --dtype float32 unless the module casts"
        )


def _jax_drift(name: str, evidence: Evidence) -> float:
    """Return the error of JAX's native run against its float64 run; 0 where it is unknown or not finite, which allows nothing."""
    if evidence.float64_values is None:
        return 0.0
    drift = difference(
        evidence.native_values[name], evidence.float64_values[name], mask=evidence.masks.get(name)
    ).relative
    return drift if math.isfinite(drift) else 0.0


def _measure(
    name: str,
    reference: Reference,
    evidence: Evidence,
    torch_side: TorchInFloat64,
    run_values: Values,
    drift: float,
    drifted_in: str,
) -> Measure:
    """Measure one boundary or output. PyTorch's own error has no influence on the tolerance.

    Args:
        run_values: of PyTorch in native precision.
        drift: the largest of JAX so far; drifted_in: the precision of that run.
    """
    mask = evidence.masks.get(name)
    precision = evidence.precision
    reduction, depth = reference.reduction, reference.depth
    exact, written, drifted = (
        evidence.pick(name, values[name]) for values in (torch_side.exact, torch_side.written, run_values)
    )
    run = _located(difference(drifted, evidence.native_values[name], precision=precision, mask=mask), name, evidence)
    is_logits = name in reference.logits
    predicted = agreement(drifted, evidence.native_values[name], mask=mask) if is_logits else None
    weights = 0.0
    float64 = float64_bound = predicted_float64 = None
    if evidence.float64_values is not None:  # else a recording without float64 values
        float64 = _located(
            difference(exact, evidence.float64_values[name], precision="float64", mask=mask), name, evidence
        )
        of_weights = bound_of_weights(name, reference, evidence, torch_side)
        weights = (
            of_weights.value if evidence.rounded else 0.0
        )  # the native runs may differ by as much as the float64 runs
        float64_bound = with_rounded_tables(of_weights, name, evidence, torch_side)
        predicted_float64 = agreement(exact, evidence.float64_values[name], mask=mask) if is_logits else None
        if torch_side.written is not torch_side.exact:
            weights += difference(written, evidence.float64_values[name], mask=mask).relative
    allowed = run_tolerance(
        drift, precision, reduction, depth, weights=weights, casts=bool(torch_side.casts), drifted_in=drifted_in
    )
    return Measure(name, run, allowed, float64, float64_bound, logits=predicted, float64_logits=predicted_float64)


def _located(found: Difference, name: str, evidence: Evidence) -> Difference:
    """Return the difference with its index in the whole value, if only a sample was compared."""
    sample = evidence.samples.get(name)
    return found if sample is None else replace(found, at=sample.index(found.at))
