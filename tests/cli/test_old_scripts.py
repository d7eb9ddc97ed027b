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
