"""docs/getting-started/your-own-model.md: its files are written, its commands run in order, and what they print is what it shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from convert import draft_rules, open_source, parse_rules
from support.console import holds, run_console
from support.paths import DOCS

pytestmark = pytest.mark.slow  # takes long, as each test starts programs or models of its own

TUTORIAL = DOCS / "getting-started" / "your-own-model.md"


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
            if (derived := tmp_path / "derived.yaml").exists():
                assert body in derived.read_text()
                continue
            drafted = draft_rules(open_source(tmp_path / "ckpt"), "my-net")
            assert body in drafted and (tmp_path / "my-net.yaml").read_text() == drafted
        elif language == "console":
            ran += run_console(body, tmp_path)
    assert ran == 12
    # The answers are lines of the draft, or stand in place of its questions.
    whole = next(body for _, body in blocks if body.startswith("# my-net.yaml"))
    answers = [line for line in whole.splitlines()[1:] if line and line not in drafted and "activation" not in line]
    assert len(answers) == len(parse_rules(drafted).questions) and not parse_rules(whole).questions
