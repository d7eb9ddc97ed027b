"""The report in four forms: text for a terminal, JSON, JUnit for CI, and a page that a browser shows."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import math
import re
import shutil
import subprocess
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import convert
from convert.api import plan_conversion
from convert.cli.check_text import lines
from convert.core.findings import Finding
from convert.planning.plan import Plan
from convert.planning.planner import make_plan
from convert.verify.numerics.compare import Agreement
from convert.verify.report.html import to_html
from convert.verify.report.html_plot import plot
from convert.verify.report.junit import to_junit
from convert.verify.report.report import LevelReport, Report, Verdict, share
from support.command_line import Run
from support.goldens import checkpoint
from support.memory_source import MemorySource, rule_file
from support.paths import GOLDEN, ROOT
from support.sample_report import COVERAGE, LAYERS, WEIGHTS, measure, model_level, report

NO_TIMESFM = LevelReport("model", Verdict.SKIPPED, "timesfm is not installed")
TRANSPOSED = LevelReport(
    "weights",
    Verdict.FAILED,
    findings=(
        Finding("weights-differ", "transposed: it is laid out as (N H) D", "r.yaml:12", "layers.1.attn.out.weight", data={"diagnosis": "transposed"}),
        Finding("weights-differ", "4 of 4 values differ", "r.yaml:13", "layers.1.bias"),
        Finding("weights-differ", "4 of 4 values differ", "r.yaml:13", "layers.2.bias"),
    ),
)  # fmt: skip
EVIL = '<img src=x onerror="alert(1)">&\x00\x1b[31m\ud800]]>'  # a name in someone else's file


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_conversion("timesfm", checkpoint("timesfm-1.0"))


def failing(**other: Any) -> Report:
    return report([COVERAGE, TRANSPOSED, LAYERS, model_level(2)], **other)


def passing(**other: Any) -> Report:
    layers = LevelReport("layers", Verdict.PASSED, measures=(measure("a", rule="x/r.yaml:3"), measure("b")))
    return report([COVERAGE, WEIGHTS, layers, model_level()], **other)


def evil() -> Report:
    level = LevelReport(
        "model",
        Verdict.FAILED,
        findings=(Finding("weights-differ", EVIL, EVIL, EVIL, data={"diagnosis": EVIL}),),
        measures=(measure(EVIL, lifted=1.0, rule=EVIL), measure("plain")),
        notes=(EVIL,),
        diagnosis={**(model_level(2).diagnosis or {}), "name": EVIL, "said": EVIL, "ruled_out": [EVIL]},
    )
    skipped = LevelReport("layers", Verdict.SKIPPED, EVIL)
    return replace(report([skipped, level]), out=EVIL, source=EVIL, model=EVIL, environment={EVIL: EVIL})


# ---- text


def test_text_of_a_pass() -> None:
    assert list(lines(passing())) == [
        "out.safetensors against ckpt",
        "mine -> torch",
        "",
        "coverage  passed  0.0 s  45 tensors against 45 of the plan",
        "weights   passed  0.1 s  45 of 45 tensors compared bit for bit",
        "layers    passed  0.0 s  2 measures, the worst at 6% of what is allowed",
        "model     passed  1.5 s  7 measures, the worst at 14% of what is allowed",
        "",
        "layers: passed",
        "     worst first  lifted float64  allowed  as users run it  allowed  ULPs  rule",
        "     a                   4.0e-16  8.0e-14          3.0e-07  5.0e-06   2.5  r.yaml:3",
        "     b                   4.0e-16  8.0e-14          3.0e-07  5.0e-06   2.5",
        "     allowed lifted, a: 16 x 24 x eps(float64): measured",
        "     allowed as run, a: 4 x 1.2e-06: measured",
        "",
        "model: passed",
        "     worst first        lifted float64  allowed  as users run it  allowed  ULPs",
        "     logits                    2.4e-15  8.0e-14          7.0e-07  5.0e-06   5.9",
        "     layers.2.mlp              2.0e-15  8.0e-14          6.0e-07  5.0e-06   5.0",
        "     layers.2.attn.out         1.6e-15  8.0e-14          5.0e-07  5.0e-06   4.2",
        "     ... and 4 more, each within its bounds",
        "     allowed lifted, logits: 16 x 24 x eps(float64): measured",
        "     allowed as run, logits: 4 x 1.2e-06: measured",
        "  note: 7 boundaries and outputs, live",
        "",
        "equal (exit code 0)",
    ]


def test_text_of_a_failure() -> None:
    """The diagnosis comes first, then the first boundary that differs, then the worst; levels that passed say little."""
    text = list(lines(failing()))
    assert text[3:7] == [
        "coverage  passed   0.0 s  45 tensors against 45 of the plan",
        "weights   FAILED   0.0 s  3 findings: transposed",
        "layers    skipped  0.0 s  jax is not installed",
        "model     FAILED   1.5 s  transposed; 1 finding; 5 of 7 measures beyond what is allowed",
    ]
    at = text.index("weights: FAILED")
    assert text[at + 1 : at + 4] == [
        "  - r.yaml:12: layers.1.attn.out.weight: transposed: it is laid out as (N H) D",
        "  - r.yaml:13: layers.1.bias: 4 of 4 values differ",
        "      and 1 more of this rule",
    ]
    at = text.index("model: FAILED")
    assert text[at + 1 : at + 9] == [
        "  diagnosis: transposed",
        "      layers.1.attn.out.weight is laid out as D (N H), and is wanted as (N H) D",
        "      relative error of layers.1.attn.out: 4.0e-01 as it is, 3.0e-16 when that is undone",
        "      repair: correct the rule at rules/mine.yaml:12",
        "  - layers.1.attn.out: first difference: relative error 1.3e-01 where 8.0e-14 is allowed",
        "     first failure, then worst first  lifted float64  allowed  as users run it  allowed     ULPs",
        "  >  layers.1.attn.out                       1.3e-01  8.0e-14          1.3e-01  5.0e-06  1.1e+06",
        "  !  layers.1.mlp                            1.0e-01  8.0e-14          1.0e-01  5.0e-06  8.4e+05",
    ]
    assert "coverage: passed" not in text and "layers: skipped" not in text
    assert text[-1] == "different: weights, model (exit code 1)"


def test_text_without_a_diagnosis() -> None:
    level = model_level(2)
    unknown = replace(level, diagnosis={**(level.diagnosis or {}), "name": "", "said": "no known mistake explains it"})
    text = "\n".join(lines(report([unknown])))
    assert "no diagnosis: no known mistake explains it at layers.1.attn.out, where the two differ first" in text
    assert "ruled out: of another layer" in text


def test_many_measures_and_findings_are_folded() -> None:
    level = model_level(0, layers=20)
    findings = tuple(Finding("weights-differ", "differs", f"r.yaml:{k}", f"t{k}") for k in range(30))
    text = list(lines(report([replace(level, findings=findings)])))
    assert "  - and 22 more of other rules (--json has all)" in text
    assert "     ... and 33 more, 33 of them beyond" in text
    assert sum(line.startswith("  !") for line in text) == 7 and len(text) < 40


def test_text_of_what_could_not_be_told() -> None:
    def last(made: Report) -> str:
        return list(lines(made))[-1]

    assert last(report([COVERAGE, WEIGHTS])) == (
        "equal, as far as coverage, weights can tell; not checked: layers, model (exit code 0)"
    )
    assert last(report([COVERAGE, LAYERS], ("layers", "model"))) == (
        "inconclusive: layers was skipped, model did not run (exit code 2)"
    )
    assert last(report([NO_TIMESFM])) == "inconclusive: model was skipped (exit code 2)"


def test_paths_are_no_longer_than_needed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    source = tmp_path / "deep" / "down" / "checkpoint"
    skipped = LevelReport("model", Verdict.SKIPPED, f"{source}: the tree does not tell the window")
    made = replace(report([COVERAGE, skipped]), source=str(source), out=str(tmp_path / "out"))
    text = list(lines(made))
    assert text[0] == "out against deep/down/checkpoint"
    assert "model     skipped  0.0 s  the tree does not tell the window" in text


def backends(name: str = "a backend") -> LevelReport:
    finding = Finding(
        "backend-differs",
        f"the weights are equal; {name} computes differently",
        path="torch.compile",
        data={"diagnosis": name},
    )
    matrix = {"jax": {"jax": 0.0, "torch": 3e-7}, "torch": {"jax": math.nan, "torch": 0.0}}
    return LevelReport("backends", Verdict.FAILED, findings=(finding,), matrix=matrix)


def test_a_backend_is_told_from_a_wrong_conversion(plan: Plan) -> None:
    odd = report([COVERAGE, WEIGHTS, model_level(), backends()])
    assert odd.exit_code == 1 and odd.only_backends
    text = list(lines(odd))
    said = "equal, but a backend computes differently"
    assert text[-1] == f"{said} (exit code 1)" and odd.to_dict()["verdict"] == odd.verdict == said
    assert any(line.split() == ["2", "torch", "nan", "."] for line in text)
    page = Page(to_html(odd))
    assert said.capitalize() in page.words and f"<title>{said.capitalize()}: " in to_html(odd)
    assert len(page.of("table", "matrix")) == 1
    assert "torch against jax: 3.0e-07" in (case_of(junit_of(odd), "backends", "level").findtext("system-out") or "")
    for other in (report([backends("wrong conversion")]), report([TRANSPOSED, backends()]), failing()):
        assert not other.only_backends and list(lines(other))[-1].startswith("different: ")
        assert other.verdict == "different"


# ---- JUnit


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
    assert out is not None and "lifted float64: relative error 2.4e-15" in out and "allowed 8.0e-14: 16 x 24" in out


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
    assert "repair: correct the rule at rules/mine.yaml:12" in level.text
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
    assert '<img src=x onerror="alert(1)">&�\ufffd[31m\ufffd]]>'.replace("�", "\ufffd") in found


# ---- HTML

VOID = {"meta", "input", "br", "img", "link"}
LOADING = ("src", "href", "xlink:href", "action", "data", "poster", "srcset", "style")


@dataclass
class Page(HTMLParser):
    """A page taken apart: elements with their attributes, texts, and whether the tags balance."""

    text: str
    elements: list[tuple[str, dict[str, str | None]]] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    open: list[str] = field(default_factory=list)
    contents: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__()
        self.feed(self.text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("style", "script"):
            self.contents[self.open[-1]] = data
        elif data.strip():
            self.words.append(data.strip())

    def of(self, tag: str, kind: str = "") -> list[dict[str, str | None]]:
        return [a for name, a in self.elements if name == tag and (not kind or kind in (a.get("class") or "").split())]

    @property
    def said(self) -> str:
        return " ".join(self.words)


def pages(plan: Plan) -> dict[str, Page]:
    return {
        "good": Page(to_html(passing(plan=plan), plan.to_dict())),
        "bad": Page(to_html(failing(plan=plan), plan.to_dict())),
        "evil": Page(to_html(evil(), plan.to_dict())),
        "bare": Page(to_html(report([COVERAGE]))),
    }


def test_html_loads_nothing(plan: Plan) -> None:
    for page in pages(plan).values():
        for tag, attributes in page.elements:
            assert tag not in ("img", "link", "iframe", "object", "embed", "base", "form", "image", "use"), tag
            for name in LOADING:
                assert name not in attributes or (attributes[name] or "").startswith("#"), (tag, attributes)
            assert not any(name.startswith("on") for name in attributes), attributes
        style, script = page.contents["style"], page.contents["script"]
        assert "url(" not in style and "@import" not in style and "@font-face" not in style
        assert not re.search(r"fetch|XMLHttp|import\s*\(|innerHTML|eval|document\.write|https?:", script)


def test_html_policy_admits_its_own_style_and_script_only(plan: Plan) -> None:
    for page in pages(plan).values():
        (policy,) = (a["content"] for a in page.of("meta") if a.get("http-equiv") == "Content-Security-Policy")
        assert policy is not None and policy.startswith("default-src 'none'; ") and "unsafe" not in policy
        for tag in ("style", "script"):
            digest = base64.b64encode(hashlib.sha256(page.contents[tag].encode()).digest()).decode()
            assert f"{tag}-src 'sha256-{digest}'" in policy


def test_html_anchors_exist(plan: Plan) -> None:
    for page in pages(plan).values():
        ids = [a["id"] for _, a in page.elements if "id" in a]
        assert len(set(ids)) == len(ids)
        assert {(a["href"] or "")[1:] for a in page.of("a")} <= set(ids)


def test_html_of_hostile_names(plan: Plan) -> None:
    text = to_html(evil(), plan.to_dict())
    text.encode()
    assert "<img" not in text and "\x1b" not in text and "\x00" not in text
    page = Page(text)
    assert '<img src=x onerror="alert(1)">&\\x00\\x1b[31m\\ud800]]>' in page.words
    assert not any(key.startswith("on") for _, attributes in page.elements for key in attributes)


def test_html_of_hostile_paths_in_the_mapping() -> None:
    source = MemorySource({"p": np.zeros(2, np.float32), EVIL.replace("/", ""): np.zeros(2, np.float32)})
    plan = make_plan(rule_file("- parameter: p\n  from: p\n- drop: '<*'\n  because: hostile"), source)
    page = Page(to_html(report([COVERAGE], plan=plan), plan.to_dict()))
    assert any('onerror="alert(1)"' in word for word in page.words) and page.of("img") == []


def test_html_says_what_matters_first(plan: Plan) -> None:
    page = pages(plan)["bad"]
    assert page.words[page.words.index("Different") :][:1] == ["Different"]
    order = [page.said.index(word) for word in ("Different", "Diagnosis: transposed", "Relative error along the depth: model", "What each tensor is made of")]  # fmt: skip
    assert order == sorted(order)
    assert (
        "correct the rule at rules/mine.yaml:12" in page.said
        and "4.0e-01 as it is, 3.0e-16 when it is undone" in page.said
    )
    assert "weights: 3 findings: transposed" in page.said
    assert "exit code 1" in page.said and "skipped, so not proven: layers" in page.said
    assert pages(plan)["good"].said.count("✓") == 4
    undecided = Page(to_html(report([LAYERS], ("model",))))
    assert "Inconclusive" in undecided.words and "undecided: layers, model" in undecided.said


def test_html_has_every_measure_and_tensor(plan: Plan) -> None:
    page = pages(plan)["bad"]
    ids = {a["id"] for a in page.of("tr") if "id" in a}
    assert ids == {f"model-{k}" for k in range(1, 8)}
    assert len(page.of("tr", "bad")) == 5
    cells = page.said
    for step in plan.steps:
        assert step.name in cells and step.rule.line_only.removeprefix("rules/") in cells
        assert all(part.leaf in cells and part.layout in cells for part in step.parts)
    assert all(d.leaf in cells and d.reason in cells for d in plan.dropped)
    assert "+ 1" in cells and "at i=" not in cells


def with_logits() -> Report:
    """The last measure is of logits; as users run it, three of 70,000 positions have another first token."""
    level = model_level()
    run, lifted = Agreement(1.25e-7, 3.5e-3, 1 - 3 / 70_000, 70_000), Agreement(2e-27, 5e-26, 1.0, 70_000)
    last = replace(level.measures[-1], logits=run, lifted_logits=lifted)
    return report([replace(level, measures=(*level.measures[:-1], last))])


def test_logits_have_their_divergence_and_agreement_in_each_report() -> None:
    made = with_logits()
    run = "KL divergence 1.2e-07 nats (at most 3.5e-03 at a position), top-1 agreement 99.9957% of 70,000 positions"
    exact = "KL divergence 2.0e-27 nats (at most 5.0e-26 at a position), top-1 agreement 100% of 70,000 positions"
    text = list(lines(made))
    assert f"     logits: {run}" in text and f"     logits, lifted: {exact}" in text
    measures = made.to_dict()["levels"][0]["measures"]
    assert measures[-1]["logits"] == {"kl": 1.25e-7, "kl_max": 3.5e-3, "top1": 1 - 3 / 70_000, "positions": 70_000}
    assert measures[-1]["lifted_logits"]["top1"] == 1.0
    assert measures[0]["logits"] is measures[0]["lifted_logits"] is None
    failed = replace(made.levels[0].measures[-1], difference=measure("x", run=1.0).difference)
    wrong = replace(made.levels[0], verdict=Verdict.FAILED, measures=(failed,))
    said = ET.tostring(junit_of(report([wrong])), encoding="unicode")
    assert f"logits as users run it: {run}" in said and f"logits in lifted float64: {exact}" in said
    heads = ["KL (nats), lifted", "KL, as users run it", "top-1 agreement"]
    words = Page(to_html(made)).words
    at = words.index(heads[0])
    assert words[at : at + 3] == heads
    at = words.index("2.0e-27")
    assert words[at : at + 3] == ["2.0e-27", "1.2e-07", "99.9957% of 70,000"]
    assert not set(heads) & set(Page(to_html(report([model_level()]))).words)


def test_agreement_is_not_rounded_up_to_all() -> None:
    assert [share(x) for x in (1.0, 1 - 1e-9, 0.5, 0.0)] == ["100%", "<100%", "50%", "0%"]


def test_html_of_nothing() -> None:
    page = pages_of_nothing = Page(to_html(report([])))
    assert "Inconclusive" in page.words and pages_of_nothing.of("svg") == []


# ---- the plot


def drawn(level: LevelReport) -> Page:
    return Page(plot(level))


def test_plot_has_every_point_and_bound() -> None:
    page = drawn(model_level())
    assert len(page.of("a", "lifted")) == len(page.of("a", "run")) == 7
    assert len(page.of("circle")) == len(page.of("rect")) == 7
    assert len(page.of("path", "bound")) == 2 and len(page.of("path", "line")) == 2
    assert page.of("line", "first") == [] and page.of("a", "bad") == []
    assert "layers.0.attn.out\nlifted float64: 0.00e+00\nallowed: 8.00e-14" in page.words


def test_plot_marks_the_first_failure() -> None:
    page = drawn(model_level(2))
    (mark,) = page.of("line", "first")
    point = page.of("circle")[2]
    assert mark["x1"] == mark["x2"] == point["cx"]
    assert "first difference: layers.1.attn.out" in page.words
    assert len(page.of("a", "bad")) == 10


def heights(page: Page) -> list[float]:
    return [float(circle["cy"] or "nan") for circle in page.of("circle")]


def test_plot_is_logarithmic_with_room_for_zero_and_infinity() -> None:
    errors = (0.0, 1e-16, 1e-14, 1e-12, math.inf, math.nan)
    level = LevelReport("model", Verdict.FAILED, measures=tuple(measure(f"m{e}", lifted=e) for e in errors))
    zero, a, b, c, inf, nan = heights(drawn(level))
    assert zero > a > b > c > inf == nan
    assert a - b == pytest.approx(b - c, abs=0.2)  # equal ratios, equal distances
    assert {"0", "∞", "1e-16"} <= set(drawn(level).words)


def test_plot_of_degenerate_levels() -> None:
    """One measure, none lifted, all zero, many: numbers stay within the picture."""
    for measures in (
        (measure("a"),),
        (measure("a", lifted=None), measure("b", lifted=None)),
        (measure("a", 0.0, 0.0), measure("b", 0.0, 0.0)),
        (measure("a", 1e-300, 1e-300),),
        (measure("a", 1e30, 1e300),),
        tuple(measure(f"layers.{k}.mlp") for k in range(500)),
    ):
        page = drawn(LevelReport("model", Verdict.PASSED, measures=measures))
        for tag in ("circle", "rect", "line", "text"):
            for attributes in page.of(tag):
                numbers = [
                    float(attributes[key] or "nan") for key in ("x", "y", "x1", "y1", "cx", "cy") if key in attributes
                ]
                assert all(-1 <= number <= 961 for number in numbers), (tag, attributes)
    assert sum(word.startswith("layer ") for word in page.words) <= 25


def test_plot_names_the_layers_of_a_stack() -> None:
    assert [word for word in drawn(model_level()).words if word.startswith("layer ")] == [
        "layer 0",
        "layer 1",
        "layer 2",
    ]


# ---- in a browser

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium, chromium-browser or google-chrome on the PATH")


def chromium(tmp_path: Path, page: Path, fragment: str, *options: str) -> str:
    assert CHROMIUM is not None
    command = [
        CHROMIUM,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        f"--user-data-dir={tmp_path / 'user'}",
    ]
    done = subprocess.run(
        [*command, *options, page.as_uri() + fragment], capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout


@pytest.fixture
def page(tmp_path: Path, plan: Plan) -> Path:
    path = tmp_path / "report.html"
    path.write_text(to_html(failing(plan=plan), plan.to_dict()), encoding="utf-8")
    return path


def rows(dom: str) -> list[tuple[bool, str]]:
    """The rows of the mapping: whether shown, and the tensor."""
    body = dom[dom.index('<section id="mapping"') :].partition("<tbody>")[2].partition("</tbody>")[0]
    found = re.findall(r"<tr([^>]*)><td[^>]*>(?:<span class=\"failed\">[^<]*</span> )?([^<]*)", body)
    return [("hidden" not in attributes, name.strip()) for attributes, name in found]


@browser
def test_browser_draws_and_filters(tmp_path: Path, page: Path, plan: Plan) -> None:
    dom = chromium(tmp_path, page, "#q=attn%202%20O_PROJ", "--dump-dom")
    assert 'class="scripted"' in dom and dom.count("<circle") >= 7 and 'class="first"' in dom
    shown = [name for visible, name in rows(dom) if visible]
    assert len(rows(dom)) == len(plan.steps) + len(plan.dropped)
    assert shown == [f"stacked_transformer.layers.2.self_attn.o_proj.{role}" for role in ("weight", "bias")]
    assert f">2 of {len(plan.steps) + len(plan.dropped)}<" in dom
    everything = chromium(tmp_path, page, "", "--dump-dom")
    assert all(visible for visible, _ in rows(everything))


@browser
def test_browser_in_light_and_dark(tmp_path: Path, page: Path) -> None:
    for scheme, background in ((1, (255, 255, 255)), (0, (0x12, 0x15, 0x1B))):
        picture = tmp_path / f"{scheme}.png"
        chromium(tmp_path, page, "", f"--blink-settings=preferredColorScheme={scheme}", "--window-size=1200,1600", f"--screenshot={picture}")  # fmt: skip
        size, pixel, nbytes = look(picture)
        assert size == (1200, 1600) and pixel == background
        assert nbytes > 60_000  # an empty page is 10 kB


def look(picture: Path) -> tuple[tuple[int, int], tuple[int, ...], int]:
    """Size, first pixel and bytes of a PNG; no filter of PNG changes the first pixel of the first row."""
    data = picture.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    at, pixels = 8, b""
    while at < len(data):
        length, kind = int.from_bytes(data[at : at + 4], "big"), data[at + 4 : at + 8]
        if kind == b"IHDR":
            size = int.from_bytes(data[at + 8 : at + 12], "big"), int.from_bytes(data[at + 12 : at + 16], "big")
        if kind == b"IDAT":
            pixels += data[at + 8 : at + 8 + length]
        at += length + 12
    return size, tuple(zlib.decompress(pixels)[1:4]), len(data)


# ---- the command


@pytest.fixture
def run(run: Run) -> Callable[..., tuple[str, str]]:
    """`convert check` within this process."""
    return functools.partial(run, "check")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    out = tmp_path / "out.safetensors"
    convert.convert("timesfm", checkpoint("timesfm-1.0"), out)
    return out


QUICK = ("--level", "coverage,weights")
FROM = ("--from", GOLDEN / "timesfm-1.0" / "checkpoints")


def test_exit_codes(run: Run, file: Path) -> None:
    out, err = run(file, *FROM, *QUICK, code=0)
    assert out.splitlines()[-1].endswith("not checked: layers, model (exit code 0)") and err == ""
    assert run(file, *FROM, *QUICK, "--require", "layers", code=2)[0].splitlines()[-1] == (
        "inconclusive: layers did not run (exit code 2)"
    )
    tensors = load_file(file)
    name = "stacked_transformer.layers.0.self_attn.o_proj.weight"
    save_file({**tensors, name: np.ascontiguousarray(tensors[name].T)}, file)
    out, _ = run(file, *FROM, "--model", "timesfm", *QUICK, "--require", "layers", code=1)
    assert "weights   FAILED" in out and f": {name}: " in out and "transposed" in out
    assert out.splitlines()[-1] == "different: weights (exit code 1)"


def test_a_skip_and_a_required_skip(run: Run, file: Path, tmp_path: Path) -> None:
    rules = tmp_path / "rules.yaml"
    text = (ROOT / "rules" / "timesfm-1.yaml").read_text(encoding="utf-8")
    rules.write_text("".join(line for line in text.splitlines(True) if not line.startswith("reference:")))
    levels = ("--model", rules, "--level", "weights", "--level", "model")
    out, _ = run(file, *FROM, *levels, code=0)
    assert re.search(
        r"^model +skipped +0.0 s  .*rules.yaml has no `reference`; give the two models with --reference", out, re.M
    )
    assert run(file, *FROM, *levels, "--require", "model", code=2)[0].splitlines()[-1] == (
        "inconclusive: model was skipped (exit code 2)"
    )


def test_usage_errors_are_2(run: Run, file: Path, tmp_path: Path) -> None:
    assert "there is no level 'weight'; did you mean 'weights'?" in run(file, *FROM, "--level", "weight", code=2)[1]
    assert "there is no level 'all'" in run(file, *FROM, "--require", "all", code=2)[1]
    assert "no such file" in run(tmp_path / "absent.safetensors", *FROM, code=2)[1]


def test_settings_in_a_foreign_header(run: Run, file: Path) -> None:
    for settings in ("{", "[1]"):
        save_file(load_file(file), file, {"format": "pt", "model": "timesfm-1", "settings": settings})
        _, err = run(file, *FROM, *QUICK, code=2)
        assert "`settings` in its header is not a JSON object" in err and "internal error" not in err


def test_json_on_stdout(run: Run, file: Path) -> None:
    out, err = run(file, *FROM, *QUICK, "--json", code=0)
    made = json.loads(out, parse_constant=lambda word: pytest.fail(word))
    assert err == "" and made["format"] == 2 and made["verdict"] == "equal"
    assert made["plan"]["rules"]["model"] == "timesfm-1" and made["plan"]["target"] == "timesfm"


def test_report_files(run: Run, file: Path, tmp_path: Path) -> None:
    """Written whichever way the check ends, over an older report, and nothing is left beside them."""
    junit, html = tmp_path / "report.xml", tmp_path / "report.html"
    junit.write_text("old")
    for code, extra in ((0, ()), (2, ("--require", "model"))):
        run(file, *FROM, *QUICK, *extra, "--junit", junit, "--html", html, code=code)
        assert ET.parse(junit).getroot().get("errors") == ("1" if code else "0")
        page = Page(html.read_text(encoding="utf-8"))
        assert ("Equal" in page.words) is (code == 0)
        assert "input_ff_layer.hidden_layer.0.weight" in page.said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.safetensors", "report.html", "report.xml"]


def test_reports_of_a_check_that_stopped(run: Run, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A report of an earlier, passing check must not stay: CI would show that one."""
    junit, html = tmp_path / "report.xml", tmp_path / "report.html"
    reports = ("--junit", junit, "--html", html)
    run(file, *FROM, *QUICK, *reports, code=0)

    def stopped(said: str, *options: object) -> None:
        out, err = run(file, *FROM, *QUICK, *reports, "--json", *options, code=2)
        made = json.loads(out)
        assert made["verdict"] == "inconclusive" and made["exit_code"] == 2 and made["levels"] == []
        assert said in made["error"] and said in err, made["error"]
        (case,) = ET.parse(junit).getroot().iter("testcase")
        problem = case.find("error")
        assert (
            problem is not None
            and said in problem.get("message", "")
            and ET.parse(junit).getroot().get("errors") == "1"
        )
        page = Page(html.read_text(encoding="utf-8"))
        assert said in page.said and "Inconclusive" in page.words and "Equal" not in page.words

    stopped("there is no level 'weight'", "--level", "weight")
    whole = file.read_bytes()
    file.write_bytes(whole[:-100])
    stopped("not a whole safetensors file")
    file.write_bytes(whole)
    run(file, *FROM, *QUICK, *reports, code=0)
    assert "Equal" in Page(html.read_text(encoding="utf-8")).words

    def defect(*args: object, **options: object) -> None:
        raise ZeroDivisionError("ours")

    monkeypatch.setattr("convert.verify.run.check", defect)
    stopped("ZeroDivisionError")


def test_a_report_does_not_replace_what_is_checked(run: Run, file: Path, tmp_path: Path) -> None:
    before = file.read_bytes()
    assert "is part of what is checked" in run(file, *FROM, *QUICK, "--html", file, code=2)[1]
    assert "is part of what is checked" in run(file, *FROM, *QUICK, "--junit", FROM[1] / "x.xml", code=2)[1]
    assert "does not exist; create it first" in run(file, *FROM, *QUICK, "--html", tmp_path / "no" / "x", code=2)[1]
    assert "is a directory" in run(file, *FROM, *QUICK, "--html", tmp_path, code=2)[1]
    assert file.read_bytes() == before and not (FROM[1] / "x.xml").exists()
