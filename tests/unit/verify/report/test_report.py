"""What a report concludes: verdicts, exit codes, what is inconclusive, and the same as JSON."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest

from convert.api import plan_conversion
from convert.core.findings import Finding
from convert.numerics.tolerances import Tolerance
from convert.verify.report.report import LEVELS, LevelReport, Measure, Report, Verdict, percent
from support.goldens import checkpoint
from support.sample_report import COVERAGE, LAYERS, LIFTED, RUN, WEIGHTS, difference_of, measure, model_level, report

FAILED = LevelReport(
    "weights", Verdict.FAILED, findings=(Finding("weights-differ", "transposed: w is laid out as D (N H)", path="w"),)
)
ABSENT = LevelReport("model", Verdict.NOT_APPLICABLE, "the target has no model")
NO_MODEL = LevelReport("model", Verdict.SKIPPED, "timesfm is not installed")


def codes(made: Report) -> tuple[int, str, tuple[str, ...]]:
    return made.exit_code, made.verdict, made.inconclusive


def test_all_passed() -> None:
    assert codes(report([COVERAGE, WEIGHTS, model_level()])) == (0, "equal", ())


def test_a_difference_is_1_whatever_else_is() -> None:
    assert codes(report([COVERAGE, FAILED, LAYERS], ("layers",)))[:2] == (1, "different")
    assert report([FAILED]).failed and not report([WEIGHTS]).failed


def test_a_skip_is_no_pass_and_no_failure() -> None:
    """It leaves the exit code to the other levels, unless it is required."""
    assert codes(report([COVERAGE, WEIGHTS, LAYERS])) == (0, "equal", ())
    assert codes(report([COVERAGE, WEIGHTS, LAYERS], ("layers",))) == (2, "inconclusive", ("layers",))
    assert codes(report([COVERAGE, WEIGHTS, LAYERS, NO_MODEL], ("coverage", "model"))) == (
        2,
        "inconclusive",
        ("model",),
    )


def test_a_required_level_that_was_not_asked_for() -> None:
    assert codes(report([COVERAGE], ("coverage", "model"))) == (2, "inconclusive", ("model",))


def test_a_required_level_that_does_not_apply() -> None:
    assert codes(report([WEIGHTS, ABSENT], ("model",)))[0] == 0


def test_nothing_decided_is_2_and_names_what_should_have() -> None:
    assert codes(report([NO_MODEL])) == (2, "inconclusive", ("model",))
    assert codes(report([LAYERS, NO_MODEL]))[2] == ("layers", "model")
    assert codes(report([ABSENT]))[0] == 2
    assert codes(report([NO_MODEL], ("weights",)))[2] == ("model", "weights")
    assert codes(report([]))[2] == LEVELS


# ---- measures


def test_a_measure_passes_when_every_bound_holds() -> None:
    assert measure("a").passed
    assert not measure("a", float64=1e-12).passed and not measure("a", run=1e-4).passed
    assert measure("a", float64=None).passed
    at_bound = Measure("a", difference_of(RUN.value), RUN, difference_of(LIFTED.value), LIFTED)
    assert at_bound.passed and at_bound.excess == 1


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_what_is_not_finite_never_passes(bad: float) -> None:
    assert not measure("a", float64=bad).passed and not measure("a", run=bad).passed
    assert measure("a", float64=bad).excess == math.inf
    assert model_level().worst_first[0].excess < 1


def test_a_bound_of_zero() -> None:
    assert Measure("a", difference_of(0.0), Tolerance(0.0, "exact")).excess == 0
    assert Measure("a", difference_of(1e-9), Tolerance(0.0, "exact")).excess == math.inf


def test_first_in_flow_order_and_worst() -> None:
    level = model_level(wrong_from=3)
    assert level.first_failure is level.measures[3] and level.first_failure.name == "layers.1.mlp"
    late = dataclasses.replace(level, measures=(*level.measures, measure("late", float64=7.0)))
    assert late.worst_first[0].name == "late" and late.first_failure is level.measures[3]
    assert model_level().first_failure is None
    excesses = [m.excess for m in late.worst_first]
    assert excesses == sorted(excesses, reverse=True)


def test_the_summary_of_a_level() -> None:
    assert LAYERS.summary == "jax is not installed"
    assert COVERAGE.summary == "45 tensors against 45 of the plan"
    assert model_level().summary == "7 measures, the largest at 14% of its tolerance"
    assert model_level(2).summary == "transposed; 1 finding; 5 of 7 measures above the tolerance"
    assert FAILED.summary == "1 finding"
    named = dataclasses.replace(
        FAILED, findings=(Finding("weights-differ", "w", path="w", data={"diagnosis": "transposed"}),) * 2
    )
    assert named.summary == "2 findings: transposed"


def test_percent() -> None:
    shown = {0.0: "0%", 0.0831: "8.3%", 0.99: "99%", 0.996: "100%", 1.2: "120%", 99.0: "9900%", 1e9: ">9999%"}
    assert {fraction: percent(fraction) for fraction in shown} == shown
    assert percent(math.inf) == ">9999%"


# ---- JSON


def test_json_is_json() -> None:
    """NaN and infinity, which JSON does not have, are strings that every language's parser takes for a number."""
    level = LevelReport(
        "model",
        Verdict.FAILED,
        measures=(measure("a", float64=math.inf, run=math.nan),),
        findings=(Finding("weights-differ", "x", data={"value": -math.inf}),),
    )
    made = report([COVERAGE, level]).to_dict()
    text = json.dumps(made, allow_nan=False)
    loaded = json.loads(text)
    found = loaded["levels"][1]["measures"][0]
    assert (
        found["float64"]["relative"] == "inf" and found["difference"]["relative"] == "nan" and found["excess"] == "inf"
    )
    assert float(loaded["levels"][1]["findings"][0]["data"]["value"]) == -math.inf


def test_json_fields() -> None:
    plan = plan_conversion("timesfm", checkpoint("timesfm-2.5"), dtype="bfloat16")
    made = report([COVERAGE, model_level(2)], ("layers",), plan=plan, environment={"jax": "0.10.2"}).to_dict()
    assert list(made) == [
        "format", "out", "source", "model", "target", "verdict", "exit_code", "required", "inconclusive", "errors", "plan", "facts", "levels",
        "environment",
    ]  # fmt: skip
    assert (made["format"], made["verdict"], made["exit_code"]) == (2, "different", 1)
    assert made["inconclusive"] == ["layers"]
    identity = made["plan"]
    assert identity["rules"] == {"model": "timesfm-2.5", "file": "rules/timesfm-2.5.yaml", "sha256": plan.rules.sha256}
    assert (identity["target"], identity["dtype"], identity["tensors"]) == ("timesfm", "bfloat16", 45)
    assert made["environment"] == {"jax": "0.10.2"}
    level = made["levels"][1]
    assert level["diagnosis"]["name"] == "transposed" and level["verdict"] == "failed"
    first = level["measures"][2]
    assert first["passed"] is False and first["tolerance"] == {
        "relative": RUN.value,
        "conclusive": True,
        "why": RUN.why,
    }
    assert first["float64"]["at"] == [1, 2]
    assert report([COVERAGE]).to_dict()["plan"] is None
