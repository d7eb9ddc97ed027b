"""The same weights through every backend at hand: which one computes differently, and whether the weights have a part in it.

A backend is odd when it is further from lifted float64 of its own side than the others' rounding allows. An odd backend is no
fault of the weights. When no backend is odd and yet JAX's and torch's functions differ, it is no fault of a backend.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from convert.core.findings import Finding
from convert.planning.plan import Plan
from convert.references.protocol import Reference
from convert.verify.model.backend_runs import EAGER, JAX_NAMES, OP_BY_OP, RECORDED, Skip, jax_runs, torch_runs
from convert.verify.numerics.compare import (
    Difference,
    Tolerance,
    difference,
    lifted_tolerance,
    rounded_tolerance,
    run_floor,
)
from convert.verify.report.report import LevelReport, Measure, Verdict
from convert.verify.sides.evidence import Evidence, Values
from convert.verify.sides.run_torch import lifted_torch
from convert.verify.written import Written

Array = np.ndarray[Any, np.dtype[Any]]
Locate = Callable[[], Values]
LEVEL = "backends"
SIDES = ("JAX", "torch")
ANCHORS = (OP_BY_OP, RECORDED, EAGER)  # as the models' authors wrote them, with nothing fused
FACTOR = 8.0  # of the smaller of two roundings; the goldens' torch rounds up to 2.6 times as much as JAX, a compiler fuses more
NOT_RUN = "a backend that does not run"


@dataclass(frozen=True)
class _Backend:
    """What a backend gave, and how far each value is from lifted float64 of its own side."""

    name: str
    values: Values
    drift: Mapping[str, Difference]

    @property
    def side(self) -> str:
        """Of which model it is."""
        return "JAX" if self.name in JAX_NAMES else "torch"


@dataclass(frozen=True)
class _Context:
    """What all comparisons share.

    Attributes:
        lifted: side -> values in lifted float64.
        allowed: side -> name -> bound on a backend's distance from lifted float64.
    """

    reference: Reference
    evidence: Evidence
    lifted: Mapping[str, Values]
    allowed: Mapping[str, Mapping[str, Tolerance]]

    def between(self, one: Array, two: Array, name: str, precision: str | None = None) -> Difference:
        mask = self.evidence.masks.get(name)
        return difference(one, two, precision=precision or self.evidence.precision, mask=mask)

    def beyond(self, backend: _Backend) -> list[str]:
        """Where a backend is further from lifted float64 than is allowed, as data flows."""
        allowed = self.allowed[backend.side]
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
    """Runs every backend in the evidence's precision and says which computes differently, if any.

    Args:
        evidence: what JAX gave, lifted and as users run it; live or recorded.
        weights: how the weights level ended; None when it did not run.
        only: names of backends to run; None is all of them.
    """
    started = time.monotonic()
    torch_side = lifted_torch(plan, written, reference, evidence, list(evidence.native_values), "cpu")
    ours, as_written, perturbed = (
        {name: evidence.pick(name, values[name]) for name in evidence.native_values if name in values}
        for values in (torch_side.exact, torch_side.written, torch_side.perturbed)
    )
    theirs = evidence.float64_values if evidence.float64_values is not None else {}
    lifted = {"JAX": theirs, "torch": as_written}
    runs, locate, skipped, failed = _run_all(plan, written, reference, evidence, only)
    backends = [_backend(name, values, lifted, evidence) for name, values in runs.items()]
    context = _Context(reference, evidence, lifted, _allowed(backends, evidence, reference))
    backends = [_located(backend, locate.get(backend.name), context) for backend in backends]
    odd = [(backend, first) for backend in backends if (first := _first_beyond(backend, context)) is not None]
    findings = [
        *(
            Finding("backend-failed", f"backend {name} did not run: {why}", path=name, data={"diagnosis": NOT_RUN})
            for name, why in failed
        ),
        *(finding for backend in backends for finding in _incomplete(backend, context)),
        *_verdicts(backends, odd, context, ours, perturbed, weights),
    ]
    notes = [f"{len(backends)} backends in {evidence.precision}, {_said_of(backends)}"]
    notes += [f"{name} was skipped: {why}" for name, why in skipped]
    for side, what in (("JAX", evidence.unlifted), ("torch", torch_side.unlifted)):
        if what:
            notes.append(f"could not be lifted to float64 on {side}'s side: {', '.join(what)}")
    decided = Verdict.FAILED if findings else Verdict.PASSED if len(backends) > 1 else Verdict.SKIPPED
    return LevelReport(
        LEVEL,
        decided,
        "" if decided is not Verdict.SKIPPED else "there are no two backends to compare",
        tuple(findings),
        tuple(_measure(backend, context) for backend in backends if backend.drift),
        tuple(notes),
        time.monotonic() - started,
        matrix=_matrix(backends, context),
    )


def _said_of(backends: list[_Backend]) -> str:
    return ", ".join(backend.name for backend in backends)


def _run_all(
    plan: Plan,
    written: Written,
    reference: Reference,
    evidence: Evidence,
    only: Collection[str] | None,
) -> tuple[dict[str, Values], dict[str, Locate], list[tuple[str, str]], list[tuple[str, str]]]:
    """Values of each backend that ran, and how to learn more; those that were skipped and why; registered ones that failed."""
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
    """What of a backend's values is known of the evidence's; a recording holds its own already."""
    if backend == RECORDED:
        return values
    return {name: evidence.pick(name, values[name]) for name in evidence.native_values if name in values}


def _located(backend: _Backend, locate: Locate | None, context: _Context) -> _Backend:
    """The same with values at boundaries, if its outputs are wrong and it has not told them yet."""
    if locate is None or _first_beyond(backend, context) is None:
        return backend
    try:
        values = {**_picked(locate(), context.evidence, backend.name), **backend.values}
    except Skip:
        return backend
    order = {name: values[name] for name in context.evidence.native_values if name in values}
    return _backend(backend.name, order, context.lifted, context.evidence)


def _backend(name: str, values: Values, lifted: Mapping[str, Values], evidence: Evidence) -> _Backend:
    exact = lifted["JAX" if name in JAX_NAMES else "torch"]
    drift = {
        key: difference(value, exact[key], precision=evidence.precision, mask=evidence.masks.get(key))
        for key, value in values.items()
        if key in exact and value.shape == exact[key].shape
    }
    return _Backend(name, values, drift)


def _allowed(backends: list[_Backend], evidence: Evidence, reference: Reference) -> dict[str, dict[str, Tolerance]]:
    """By side: how far a backend may be from lifted float64: what the plain ones round, and then some.

    Plain are JAX op by op (or recorded) and torch eager: those that nobody optimised. The smaller of their two roundings
    counts, so that neither excuses itself, nor do any number of other backends. In float64 code may cast to float32 in the
    middle on one side alone; then it is that side's, up to what rounding in float32 may do.
    """
    precision, reduction, depth = evidence.precision, reference.reduction, reference.depth
    most = run_floor("float32", reduction, depth)
    plain = [backend for backend in backends if backend.name in ANCHORS] or backends

    def typical(name: str, side: str) -> float:
        known = [(b.side, b.drift[name].relative) for b in plain if name in b.drift]
        of_all, own = (lower_median([d for s, d in known if s in sides]) for sides in (SIDES, (side,)))
        return max(of_all, min(own, most)) if precision == "float64" else of_all

    def bound(name: str, side: str) -> Tolerance:
        floor, rounding = run_floor(precision, reduction, depth), typical(name, side)
        larger = max(rounding, floor)
        return Tolerance(
            FACTOR * larger,
            f"{FACTOR:.0f} x {larger:.1e}: what a plain backend rounds in {precision} ({rounding:.1e} from lifted float64, the smaller of "
            f"JAX op by op and torch eager), or what any model of this size may (sqrt of {reduction} summands, {depth} layers)",
        )

    names = {side: dict.fromkeys(name for b in backends if b.side == side for name in b.drift) for side in SIDES}
    return {side: {name: bound(name, side) for name in names[side]} for side in SIDES}


def lower_median(numbers: list[float]) -> float:
    """The middle one, or of two the smaller; 0 of none."""
    return sorted(numbers)[(len(numbers) - 1) // 2] if numbers else 0.0


def _first_beyond(backend: _Backend, context: _Context) -> str | None:
    """Where a backend leaves lifted float64 first, as data flows."""
    return next(iter(context.beyond(backend)), None)


def _measure(backend: _Backend, context: _Context) -> Measure:
    """A backend's output that is furthest from lifted float64, or a boundary where no output is known."""
    known = [name for name in context.reference.outputs if name in backend.drift] or list(backend.drift)
    allowed = context.allowed[backend.side]
    worst = max(known, key=lambda name: backend.drift[name].relative / allowed[name].value)
    return Measure(f"{backend.name}: {worst}", backend.drift[worst], allowed[worst])


