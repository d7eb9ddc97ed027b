"""Every code of a finding has a page in the error index, and every page a code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache

import pytest

from support.paths import DOCS, ROOT

CODE = re.compile(r"[a-z]+(-[a-z0-9]+)*")
PARTS = ("## What it means", "## Example", "## What to do")
PAGES = sorted((DOCS / "errors").glob("*.md"))


@cache
def trees() -> list[ast.Module]:
    return [ast.parse(path.read_text()) for path in sorted((ROOT / "src").rglob("*.py"))]


def taking_code() -> dict[str, int]:
    """Find the functions that have a parameter `code`, and its position: `Finding`, and those that pass it on."""
    found = {"Finding": 0}
    for tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                names = [arg.arg for arg in (*node.args.posonlyargs, *node.args.args) if arg.arg not in ("self", "cls")]
                if "code" in names:
                    found[node.name] = names.index("code")
    return found


def codes() -> Iterator[str]:
    """Collect the codes: what these functions get for `code`, where it is written down."""
    positions = taking_code()
    for tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                name = getattr(node.func, "id", getattr(node.func, "attr", ""))
                given = [keyword.value for keyword in node.keywords if keyword.arg == "code"]
                if name in positions and not given:
                    given = node.args[positions[name] : positions[name] + 1]
                for value in given if name in positions else ():
                    yield from (
                        part.value
                        for part in ast.walk(value)
                        if isinstance(part, ast.Constant) and isinstance(part.value, str)
                    )


@pytest.mark.slow
def test_codes_and_pages_are_the_same() -> None:
    used = {code for code in codes() if CODE.fullmatch(code)}
    described = {path.stem for path in PAGES}
    assert (sorted(used - described), sorted(described - used)) == ([], [])


EXAMPLES = re.compile(
    r"""
    \n\#\#\ Example\n\n
    (
      ```\n (.*\n)*? error\[(?P<code>[a-z0-9-]+)\]:\ .+\n            # an error that ends the command
    | In\ the\ report\ of\ `convert\ (check|verify)`:\n\n ```\n \ \ -\ .+\n   # a finding of a check
    | In\ the\ output\ of\ `convert\ (inspect|plan)`:\n\n ```\n note:\ .+\n  # a note on how a checkpoint was read
    )
    (.*\n)*? ```\n
    """,
    re.VERBOSE,
)


def test_the_example_of_a_page_is_what_the_command_line_prints() -> None:
    for path in PAGES:
        example = EXAMPLES.search(path.read_text())
        assert example is not None, path
        assert example["code"] in (path.stem, None), path


def test_pages_have_the_same_parts() -> None:
    for path in PAGES:
        text = path.read_text()
        assert text.startswith(f"# {path.stem}\n"), path
        assert [part for part in PARTS if f"\n{part}\n" in text] == list(PARTS), path
