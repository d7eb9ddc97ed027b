"""What the families of models add to the wheel: their rules, tables of classes, and the code of the models of a check."""

from __future__ import annotations

import tomllib
import zlib
from collections.abc import Iterable
from pathlib import Path

from support.paths import ROOT

# The wheel may grow by 1 MB for all families together, and a table that a script writes grows without a line of review.
# This is what they have today and 15 % more: a larger one is a decision, to be made here.
LIMIT = 296_000


def compressed(files: Iterable[Path]) -> int:
    """Return the bytes of files as a wheel holds them: each is compressed by itself."""
    return sum(len(zlib.compress(file.read_bytes())) for file in files)


def shipped() -> list[Path]:
    """Return the files of the families that the wheel includes."""
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel["include"] == ["/src/convert", "/rules"]
    left_out = {ROOT / path.removeprefix("/") for path in wheel["exclude"]}
    folders = (ROOT / "rules", ROOT / "src" / "convert" / "references")
    files = (file for folder in folders for file in folder.rglob("*") if "__pycache__" not in file.parts)
    return sorted(file for file in files if file.is_file() and file not in left_out)


def test_the_families_stay_small() -> None:
    size = compressed(shipped())
    assert 0.5 * LIMIT < size <= LIMIT, (
        f"{size} bytes; the largest: {sorted((compressed([x]), x.name) for x in shipped())[-3:]}"
    )


def test_three_more_tables_of_classes_are_too_many() -> None:
    assert compressed([*shipped(), *[ROOT / "rules" / "transformers-classes.json"] * 3]) > LIMIT
