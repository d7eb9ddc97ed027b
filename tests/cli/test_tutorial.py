"""docs/getting-started/your-own-model.md: its files are written, its commands run in order, and what they print is what it shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from convert import draft_rules, open_source, parse_rules
from support.paths import DOCS

TUTORIAL = DOCS / "getting-started" / "your-own-model.md"
ENV = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "JAX_PLATFORMS": "cpu"}
MEASURED = re.compile(r"[0-9.]+e[+-][0-9]+|[0-9.]+ s\b|[0-9.]+ [kM]?B/s|[0-9]+%")


def shown(lines: Sequence[str]) -> list[str]:
    """Lines with what depends on the machine taken out."""
    return [MEASURED.sub("#", line).rstrip() for line in lines]


def holds(expected: Sequence[str], printed: Sequence[str]) -> bool:
    """Whether the lines are printed in this order; any lines may stand where `...` is, and no others."""
    if not expected:
        return not printed
    if expected[0] == "...":
        return any(holds(expected[1:], printed[k:]) for k in range(len(printed) + 1))
    return bool(printed) and printed[0] == expected[0] and holds(expected[1:], printed[1:])


def test_the_comparison_can_fail() -> None:
    assert holds(["a", "...", "d"], ["a", "b", "c", "d"]) and holds(["a", "..."], ["a"])
    assert not holds(["a"], ["a", "b"]) and not holds(["a", "b"], ["a"]) and not holds(["...", "x"], ["a", "b"])
    assert not holds(["b", "..."], ["a", "b"])


@pytest.fixture(scope="module")
def blocks() -> list[tuple[str, str]]:
    return re.findall(r"^```(\w+)\n(.*?)^```", TUTORIAL.read_text(), re.DOTALL | re.MULTILINE)


def test_tutorial(blocks: list[tuple[str, str]], tmp_path: Path) -> None:
    # The PyTorch side and the pair are shown when they are needed; the first yaml block is a part of the draft.
    ran, drafted = 0, ""
    for language, body in blocks:
        name = re.match(r"# ([a-z_-]+\.(?:py|yaml))\n", body)
        if name is not None:
            (tmp_path / name[1]).write_text(body)
        elif language == "yaml":
            drafted = draft_rules(open_source(tmp_path / "ckpt"))
            assert body in drafted and (tmp_path / "my-net.yaml").read_text() == drafted
        elif language == "console":
            for said in re.split(r"^\$ ", body, flags=re.MULTILINE)[1:]:
                command, *expected = said.rstrip("\n").split("\n")
                done = subprocess.run(["bash", "-c", command], cwd=tmp_path, env=ENV, capture_output=True, text=True, check=False)  # fmt: skip
                wrong = next((line for line in expected if line.endswith("(exit code 1)")), None)
                unfinished = any(line.startswith("Open:") for line in expected)
                assert done.returncode == (1 if wrong else 2 if unfinished else 0), (command, done.stderr)
                printed = (done.stdout + ("" if done.stdout else done.stderr)).splitlines()
                assert holds(shown(expected), shown(printed)), (command, "\n".join(printed))
                ran += 1
    assert ran == 9
    # The answers are lines of the draft, or stand in place of its questions.
    whole = next(body for _, body in blocks if body.startswith("# my-net.yaml"))
    answers = [line for line in whole.splitlines()[1:] if line and line not in drafted and "activation" not in line]
    assert len(answers) == len(parse_rules(drafted).questions) and not parse_rules(whole).questions
