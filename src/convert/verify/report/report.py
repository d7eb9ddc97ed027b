"""The outcome of a check: findings and measures of each level, a verdict, and the same as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from convert.core.findings import Finding
from convert.numerics.compare import Agreement, Difference
from convert.numerics.tolerances import Tolerance
from convert.verify.report.facts import JudgedFact

if TYPE_CHECKING:
    from convert.planning.plan import Plan

FORMAT = 2  # of `Report.to_dict`; raise it with each change that breaks readers
LEVELS = ("coverage", "weights", "layers", "model")
FLOAT64 = "float64"  # both models in float64, with the casts to narrower dtypes removed
NATIVE = "native precision"  # the dtype in which the model runs in production


class Verdict(StrEnum):
    """How a level ended. `SKIPPED` does not count as `PASSED`. `INCONCLUSIVE`: an error stopped it, or its comparison proves nothing."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"
    NOT_APPLICABLE = "not applicable"
    INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True)
class Measure:
    """A measured difference and its tolerance.

    "Lifted" means float64 with the casts to narrower dtypes removed from both models.

    Attributes:
        name: the layer, boundary or output.
        difference: measured in native precision, the dtype in which the model runs.
        tolerance: of `difference`; None when the float64 run alone decides.
        float64: measured in float64; None when a model could not be run so.
        float64_tolerance: of `float64`.
        rule: ``file:line`` of the rule that made the layer; empty without one.
        logits: distance of the predictions in native precision, where the output is logits.
        float64_logits: the same in float64.
    """

    name: str
    difference: Difference
    tolerance: Tolerance | None = None
    float64: Difference | None = None
    float64_tolerance: Tolerance | None = None
    rule: str = ""
    logits: Agreement | None = None
    float64_logits: Agreement | None = None

    @property
    def passed(self) -> bool:
        """Whether each difference is within its tolerance; NaN is not."""
        return all(d.relative <= t.value for d, t in self._bounded)

    @property
    def excess(self) -> float:
        """The largest error as a fraction of its tolerance; above 1 the measure has failed."""
        return max((_fraction(d.relative, t.value) for d, t in self._bounded), default=0.0)

    @property
    def _bounded(self) -> Iterator[tuple[Difference, Tolerance]]:
        for d, t in ((self.difference, self.tolerance), (self.float64, self.float64_tolerance)):
            if d is not None and t is not None:
                yield d, t

    def to_dict(self) -> dict[str, Any]:
        def bound(tolerance: Tolerance | None) -> dict[str, Any] | None:
            if tolerance is None:
                return None
            return {"relative": tolerance.value, "conclusive": tolerance.conclusive, "why": tolerance.why}

        return {
            "name": self.name,
            "passed": self.passed,
            "excess": self.excess,
            "difference": self.difference.to_dict(),
            "tolerance": bound(self.tolerance),
            "float64": self.float64.to_dict() if self.float64 else None,
            "float64_tolerance": bound(self.float64_tolerance),
            "rule": self.rule,
            "logits": self.logits.to_dict() if self.logits else None,
            "float64_logits": self.float64_logits.to_dict() if self.float64_logits else None,
        }


@dataclass(frozen=True)
class LevelReport:
    """The outcome of one level.

    Attributes:
        level: one of `LEVELS`, or ``backends``.
        verdict: how it ended.
        reason: why it was skipped, does not apply, was stopped by an error or proves nothing; empty otherwise.
        findings: the problems; a level with findings has failed, or is inconclusive because of a required fact.
        measures: in the order in which data flows through the model.
        notes: what the reader should know, such as which code could not run in float64.
        seconds: wall time.
        diagnosis: of the first layer that differs (`convert.verify.diagnosis.diagnose.Diagnosis.to_dict`).
        matrix: for ``backends``, the relative difference of each pair of them.
    """

    level: str
    verdict: Verdict
    reason: str = ""
    findings: tuple[Finding, ...] = ()
    measures: tuple[Measure, ...] = ()
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    diagnosis: Mapping[str, Any] | None = None
    matrix: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    @property
    def first_failure(self) -> Measure | None:
        """The first measure above its tolerance, in the order of the data flow."""
        return next((measure for measure in self.measures if not measure.passed), None)

    @property
    def worst_first(self) -> tuple[Measure, ...]:
        """The measures, sorted by their share of the tolerance, largest first."""
        return tuple(sorted(self.measures, key=lambda measure: measure.excess, reverse=True))

    @property
    def summary(self) -> str:
        """One line: why the level did not run, its findings, or the measure that comes nearest to its tolerance."""
        if self.reason:
            return self.reason
        parts = []
        if self.diagnosis and self.diagnosis["name"]:
            parts.append(str(self.diagnosis["name"]))
        if self.findings:
            diagnosis = str(self.findings[0].data.get("diagnosis") or "")
            parts.append(_count(len(self.findings), "finding") + (f": {diagnosis}" if diagnosis else ""))
        if failed := sum(not measure.passed for measure in self.measures):
            parts.append(f"{failed} of {_count(len(self.measures), 'measure')} above the tolerance")
        if not parts and self.measures:
            largest = percent(self.worst_first[0].excess)
            parts.append(f"{_count(len(self.measures), 'measure')}, the largest at {largest} of its tolerance")
        return "; ".join(parts or self.notes[:1])

    def to_dict(self) -> dict[str, Any]:
        return {
            "level": self.level,
            "verdict": str(self.verdict),
            "reason": self.reason,
            "findings": [finding.to_dict() for finding in self.findings],
            "measures": [measure.to_dict() for measure in self.measures],
            "notes": list(self.notes),
            "seconds": round(self.seconds, 3),
            "diagnosis": dict(self.diagnosis) if self.diagnosis else None,
            "matrix": {name: dict(row) for name, row in self.matrix.items()},
        }