def _matrix(backends: list[_Backend], context: _Context) -> dict[str, dict[str, float]]:
    """The largest relative difference of two backends' outputs, and of each from lifted float64; the row's is the reference."""
    columns: dict[str, Values] = {backend.name: backend.values for backend in backends}
    columns |= {f"{side} lifted": values for side, values in context.lifted.items() if values}

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
    """Outputs that cannot be compared."""
    exact = context.lifted[backend.side]
    for name in context.reference.outputs:
        if name in exact and name not in backend.drift:
            got = f"of shape {list(backend.values[name].shape)}" if name in backend.values else "not there"
            yield Finding(
                "backend-failed",
                f"backend {backend.name}: its output {name} is {got}; it should have the shape {list(exact[name].shape)}",
                path=backend.name,
                data={"diagnosis": NOT_RUN, "first": name},
            )


def _verdicts(
    backends: list[_Backend],
    odd: list[tuple[_Backend, str]],
    context: _Context,
    ours: Values,
    perturbed: Values,
    weights: Verdict | None,
) -> list[Finding]:
    """Whether a backend computes differently, or the two sides do."""
    findings = []
    conversion = _conversion(context, ours, perturbed)
    sound = [backend for backend in backends if all(backend is not other for other, _ in odd)]
    for backend, first in odd:
        findings.append(_odd(backend, first, sound, context, conversion is None, weights))
    if conversion is not None:
        findings.insert(0, conversion)
    return findings


