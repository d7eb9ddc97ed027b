"""The weights level alone."""

from __future__ import annotations

from convert.planning.plan import Plan
from convert.verify.report.report import LevelReport
from convert.verify.weights.level import WeightsPass
from convert.writing.written import Written


def check_weights(plan: Plan, written: Written) -> LevelReport:
    """Compare every written tensor with what the plan makes of the source."""
    with WeightsPass(plan, written) as comparison:
        return comparison.report()
