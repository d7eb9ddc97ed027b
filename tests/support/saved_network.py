"""A small network of a test: saved by Orbax, converted with rules of the test, and checked without a reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

from convert.checkpoints import open_source
from convert.planning.plan import Plan
from convert.planning.planner import make_plan
from convert.verify.layers.level import check_layers
from convert.verify.report.report import Verdict
from convert.writing.execute import Result, execute
from convert.writing.written import open_written
from support.memory_source import rule_file
from support.weights_level import check_weights


def plan_saved(variables: Any, rules: str, head: str, folder: Path) -> Plan:
    """Save the variables and plan their conversion."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "checkpoint", variables)
    return make_plan(rule_file(rules, head), open_source(folder / "checkpoint"))


def write(plan: Plan, path: Path) -> Path:
    assert isinstance(list(execute(plan, path))[-1], Result)
    return path


def assert_levels_pass(plan: Plan, path: Path) -> None:
    for level in (check_weights(plan, open_written(path)), check_layers(plan, open_written(path))):
        assert level.verdict is Verdict.PASSED, level