def _odd(
    backend: _Backend, first: str, sound: list[_Backend], context: _Context, equal: bool, weights: Verdict | None
) -> Finding:
    found, bound = backend.drift[first], context.allowed[backend.side][first]
    if weights is Verdict.FAILED:
        head = "the weights level found a difference, and besides "
    elif not equal:
        head = "besides, "
    else:
        proof = (
            "bit for bit" if weights is Verdict.PASSED else "they compute the JAX model's function in lifted float64"
        )
        head = f"the weights are equal ({proof}); "
    others = f", while {_said_of(sound)} stay within it" if sound else ", and no other backend stays within it"
    repair = (
        f"Do not change the conversion: report it to the makers of {backend.name}, or run without it"
        if equal and weights is not Verdict.FAILED
        else "Repair the weights first and check again"
    )
    return Finding(
        "backend-differs",
        f"{head}backend {backend.name} computes differently, first at {first}: relative error {found.relative:.1e} from lifted "
        f"float64 where {bound.value:.1e} is allowed ({found.got:.6g} where it should be {found.want:.6g} at {list(found.at)})"
        f"{others}. {repair}",
        path=backend.name,
        data={
            "diagnosis": "a backend",
            "backend": backend.name,
            "first": first,
            "differing": context.beyond(backend),
            "relative": found.relative,
            "allowed": bound.value,
            "agreeing": [other.name for other in sound],
            "repair": repair,
        },
    )


def _conversion(context: _Context, ours: Values, perturbed: Values) -> Finding | None:
    """Whether JAX's function and torch's differ, backends aside: both in lifted float64.

    Args:
        perturbed: as in `LiftedTorch`.
    """
    theirs = context.lifted["JAX"]
    evidence, reference = context.evidence, context.reference
    for name in theirs:
        if name not in ours or ours[name].shape != theirs[name].shape:
            continue
        drift = context.between(evidence.native_values[name], theirs[name], name).relative
        bound = lifted_tolerance(drift, evidence.precision, reference.reduction, reference.depth)
        if evidence.rounded:
            bound = rounded_tolerance(
                bound, context.between(perturbed[name], ours[name], name).relative, evidence.rounded
            )
        found = context.between(ours[name], theirs[name], name, "float64")
        if not found.relative <= bound.value:
            return Finding(
                "outputs-differ",
                f"not a backend: in lifted float64, too, the PyTorch model differs from the JAX model, first at {name}: relative "
                f"error {found.relative:.1e} where {bound.value:.1e} is allowed. The conversion is wrong, or the models are not "
                "the same; see the levels weights, layers and model",
                path=name,
                data={"diagnosis": "wrong conversion", "first": name, "relative": found.relative},
            )
    return None
