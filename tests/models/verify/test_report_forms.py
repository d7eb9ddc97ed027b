"""The report in a terminal, in a browser, and as files of the command."""

from __future__ import annotations

import functools
import json
import re
import shutil
import subprocess
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree as ET

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import convert
from convert.api import plan_conversion
from convert.cli.check_text import lines
from convert.core.findings import Finding
from convert.planning.plan import Plan
from convert.verify.report.html import to_html
from convert.verify.report.junit import to_junit
from convert.verify.report.report import LevelReport, Report, Verdict
from support.command_line import Run
from support.goldens import checkpoint
from support.html_page import Page
from support.paths import GOLDEN, ROOT
from support.sample_report import (  # fmt: skip
    COVERAGE,
    LAYERS,
    NO_TIMESFM,
    TRANSPOSED,
    WEIGHTS,
    backends,
    failing,
    model_level,
    passing,
    report,
)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_conversion("timesfm", checkpoint("timesfm-1.0"))


# ---- text


def test_text_of_a_pass() -> None:
    assert list(lines(passing())) == [
        "out.safetensors against ckpt",
        "mine -> torch",
        "",
        "coverage  passed  0.0 s  45 tensors against 45 of the plan",
        "weights   passed  0.1 s  45 of 45 tensors compared bit for bit",
        "layers    passed  0.0 s  2 measures, the largest at 6% of its tolerance",
        "model     passed  1.5 s  7 measures, the largest at 14% of its tolerance",
        "",
        "layers: passed",
        "     worst first  float64  allowed  native precision  allowed  ULPs  rule",
        "     a            4.0e-16  8.0e-14           3.0e-07  5.0e-06   2.5  r.yaml:3",
        "     b            4.0e-16  8.0e-14           3.0e-07  5.0e-06   2.5",
        "     allowed in float64, a: 16 x 24 x eps(float64): measured",
        "     allowed in native precision, a: 4 x 1.2e-06: measured",
        "",
        "model: passed",
        "     worst first        float64  allowed  native precision  allowed  ULPs",
        "     logits             2.4e-15  8.0e-14           7.0e-07  5.0e-06   5.9",
        "     layers.2.mlp       2.0e-15  8.0e-14           6.0e-07  5.0e-06   5.0",
        "     layers.2.attn.out  1.6e-15  8.0e-14           5.0e-07  5.0e-06   4.2",
        "     ... and 4 more, each within its bounds",
        "     allowed in float64, logits: 16 x 24 x eps(float64): measured",
        "     allowed in native precision, logits: 4 x 1.2e-06: measured",
        "  note: 7 boundaries and outputs, from a live run of the JAX model",
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
        "model     FAILED   1.5 s  transposed; 1 finding; 5 of 7 measures above the tolerance",
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
        "      relative error of layers.1.attn.out: 4.0e-01; 3.0e-16 without the mistake",
        "      fix: correct the rule at rules/mine.yaml:12",
        "  - layers.1.attn.out: first difference: relative error 1.3e-01 where 8.0e-14 is allowed",
        "     first failure, then worst first  float64  allowed  native precision  allowed     ULPs",
        "  >  layers.1.attn.out                1.3e-01  8.0e-14           1.3e-01  5.0e-06  1.1e+06",
        "  !  layers.1.mlp                     1.0e-01  8.0e-14           1.0e-01  5.0e-06  8.4e+05",
    ]
    assert "coverage: passed" not in text and "layers: skipped" not in text
    assert text[-1] == "different: weights, model (exit code 1)"


def test_text_without_a_diagnosis() -> None:
    level = model_level(2)
    unknown = replace(
        level, diagnosis={**(level.diagnosis or {}), "name": "", "problem": "no known mistake explains it"}
    )
    text = "\n".join(lines(report([unknown])))
    assert "no diagnosis at layers.1.attn.out, where the two differ first: no known mistake explains it" in text
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
    assert "torch against jax: 3.0e-07" in to_junit(odd)
    for other in (report([backends("outputs-differ")]), report([TRANSPOSED, backends()]), failing()):
        assert not other.only_backends and list(lines(other))[-1].startswith("different: ")
        assert other.verdict == "different"


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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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
    error = run(file, *FROM, "--level", "weight", code=2)[1]
    assert "there is no level 'weight'" in error and "did you mean 'weights'?" in error
    assert "there is no level 'all'" in run(file, *FROM, "--require", "all", code=2)[1]
    assert "no such file" in run(tmp_path / "absent.safetensors", *FROM, code=2)[1]


def test_settings_in_a_foreign_header(run: Run, file: Path) -> None:
    for settings in ("{", "[1]"):
        save_file(load_file(file), file, {"format": "pt", "model": "timesfm-1", "settings": settings})
        _, err = run(file, *FROM, *QUICK, code=2)
        assert "converted-metadata-invalid" in err and "expected a JSON object" in err and "internal error" not in err


def test_json_on_stdout(run: Run, file: Path) -> None:
    out, err = run(file, *FROM, *QUICK, "--json", code=0)
    made = json.loads(out, parse_constant=lambda word: pytest.fail(word))
    assert err == "" and made["format"] == 2 and made["verdict"] == "equal"
    assert made["plan"]["rules"]["model"] == "timesfm-1" and made["plan"]["target"] == "timesfm"


@pytest.mark.slow
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


@pytest.mark.slow
def test_reports_of_a_check_that_stopped(run: Run, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A report of an earlier, passing check must not stay: CI would show that one."""
    junit, html = tmp_path / "report.xml", tmp_path / "report.html"
    reports = ("--junit", junit, "--html", html)
    run(file, *FROM, *QUICK, *reports, code=0)

    def stopped(said: str, *options: object) -> None:
        out, err = run(file, *FROM, *QUICK, *reports, "--json", *options, code=2)
        made = json.loads(out)
        assert made["verdict"] == "inconclusive" and made["exit_code"] == 2 and made["levels"] == []
        assert said in made["errors"][0]["text"] and said in err, made["errors"]
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
    stopped("not a complete safetensors file")
    file.write_bytes(whole)
    run(file, *FROM, *QUICK, *reports, code=0)
    assert "Equal" in Page(html.read_text(encoding="utf-8")).words

    def defect(*args: object, **options: object) -> None:
        raise ZeroDivisionError("ours")

    monkeypatch.setattr("convert.verify.run.check", defect)
    stopped("ZeroDivisionError")


@pytest.mark.slow
def test_a_report_does_not_replace_what_is_checked(run: Run, file: Path, tmp_path: Path) -> None:
    before = file.read_bytes()
    assert "is part of what is checked" in run(file, *FROM, *QUICK, "--html", file, code=2)[1]
    assert "is part of what is checked" in run(file, *FROM, *QUICK, "--junit", FROM[1] / "x.xml", code=2)[1]
    assert "does not exist; create it first" in run(file, *FROM, *QUICK, "--html", tmp_path / "no" / "x", code=2)[1]
    assert "is a directory" in run(file, *FROM, *QUICK, "--html", tmp_path, code=2)[1]
    assert file.read_bytes() == before and not (FROM[1] / "x.xml").exists()
