"""The report as JUnit XML."""

from __future__ import annotations

from xml.etree import ElementTree as ET

import pytest

from convert.api import plan_conversion
from convert.planning.plan import Plan
from convert.verify.report.junit import to_junit
from convert.verify.report.report import Report
from support.goldens import checkpoint
from support.sample_report import (  # fmt: skip
    COVERAGE,
    LAYERS,
    evil,
    failing,
    model_level,
    passing,
    report,
)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_conversion("timesfm", checkpoint("timesfm-1.0"))


def junit_of(made: Report) -> ET.Element:
    """The document, its structure checked: that of Jenkins' junit-10.xsd."""
    root = ET.fromstring(to_junit(made))
    assert root.tag == "testsuites"
    totals = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
    for suite in root:
        assert suite.tag == "testsuite" and {"name", "tests", "failures", "errors", "skipped", "time"} == set(
            suite.attrib
        )
        cases = suite.findall("testcase")
        assert [child.tag for child in suite] == ["properties", *["testcase"] * len(cases)]
        assert all(p.tag == "property" and set(p.attrib) == {"name", "value"} for p in suite[0])
        names = [case.attrib["name"] for case in cases]
        assert len(set(names)) == len(names) and all(names)
        for case in cases:
            assert (
                set(case.attrib) == {"name", "classname", "time"} and case.attrib["classname"] == suite.attrib["name"]
            )
            tags = [child.tag for child in case]
            assert tags in (
                [], ["system-out"], ["failure"], ["failure", "system-out"], ["error"], ["error", "system-out"],
                ["skipped"], ["skipped", "system-out"],
            )  # fmt: skip
            assert all(child.get("message") for child in case if child.tag != "system-out")
        for key, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
            assert int(suite.attrib[key]) == sum(case.find(tag) is not None for case in cases)
        assert int(suite.attrib["tests"]) == len(cases)
        for key in totals:
            totals[key] += int(suite.attrib[key])
    assert {key: int(root.attrib[key]) for key in totals} == totals
    return root


def names(root: ET.Element) -> dict[str, list[str]]:
    return {suite.attrib["name"]: [case.attrib["name"] for case in suite.findall("testcase")] for suite in root}


def case_of(root: ET.Element, level: str, name: str) -> ET.Element:
    (found,) = (
        case
        for case in root.iter("testcase")
        if (case.get("classname"), case.get("name")) == (f"convert.{level}", name)
    )
    return found


def test_junit_of_a_pass(plan: Plan) -> None:
    root = junit_of(passing(plan=plan, environment={"jax": "0.10.2"}))
    assert (root.get("tests"), root.get("failures"), root.get("errors"), root.get("skipped")) == ("13", "0", "0", "0")
    properties = {p.get("name"): p.get("value") for p in root[0][0]}
    assert properties["rules_sha256"] == plan.rules.sha256 and properties["jax"] == "0.10.2"
    out = case_of(root, "model", "logits").findtext("system-out")
    assert out is not None and "float64: relative error 2.4e-15" in out and "allowed 8.0e-14: 16 x 24" in out


def test_junit_names_are_stable() -> None:
    """A measure is a case whether it passes or fails, so that a CI system can tell a new failure from an old one."""
    good, bad = names(junit_of(passing())), names(junit_of(failing()))
    assert bad["convert.model"] == good["convert.model"] == ["level", *(m.name for m in model_level().measures)]
    assert set(good["convert.weights"]) <= set(bad["convert.weights"])
    assert bad["convert.weights"] == ["level", "layers.1.attn.out.weight", "layers.1.bias", "layers.2.bias"]


def test_junit_of_a_failure() -> None:
    root = junit_of(failing())
    level = case_of(root, "model", "level").find("failure")
    assert (
        level is not None and level.text is not None and level.text.startswith("transposed: layers.1.attn.out.weight")
    )
    assert "fix: correct the rule at rules/mine.yaml:12" in level.text
    first = case_of(root, "model", "layers.1.attn.out").find("failure")
    assert first is not None and first.text is not None
    assert "relative error 1.3e-01" in first.text and "layers.1.attn.out: first difference" in first.text
    assert case_of(root, "model", "layers.0.mlp").find("failure") is None
    weight = case_of(root, "weights", "layers.1.attn.out.weight").find("failure")
    assert weight is not None and "layers.1.attn.out.weight: transposed" in (weight.get("message") or "")
    skipped = case_of(root, "layers", "level").find("skipped")
    assert skipped is not None and skipped.get("message") == "jax is not installed"


def test_junit_of_a_required_skip_is_an_error() -> None:
    """CI systems show a skip as no problem."""
    root = junit_of(report([COVERAGE, LAYERS], ("layers", "model")))
    assert root.get("errors") == "2" and root.get("skipped") == "0"
    for level, said in (("layers", "jax is not installed"), ("model", "is required and did not run")):
        error = case_of(root, level, "level").find("error")
        assert error is not None and error.get("message") == said


def test_junit_of_hostile_names() -> None:
    text = to_junit(evil())
    text.encode()  # no surrogates
    root = junit_of(evil())
    found = [name for suite in names(root).values() for name in suite]
    assert r'<img src=x onerror="alert(1)">&\x00\x1b[31m\ud800]]>' in found
