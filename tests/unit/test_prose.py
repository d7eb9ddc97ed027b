"""The prose of the project is plain technical English: phrases that a reader has to read twice are not used."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.paths import DOCS, EXAMPLES, GOLDEN, ROOT

PHRASES = (
    "is told", "are told", "was told", "is said", "are said", "at hand", "of one's own", "had back", "made whole", "alike", "nobody",
    "whatever", "for good", "nowhere", "lifted float64", "as users run it", "could not tell", "is no weight", "was wanted", "put right",
)  # fmt: skip
BANNED = re.compile("|".join(rf"\b{re.escape(phrase)}\b" for phrase in PHRASES), re.IGNORECASE)
PAGES = [*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *EXAMPLES.rglob("*.md"), *GOLDEN.glob("*.md")]
PAGES = sorted([*PAGES, ROOT / "rules" / "README.md", ROOT / "benchmarks" / "README.md"])
SOURCES = sorted((ROOT / "src").rglob("*.py"))  # docstrings, comments and messages
OLD_WORDS = {"CHANGELOG.md"}  # names the words that were replaced


def banned(path: Path) -> list[str]:
    """Return the banned phrases in a file; a phrase may go over the end of a line."""
    text = re.sub(r"^\s*#", "", path.read_text(), flags=re.MULTILINE)
    return [hit[0] for hit in BANNED.finditer(" ".join(text.split()))]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_banned_phrase_in_a_page(page: Path) -> None:
    assert page.name in OLD_WORDS or banned(page) == []


def test_no_banned_phrase_in_the_code() -> None:
    assert {str(path.relative_to(ROOT)): found for path in SOURCES if (found := banned(path))} == {}


def test_the_search_can_fail() -> None:
    assert BANNED.search("what it IS TOLD") and not BANNED.search("a balike word")


def test_short_pages_stay_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 160
    assert len((ROOT / "CHANGELOG.md").read_text().splitlines()) <= 60
