"""The preset's `class_name` says whose tree it is: the backbone of another model has the same one."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import convert
from convert.rules.library import shipped_rules_dir
from convert.rules.parse import parse_models
from support import keras_hub
from support.goldens import SpecsOnly


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


@pytest.mark.parametrize("width", [4, 8])
def test_the_width_of_a_head_of_mistral_is_that_of_the_tree(width: int, tmp_path: Path) -> None:
    """keras-hub's convert_mistral.py copies `head_dim`, which is the width of the model / heads, 4, or another one."""
    preset = keras_hub.checkpoint("mistral", tmp_path)
    shapes = {name: leaf.spec.shape for name, leaf in convert.open_source(preset).leaves.items()}
    for name, shape in shapes.items():
        if "_self_attention_layer/" in name:
            place = 1 if "_output_dense" in name else 2
            shapes[name] = (*shape[:place], width, *shape[place + 1 :])
    specs = SpecsOnly({name: (shape, "float32") for name, shape in shapes.items()})
    specs.path = preset

    def planned(stated: int | None) -> convert.Plan:
        config = json.loads((preset / "config.json").read_text())
        config["config"]["head_dim"] = stated
        (preset / "config.json").write_text(json.dumps(config))
        return convert.plan_conversion("keras-hub", specs, settings=keras_hub.settings("mistral"))

    for right in (width, None):
        plan = planned(right)
        assert plan.rules.model == "keras-mistral" and plan.config is not None and plan.config["head_dim"] == width
    with pytest.raises(convert.PlanError, match=rf"has head_dim = 6, and the tree has H = {width}"):
        planned(6)


def layer_name(name: str) -> str:
    """Return the name that Keras gives the layer of a class (keras/src/utils/naming.py, to_snake_case)."""
    return re.sub(r"([a-z])([A-Z])", r"\1_\2", re.sub(r"(.)([A-Z][a-z]+)", r"\1_\2", name)).lower()


def test_a_task_of_each_class_is_read() -> None:
    """A task holds its backbone below the name of its class; the rules of ViT, whose head lies beside it, name it."""
    for file in shipped_rules_dir().glob("keras-hub*.yaml"):
        for rules in parse_models(file.read_text(), file.name):
            assert rules.sidecar is not None
            for name in rules.sidecar.supported["class_name"]:
                below = f"layers/{layer_name(name)}"
                named = any(str(rule.path).startswith(f"{below}/") for rule in rules.rules)
                assert below in rules.root or named, (rules.model, name)


@pytest.mark.parametrize("name", ["llama", "llama3"])
def test_weights_of_a_task_of_llama_are_read(name: str, tmp_path: Path) -> None:
    preset = keras_hub.checkpoint("llama", tmp_path)
    leaves = convert.open_source(preset).leaves
    specs = SpecsOnly({f"layers/{name}_backbone/{path}": (leaf.spec.shape, leaf.spec.dtype) for path, leaf in leaves.items()})  # fmt: skip
    plan = convert.plan_conversion("keras-llama", specs, settings=keras_hub.settings("llama"))
    alone = convert.plan_conversion("keras-hub", preset, settings=keras_hub.settings("llama"))
    assert {step.name: step.spec for step in plan.steps} == {step.name: step.spec for step in alone.steps}


# Keys that came in the same release.
WITH = {"rope_frequency_adjustment_factor": ("rope_low_freq_factor", "rope_high_freq_factor", "rope_pretraining_sequence_length", "rope_position_scaling_factor")}  # fmt: skip


@pytest.mark.parametrize(
    ("case", "key", "model"),
    [
        ("llama", "rope_frequency_adjustment_factor", "keras-llama"),
        ("llama3.1-tied", "rope_frequency_adjustment_factor", "keras-llama-tied"),
        ("gemma", "use_sliding_window_attention", "keras-gemma"),
        ("gemma", "attention_logit_soft_cap", "keras-gemma"),
        ("gemma2", "use_sliding_window_attention", ""),
        ("gemma2", "attention_logit_soft_cap", ""),
        ("gemma2", "final_logit_soft_cap", ""),
    ],
)
def test_a_key_that_the_configuration_lacks_has_the_default_of_the_class(
    case: str, key: str, model: str, tmp_path: Path
) -> None:
    """Releases before the key wrote none, and its default computes as they did; `model` is empty where no rules compute so."""
    preset = keras_hub.checkpoint(case, tmp_path)
    config = json.loads((preset / "config.json").read_text())
    config["config"] = {
        name: value for name, value in config["config"].items() if name not in (key, *WITH.get(key, ()))
    }
    (preset / "config.json").write_text(json.dumps(config))
    if model:
        plan = convert.plan_conversion("keras-hub", preset, settings=keras_hub.settings(case))
        assert plan.rules.model == model and not any(key in note for note in plan.notes)
        return
    with pytest.raises(
        convert.PlanError, match=f"{key} in the config.json of the checkpoint, which leaves it out: "
    ) as refused:
        convert.plan_conversion("keras-hub", preset, settings=keras_hub.settings(case))
    assert refused.value.code == "config-conflict"
