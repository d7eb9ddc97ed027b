"""A mistake in the shipped rules of a family: the file is converted by them, and compared with what the right rules make."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import convert
from convert.checkpoints.source import Source
from convert.rules.parse import parse_models
from convert.verify.report.report import LevelReport
from convert.writing.written import open_written
from support.weights_level import check_weights


def report_of_mistake(model: str, source: Path | Source, old: str, new: str, out: Path, **options: Any) -> LevelReport:
    """Replace a text of the rules, convert, and return the weights level of the check.

    Args:
        model: of the right rules, or its family.
        options: of `convert.convert` and `convert.plan_conversion`.
    """
    plan = convert.plan_conversion(model, source, **options)
    assert old in plan.rules.text
    wrong = parse_models(plan.rules.text.replace(old, new), "wrong.yaml")
    (rules,) = (rules for rules in wrong if rules.model == plan.rules.model)
    convert.convert(rules, source, out, **options)
    return check_weights(plan, open_written(out))


def assert_mistake_is_named(
    model: str, source: Path | Source, old: str, new: str, name: str, out: Path, **options: Any
) -> None:
    """Check that every finding about the weights has this name."""
    report = report_of_mistake(model, source, old, new, out, **options)
    named = [f for f in report.findings if f.code != "provenance-differs" and f.data.get("tried", True)]
    assert named and {f.data["diagnosis"] for f in named} == {name}, report.findings
