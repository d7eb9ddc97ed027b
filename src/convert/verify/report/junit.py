"""A report as JUnit XML for CI systems: one test suite for each level, one test case for each measure and finding.

The names of the cases do not depend on the outcome. A level is a case, a measure is a case whether it passes or not, and a
finding that concerns no measure is a case named after its path. The structure is the one that the readers of Jenkins and
GitLab share (https://github.com/jenkinsci/xunit-plugin, junit-10.xsd).
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from xml.etree import ElementTree as ET

from convert.core.findings import Finding
from convert.core.text import one_line
from convert.numerics.compare import Difference
from convert.numerics.tolerances import Tolerance
from convert.verify.report.report import FLOAT64, NATIVE, LevelReport, Measure, Report, Verdict, predictions

LEVEL = "level"  # name of the case for the level itself
COUNTS = {"tests": "", "failures": "failure", "errors": "error", "skipped": "skipped"}
_FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # XML 1.0, production 2 (Char)


@dataclass(frozen=True)
class _Case:
    """A test case; `outcome` is ``failure``, ``error``, ``skipped`` or empty."""

    name: str
    outcome: str = ""
    text: str = ""
    kind: str = ""
    output: str = ""
    seconds: float = 0.0


def to_junit(report: Report) -> str:
    """Render the report as a JUnit XML document."""
    suites = {level.level: (level.seconds, list(_cases(level, report))) for level in report.levels}
    if report.errors:
        suites["check"] = 0.0, [_Case(LEVEL, "error", "\n".join(map(str, report.errors)), "required")]
    else:
        for name in report.inconclusive:
            missing = _Case(LEVEL, "error", "is required and did not run", "required")
            suites.setdefault(name, (0.0, [missing]))
    seconds = sum(level.seconds for level in report.levels)
    root = ET.Element("testsuites", name="convert check", time=f"{seconds:.3f}")
    root.attrib |= _counts([case for _, cases in suites.values() for case in cases])
    for name, (seconds, cases) in suites.items():
        suite = ET.SubElement(
            root, "testsuite", {"name": f"convert.{name}", "time": f"{seconds:.3f}", **_counts(cases)}
        )
        properties = ET.SubElement(suite, "properties")
        for key, value in _properties(report).items():
            ET.SubElement(properties, "property", name=clean(key), value=clean(one_line(value)))
        for case in cases:
            _write(suite, case)
    ET.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"


def _properties(report: Report) -> dict[str, str]:
    values = {"out": report.out, "source": report.source, "model": report.model, "target": report.target}
    if (plan := report.plan) is not None:
        values |= {"rules": plan.rules.path, "rules_sha256": plan.rules.sha256, "found": plan.found}
    return {**values, **report.environment}


def _counts(cases: list[_Case]) -> dict[str, str]:
    outcomes = Counter(case.outcome for case in cases)
    return {key: str(outcomes[outcome] if outcome else len(cases)) for key, outcome in COUNTS.items()}


def _write(suite: ET.Element, case: _Case) -> None:
    element = ET.SubElement(
        suite, "testcase", classname=suite.attrib["name"], name=clean(one_line(case.name)), time=f"{case.seconds:.3f}"
    )
    if case.outcome:
        problem = ET.SubElement(element, case.outcome, message=clean((case.text.splitlines() or [""])[0]))
        if case.outcome != "skipped":
            problem.set("type", case.kind)
            problem.text = clean(case.text)
    if case.output:
        ET.SubElement(element, "system-out").text = clean(case.output)


def _cases(level: LevelReport, report: Report) -> Iterator[_Case]:
    """The level itself, its measures in the order of the data flow, then findings about anything else."""
    yield _level_case(level, level.level in report.inconclusive)
    about: dict[str, list[Finding]] = defaultdict(list)
    for finding in level.findings:
        about[_subject(finding)].append(finding)
    for measure in level.measures:
        figures = _figures(measure)
        failures = [*([] if measure.passed else [figures]), *map(str, about.pop(measure.name, ()))]
        yield _case(measure.name, failures, figures)
    for name, findings in about.items():
        text = "\n".join(map(str, findings))
        failed = level.verdict is Verdict.FAILED
        yield _Case(name, "failure" if failed else "error", text, "different" if failed else "required")


def _case(name: str, failures: list[str], output: str = "") -> _Case:
    if not failures:
        return _Case(name, output=output)
    return _Case(name, "failure", "\n".join(failures), "different", output)


def _level_case(level: LevelReport, required: bool) -> _Case:
    """The case of the level.

    Args:
        required: a skip is an error, as CI systems show skips as no problem.
    """
    pairs = (
        f"{other} against {name}: {value:.1e}"
        for name, row in level.matrix.items()
        for other, value in row.items()
        if other != name
    )
    outcome, text, kind = "skipped", level.reason or str(level.verdict), ""
    if level.verdict is Verdict.PASSED:
        outcome, text = "", ""
    elif level.verdict is Verdict.FAILED:
        outcome, text, kind = "failure", _describe(level), "different"
    elif level.verdict is Verdict.INCONCLUSIVE:
        outcome, kind = "error", str(level.verdict)
    elif level.verdict is Verdict.SKIPPED and required:
        outcome, kind = "error", "required"
    return _Case(LEVEL, outcome, text, kind, "\n".join((*level.notes, *pairs)), level.seconds)


def _describe(level: LevelReport) -> str:
    """The diagnosis, then the findings."""
    lines = list(map(str, level.findings))
    found = level.diagnosis
    if found and found["name"]:
        lines.insert(0, f"{found['name']}: {found['problem']}\nfix: {found['fix']}")
    elif found:
        ruled_out = ", ".join(found["ruled_out"]) or "nothing"
        lines.insert(0, f"no diagnosis for {found['boundary']}; ruled out: {ruled_out}")
    return "\n".join(lines) or "different"


def _subject(finding: Finding) -> str:
    return finding.path or str(finding.data.get("diagnosis") or "") or finding.rule or finding.code


def _figures(measure: Measure) -> str:
    """Every number of a measure, a line for each precision."""
    lines = [_figure(FLOAT64, measure.float64, measure.float64_tolerance)] if measure.float64 is not None else []
    lines.append(_figure(NATIVE, measure.difference, measure.tolerance))
    for label, logits in ((NATIVE, measure.logits), (FLOAT64, measure.float64_logits)):
        lines += [f"logits, {label}: {predictions(logits)}"] if logits is not None else []
    return "\n".join([*lines, *([measure.rule] if measure.rule else [])])


def _figure(label: str, found: Difference, allowed: Tolerance | None) -> str:
    bound = f"allowed {allowed.value:.1e}: {allowed.why}" if allowed else "no tolerance"
    return (
        f"{label}: relative error {found.relative:.1e} (max abs {found.max_abs:.1e}, {found.ulps:.3g} ULPs, cosine "
        f"{found.cosine:.9g}; expected {found.want:.6g}, got {found.got:.6g} at {list(found.at)}); {bound}"
    )


def clean(text: str) -> str:
    """Replace the characters that XML cannot hold: names come from files of others."""
    return _FORBIDDEN.sub("\ufffd", text)
