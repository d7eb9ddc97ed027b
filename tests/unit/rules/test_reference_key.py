"""The header key `reference`: the function that builds the two models of a check."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from convert.rules.file import RuleFile
from convert.rules.library import available_rules
from convert.rules.parse import parse_models

MODELS = """
family: f
reference: shared:reference
targets:
  torch: {loads: T}
axes: {D: {is: width}}
models:
  one: {title: One}
  two: {title: Two, reference: own:reference}
rules:
- {from: scale, axes: D, parameter: scale}
"""


def test_a_model_replaces_the_reference_of_its_file() -> None:
    assert [rules.reference for rules in parse_models(MODELS)] == ["shared:reference", "own:reference"]


def test_a_file_without_a_reference() -> None:
    text = MODELS.replace("reference: shared:reference\n", "")
    assert [rules.reference for rules in parse_models(text)] == ["", "own:reference"]


@pytest.mark.parametrize("rules", [r for r in available_rules() if r.reference], ids=lambda rules: rules.model)
def test_shipped_references_exist(rules: RuleFile) -> None:
    module, _, function = rules.reference.partition(":")
    spec = find_spec(module)
    assert spec is not None and spec.origin is not None
    assert f"\ndef {function}(" in Path(spec.origin).read_text(encoding="utf-8")
