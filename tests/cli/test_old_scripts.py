"""The page that names a command for each script that transformers once had."""

from __future__ import annotations

import re

from convert.rules import library
from support.paths import DOCS

PAGE = (DOCS / "guides" / "old-scripts.md").read_text()


def test_every_command_names_a_shipped_model() -> None:

    named = set(re.findall(r"`convert ([a-z0-9-]+)[ `]", PAGE)) - {"check", "rules"}
    assert len(named) >= 6 and all(library.named_rules(name) for name in named)


def test_every_script_is_listed_once() -> None:
    scripts = re.findall(r"convert_\w+\.py", PAGE.partition("Scripts of the same folders")[0])
    assert len(scripts) == len(set(scripts)) >= 20


def test_a_script_without_a_command_has_none_in_its_row() -> None:
    without = PAGE.partition("## The scripts that have no command")[2].partition("For these")[0]
    assert "convert_fnet" in without and not re.search(r"`convert [a-z]", without.replace("`convert` loads", ""))


PUBLISHED = DOCS / "guides" / "published-models.md"


def section(page: str, anchor: str) -> str:
    """Return the text below a heading, up to the next one of any level."""
    parts = re.split(r"^#{1,6} +(.+)$", page, flags=re.MULTILINE)
    found = {
        re.sub(r"[^\w -]", "", name).lower().replace(" ", "-"): text
        for name, text in zip(parts[1::2], parts[2::2], strict=True)
    }
    return found[anchor] if anchor else page


def test_each_published_model_has_its_command_where_its_row_links_to() -> None:
    page = PUBLISHED.read_text()
    rows = [line for line in page.partition("\nEach of them also goes to")[0].splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= 25
    for row in rows:
        links = re.findall(r"\]\(([\w.-]*)#?([\w-]*)\)", row)
        texts = [section((PUBLISHED.parent / file).read_text() if file else page, anchor) for file, anchor in links]
        commands = [name for text in texts for name in re.findall(r"^convert ([\w.-]+) ", text, flags=re.MULTILINE)]
        assert commands and all(library.named_rules(name) for name in commands), row


def test_the_index_names_each_of_them() -> None:
    index = (DOCS / "index.md").read_text()
    page = PUBLISHED.read_text().partition("\nEach of them also goes to")[0]
    for anchor in set(re.findall(r"\(#([\w-]+)\)", page)) - {
        "gemma-4-and-gemma-3n",
        "bert-gpt-2-t5-whisper-llama-mistral-dinov2",
    }:
        assert f"published-models.md#{anchor})" in index, anchor
    for other in set(re.findall(r"\(([\w-]+\.md)[)#]", page)):
        assert f"guides/{other}" in index, other
