"""Keras Hub's Gemma, Llama, Mistral, BERT and ViT: what its own code computed on JAX, and what transformers computes from the converted file."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import convert
from convert.core.errors import ConvertError
from convert.rules.library import shipped_rules_dir
from convert.rules.parse import parse_models
from convert.verify.report.report import Verdict
from convert.verify.run import check
from support import keras_hub
from support.goldens import SpecsOnly, ends_of_modules, relative_error
from support.value_mistakes import assert_mistakes_are_named

pytestmark = pytest.mark.slow

MODELS = {
    "bert": "keras-bert",
    "gemma": "keras-gemma",
    "gemma2": "keras-gemma2",
    "llama": "keras-llama",
    "llama3.1-tied": "keras-llama3.1-tied",
    "mistral": "keras-mistral",
    "vit": "keras-vit",
}


def planned(case: str, source: object, model: str = "keras-hub", **settings: object) -> convert.Plan:
    return convert.plan_conversion(model, source, settings={**keras_hub.settings(case), **settings})  # type: ignore[arg-type]


@pytest.mark.parametrize("case", keras_hub.CASES)
def test_transformers_computes_what_keras_hub_did(case: str, tmp_path: Path) -> None:
    _, out = keras_hub.converted(case, tmp_path)
    errors = keras_hub.errors(case, out)
    assert errors and max(errors.values()) < keras_hub.BOUND, errors


def test_every_weight_is_random(tmp_path: Path) -> None:
    """No norm scale is one and no bias is zero: a mistake in them shows."""
    for case in keras_hub.CASES:
        plan = planned(case, keras_hub.checkpoint(case, tmp_path))
        for name in {part.leaf for step in plan.steps for part in step.parts}:
            values = plan.source.read(name)
            assert not np.any(values == 0) and not np.any(values == 1), (case, name)


def test_the_tree_and_the_preset_name_the_model(tmp_path: Path) -> None:
    assert MODELS.keys() == set(keras_hub.CASES)
    for case, model in MODELS.items():
        assert planned(case, keras_hub.checkpoint(case, tmp_path)).rules.model == model
    (tmp_path / "llama" / "config.json").unlink()
    with pytest.raises(ConvertError) as refused:
        planned("llama", tmp_path / "llama")
    assert refused.value.code == "rules-ambiguous" and "keras-llama3.1" in str(refused.value)


def test_facts_are_those_of_the_preset(tmp_path: Path) -> None:
    plan = planned("gemma2", keras_hub.checkpoint("gemma2", tmp_path))
    assert plan.config is not None
    wanted = {
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 2.0,
        "sliding_window": 4,
        "query_pre_attn_scalar": 8,
    }
    assert {key: plan.config[key] for key in wanted} == wanted
    assert not {"class_name", "num_query_heads", "trainable", "hidden_dim", "layer_norm_epsilon"} & plan.config.keys()
    assert any("query_head_dim_normalize" in note for note in plan.notes)
    config = tmp_path / "gemma2" / "config.json"
    preset = json.loads(config.read_text())
    preset["config"]["final_logit_soft_cap"] = None
    config.write_text(json.dumps(preset))
    with pytest.raises(ConvertError, match="final_logit_soft_cap in the config.json"):
        planned("gemma2", tmp_path / "gemma2", "keras-gemma2")


def test_any_factor_of_llama_3_1_is_converted(tmp_path: Path) -> None:
    """The frequencies of Keras Hub 0.32.0 (LlamaRotaryEmbedding), with another factor than that of the presets."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    source, case = keras_hub.checkpoint("llama3.1-tied", tmp_path), "llama3.1-tied"
    preset = json.loads((source / "config.json").read_text())
    preset["config"]["rope_frequency_adjustment_factor"] = 16.0
    (source / "config.json").write_text(json.dumps(preset))
    plan = planned(case, source)
    assert plan.rules.model == "keras-llama3.1-tied" and plan.config is not None
    rope = plan.config["rope_parameters"]
    assert rope["factor"] == 16.0
    config = LlamaConfig(hidden_size=64, num_attention_heads=1, head_dim=64, rope_parameters=rope)
    got = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")[0].numpy()
    plain = rope["rope_theta"] ** -(np.arange(0, 64, 2) / 64)
    turns = rope["original_max_position_embeddings"] / (2 * np.pi / plain)
    share = np.clip((turns - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"]), 0, 1)
    assert relative_error(got, (1 - share) * plain / 16 + share * plain) < 1e-6
    for value, said in ((0.5, "at least 1"), (None, "a number")):
        preset["config"]["rope_frequency_adjustment_factor"] = value
        (source / "config.json").write_text(json.dumps(preset))
        with pytest.raises(ConvertError, match=f"rope_frequency_adjustment_factor in the config.json.*{said}"):
            planned(case, source, "keras-llama3.1-tied")


def test_a_mistral_without_a_window_sees_all_positions(tmp_path: Path) -> None:
    """`sliding_window: null`, as of the presets 0.2 and 0.3: MistralTransformerDecoder has the causal mask alone. Run with Keras Hub 0.32.0: 1.9e-7 off."""
    source, out = keras_hub.checkpoint("mistral", tmp_path), tmp_path / "out"
    preset = json.loads((source / "config.json").read_text())

    def converted(window: int | None, **said: object) -> np.ndarray[Any, Any]:
        preset["config"]["sliding_window"] = window
        (source / "config.json").write_text(json.dumps(preset))
        given: dict[str, Any] = {**keras_hub.settings("mistral"), **said}
        convert.convert("keras-hub", source, out, settings=given, overwrite=True)
        return keras_hub.outputs("mistral", keras_hub.load(out))["logits"]

    windowed, of_all = converted(4), converted(64)
    assert relative_error(windowed, of_all) > 1e-2
    assert np.array_equal(converted(None), of_all) and np.array_equal(converted(None, sliding_window=4), windowed)
    assert np.array_equal(converted(None), of_all)
    assert json.loads((out / "config.json").read_text())["sliding_window"] is None
    assert all(level.verdict is not Verdict.FAILED for level in check(out, source).levels)
    stated = json.loads((out / "config.json").read_text()) | {"sliding_window": 4}
    (out / "config.json").write_text(json.dumps(stated))
    (layers,) = check(out, source, levels=["layers"]).levels
    assert layers.verdict is Verdict.FAILED and "sliding_window" in str(layers.findings)
    preset["config"]["rope_max_wavelength"] = None  # another number without a value
    (source / "config.json").write_text(json.dumps(preset))
    with pytest.raises(ConvertError, match="rope_max_wavelength in the config.json"):
        planned("mistral", source)


# Numbers of a preset that no leaf shows, or that are facts.
NO_SIZE = {
    "sliding_window",
    "sliding_window_size",
    "rope_max_wavelength",
    "rope_pretraining_sequence_length",
    "dropout",
}


@pytest.mark.parametrize("case", sorted(MODELS.keys() - {"vit"}))
def test_each_size_of_a_preset_is_compared_with_the_tree(case: str, tmp_path: Path) -> None:
    source = keras_hub.checkpoint(case, tmp_path)
    specs = SpecsOnly({name: (leaf.spec.shape, leaf.spec.dtype) for name, leaf in planned(case, source).source.leaves.items()})  # fmt: skip
    specs.path = source
    preset = json.loads((source / "config.json").read_text())
    for key, value in preset["config"].items():
        if not isinstance(value, int) or isinstance(value, bool) or key in NO_SIZE:
            continue
        other = {**preset, "config": {**preset["config"], key: value + 1}}
        (source / "config.json").write_text(json.dumps(other))
        with pytest.raises(ConvertError) as refused:
            planned(case, specs, MODELS[case])
        (found,) = refused.value.findings
        assert found.code == "config-conflict" and f"has {key} = {value + 1}, and the tree has" in found.problem


@pytest.mark.parametrize(
    ("key", "value"), [("num_layers", 3), ("num_heads", 2), ("hidden_dim", 24), ("mlp_dim", 16), ("patch_size", 16)]
)
def test_the_configuration_of_a_backbone_beside_save_weights_is_compared(key: str, value: int, tmp_path: Path) -> None:
    source = keras_hub.checkpoint("vit", tmp_path)
    right = {"patch_size": 8, "num_layers": 2, "num_heads": 4, "hidden_dim": 16, "mlp_dim": 24}
    (source / "config.json").write_text(json.dumps({"class_name": "ViTBackbone", "config": right}))
    assert planned("vit", source).config is not None
    (source / "config.json").write_text(json.dumps({"class_name": "ViTBackbone", "config": {**right, key: value}}))
    with pytest.raises(ConvertError, match=f"has {key} = {value}, and the tree has"):
        planned("vit", source)


@pytest.mark.parametrize("case", ["gemma", "llama", "mistral"])
def test_a_task_saved_by_save_weights_has_the_backbone_below_its_name(case: str, tmp_path: Path) -> None:
    """The paths are those that `save_weights` of keras-hub 0.32.0 wrote for the same models."""
    preset = planned(case, keras_hub.checkpoint(case, tmp_path))
    specs = {
        f"layers/{case}_backbone/{name}": (leaf.spec.shape, leaf.spec.dtype)
        for name, leaf in preset.source.leaves.items()
    }
    specs |= {"optimizer/vars/0": ((), "int32"), "optimizer/vars/1": ((), "float32")}
    plan = planned(case, SpecsOnly(specs), MODELS[case], eos_token_id=1, bos_token_id=2)
    assert {step.name: step.spec for step in plan.steps} == {step.name: step.spec for step in preset.steps}
    assert {drop.reason for drop in plan.dropped} == {"optimizer state"}


@pytest.mark.parametrize("case", keras_hub.CASES)
def test_mistakes_in_the_file_are_named(case: str, tmp_path: Path) -> None:
    source, out = keras_hub.converted(case, tmp_path)
    assert assert_mistakes_are_named(out, source) >= 9


# What may be missing, as the tree is then that of another model: Llama with a tied head, which no key of a preset states.
OTHER_MODEL = {("llama", "layers/reversible_embedding/vars/1")}


@pytest.mark.parametrize("case", keras_hub.CASES)
def test_each_block_and_each_module_is_needed(case: str, tmp_path: Path) -> None:
    """Of modules that differ in numbers alone, the first and the last is removed, with all that lies in it."""
    source = keras_hub.checkpoint(case, tmp_path)
    if (
        case == "vit"
    ):  # beside `save_weights` lies no configuration, and a tree without its last block is a smaller model
        preset = {"class_name": "ViTBackbone", "config": {"patch_size": 8, "num_layers": 2, "num_heads": 4, "hidden_dim": 16, "mlp_dim": 24}}  # fmt: skip
        (source / "config.json").write_text(json.dumps(preset))
    plan = planned(case, source)
    leaves = {name: (leaf.spec.shape, leaf.spec.dtype) for name, leaf in plan.source.leaves.items()}
    removed = ends_of_modules(leaves)
    assert any(re.search(r"(block|decoder|encoder)_1$", name) for name in removed)
    dropped = {drop.leaf for drop in plan.dropped}
    for name, without in removed.items():
        if without <= dropped:
            continue
        less = SpecsOnly({leaf: spec for leaf, spec in leaves.items() if leaf not in without})
        less.path = source
        if (case, name) in OTHER_MODEL:
            assert planned(case, less).rules.model != MODELS[case]
            continue
        with pytest.raises(ConvertError):
            planned(case, less)
            pytest.fail(f"the plan does not need {name}")


def test_a_classifier_that_averages_is_not_what_transformers_computes(tmp_path: Path) -> None:
    """`ViTImageClassifier(pooling="gap")` has the same tree: a note says so until the user confirms the class token."""
    source = keras_hub.checkpoint("vit", tmp_path)
    assert any("--set pooling=token confirms it" in note for note in planned("vit", source).config_notes)
    assert not any("pooling" in note for note in planned("vit", source, pooling="token").config_notes)
    with pytest.raises(convert.PlanError, match="class token"):
        planned("vit", source, pooling="gap")


SLIPS = (  # case, a text of the rules, what stands there instead, what the check calls it
    ("gemma", "multiplies_by: 1+scale\n  epsilon: $layer_norm_epsilon\n  axes: D\n  rms_norm: &gemma_final {module: model.norm, multiplies_by: 1+weight}", "multiplies_by: scale\n  epsilon: $layer_norm_epsilon\n  axes: D\n  rms_norm: &gemma_final {module: model.norm, multiplies_by: 1+weight}", "norm"),
    ("llama", "half-split", "interleaved", "RoPE pairs de-interleaved needlessly"),
    ("mistral", "{_self_attention,_feedforward}_layernorm", "{_feedforward,_self_attention}_layernorm", "of another tensor"),
    ("bert", "{query,key,value}_dense/vars/0", "{key,query,value}_dense/vars/0", "of another tensor"),
    ("bert", "{query,key,value}_dense/vars/1", "{query,value,key}_dense/vars/1", "of another tensor"),
    ("vit", "NHWC,HWIO->NHWC", "NHWC,WHIO->NHWC", "spatial axes exchanged"),
)  # fmt: skip


@pytest.mark.parametrize(("case", "old", "new", "name"), SLIPS)
def test_slips_in_the_rules_are_named(case: str, old: str, new: str, name: str, tmp_path: Path) -> None:
    source = keras_hub.checkpoint(case, tmp_path)
    plan = planned(case, source)
    text = (shipped_rules_dir() / Path(plan.rules.path).name).read_text()
    assert old in text
    slipped = next(r for r in parse_models(text.replace(old, new), "rules.yaml") if r.model == plan.rules.model)
    convert.convert(slipped, source, tmp_path / "out", settings=keras_hub.settings(case))
    (report,) = check(tmp_path / "out", source, levels=["weights"], model=plan.rules.model).levels
    said = " ".join(map(str, report.findings))
    assert report.verdict.value == "failed" and name in said, said


@pytest.mark.parametrize("case", keras_hub.CASES)
def test_a_correct_conversion_passes(case: str, tmp_path: Path) -> None:
    """The preset's config.json has the words of Keras Hub; nothing of it belongs into that of the output."""
    source, out = keras_hub.converted(case, tmp_path)
    report = check(out, source, levels=("coverage", "weights", "layers"))
    assert report.exit_code == 0, [str(finding) for level in report.levels for finding in level.findings]


def test_another_gelu_in_config_json_is_named(tmp_path: Path) -> None:
    source, out = keras_hub.converted("bert", tmp_path)
    (out / "config.json").write_text((out / "config.json").read_text().replace("gelu_pytorch_tanh", "gelu"))
    (report,) = check(out, source, levels=["layers"]).levels
    assert report.verdict.value == "failed" and any("hidden_act" in str(f) for f in report.findings)
    assert load_file(out / "model.safetensors")["pooler.dense.weight"].shape == (16, 16)
