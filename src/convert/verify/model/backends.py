"""Run the same weights with every available backend, and find the one that computes another function.

A backend deviates if its distance from its own model in float64 is larger than rounding allows. That is a bug of the backend, not
of the weights. If no backend deviates and JAX and PyTorch still differ in float64, it is a bug of the conversion.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from convert.core.findings import Finding
from convert.numerics.compare import TF32, TF32_DIGITS, Difference, difference, epsilon
from convert.numerics.precision import gpu_name
from convert.numerics.tolerances import Tolerance, run_floor
from convert.planning.plan import Plan
from convert.references.protocol import Reference
from convert.verify.model.backend_runs import (
    CUDA,
    CUDA_TF32,
    EAGER,
    JAX_NAMES,
    OP_BY_OP,
    RECORDED,
    Skip,
    jax_runs,
    torch_runs,
)
from convert.verify.model.bounds import bound_of_weights, with_rounded_tables, within_bounds
from convert.verify.report.report import LevelReport, Measure, Verdict
from convert.verify.sides.evidence import Evidence, Values
from convert.verify.sides.run_torch import TorchInFloat64, torch_in_float64
from convert.writing.written import Written

Array = np.ndarray[Any, np.dtype[Any]]
Locate = Callable[[], Values]
LEVEL = "backends"
SIDES = ("JAX", "torch")
PLAIN = (OP_BY_OP, RECORDED, EAGER)  # no compiler, nothing fused
FACTOR = 8.0  # of the smaller of two roundings: in the golden models torch rounds up to 2.6 times as much as JAX
NOT_RUN = "a backend that does not run"


@dataclass(frozen=True)
class _Backend:
    """The values of a backend, and the distance of each from the same model in float64."""

    name: str
    values: Values
    drift: Mapping[str, Difference]

    @property
    def side(self) -> str:
        """The model that the backend runs."""
        return "JAX" if self.name in JAX_NAMES else "torch"

    def precision(self, of_evidence: str) -> str:
        """The precision in which the backend multiplies."""
        return TF32 if self.name == CUDA_TF32 else of_evidence


@dataclass(frozen=True)
class _Context:
    """What all comparisons share.

    Attributes:
        float64: side -> values in float64.
        allowed: backend -> name -> tolerance of its distance from float64.
    """

    reference: Reference
    evidence: Evidence
    float64: Mapping[str, Values]
    allowed: Mapping[str, Mapping[str, Tolerance]]

    def between(self, one: Array, two: Array, name: str, precision: str | None = None) -> Difference:
        mask = self.evidence.masks.get(name)
        return difference(one, two, precision=precision or self.evidence.precision, mask=mask)

    def beyond(self, backend: _Backend) -> list[str]:
        """Return the names at which a backend is beyond its tolerance, in the order of the data."""
        allowed = self.allowed[backend.name]
        return [name for name, found in backend.drift.items() if not found.relative <= allowed[name].value]


def check_backends(
    plan: Plan,
    written: Written,
    reference: Reference,
    evidence: Evidence,
    *,
    weights: Verdict | None = None,
    only: Collection[str] | None = None,
) -> LevelReport:
    """Run every backend in the evidence's precision, and report those that compute another function.

    Args:
        evidence: what the JAX model computed, live or recorded.
        weights: verdict of the weights level; None if it did not run.
        only: names of backends to run; None for all.
    """
    started = time.monotonic()
    reference, corrected = within_bounds(reference, plan, evidence)
    torch_side = torch_in_float64(plan, written, reference, evidence, list(evidence.native_values), "cpu")
    as_written = {
        name: evidence.pick(name, torch_side.written[name])
        for name in evidence.native_values
        if name in torch_side.written
    }
    float64 = {"JAX": evidence.float64_values or {}, "torch": as_written}
    runs, locate, skipped, failed = _run_all(plan, written, reference, evidence, only)
    backends = [_backend(name, values, float64, evidence) for name, values in runs.items()]
    context = _Context(reference, evidence, float64, _allowed(backends, evidence, reference))
    backends = [_located(backend, locate.get(backend.name), context) for backend in backends]
    deviating = [(backend, first) for backend in backends if (first := _first_beyond(backend, context)) is not None]
    findings = [
        *(
            Finding("backend-failed", f"the backend did not run: {why}", path=name, data={"diagnosis": NOT_RUN})
            for name, why in failed
        ),
        *(finding for backend in backends for finding in _incomplete(backend, context)),
        *_verdicts(backends, deviating, context, torch_side, weights),
    ]
    notes = [f"{len(backends)} backends in {evidence.precision}, {_names(backends)}", *corrected]
    if CUDA in runs:
        notes.append(f"CUDA is {gpu_name('cuda')}; {CUDA_TF32} multiplies with factors of {TF32_DIGITS} binary digits")
    notes += [f"{name} was skipped: {why}" for name, why in skipped]
    for side, what in (("JAX", evidence.unlifted), ("torch", torch_side.unlifted)):
        if what:
            notes.append(f"could not be computed in float64 in {side}: {', '.join(what)}")
    decided = Verdict.FAILED if findings else Verdict.PASSED if len(backends) > 1 else Verdict.SKIPPED
    return LevelReport(
        LEVEL,
        decided,
        "" if decided is not Verdict.SKIPPED else "fewer than two backends ran",
        tuple(findings),
        tuple(_measure(backend, context) for backend in backends if backend.drift),
        tuple(notes),
        time.monotonic() - started,
        matrix=_matrix(backends, context),
    )


def _names(backends: list[_Backend]) -> str:
    return ", ".join(backend.name for backend in backends)


def _run_all(
    plan: Plan,
    written: Written,
    reference: Reference,
    evidence: Evidence,
    only: Collection[str] | None,
) -> tuple[dict[str, Values], dict[str, Locate], list[tuple[str, str]], list[tuple[str, str]]]:
    """Run the backends.

    Returns:
        The values of each, how to compute its boundaries, those that were skipped and why, and registered ones that failed.
    """
    runs: dict[str, Values] = {}
    locate: dict[str, Locate] = {}
    skipped: list[tuple[str, str]] = []
    failed: list[tuple[str, str]] = []
    for run in (*jax_runs(plan, reference, evidence), *torch_runs(written, reference, evidence)):
        if only is not None and run.name not in only:
            continue
        try:
            values = run.make()
        except Skip as skip:
            (failed if run.registered else skipped).append((run.name, str(skip)))
            continue
        runs[run.name] = _picked(values, evidence, run.name)
        if run.locate is not None:
            locate[run.name] = run.locate
    return runs, locate, skipped, failed


def _picked(values: Values, evidence: Evidence, backend: str) -> Values:
    """Return the part of a backend's values that can be compared with the evidence; recorded values are that part already."""
    if backend == RECORDED:
        return values
    return {name: evidence.pick(name, values[name]) for name in evidence.native_values if name in values}


