"""Findings as SARIF: each at its line, in the form that GitHub reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from convert.core.findings import Finding
from convert.verify.report.sarif import sarif, to_sarif
from support.command_line import Run
from support.sample_report import failing, passing
from support.small_conversion import RULES, small_output, write_rules


def test_places_are_files_lines_and_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    findings = [
        (Finding("a", "x", rule="rules/m.yaml:12:3"), "error"),
        (Finding("b", "x", rule=f"{tmp_path}/m.yaml:12"), "warning"),
        (Finding("a", "x", path="out.safetensors"), "error"),
        (Finding("c", "x"), "note"),
    ]
    (made,) = sarif(findings, "ckpt-convert 0.1.0", "default.yaml")["runs"]
    assert [rule["id"] for rule in made["tool"]["driver"]["rules"]] == ["a", "b", "c"]
    places = [result["locations"][0]["physicalLocation"] for result in made["results"]]
    assert places == [
        {"artifactLocation": {"uri": "rules/m.yaml"}, "region": {"startLine": 12, "startColumn": 3}},
        {"artifactLocation": {"uri": "m.yaml"}, "region": {"startLine": 12}},
        {"artifactLocation": {"uri": "out.safetensors"}},
        {"artifactLocation": {"uri": "default.yaml"}},
    ]


def test_a_report_gives_its_findings() -> None:
    assert to_sarif(passing(), "t 1")["runs"][0]["results"] == []
    results = to_sarif(failing(), "t 1")["runs"][0]["results"]
    assert results and all(result["level"] == "error" and result["message"]["text"] for result in results)


def test_a_rule_that_does_not_fit_is_found_at_its_line(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A validation, and a check of weights that another rule wrote."""
    monkeypatch.chdir(tmp_path)
    write_rules(tmp_path, RULES.replace("parameter:", "paramter:"))
    run("rules", "validate", "small.yaml", "--sarif", "rules.sarif", code=2)
    (result,) = json.loads(Path("rules.sarif").read_text())["runs"][0]["results"]
    assert result["locations"][0]["physicalLocation"]["region"]["startLine"] in (5, 7)
    out = small_output(tmp_path, "out.safetensors")
    data = bytearray(out.read_bytes())
    data[-2] ^= 0x10
    out.write_bytes(data)
    check = ("check", out, "--from", "source-0.npz", "--model", "./small.yaml", "--level", "weights")
    run(*check, "--sarif", "check.sarif", code=1)
    results = json.loads(Path("check.sarif").read_text())["runs"][0]["results"]
    places = [result["locations"][0]["physicalLocation"] for result in results]
    assert {"artifactLocation": {"uri": "small.yaml"}, "region": {"startLine": 5}} in places
    before = Path("small.yaml").read_bytes()
    run("rules", "validate", "small.yaml", "--sarif", "./small.yaml", code=2)
    run(*check, "--sarif", "./small.yaml", code=2)
    assert Path("small.yaml").read_bytes() == before
