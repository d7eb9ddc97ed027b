"""A report as JUnit XML, which CI systems show: one test suite for each level, one test case for each measure and finding.

The names do not depend on the outcome: a level is a case of its own, a measure is a case whether it passes or not, and a
finding that concerns no measure is a case named after the tensor (or else what was found). The structure is the one that
Jenkins' and GitLab's readers share (https://github.com/jenkinsci/xunit-plugin, junit-10.xsd).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from xml.etree import ElementTree as ET

from convert.core.findings import Finding
from convert.verify.numerics.compare import Difference, Tolerance
from convert.verify.report.report import LevelReport, Measure, Report, Verdict, predictions

LEVEL = "level"  # name of the case for the level as a whole
_FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # XML 1.0, production 2 (Char)


def to_junit(report: Report) -> str:
    """The report as a JUnit XML document."""
    suites = [_suite(level, level.level in report.undecided) for level in report.levels]
    ran = {level.level for level in report.levels}
    if report.error:
        suites.append(_stopped("check", report.error))
    else:
        suites += [_stopped(name, "is required and did not run") for name in report.undecided if name not in ran]
    root = ET.Element("testsuites", name="convert check")
    _totals(root, suites)
    root.set("time", f"{sum(level.seconds for level in report.levels):.3f}")
    for suite in suites:
        suite.insert(0, _properties(report))
        root.append(suite)
    ET.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"


def _totals(element: ET.Element, of: list[ET.Element]) -> None:
    for key in ("tests", "failures", "errors", "skipped"):
        element.set(key, str(sum(int(child.get(key, "0")) for child in of)))


def _properties(report: Report) -> ET.Element:
    values = {"out": report.out, "source": report.source, "model": report.model, "target": report.target}
    if report.plan is not None:
        values |= {
            "rules": report.plan.rules.path,
            "rules_sha256": report.plan.rules.sha256,
            "found": report.plan.found,
        }
    element = ET.Element("properties")
    for name, value in {**values, **report.environment}.items():
        ET.SubElement(element, "property", name=clean(name), value=clean(str(value)))
    return element


def _suite(level: LevelReport, required: bool) -> ET.Element:
    """A level: its own case, the measures in the order of the data, then findings about anything else.

    Args:
        required: whether a skip of it must not go unnoticed: then it is an error.
    """
    cases = [_level_case(level, required)]
    measured = {measure.name for measure in level.measures}
    about: dict[str, list[Finding]] = {}
    for finding in level.findings:
        about.setdefault(_subject(finding), []).append(finding)
    for measure in level.measures:
        cases.append(
            _case(level.level, measure.name, [*_beyond(measure), *(str(f) for f in about.get(measure.name, []))])
        )
        _out(cases[-1], _figures(measure))
    cases += [
        _case(level.level, name, [str(finding) for finding in findings])
        for name, findings in about.items()
        if name not in measured
    ]
    suite = ET.Element("testsuite", name=f"convert.{level.level}", time=f"{level.seconds:.3f}")
    suite.extend(cases)
    _count(suite)
    return suite


def _stopped(name: str, why: str) -> ET.Element:
    """A level that is required and was not asked for, or a check that stopped."""
    suite = ET.Element("testsuite", name=f"convert.{name}", time="0.000")
    case = ET.SubElement(suite, "testcase", classname=f"convert.{name}", name=LEVEL, time="0.000")
    _say(case, "error", why, "required")
    _count(suite)
    return suite


def _count(suite: ET.Element) -> None:
    cases = suite.findall("testcase")
    suite.set("tests", str(len(cases)))
    for key, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(key, str(sum(case.find(tag) is not None for case in cases)))


def _level_case(level: LevelReport, required: bool) -> ET.Element:
    case = ET.Element("testcase", classname=f"convert.{level.level}", name=LEVEL, time=f"{level.seconds:.3f}")
    if level.verdict is Verdict.FAILED:
        _say(case, "failure", _summary(level), "different")
    elif level.verdict is Verdict.INCONCLUSIVE:
        _say(case, "error", level.reason, str(level.verdict))
    elif level.verdict is Verdict.SKIPPED and required:
        _say(case, "error", level.reason or "skipped", "required")
    elif level.verdict is not Verdict.PASSED:
        ET.SubElement(case, "skipped", message=clean(level.reason or str(level.verdict)))
    _out(case, "\n".join((*level.notes, *_pairs(level))))
    return case


def _pairs(level: LevelReport) -> Iterator[str]:
    """The matrix of backends, a line for each pair."""
    for name, row in level.matrix.items():
        yield from (f"{other} against {name}: {value:.1e}" for other, value in row.items() if other != name)


def _summary(level: LevelReport) -> str:
    """The diagnosis, and what was found."""
    said = [str(finding) for finding in level.findings]
    found = level.diagnosis
    if found and found["name"]:
        said.insert(0, f"{found['name']}: {found['said']}\nrepair: {found['repair']}")
    elif found:
        said.insert(0, f"no diagnosis for {found['boundary']}; ruled out: {', '.join(found['ruled_out']) or 'nothing'}")
    return "\n".join(said) or "different"


def _case(level: str, name: str, failures: list[str]) -> ET.Element:
    case = ET.Element("testcase", classname=f"convert.{level}", name=clean(name), time="0.000")
    if failures:
        _say(case, "failure", "\n".join(failures), "different")
    return case


def _subject(finding: Finding) -> str:
    return finding.path or str(finding.data.get("diagnosis") or "") or finding.rule or "the whole"


def _beyond(measure: Measure) -> list[str]:
    return [] if measure.passed else [_figures(measure)]


def _figures(measure: Measure) -> str:
    said = [_figure("as users run it", measure.difference, measure.tolerance)]
    if measure.lifted is not None:
        said.insert(0, _figure("lifted float64", measure.lifted, measure.lifted_tolerance))
    if measure.logits is not None:
        said.append(f"logits as users run it: {predictions(measure.logits)}")
    if measure.lifted_logits is not None:
        said.append(f"logits in lifted float64: {predictions(measure.lifted_logits)}")
    return "\n".join([*said, *([measure.rule] if measure.rule else [])])


def _figure(word: str, found: Difference, allowed: Tolerance | None) -> str:
    bound = f"allowed {allowed.value:.1e}: {allowed.why}" if allowed else "no bound"
    return (
        f"{word}: relative error {found.relative:.1e} (max abs {found.max_abs:.1e}, {found.ulps:.3g} ULPs, cosine "
        f"{found.cosine:.9g}; {found.got:.6g} for {found.want:.6g} at {list(found.at)}); {bound}"
    )


def _say(case: ET.Element, tag: str, text: str, kind: str) -> None:
    ET.SubElement(case, tag, message=clean((text.splitlines() or [""])[0]), type=kind).text = clean(text)


def _out(case: ET.Element, text: str) -> None:
    if text:
        ET.SubElement(case, "system-out").text = clean(text)


def clean(text: str) -> str:
    """Names come out of foreign files: what XML cannot hold is replaced."""
    return _FORBIDDEN.sub("�", text)