def _located(backend: _Backend, locate: Locate | None, context: _Context) -> _Backend:
    """Return the backend with values at boundaries, if its outputs are wrong and its boundaries are not known yet."""
    if locate is None or _first_beyond(backend, context) is None:
        return backend
    try:
        values = {**_picked(locate(), context.evidence, backend.name), **backend.values}
    except Skip:
        return backend
    order = {name: values[name] for name in context.evidence.native_values if name in values}
    return _backend(backend.name, order, context.float64, context.evidence)


def _backend(name: str, values: Values, float64: Mapping[str, Values], evidence: Evidence) -> _Backend:
    exact = float64["JAX" if name in JAX_NAMES else "torch"]
    drift = {
        key: difference(value, exact[key], precision=evidence.precision, mask=evidence.masks.get(key))
        for key, value in values.items()
        if key in exact and value.shape == exact[key].shape
    }
    return _Backend(name, values, drift)


def _allowed(backends: list[_Backend], evidence: Evidence, reference: Reference) -> dict[str, dict[str, Tolerance]]:
    """Derive how far each backend may be from float64, from the rounding of the plain backends.

    Plain are JAX op by op (or recorded) and torch eager, which no compiler changed. The smaller of their two roundings counts, so
    that no backend widens its own tolerance. If the precision is float64, the code of one side may cast to float32; then that
    side's own rounding counts, up to what rounding in float32 may do. A backend that multiplies in TF32 rounds as many units of
    TF32 as the plain backends round units of float32.
    """
    precision, reduction, depth = evidence.precision, reference.reduction, reference.depth
    most = run_floor("float32", reduction, depth)
    plain = [backend for backend in backends if backend.name in PLAIN] or backends

    def typical(name: str, side: str) -> float:
        known = [(b.side, b.drift[name].relative) for b in plain if name in b.drift]
        of_all, own = (lower_median([d for s, d in known if s in sides]) for sides in (SIDES, (side,)))
        return max(of_all, min(own, most)) if precision == "float64" else of_all

    def bound(name: str, backend: _Backend) -> Tolerance:
        own = backend.precision(precision)
        floor = run_floor(own, reduction, depth)
        rounding = typical(name, backend.side) * (epsilon(own) / epsilon(precision))
        larger = max(rounding, floor)
        return Tolerance(
            FACTOR * larger,
            f"{FACTOR:.0f} x {larger:.1e}: what a plain backend rounds in {own} ({rounding:.1e} from float64, the smaller of "
            f"JAX op by op and torch eager), or what any model of this size may (sqrt of {reduction} summands, {depth} layers)",
        )

    names = {side: dict.fromkeys(name for b in backends if b.side == side for name in b.drift) for side in SIDES}
    return {backend.name: {name: bound(name, backend) for name in names[backend.side]} for backend in backends}


