"""README and docs: the commands of their ``console`` blocks are run, and print what the page shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.console import run_console
from support.paths import DOCS, EXAMPLES, ROOT

BLOCK = re.compile(r"^```console\n(.*?)^```", re.DOTALL | re.MULTILINE)
TUTORIAL = DOCS / "getting-started" / "your-own-model.md"  # tests/cli/test_tutorial.py
PAGES = [
    ROOT / "README.md",
    *sorted(path for path in DOCS.rglob("*.md") if path != TUTORIAL and BLOCK.search(path.read_text())),
]


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_the_page_shows_what_is_printed(page: Path, tmp_path: Path) -> None:
    for name, folder in (("examples", EXAMPLES), ("rules", ROOT / "rules")):
        (tmp_path / name).symlink_to(folder)
    assert sum(run_console(body, tmp_path) for body in BLOCK.findall(page.read_text())) > 0


def test_the_pages_are_found() -> None:
    assert len(PAGES) >= 4
