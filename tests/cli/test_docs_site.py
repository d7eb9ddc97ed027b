"""The documentation: its generated parts can be made, its links lead somewhere, and the options that it names exist.

`mkdocs build --strict` in `.ci/run` builds the site itself.
"""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from support.paths import DOCS, EXAMPLES, ROOT

PAGES = sorted(DOCS.rglob("*.md"))
FENCE = re.compile(r"^```(?:sh|console)\n(.*?)^```", re.DOTALL | re.MULTILINE)
INLINE = re.compile(r"`(convert [^`]+|--[a-z-]+[^`]*)`")
OTHERS = {"--no-deps", "--target", "--head"}  # of pip and ray


@pytest.fixture(scope="module")
def hooks() -> dict[str, Any]:
    return runpy.run_path(str(DOCS / "hooks.py"))


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(DOCS).as_posix())
def test_generated_parts_and_links(page: Path, hooks: dict[str, Any]) -> None:
    text = hooks["link"](hooks["fill"](page.read_text()), page, page.relative_to(DOCS).as_posix())
    assert "<!-- generated:" not in text
    linked = re.findall(r"\]\(([^)#\s:]+\.(?:md|svg))(?:#[^)]*)?\)", page.read_text())
    assert [target for target in linked if not (page.parent / target).exists() and target != "benchmarks.md"] == []


def test_options_on_pages_exist(hooks: dict[str, Any]) -> None:
    known = {name for _, command in hooks["commands"]() for param in command.params for name in param.opts}
    known |= {"--help", "--version", "--install-completion"}
    for page in (*PAGES, ROOT / "README.md"):
        text = page.read_text()
        lines = [line for block in FENCE.findall(text) for line in block.splitlines() if "convert " in line]
        named = {
            name for part in (*lines, *INLINE.findall(text)) for name in re.findall(r"(?<!\S)--[a-z][a-z-]+", part)
        }
        assert named - known - OTHERS == set(), page


def test_the_script_of_the_ci_page_is_the_example() -> None:
    (block,) = FENCE.findall((DOCS / "guides" / "ci.md").read_text())
    script = (EXAMPLES / "ci" / "check.sh").read_text()
    assert all(line in script for line in block.splitlines())
