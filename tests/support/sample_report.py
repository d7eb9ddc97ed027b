"""Reports made by hand: numbers that a test can name, without a model being run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from convert.core.findings import Finding
from convert.numerics.compare import Agreement, Difference, epsilon
from convert.numerics.tolerances import Tolerance
from convert.verify.report.report import LevelReport, Measure, Report, Verdict

RUN, LIFTED = Tolerance(5e-6, "4 x 1.2e-06: measured"), Tolerance(8e-14, "16 x 24 x eps(float64): measured")
DIAGNOSIS: dict[str, Any] = {
    "boundary": "layers.1.attn.out",
    "name": "transposed",
    "problem": "layers.1.attn.out.weight is laid out as D (N H), and is wanted as (N H) D",
    "rule": "rules/mine.yaml:12",
    "fix": "correct the rule at rules/mine.yaml:12",
    "error_before": 0.4,
    "error_after": 3e-16,
    "ruled_out": ["of another layer"],
}


def difference_of(relative: float, precision: str = "float32") -> Difference:
    """A difference of this relative size."""
    return Difference(3 * relative, relative, relative / epsilon(precision), 0.999, (1, 2), 1.25, 1.5, 64)


def measure(name: str, float64: float | None = 4e-16, run: float = 3e-7, rule: str = "") -> Measure:
    """A boundary whose errors are these."""
    exact = None if float64 is None else difference_of(float64, "float64")
    return Measure(name, difference_of(run), RUN, exact, LIFTED if exact else None, rule)


def model_level(wrong_from: int | None = None, layers: int = 3) -> LevelReport:
    """A model of some layers with two boundaries each; from one of the measures on, everything differs."""
    names = [f"layers.{i}.{name}" for i in range(layers) for name in ("attn.out", "mlp")] + ["logits"]
    wrong = len(names) if wrong_from is None else wrong_from
    measures = tuple(
        measure(name, 0.4 / (k + 1), 0.4 / (k + 1)) if k >= wrong else measure(name, 4e-16 * k, 1e-7 * (k + 1))
        for k, name in enumerate(names)
    )
    notes = (f"{len(measures)} boundaries and outputs, from a live run of the JAX model",)
    if wrong_from is None:
        return LevelReport("model", Verdict.PASSED, measures=measures, notes=notes, seconds=1.5)
    first = Finding(
        "outputs-differ", "first difference: relative error 1.3e-01 where 8.0e-14 is allowed", path=names[wrong]
    )
    return LevelReport("model", Verdict.FAILED, "", (first,), measures, notes, 1.5, DIAGNOSIS)


COVERAGE = LevelReport("coverage", Verdict.PASSED, notes=("45 tensors against 45 of the plan",), seconds=0.01)
WEIGHTS = LevelReport("weights", Verdict.PASSED, notes=("45 of 45 tensors compared bit for bit",), seconds=0.1)
LAYERS = LevelReport("layers", Verdict.SKIPPED, "jax is not installed")


def report(levels: Sequence[LevelReport], required: tuple[str, ...] = (), **other: Any) -> Report:
    """A report with these levels."""
    return Report("out.safetensors", "ckpt", "mine", "torch", tuple(levels), required, **other)


NO_TIMESFM = LevelReport("model", Verdict.SKIPPED, "timesfm is not installed")
TRANSPOSED = LevelReport(
    "weights",
    Verdict.FAILED,
    findings=(
        Finding("weights-differ", "transposed: it is laid out as (N H) D", "r.yaml:12", "layers.1.attn.out.weight", data={"diagnosis": "transposed"}),
        Finding("weights-differ", "4 of 4 values differ", "r.yaml:13", "layers.1.bias"),
        Finding("weights-differ", "4 of 4 values differ", "r.yaml:13", "layers.2.bias"),
    ),
)  # fmt: skip
EVIL = '<img src=x onerror="alert(1)">&\x00\x1b[31m\ud800]]>'  # a name in someone else's file


def failing(**other: Any) -> Report:
    return report([COVERAGE, TRANSPOSED, LAYERS, model_level(2)], **other)


def passing(**other: Any) -> Report:
    layers = LevelReport("layers", Verdict.PASSED, measures=(measure("a", rule="x/r.yaml:3"), measure("b")))
    return report([COVERAGE, WEIGHTS, layers, model_level()], **other)


def evil() -> Report:
    level = LevelReport(
        "model",
        Verdict.FAILED,
        findings=(Finding("weights-differ", EVIL, EVIL, EVIL, data={"diagnosis": EVIL}),),
        measures=(measure(EVIL, float64=1.0, rule=EVIL), measure("plain")),
        notes=(EVIL,),
        diagnosis={**(model_level(2).diagnosis or {}), "name": EVIL, "problem": EVIL, "ruled_out": [EVIL]},
    )
    skipped = LevelReport("layers", Verdict.SKIPPED, EVIL)
    return replace(report([skipped, level]), out=EVIL, source=EVIL, model=EVIL, environment={EVIL: EVIL})


def backends(code: str = "backend-differs") -> LevelReport:
    """A finding about backends, and the distances of their outputs."""
    finding = Finding(code, "the weights are equal; it computes differently", path="torch.compile")
    matrix = {"jax": {"jax": 0.0, "torch": 3e-7}, "torch": {"jax": math.nan, "torch": 0.0}}
    return LevelReport("backends", Verdict.FAILED, findings=(finding,), matrix=matrix)


def with_logits() -> Report:
    """The last measure is of logits; as users run it, three of 70,000 positions have another first token."""
    level = model_level()
    run, float64 = Agreement(1.25e-7, 3.5e-3, 1 - 3 / 70_000, 70_000), Agreement(2e-27, 5e-26, 1.0, 70_000)
    last = replace(level.measures[-1], logits=run, float64_logits=float64)
    return report([replace(level, measures=(*level.measures[:-1], last))])
