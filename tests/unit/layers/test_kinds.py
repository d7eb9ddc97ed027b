"""What holds for every kind of layer."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from convert.drafting.layer_rules import kind_named
from convert.layers import KINDS, LayerKind
from convert.layers.draft import Group, Layer, PathKey

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("word", KINDS)
def test_every_kind_has_a_class_a_text_and_a_guide(word: str) -> None:
    kind = KINDS[word]
    assert issubclass(kind, LayerKind) and kind.kind_name == word and kind.doc
    assert (ROOT / "docs" / "guides" / f"{kind.guide}.md").is_file()
    assert kind.from_key in ("required", "optional", "none")


def test_generic_code_does_not_ask_for_the_class_of_a_kind() -> None:
    """Compiling, the layers level and the catalogue of mistakes call the kind's methods."""
    folders = ("planning/compile", "verify/layers", "verify/mistakes", "drafting")
    found = [
        f"{file.name}: {line.strip()}"
        for folder in folders
        for file in (ROOT / "src" / "convert" / folder).rglob("*.py")
        for line in file.read_text().splitlines()
        if re.search(r"isinstance\([^)]*\bkind\b|getattr\([^)]*\bkind\b|type\((rule\.)?kind\)", line)
    ]
    assert not found


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("GroupNorm_0", "group_norm"),
        ("instance_norm", "instance_norm"),
        ("InstanceNorm_3", "instance_norm"),
        ("Dense_0", ""),
    ],
)
def test_the_name_of_a_module_may_say_its_kind(name: str, word: str) -> None:
    group = Group((PathKey((name,)), PathKey(("scale",))), (4,), "float32", (f"{name}/scale",))
    kind = kind_named(Layer((PathKey((name,)),), {"scale": group}))
    assert (kind.kind_name if kind else "") == word