def lower_median(numbers: list[float]) -> float:
    """Return the median, or the smaller of the two middle numbers; 0 if there are none."""
    return sorted(numbers)[(len(numbers) - 1) // 2] if numbers else 0.0


def _first_beyond(backend: _Backend, context: _Context) -> str | None:
    """Return the first name at which a backend is beyond its tolerance, in the order of the data."""
    return next(iter(context.beyond(backend)), None)


def _measure(backend: _Backend, context: _Context) -> Measure:
    """Measure the output of a backend that is furthest from float64, or a boundary if no output is known."""
    known = [name for name in context.reference.outputs if name in backend.drift] or list(backend.drift)
    allowed = context.allowed[backend.name]
    worst = max(known, key=lambda name: backend.drift[name].relative / allowed[name].value)
    return Measure(f"{backend.name}: {worst}", backend.drift[worst], allowed[worst])


def _matrix(backends: list[_Backend], context: _Context) -> dict[str, dict[str, float]]:
    """Return the largest relative differences of outputs between backends, and from float64; errors are relative to the row."""
    columns: dict[str, Values] = {backend.name: backend.values for backend in backends}
    columns |= {f"{side} float64": values for side, values in context.float64.items() if values}

    def apart(one: Values, two: Values) -> float:
        outputs = [name for name in context.reference.outputs if name in one and name in two]
        shared = [name for name in outputs if one[name].shape == two[name].shape]
        return max((context.between(one[name], two[name], name).relative for name in shared), default=float("nan"))

    return {
        row: {column: 0.0 if row == column else apart(values, reference) for column, values in columns.items()}
        for row, reference in columns.items()
    }


# ---- the verdict


def _incomplete(backend: _Backend, context: _Context) -> Iterator[Finding]:
    """Report outputs that cannot be compared."""
    exact = context.float64[backend.side]
    for name in context.reference.outputs:
        if name in exact and name not in backend.drift:
            yield Finding(
                "backend-failed",
                f"the output {name}",
                path=backend.name,
                expected=f"shape {list(exact[name].shape)}",
                got=f"shape {list(backend.values[name].shape)}" if name in backend.values else "no value",
                data={"diagnosis": NOT_RUN, "first": name},
            )


def _verdicts(
    backends: list[_Backend],
    deviating: list[tuple[_Backend, str]],
    context: _Context,
    torch_side: TorchInFloat64,
    weights: Verdict | None,
) -> list[Finding]:
    """Report the backends that deviate, and whether the two models differ in float64."""
    conversion = _conversion(context, torch_side)
    agreeing = [backend for backend in backends if all(backend is not other for other, _ in deviating)]
    equal = conversion is None and weights is not Verdict.FAILED
    return [
        *([] if conversion is None else [conversion]),
        *(_deviation(backend, first, agreeing, context, equal, weights) for backend, first in deviating),
    ]


def _deviation(
    backend: _Backend, first: str, agreeing: list[_Backend], context: _Context, equal: bool, weights: Verdict | None
) -> Finding:
    """Report a backend that computes another function.

    Args:
        equal: whether the weights are known to be right.
    """
    found, tolerance = backend.drift[first], context.allowed[backend.name][first]
    proof = ""
    if equal:
        bits = weights is Verdict.PASSED
        how = "bit for bit" if bits else "both models compute the same function in float64"
        proof = f"the weights are equal ({how}), but "
    others = f"{_names(agreeing)} agree" if agreeing else "no other backend agrees, either"
    fix = (
        f"do not change the conversion: report the bug to the makers of {backend.name}, or run without it"
        if equal
        else "correct the conversion first, and check again"
    )
    return Finding(
        "backend-differs",
        f"{proof}this backend computes another function, first at {first} {list(found.at)}: {found.got:.6g}, in float64 "
        f"{found.want:.6g}; {others}",
        path=backend.name,
        expected=f"a relative error of at most {tolerance.value:.1e}",
        got=f"{found.relative:.1e}",
        fix=fix,
        data={
            "diagnosis": "a backend",
            "backend": backend.name,
            "first": first,
            "differing": context.beyond(backend),
            "relative": found.relative,
            "allowed": tolerance.value,
            "agreeing": [other.name for other in agreeing],
        },
    )


def _conversion(context: _Context, torch_side: TorchInFloat64) -> Finding | None:
    """Report where the two models differ in float64: then it is a bug of the conversion, not of a backend."""
    evidence = context.evidence
    for name, theirs in context.float64["JAX"].items():
        if name not in torch_side.exact or torch_side.exact[name].shape != evidence.shape(name):
            continue
        bound = bound_of_weights(name, context.reference, evidence, torch_side)
        bound = with_rounded_tables(bound, name, evidence, torch_side)
        found = context.between(evidence.pick(name, torch_side.exact[name]), theirs, name, "float64")
        if not found.relative <= bound.value:
            return Finding(
                "outputs-differ",
                "the PyTorch model differs from the JAX model in float64, too, so no backend is the cause",
                path=name,
                expected=f"a relative error of at most {bound.value:.1e}",
                got=f"{found.relative:.1e}",
                fix="see the levels weights, layers and model: the conversion is wrong, or the models are not the same",
                data={"diagnosis": "wrong conversion", "first": name, "relative": found.relative},
            )
    return None
