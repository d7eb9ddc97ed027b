"""Each published model has a page, which names its command."""

from __future__ import annotations

import re

from convert.rules import library
from support.paths import DOCS, ROOT

MODELS = DOCS / "models"
PAGES = sorted(path for path in MODELS.glob("*.md") if path.name != "index.md")
TABLE = (MODELS / "index.md").read_text().partition("\nEach of them also goes to")[0]


def test_each_row_links_to_a_page_with_the_command() -> None:
    rows = [line for line in TABLE.splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= 25
    for row in rows:
        pages = [MODELS / name for name in re.findall(r"\]\(([\w-]+\.md)", row)]
        commands = [
            name for page in pages for name in re.findall(r"^convert ([\w.-]+) ", page.read_text(), re.MULTILINE)
        ]
        assert commands and all(library.named_rules(name) for name in commands), row


def test_each_page_is_in_the_table_and_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    for page in PAGES:
        assert f"({page.name}" in TABLE, page.name
        assert f"models/{page.name}" in navigation, page.name


def test_a_page_begins_with_what_it_converts_and_the_command() -> None:
    for page in PAGES:
        title, _, rest = page.read_text().removeprefix("# ").partition("\n")
        opening = rest.strip().partition("\n\n")[0]
        assert title and opening[0].isalpha(), page.name
        assert re.search(r"^convert [\w.-]+ ", rest, re.MULTILINE), page.name
