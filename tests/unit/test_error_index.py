"""Every code of a finding has a page in the error index, and every page a code."""

from __future__ import annotations

import ast

from support.paths import DOCS, ROOT

PARTS = ("## What it means", "## Example", "## What to do")


def codes() -> set[str]:
    """Collect the codes in the source: the first argument of each ``Finding(...)``."""
    found = set()
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Finding":
                code = next((k.value for k in node.keywords if k.arg == "code"), node.args[0] if node.args else None)
                if isinstance(code, ast.Constant):
                    found.add(str(code.value))
    return found


def test_codes_and_pages_are_the_same() -> None:
    assert codes() == {path.stem for path in (DOCS / "errors").glob("*.md")}


def test_pages_have_the_same_parts() -> None:
    for path in (DOCS / "errors").glob("*.md"):
        text = path.read_text()
        assert text.startswith(f"# {path.stem}\n"), path
        assert [part for part in PARTS if f"\n{part}\n" in text] == list(PARTS), path
