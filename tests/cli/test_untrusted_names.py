"""Names of leaves and texts of rules come from others: they never begin a line, command CI, or hold HTML in the card."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree as ET

import numpy as np
import pytest
from safetensors.numpy import save_file

from convert.core.errors import CheckpointError, ConvertError, PlanError
from convert.core.findings import Finding
from convert.rules.parse import parse_rules
from support.command_line import Run

COMMAND = "::error file=x::y"
NAMES = (
    f"a\n{COMMAND}",
    f"b\r\n  {COMMAND}",
    f"c\0{COMMAND}",
    COMMAND,
    "d\x1b[2J##[error]z",
    "e\u202e\u2028::f",
    "7" * 5000,
)
TITLE = f"T\\n{COMMAND}\\n```\\e[31m <img src=x onerror=y> [l](javascript:z) `q"
HEAD = f'model: m\ntitle: "{TITLE}"\ntargets: {{torch: {{loads: "L\\n{COMMAND}<b>"}}}}\nrules:\n'
RULES = HEAD + "".join(f"  - from: {json.dumps(name)}\n    parameter: t{k}\n" for k, name in enumerate(NAMES))


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    return Run(monkeypatch, capsys)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    save_file({name: np.zeros(2, np.float32) for name in NAMES}, tmp_path / "c.safetensors")
    return tmp_path / "c.safetensors"


def harmless(text: str) -> bool:
    """Whether no line is a command of a CI system and no character commands a terminal."""
    commands = re.findall(r"(?m)^\s*::.*|##\w*\[.*", text)
    return not commands and text.replace("\n", "").isprintable()


@pytest.mark.parametrize("args", [("--full",), (), ("--json",)])
def test_inspect(run: Run, checkpoint: Path, args: tuple[str, ...]) -> None:
    out, err = run("inspect", checkpoint, *args)
    assert harmless(out) and harmless(err)
    assert args == ("--json",) or r"a\n::error" in out


@pytest.mark.parametrize("args", [("--full",), (), ("--json",)])
def test_plan_and_its_errors(run: Run, checkpoint: Path, tmp_path: Path, args: tuple[str, ...]) -> None:
    rules = tmp_path / "r.yaml"
    rules.write_text(RULES)
    for text, code in ((RULES, 0), (HEAD + "  - from: a\n    parameter: a\n", 2)):
        rules.write_text(text)
        assert all(map(harmless, run("plan", rules, checkpoint, *args, code=code)))


def test_rules_validate_and_show(run: Run, tmp_path: Path) -> None:
    rules = tmp_path / "r.yaml"
    for text, code in ((RULES, 0), (RULES.replace("targets: {", f'targets: {{"t\\n{COMMAND}": {{loads: T}}, '), None), (f'"k\\n{COMMAND}": 1', 2)):  # fmt: skip
        rules.write_text(text)
        for command in ("validate", "show"):
            try:
                out, err = run("rules", command, rules, code=code or 0)
            except AssertionError:
                out, err = run("rules", command, rules, code=2)
            assert harmless(out) and harmless(err), out + err


def test_a_draft_is_yaml_with_these_names(run: Run, checkpoint: Path) -> None:
    out, err = run("rules", "new", checkpoint)
    assert harmless(out) and harmless(err)
    assert len(parse_rules(out, "draft").rules) == len(NAMES)


def test_conversion_and_its_card(run: Run, tmp_path: Path) -> None:
    np.savez(tmp_path / "c.npz", w=np.zeros(2, np.float32), **{NAMES[0]: np.zeros(2, np.float32)})
    rules = tmp_path / "r.yaml"
    rules.write_text(
        HEAD + "  - from: w\n    parameter: w\n" + f'  - drop: "a*"\n    because: "no <script>\\n{COMMAND}"\n'
    )
    out, err = run(rules, tmp_path / "c.npz", tmp_path / "out")
    assert harmless(out) and harmless(err)
    card = (tmp_path / "out" / "README.md").read_text()
    assert harmless(card)
    assert (
        not re.search(r"(?<!\\)<[a-z]", card)
        and not re.search(r"(?<!\\)\]\(", card)
        and not re.search("(?m)^```", card)
    )
    out, err = run("check", tmp_path / "out", "--from", tmp_path / "c.npz", "--model", rules, "--level", "weights",
                   "--junit", tmp_path / "r.xml", "--html", tmp_path / "r.html", code=0)  # fmt: skip
    assert harmless(out) and harmless(err)
    for element in ET.parse(tmp_path / "r.xml").iter():
        assert all("\n" not in value for key, value in element.attrib.items() if key != "message")
    assert "<img" not in (tmp_path / "r.html").read_text()


def test_a_finding_is_one_line() -> None:
    finding = Finding("c", *(f"{field}\n{COMMAND}" for field in ("problem", "rule", "path", "expected", "got", "fix")))
    for error in (
        ConvertError(finding),
        CheckpointError(finding, finding, headline=f"h\n{COMMAND}", lines=(f"l\n{COMMAND}",)),
        PlanError(finding, headline=f"h\n{COMMAND}", hint=f"i\n{COMMAND}"),
    ):
        assert harmless(str(error))
        assert str(finding.to_dict()["text"]).isprintable()
