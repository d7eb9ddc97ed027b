"""The preset's `class_name` says whose tree it is: the backbone of another model has the same one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import convert
from support import keras_hub


def with_class(case: str, name: str, folder: Path) -> Path:
    """Write the preset of a golden with another class."""
    preset = keras_hub.checkpoint(case, folder)
    config = preset / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "class_name": name}))
    return preset


@pytest.mark.parametrize(
    ("case", "name", "expected"),
    [
        ("bert", "RobertaBackbone", '"BertBackbone"'),
        ("llama", "MistralBackbone", '"LlamaBackbone" or "Llama3Backbone"'),
        ("llama3.1-tied", "QwenBackbone", '"LlamaBackbone" or "Llama3Backbone"'),
        ("mistral", "LlamaBackbone", '"MistralBackbone"'),
        ("gemma", "Gemma3Backbone", '"GemmaBackbone"'),
    ],
)
def test_another_class_is_refused_by_name(case: str, name: str, expected: str, tmp_path: Path) -> None:
    preset = with_class(case, name, tmp_path)
    with pytest.raises(convert.PlanError) as refused:
        convert.plan_conversion("keras-hub", preset, settings=keras_hub.settings(case))
    (finding,) = refused.value.findings
    assert finding.code == "config-conflict" and "class_name in the config.json" in finding.problem
    assert finding.expected == expected and finding.got.startswith(f'"{name}"') and finding.fix


def test_the_other_name_of_llama_is_taken(tmp_path: Path) -> None:
    preset = with_class("llama", "Llama3Backbone", tmp_path)
    plan = convert.plan_conversion("keras-hub", preset, settings=keras_hub.settings("llama"))
    assert plan.rules.model == "keras-llama"
