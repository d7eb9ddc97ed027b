"""The report as an HTML page: self-contained, safe for hostile names, complete."""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import replace

import numpy as np
import pytest

from convert.api import plan_conversion
from convert.cli.check_text import lines
from convert.planning.plan import Plan
from convert.planning.planner import make_plan
from convert.verify.report.html import to_html
from convert.verify.report.junit import to_junit
from convert.verify.report.report import Verdict, share
from support.goldens import checkpoint
from support.html_page import Page
from support.memory_source import MemorySource, rule_file
from support.sample_report import (  # fmt: skip
    COVERAGE,
    EVIL,
    LAYERS,
    evil,
    failing,
    measure,
    model_level,
    passing,
    report,
    with_logits,
)

LOADING = ("src", "href", "xlink:href", "action", "data", "poster", "srcset", "style")


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_conversion("timesfm", checkpoint("timesfm-1.0"))


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


def test_html_keeps_a_text_on_its_line() -> None:
    source = MemorySource({"p": np.zeros(2, np.float32), "q": np.zeros(2, np.float32)})
    rules = rule_file('- parameter: p\n  from: p\n- drop: q\n  because: "r\\n::error::z"')
    plan = make_plan(rules, source)
    text = to_html(report([COVERAGE], plan=plan), plan.to_dict())
    assert "r\\n::error::z" in text and not any(line.startswith("::") for line in text.splitlines())


@pytest.mark.slow
def test_html_says_what_matters_first(plan: Plan) -> None:
    page = pages(plan)["bad"]
    assert page.words[page.words.index("Different") :][:1] == ["Different"]
    order = [page.said.index(word) for word in ("Different", "Diagnosis: transposed", "Relative error along the depth: model", "What each tensor is made of")]  # fmt: skip
    assert order == sorted(order)
    assert (
        "correct the rule at rules/mine.yaml:12" in page.said
        and "4.0e-01 now, 3.0e-16 with this mistake undone" in page.said
    )
    assert "weights: 3 findings: transposed" in page.said
    assert "exit code 1" in page.said and "skipped, so not proven: layers" in page.said
    assert pages(plan)["good"].said.count("✓") == 4
    inconclusive = Page(to_html(report([LAYERS], ("model",))))
    assert "Inconclusive" in inconclusive.words and "inconclusive: layers, model" in inconclusive.said


def test_html_has_every_measure_and_tensor(plan: Plan) -> None:
    page = pages(plan)["bad"]
    ids = {a["id"] for a in page.of("tr") if "id" in a}
    assert ids == {f"model-{k}" for k in range(1, 8)}
    assert len(page.of("tr", "bad")) == 5
    cells = page.said
    for step in plan.steps:
        assert step.name in cells and step.rule.line_only.removeprefix("rules/") in cells
        assert all(part.leaf in cells and str(part.layout) in cells for part in step.parts)
    assert all(d.leaf in cells and d.reason in cells for d in plan.dropped)
    assert "+ 1" in cells and "at i=" not in cells


def test_logits_have_their_divergence_and_agreement_in_each_report() -> None:
    made = with_logits()
    run = "KL divergence 1.2e-07 nats (at most 3.5e-03 at a position), top-1 agreement 99.9957% of 70,000 positions"
    exact = "KL divergence 2.0e-27 nats (at most 5.0e-26 at a position), top-1 agreement 100% of 70,000 positions"
    text = list(lines(made))
    assert f"     logits: {run}" in text and f"     logits, float64: {exact}" in text
    measures = made.to_dict()["levels"][0]["measures"]
    assert measures[-1]["logits"] == {"kl": 1.25e-7, "kl_max": 3.5e-3, "top1": 1 - 3 / 70_000, "positions": 70_000}
    assert measures[-1]["float64_logits"]["top1"] == 1.0
    assert measures[0]["logits"] is measures[0]["float64_logits"] is None
    failed = replace(made.levels[0].measures[-1], difference=measure("x", run=1.0).difference)
    wrong = replace(made.levels[0], verdict=Verdict.FAILED, measures=(failed,))
    said = to_junit(report([wrong]))
    assert f"logits, native precision: {run}" in said and f"logits, float64: {exact}" in said
    heads = ["KL (nats), float64", "KL, native precision", "top-1 agreement"]
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