@dataclass(frozen=True)
class Report:
    """The outcome of a check.

    Attributes:
        out: the conversion that was checked.
        source: the checkpoint or recording that it was compared with.
        model: of the rules.
        target: of the rules.
        levels: in the order of `LEVELS`, without those that were not requested.
        required: levels that must not be skipped.
        environment: versions of the packages that computed the figures.
        plan: the plan of the conversion; None when the check stopped before it was made.
        errors: the problems that stopped the check; empty when it ran.
        facts: values that no weight holds, and what confirms each.
    """

    out: str
    source: str
    model: str
    target: str
    levels: tuple[LevelReport, ...]
    required: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    plan: Plan | None = field(default=None, repr=False)
    errors: tuple[Finding, ...] = ()
    facts: tuple[JudgedFact, ...] = ()

    @property
    def failed(self) -> bool:
        """Whether a difference was found."""
        return any(level.verdict is Verdict.FAILED for level in self.levels)

    @property
    def inconclusive(self) -> tuple[str, ...]:
        """List the levels that leave the question open.

        These are the levels that an error stopped or that prove nothing, and the required levels that did not run. When no level passed or
        failed, they are all levels of the check.
        """
        decided = {level.level for level in self.levels if level.verdict in (Verdict.PASSED, Verdict.FAILED)}
        if not decided:
            return tuple(dict.fromkeys((*(level.level for level in self.levels), *self.required))) or LEVELS
        absent = {level.level for level in self.levels if level.verdict is Verdict.NOT_APPLICABLE}
        broken = [level.level for level in self.levels if level.verdict is Verdict.INCONCLUSIVE]
        return tuple(dict.fromkeys((*broken, *(level for level in self.required if level not in decided | absent))))

    @property
    def exit_code(self) -> int:
        """0 equal, 1 different, 2 inconclusive."""
        return 1 if self.failed else 2 if self.inconclusive else 0

    @property
    def verdict(self) -> str:
        """The exit code in words, the same in all forms of the report."""
        if self.only_backends:
            return "equal, but a backend computes differently"
        return {0: "equal", 1: "different", 2: "inconclusive"}[self.exit_code]

    @property
    def only_backends(self) -> bool:
        """Whether the conversion is equal and only a backend computes another result."""
        failed = [level for level in self.levels if level.verdict is Verdict.FAILED]
        codes = {finding.code for level in failed for finding in level.findings}
        return [level.level for level in failed] == ["backends"] and codes == {"backend-differs"}

    @property
    def identity(self) -> dict[str, Any] | None:
        """The part of `Plan.to_dict` that identifies the plan of the check."""
        if self.plan is None:
            return None
        plan = self.plan
        return {
            "rules": {"model": plan.rules.model, "file": plan.rules.path, "sha256": plan.rules.sha256},
            "found": plan.found,
            "version": plan.version,
            "target": plan.target,
            "loads": plan.rules.targets[plan.target].loads,
            "source_format": plan.source.format,
            "dtype": plan.dtype,
            "settings": dict(plan.settings),
            "choices": dict(plan.choices),
            "tensors": len(plan.steps),
            "bytes": plan.nbytes,
        }

    def to_dict(self) -> dict[str, Any]:
        """Give values for JSON. Numbers that JSON does not have become the strings ``inf``, ``-inf`` and ``nan``."""
        report: dict[str, Any] = _finite(self._to_dict())
        return report

    def _to_dict(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "out": self.out,
            "source": self.source,
            "model": self.model,
            "target": self.target,
            "verdict": self.verdict,
            "exit_code": self.exit_code,
            "required": list(self.required),
            "inconclusive": list(self.inconclusive),
            "errors": [finding.to_dict() for finding in self.errors],
            "plan": self.identity,
            "facts": [fact.to_dict() for fact in self.facts],
            "levels": [level.to_dict() for level in self.levels],
            "environment": dict(self.environment),
        }


def _count(number: int, word: str) -> str:
    return f"{number:,} {word}{'' if number == 1 else 's'}"


def percent(fraction: float) -> str:
    """Format a share of a tolerance: ``8.3%``."""
    return f"{100 * fraction:.2g}%" if fraction < 0.995 else f"{100 * fraction:.0f}%" if fraction < 100 else ">9999%"


def share(fraction: float) -> str:
    """Format a fraction: ``99.998%``, never rounded up to ``100%``."""
    text = f"{100 * fraction:.6g}%"
    return text if fraction >= 1 or text != "100%" else "<100%"


def predictions(found: Agreement) -> str:
    """Describe the KL divergence and the top-1 agreement of logits."""
    return (
        f"KL divergence {found.kl:.1e} nats (at most {found.kl_max:.1e} at a position), top-1 agreement "
        f"{share(found.top1)} of {_count(found.positions, 'position')}"
    )


def _fraction(error: float, allowed: float) -> float:
    if math.isnan(error):
        return math.inf
    return error / allowed if allowed else math.inf if error else 0.0


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(child) for key, child in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(child) for child in value]
    return str(float(value)) if isinstance(value, float) and not math.isfinite(value) else value
