"""What a check found: findings and measures per level, a verdict, and the same as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from convert.core.findings import Finding
from convert.verify.numerics.compare import Agreement, Difference, Tolerance

if TYPE_CHECKING:
    from convert.planning.plan import Plan

FORMAT = 2  # of Report.to_dict; a change that breaks readers raises it
LEVELS = ("coverage", "weights", "layers", "model")


class Verdict(StrEnum):
    """How a level ended. A skip is never a pass."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"
    NOT_APPLICABLE = "not applicable"
    INCONCLUSIVE = "inconclusive"  # it was to run, and broke off, or what it compared proves nothing


@dataclass(frozen=True)
class Measure:
    """A measured difference beside what is allowed.

    Attributes:
        name: the layer, boundary or output.
        difference: measured in the precision that users run.
        tolerance: what is allowed there; None when the lifted run alone decides.
        lifted: the same in lifted float64; None when it could not be had.
        lifted_tolerance: what is allowed there.
        rule: ``file:line`` of the rule, if one made the layer.
        logits: how far the predictions are apart, where the output is logits, in the precision that users run.
        lifted_logits: the same in lifted float64.
    """

    name: str
    difference: Difference
    tolerance: Tolerance | None = None
    lifted: Difference | None = None
    lifted_tolerance: Tolerance | None = None
    rule: str = ""
    logits: Agreement | None = None
    lifted_logits: Agreement | None = None

    @property
    def passed(self) -> bool:
        """Whether every figure that has a bound is within it (NaN is not)."""
        return all(d.relative <= t.value for d, t in self._bounded)

    @property
    def excess(self) -> float:
        """The largest error as a fraction of what is allowed; above 1 the measure has failed."""
        return max((_fraction(d.relative, t.value) for d, t in self._bounded), default=0.0)

    @property
    def _bounded(self) -> Iterator[tuple[Difference, Tolerance]]:
        for d, t in ((self.difference, self.tolerance), (self.lifted, self.lifted_tolerance)):
            if d is not None and t is not None:
                yield d, t

    def to_dict(self) -> dict[str, Any]:
        def bound(tolerance: Tolerance | None) -> dict[str, Any] | None:
            return (
                None
                if tolerance is None
                else {"relative": tolerance.value, "tells": tolerance.tells, "why": tolerance.why}
            )

        return {
            "name": self.name,
            "passed": self.passed,
            "excess": self.excess,
            "difference": self.difference.to_dict(),
            "tolerance": bound(self.tolerance),
            "lifted": self.lifted.to_dict() if self.lifted else None,
            "lifted_tolerance": bound(self.lifted_tolerance),
            "rule": self.rule,
            "logits": self.logits.to_dict() if self.logits else None,
            "lifted_logits": self.lifted_logits.to_dict() if self.lifted_logits else None,
        }


@dataclass(frozen=True)
class LevelReport:
    """The outcome of one level.

    Attributes:
        level: one of `LEVELS`, or ``backends``.
        reason: why it was skipped, does not apply, broke off or proves nothing; empty otherwise.
        findings: what is wrong; a level with findings has failed.
        measures: in the order in which data flows through the model.
        notes: what a reader should know, such as what could not be lifted.
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
        """The first measure, as data flows, that is beyond what is allowed."""
        return next((measure for measure in self.measures if not measure.passed), None)

    @property
    def worst_first(self) -> tuple[Measure, ...]:
        """The measures, by how near they come to their bounds."""
        return tuple(sorted(self.measures, key=lambda measure: measure.excess, reverse=True))

    @property
    def gist(self) -> str:
        """One line: why it did not run, or what it found, or how near the worst measure came to its bound."""
        if self.reason:
            return self.reason
        said = []
        if self.diagnosis and self.diagnosis["name"]:
            said.append(str(self.diagnosis["name"]))
        if self.findings:
            named = str(self.findings[0].data.get("diagnosis") or "")
            said.append(_count(len(self.findings), "finding") + (f": {named}" if named else ""))
        if beyond := sum(not measure.passed for measure in self.measures):
            said.append(f"{beyond} of {_count(len(self.measures), 'measure')} beyond what is allowed")
        if not said and self.measures:
            worst = percent(self.worst_first[0].excess)
            said.append(f"{_count(len(self.measures), 'measure')}, the worst at {worst} of what is allowed")
        return "; ".join(said or self.notes[:1])

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
        out: what was checked; source: against what.
        model, target: of the conversion.
        levels: in the order of `LEVELS`; levels that were not asked for are missing.
        required: levels that must not be skipped.
        plan: by which it was checked.
        error: why the check stopped before it could tell; empty when it ran.
    """

    out: str
    source: str
    model: str
    target: str
    levels: tuple[LevelReport, ...]
    required: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    plan: Plan | None = field(default=None, repr=False)
    error: str = ""

    @property
    def failed(self) -> bool:
        """Whether a difference was found."""
        return any(level.verdict is Verdict.FAILED for level in self.levels)

    @property
    def undecided(self) -> tuple[str, ...]:
        """Levels that broke off or prove nothing, and required ones that were skipped or not run; when none passed or failed, all that should have."""
        decided = {level.level for level in self.levels if level.verdict in (Verdict.PASSED, Verdict.FAILED)}
        if not decided:
            return tuple(dict.fromkeys((*(level.level for level in self.levels), *self.required))) or LEVELS
        absent = {level.level for level in self.levels if level.verdict is Verdict.NOT_APPLICABLE}
        broken = [level.level for level in self.levels if level.verdict is Verdict.INCONCLUSIVE]
        return tuple(dict.fromkeys((*broken, *(level for level in self.required if level not in decided | absent))))

    @property
    def exit_code(self) -> int:
        """0 equal, 1 different, 2 inconclusive."""
        return 1 if self.failed else 2 if self.undecided else 0

    @property
    def verdict(self) -> str:
        """The exit code, in words; all reports say it alike."""
        if self.only_backends:
            return "equal, but a backend computes differently"
        return {0: "equal", 1: "different", 2: "inconclusive"}[self.exit_code]

    @property
    def only_backends(self) -> bool:
        """Whether all that differs is a backend: the conversion is equal, and one way of running it computes otherwise."""
        failed = [level for level in self.levels if level.verdict is Verdict.FAILED]
        said = {finding.data.get("diagnosis") for level in failed for finding in level.findings}
        return [level.level for level in failed] == ["backends"] and said == {"a backend"}

    @property
    def identity(self) -> dict[str, Any] | None:
        """Which plan it was checked by: the part of `Plan.to_dict` that tells two checks apart."""
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
        """JSON-able values. Numbers that JSON does not have are the strings ``inf``, ``-inf`` and ``nan``."""
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
            "undecided": list(self.undecided),
            "error": self.error,
            "plan": self.identity,
            "levels": [level.to_dict() for level in self.levels],
            "environment": dict(self.environment),
        }


def _count(number: int, word: str) -> str:
    return f"{number:,} {word}{'' if number == 1 else 's'}"


def percent(fraction: float) -> str:
    """``8.3%`` of what is allowed; above ``100%`` a measure has failed."""
    return f"{100 * fraction:.2g}%" if fraction < 0.995 else f"{100 * fraction:.0f}%" if fraction < 100 else ">9999%"


def share(fraction: float) -> str:
    """``99.998%``: never rounded up to ``100%``."""
    text = f"{100 * fraction:.6g}%"
    return text if fraction >= 1 or text != "100%" else "<100%"


def predictions(found: Agreement) -> str:
    """KL divergence and top-1 agreement of logits, in words."""
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
