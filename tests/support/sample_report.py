"""Reports made by hand: numbers that a test can name, without a model being run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from convert.core.findings import Finding
from convert.verify.numerics.compare import Difference, Tolerance, epsilon
from convert.verify.report.report import LevelReport, Measure, Report, Verdict

RUN, LIFTED = Tolerance(5e-6, "4 x 1.2e-06: measured"), Tolerance(8e-14, "16 x 24 x eps(float64): measured")
DIAGNOSIS: dict[str, Any] = {
    "boundary": "layers.1.attn.out",
    "name": "transposed",
    "said": "layers.1.attn.out.weight is laid out as D (N H), and is wanted as (N H) D",
    "rule": "rules/mine.yaml:12",
    "repair": "correct the rule at rules/mine.yaml:12",
    "error_before": 0.4,
    "error_after": 3e-16,
    "ruled_out": ["of another layer"],
}


def difference_of(relative: float, precision: str = "float32") -> Difference:
    """A difference of this relative size."""
    return Difference(3 * relative, relative, relative / epsilon(precision), 0.999, (1, 2), 1.25, 1.5, 64)


def measure(name: str, lifted: float | None = 4e-16, run: float = 3e-7, rule: str = "") -> Measure:
    """A boundary whose errors are these."""
    exact = None if lifted is None else difference_of(lifted, "float64")
    return Measure(name, difference_of(run), RUN, exact, LIFTED if exact else None, rule)


def model_level(wrong_from: int | None = None, layers: int = 3) -> LevelReport:
    """A model of some layers with two boundaries each; from one of the measures on, everything differs."""
    names = [f"layers.{i}.{name}" for i in range(layers) for name in ("attn.out", "mlp")] + ["logits"]
    wrong = len(names) if wrong_from is None else wrong_from
    measures = tuple(
        measure(name, 0.4 / (k + 1), 0.4 / (k + 1)) if k >= wrong else measure(name, 4e-16 * k, 1e-7 * (k + 1))
        for k, name in enumerate(names)
    )
    notes = (f"{len(measures)} boundaries and outputs, live",)
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
