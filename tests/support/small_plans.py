"""A multilayer perceptron as a tree and as rules, and what its plan or its refusal says."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from convert import Plan, PlanError, RuleFile
from convert.core.errors import MAX_LINES
from convert.core.findings import Finding
from convert.planning.planner import make_plan
from support.memory_source import HEAD, MemorySource, rule_file

BF16 = ml_dtypes.bfloat16

MLP = """
- einsum: ...D,DF->...F
  from: layers_{i}/up/w
  bias: layers_{i}/up/b
  linear: layers.{i}.up
- einsum: ...F,FD->...D
  from: layers_{i}/down/w
  linear: layers.{i}.down
- from: layers_{i}/norm/scale
  multiplies_by: 1+scale
  epsilon: 1e-6
  axes: D
  layer_norm: layers.{i}.norm
- drop: opt/**
  because: optimizer state
"""  # the rules stand in lines 5, 9, 12 and 17 of r.yaml


def mlp(layers: int = 3) -> dict[str, np.ndarray]:
    tree = {}
    for i in range(layers):
        tree[f"layers_{i}/up/w"] = np.zeros((7, 11), np.float32)
        tree[f"layers_{i}/up/b"] = np.zeros(11, np.float32)
        tree[f"layers_{i}/down/w"] = np.zeros((11, 7), np.float32)
        tree[f"layers_{i}/norm/scale"] = np.zeros(7, np.float32)
    return {**tree, "opt/mu/0": np.zeros(3, np.float32)}


def without(tree: Mapping[str, np.ndarray], *names: str) -> dict[str, np.ndarray]:
    assert set(names) <= set(tree)
    return {name: x for name, x in tree.items() if name not in names}


def plan(rules: str | RuleFile, tree: Mapping[str, np.ndarray], head: str = HEAD, **options: Any) -> Plan:
    return make_plan(rule_file(rules, head) if isinstance(rules, str) else rules, MemorySource(tree), **options)


def findings(rules: str, tree: Mapping[str, np.ndarray], head: str = HEAD, **options: Any) -> list[str]:
    """The findings, each of which must stand in the message as well."""
    with pytest.raises(PlanError) as refused:
        plan(rules, tree, head, **options)
    found = [str(finding) for finding in refused.value.findings]
    said = "1 problem" if len(found) == 1 else f"{len(found)} problems"
    head_line, *lines = str(refused.value).splitlines()
    assert head_line == f"r.yaml does not fit /memory: {said}"
    ends = [re.search(r"(?: \((\d+) more like it\)|\.\.\. and (\d+) more)$", line) for line in lines]
    folded = [int(end[1] or end[2]) if end else 0 for end in ends]
    last = bool(lines) and lines[-1].startswith("  ... and ")
    shown = [line[: end.start()] if end else line for line, end in zip(lines, ends, strict=True)][
        : -1 if last else None
    ]
    assert len(shown) <= MAX_LINES and len(shown) + sum(folded) == len(found)
    without_codes = [re.sub(r" ?\[[a-z]+(-[a-z]+)+\]:", ":", line.removeprefix("  - "), count=1) for line in shown]
    assert all(line in found for line in without_codes)
    return found


def places(rules: str, tree: Mapping[str, np.ndarray], head: str = HEAD, **options: Any) -> list[tuple[str, str, str]]:
    """Code, rule and path of each finding."""
    with pytest.raises(PlanError) as refused:
        plan(rules, tree, head, **options)
    return [(finding.code, finding.rule, finding.path) for finding in refused.value.findings]


def refusal(rules: str, tree: Mapping[str, np.ndarray], head: str = HEAD, **options: Any) -> Finding:
    """The finding of an error with one finding and no headline."""
    with pytest.raises(PlanError) as refused:
        plan(rules, tree, head, **options)
    assert len(refused.value.findings) == 1 and not refused.value.headline
    finding: Finding = refused.value.findings[0]
    return finding


def names(made: Plan) -> list[str]:
    return [step.name for step in made.steps]


PRODUCTS = (
    HEAD + "axes:\n  I: {is: input, equals: 2*P}\n  P: {is: patch}\n  O: {is: output, equals: T*Q}\n"
    "  T: {is: steps}\n  Q: {is: quantiles, equals: 10}\n"
)
IO = "- einsum: ...I,IO->...O\n  from: w\n  linear: m"  # in line 11


TWO_TARGETS = HEAD.replace("{torch: {loads: T}}", "{torch: {loads: T}, hf: {loads: H}}")
ONE = "- einsum: ...D,DF->...F\n  from: w\n  linear: m"
