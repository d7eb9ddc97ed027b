"""Findings as SARIF 2.1.0: code review tools show each at its line of the rule file."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from convert.core.findings import Finding
from convert.verify.report.report import Report, Verdict

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_HELP = "https://github.com/ckpt-convert/ckpt-convert/blob/main/docs/errors"
_PLACE = re.compile(r"(?P<file>.+?)(:(?P<line>\d+))?(:(?P<column>\d+))?")


def to_sarif(report: Report, tool: str) -> dict[str, Any]:
    """Render the findings of a check. A finding of a level that failed is an error, others are warnings."""
    results = [
        (finding, "error" if level.verdict is Verdict.FAILED else "warning")
        for level in report.levels
        for finding in level.findings
    ]
    return sarif([*results, *((finding, "error") for finding in report.errors)], tool, report.out)


def sarif(findings: Iterable[tuple[Finding, str]], tool: str, default: str) -> dict[str, Any]:
    """Render findings as one SARIF run.

    Args:
        findings: each with its level: ``error``, ``warning`` or ``note``.
        tool: name and version of this tool.
        default: file of findings that concern no rule.
    """
    results = list(findings)
    name, _, version = tool.partition(" ")
    codes = sorted({finding.code for finding, _ in results})
    driver = {
        "name": name,
        "version": version,
        "rules": [{"id": code, "helpUri": f"{_HELP}/{code}.md"} for code in codes],
    }
    return {
        "$schema": SCHEMA,
        "version": "2.1.0",
        "runs": [{"tool": {"driver": driver}, "results": [_result(*result, default) for result in results]}],
    }


def _result(finding: Finding, level: str, default: str) -> dict[str, Any]:
    place = _PLACE.fullmatch(finding.rule)
    region = {
        key: int(place[group])
        for key, group in (("startLine", "line"), ("startColumn", "column"))
        if place is not None and place[group]
    }
    physical: dict[str, Any] = {"artifactLocation": {"uri": _uri(place["file"] if place else finding.path or default)}}
    if region:
        physical["region"] = region
    return {
        "ruleId": finding.code,
        "level": level,
        "message": {"text": str(finding)},
        "locations": [{"physicalLocation": physical}],
    }


def _uri(path: str) -> str:
    """Return a path relative to the current directory, which CI runs in the repository; another one stays as it is."""
    absolute = Path(path).absolute()
    return absolute.relative_to(Path.cwd()).as_posix() if absolute.is_relative_to(Path.cwd()) else Path(path).as_posix()
