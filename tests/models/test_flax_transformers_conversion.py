"""BERT, GPT-2, T5, Whisper, Llama, Mistral, Gemma, DINOv2: what the flax classes of transformers 4 published becomes what transformers 5 loads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flax import serialization

import convert
from convert.checkpoints import open_source
from convert.core.errors import OptionError
from convert.planning.facts.sidecar import MAX_BYTES
from convert.rules.allowed_by_use import FUNCTION
from support import flax_families
from support.goldens import checkpoint, golden_io, relative_error

CASES = {
    "bert": "BertForMaskedLM",
    "bert-model": "BertModel",
    "bert-pretraining": "BertForPreTraining",
    "bert-classification": "BertForSequenceClassification",
    "bert-tokens": "BertForTokenClassification",
    "bert-answers": "BertForQuestionAnswering",
    "gpt2": "GPT2LMHeadModel",
    "gpt2-model": "GPT2Model",
    "t5": "T5ForConditionalGeneration",
    "t5-v1.1": "T5ForConditionalGeneration",
    "whisper": "WhisperForConditionalGeneration",
    "llama": "LlamaForCausalLM",
    "llama-model": "LlamaModel",
    "mistral": "MistralForCausalLM",
    "mistral-model": "MistralModel",
    "gemma-flax": "GemmaForCausalLM",
    "gemma-flax-untied": "GemmaForCausalLM",
    "gemma-flax-model": "GemmaModel",
    "dinov2": "Dinov2Model",
    "dinov2-classification": "Dinov2ForImageClassification",
}
INPUTS = (
    "input_ids",
    "attention_mask",
    "token_type_ids",
    "decoder_input_ids",
    "decoder_attention_mask",
    "input_features",
    "pixel_values",
)
BOUND = 5e-6  # measured: 1e-7 to 1.5e-6


def load(out: Path) -> torch.nn.Module:
    """As a user loads it: by the class that config.json names; nothing may be missing, left over or of another shape."""
    import transformers

    (name,) = json.loads((out / "config.json").read_text())["architectures"]
    loader = getattr(transformers, name)
    model, report = loader.from_pretrained(
        out, output_loading_info=True, dtype=torch.float32, attn_implementation="eager"
    )
    assert not any(report.values()), report
    return model.eval()


def errors(model: torch.nn.Module, case: str) -> dict[str, float]:
    """Relative errors of all outputs that the flax model was recorded to give."""
    io = golden_io(case)
    given = {name: torch.tensor(io[name]) for name in io if name in INPUTS}
    with torch.no_grad():
        made = model(**{name: x if x.is_floating_point() else x.long() for name, x in given.items()})
    return {name: relative_error(made[name].numpy(), io[name]) for name in io if name not in INPUTS}


@pytest.mark.parametrize("case", CASES)
def test_it_loads_and_computes_what_the_flax_model_did(case: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    convert.convert(case.split("-")[0], checkpoint(case), out)
    model = load(out)
    assert type(model).__name__ == CASES[case]
    found = errors(model, case)
    assert len(found) >= 1 and max(found.values()) < BOUND, found


@pytest.mark.parametrize(("case", "tensor"), [("bert", "bert.encoder.layer.1.attention.output.dense.weight"), ("gpt2", "transformer.h.1.attn.c_proj.weight"), ("t5", "decoder.block.1.layer.0.layer_norm.weight"), ("whisper", "model.encoder.conv2.weight")])  # fmt: skip
def test_a_planted_fault_loads_and_is_far_off(case: str, tensor: str, tmp_path: Path) -> None:
    """A square weight transposed, the axes of a square convolution swapped, 1 added to a norm."""
    out = tmp_path / "out"
    convert.convert(case, checkpoint(case), out)
    model = load(out)
    weight = dict(model.named_parameters())[tensor]
    with torch.no_grad():
        weight.copy_(weight.transpose(0, 1).clone() if weight.ndim > 1 else weight + 1)
    assert max(errors(model, case).values()) > 1e-2


CODE = {  # golden -> key of its config.json that the flax code reads in another way, the value there, what is written, the reason
    "llama": [
        ("rope_theta", 500000.0, 10000.0, "RoPE's base 10000 written in it"),
        ("rope_scaling", {"factor": 4.0, "rope_type": "linear"}, None, "does not read rope_scaling"),
        ("tie_word_embeddings", True, False, "an lm_head of its own"),
    ],
    "mistral": [
        ("sliding_window", 5, 6, "sees itself and as many tokens before it"),
        ("rope_theta", 1000000.0, 10000.0, "RoPE's base 10000 written in it"),
        ("tie_word_embeddings", True, False, "an lm_head of its own"),
    ],
    "gemma-flax": [
        ("rope_theta", 50000.0, 10000.0, "RoPE's base 10000 written in it"),
        ("hidden_act", "gelu", "gelu_pytorch_tanh", "reads hidden_activation"),
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CODE)
def test_what_the_flax_code_computes_is_written_and_not_what_config_json_says(case: str, tmp_path: Path) -> None:
    """The notes of plan and model card name both; with the values of the source's config.json the outputs are far off."""
    plan = convert.plan_conversion(case.split("-")[0], checkpoint(case))
    expected = [
        f"config.json of the checkpoint has {key} {json.dumps(stated)}, and that of the output "
        f"{'none' if written is None else json.dumps(written)}: "
        for key, stated, written, _ in CODE[case]
    ]
    notes = [note for note in plan.notes if note.startswith("config.json of the checkpoint has ")]
    assert len(notes) == len(expected)
    for note, start, (*_, reason) in zip(notes, expected, CODE[case], strict=True):
        assert note.startswith(start) and reason in note
    out = tmp_path / "out"
    convert.convert(case.split("-")[0], checkpoint(case), out)
    assert all(note in (out / "README.md").read_text() for note in notes)
    config = json.loads((out / "config.json").read_text())
    assert "rope_theta" not in config and "rope_scaling" not in config
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 10000.0}
    for key, stated, *_ in CODE[case]:
        wrong = {"rope_theta": {"rope_parameters": {"rope_type": "default", "rope_theta": stated}}}.get(
            key, {key: stated}
        )
        (out / "config.json").write_text(json.dumps({**config, **wrong}))
        if key not in (
            "tie_word_embeddings",
            "hidden_act",
        ):  # transformers 5 loads the head all the same, and corrects gelu
            assert max(errors(load(out), case).values()) > 0.1, key


def test_the_scale_of_dinov2s_layers_contains_the_square_of_the_configured_value(tmp_path: Path) -> None:
    """FlaxDinov2LayerScale multiplies by `layerscale_value` twice; with the scale as stored, the outputs are far off."""
    plan = convert.plan_conversion("dinov2", checkpoint("dinov2"))
    said = (
        "config.json of the checkpoint has layerscale_value 0.3, and that of the output 1.0: the flax code multiplies"
    )
    assert any(note.startswith(said) for note in plan.notes)
    out = tmp_path / "out"
    convert.convert("dinov2", checkpoint("dinov2"), out)
    model = load(out)
    with torch.no_grad():
        for name, scale in model.named_parameters():
            if name.endswith("lambda1"):
                scale /= 0.3**2
    assert max(errors(model, "dinov2").values()) > 0.1
    convert.convert("dinov2", checkpoint("dinov2"), tmp_path / "one", settings={"layerscale_value": 1.0})
    tree = serialization.msgpack_restore((checkpoint("dinov2") / "flax_model.msgpack").read_bytes())
    stored = tree["encoder"]["layer"]["1"]["layer_scale2"]["lambda1"]
    kept = dict(load(tmp_path / "one").named_parameters())["encoder.layer.1.layer_scale2.lambda1"]
    assert np.array_equal(kept.detach().numpy(), stored)
    with pytest.raises(convert.PlanError, match="--set layerscale_value="):
        convert.plan_conversion("dinov2", checkpoint("dinov2"), settings={"layerscale_value": 0})


@pytest.mark.parametrize("case", ["llama.LlamaForCausalLM", "llama.biased-headless", "mistral.MistralModel"])
def test_a_width_of_heads_that_the_flax_class_does_not_read(case: str, tmp_path: Path) -> None:
    """It takes hidden_size / num_attention_heads. Run with transformers 4.49: the outputs are the recorded ones for any head_dim."""
    right = convert.plan_conversion("flax-transformers", flax_families.write(case, tmp_path / "right"))
    plan = convert.plan_conversion("flax-transformers", flax_families.write(case, tmp_path / "source", head_dim=8))
    assert plan.config == right.config and plan.config is not None and plan.config["head_dim"] == 6
    assert [step.spec for step in plan.steps] == [step.spec for step in right.steps]
    assert any("head_dim" in note and "does not read" in note for note in plan.notes)
    gemma = flax_families.write("gemma.GemmaModel", tmp_path / "gemma", head_dim=4)  # whose class reads it
    with pytest.raises(convert.PlanError, match="head_dim = 4"):
        convert.plan_conversion("flax-transformers", gemma)


@pytest.mark.slow
def test_a_dinov2_without_a_mask_token_computes_the_same(tmp_path: Path) -> None:
    """The token stands for masked patches; the recorded outputs have none. The tree and config.json must agree."""
    stated = json.loads((checkpoint("dinov2") / "config.json").read_text())
    tree = serialization.msgpack_restore((checkpoint("dinov2") / "flax_model.msgpack").read_bytes())
    masked, source = (tmp_path / name for name in ("masked", "source"))
    for folder in (masked, source):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({**stated, "use_mask_token": False}))
        (folder / "flax_model.msgpack").write_bytes(serialization.msgpack_serialize(tree))
        tree["embeddings"].pop("mask_token", None)
    with pytest.raises(convert.PlanError, match="use_mask_token"):
        convert.plan_conversion("dinov2", masked)
    convert.convert("dinov2", source, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["use_mask_token"] is False
    model = load(tmp_path / "out")
    assert "embeddings.mask_token" not in model.state_dict() and max(errors(model, "dinov2").values()) < BOUND
    (source / "config.json").write_text(json.dumps({**stated, "use_mask_token": True}))
    with pytest.raises(convert.PlanError, match="mask_token"):
        convert.plan_conversion("dinov2", source)


@pytest.mark.slow
def test_no_note_where_config_json_says_what_the_flax_code_computes() -> None:
    for case in ("mistral-model", "gemma-flax-untied"):
        notes = convert.plan_conversion(case.split("-")[0], checkpoint(case)).notes
        assert sum("rope_theta" in note for note in notes) == 0


@pytest.mark.parametrize(("key", "value"), [("attention_bias", True), ("hidden_activation", "gelu")])
def test_what_the_target_cannot_compute_is_refused(key: str, value: Any, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(checkpoint("gemma-flax"), source)
    said = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**said, key: value}))
    with pytest.raises(convert.PlanError, match=f"{key} in the config.json of the checkpoint"):
        convert.plan_conversion("gemma_flax", source)


def without_config(case: str, folder: Path) -> Path:
    folder.mkdir()
    return Path(shutil.copy(checkpoint(case) / "flax_model.msgpack", folder))


@pytest.mark.slow
def test_what_the_tree_does_not_hold_is_asked_for_by_name_without_config_json(tmp_path: Path) -> None:
    alone = without_config("bert", tmp_path / "alone")
    plan = convert.plan_conversion("bert", alone)
    with pytest.raises(convert.PlanError, match="--set num_attention_heads=") as caught:
        _ = plan.config
    assert "put config.json next to the checkpoint, or give it with --set num_attention_heads=..." in str(caught.value)
    assert plan.notes == (
        "there is no config.json next to the checkpoint; the rules assume layer_norm_eps 1e-12, hidden_act gelu",
        "the output is a BertForMaskedLM; a BertLMHeadModel may have the same tree, and no config.json with architectures next to the "
        "checkpoint says which one it is",
    )
    out = tmp_path / "out"
    convert.convert("bert", alone, out, settings={"num_attention_heads": 3})
    assert max(errors(load(out), "bert").values()) < BOUND
    weights = convert.convert("bert", alone, tmp_path / "w.safetensors")
    assert weights.tensors == 58


HEADS = {"bert": "num_attention_heads", "gpt2": "n_head", "whisper": "decoder_attention_heads"}


@pytest.mark.parametrize(("case", "key"), HEADS.items())
def test_a_number_of_heads_that_the_width_does_not_make_is_refused(case: str, key: str, tmp_path: Path) -> None:
    """Any divisor fits every leaf, and is the source's word; any other number is of another model."""
    source = tmp_path / "source"
    shutil.copytree(checkpoint(case), source)
    said = json.loads((source / "config.json").read_text())
    width = convert.plan_conversion(case, source).sizes["D"]
    wrong = next(n for n in range(5, width) if width % n)
    (source / "config.json").write_text(json.dumps({**said, key: wrong}))
    with pytest.raises(convert.PlanError) as refused:
        convert.plan_conversion(case, source)
    (finding,) = refused.value.findings
    assert (finding.code, finding.path, finding.got) == (
        "size-conflict",
        "config.json of the checkpoint",
        f"{key} = {wrong}",
    )
    assert f"D = {width} (model width)" in finding.problem
    with pytest.raises(convert.PlanError, match=f"--set {key}={wrong}: the tree has D = {width}"):
        convert.plan_conversion(case, source, settings={key: wrong})
    assert convert.plan_conversion(case, source, settings={key: said[key]}).facts[key] == said[key]


def test_config_json_is_carried_over_and_completed(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(checkpoint("bert-classification"), source)
    said = json.loads((source / "config.json").read_text())
    said |= {
        "id2label": {str(k): f"word {k}" for k in range(5)},
        "problem_type": "multi_label_classification",
        "num_labels": 5,
    }
    said |= {
        "transformers_version": "4.1.0",
        "torch_dtype": "float16",
        "quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True},
        "architectures": ["FlaxBertForSequenceClassification"],
    }
    (source / "config.json").write_text(json.dumps(said))
    (source / "generation_config.json").write_text('{"max_length": 7, "transformers_version": "4.1.0"}')
    out = tmp_path / "out"
    convert.convert("bert", source, out)
    made = json.loads((out / "config.json").read_text())
    assert made["id2label"]["3"] == "word 3" and made["problem_type"] == "multi_label_classification"
    assert made["architectures"] == ["BertForSequenceClassification"] and made["dtype"] == "float32"
    assert not made.keys() & {"transformers_version", "torch_dtype", "quantization_config"}
    assert json.loads((out / "generation_config.json").read_text()) == {"max_length": 7}


def of_class(case: str, folder: Path, architectures: Any, **more: Any) -> Path:
    """A golden whose config.json names another class; None: it names none."""
    shutil.copytree(checkpoint(case), folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": architectures, **more}
    (folder / "config.json").write_text(
        json.dumps({key: value for key, value in config.items() if key != "architectures" or value is not None})
    )
    return folder


@pytest.mark.parametrize(
    ("case", "claimed", "expected"),
    [
        ("bert-classification", "BertForMultipleChoice", "BertForSequenceClassification"),
        ("bert-classification", "FlaxBertForMultipleChoice", "BertForSequenceClassification"),
        ("bert", "BertForPreTraining", "BertForMaskedLM"),  # the tree has no head for pairs of sentences
        ("bert-model", "BertForTokenClassification", "BertModel"),
        ("gpt2", "GPT2ForSequenceClassification", "GPT2LMHeadModel"),
        ("t5-v1.1", "T5Model", "T5ForConditionalGeneration"),
    ],
)
def test_a_class_that_the_rules_do_not_write_is_refused(case: str, claimed: str, expected: str, tmp_path: Path) -> None:
    source = of_class(case, tmp_path / "source", [claimed])
    with pytest.raises(convert.PlanError) as refused:
        convert.plan_conversion(case.split("-")[0], source)
    finding = next(finding for finding in refused.value.findings if finding.code == "config-conflict")
    assert (finding.expected, finding.got) == (expected, claimed.removeprefix("Flax"))
    assert expected in finding.fix and "convert rules list" in finding.fix


@pytest.mark.parametrize(
    ("case", "named"),
    [("bert", "BertLMHeadModel"), ("gpt2-model", "GPT2LMHeadModel"), ("whisper", "WhisperModel")],
)
def test_a_class_with_the_same_tree_is_left_to_the_rules_of_all_families(case: str, named: str, tmp_path: Path) -> None:
    source, out = of_class(case, tmp_path / "source", [named]), tmp_path / "out"
    convert.convert(case.split("-")[0], source, out)
    assert type(load(out)).__name__ == named


def test_a_list_with_another_class_is_refused(tmp_path: Path) -> None:
    source = of_class("bert-classification", tmp_path / "a", ["BertForMultipleChoice", "BertForSequenceClassification"])
    with pytest.raises(convert.PlanError, match="names another class"):
        convert.plan_conversion("bert", source)


def changed(case: str, folder: Path, **change: Any) -> Path:
    """A golden with other keys in its config.json."""
    named = json.loads((checkpoint(case) / "config.json").read_text()).get("architectures")
    return of_class(case, folder, **{"architectures": named, **change})


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize(
    ("case", "tied"),
    [
        ("t5", False),
        ("t5-v1.1", True),
        ("gpt2", False),
        ("gemma-flax", False),
        ("gemma-flax-untied", True),
        ("bert", False),
        ("whisper", False),
    ],
)
def test_a_tied_head_that_the_tree_contradicts_is_refused(case: str, tied: bool, named: bool, tmp_path: Path) -> None:
    source = changed(case, tmp_path / "source", tie_word_embeddings=tied, **({} if named else {"architectures": None}))
    if case == "t5" and not named:  # a T5Model has this tree and may state this
        made = convert.plan_conversion("t5", source).config
        assert made is not None and (made["architectures"], made["tie_word_embeddings"]) == (["T5Model"], False)
        return
    with pytest.raises(convert.PlanError) as refused:
        convert.plan_conversion(case.split("-")[0], source)
    (finding,) = (finding for finding in refused.value.findings if "tie_word_embeddings" in finding.problem)
    assert finding.code == "config-conflict" and finding.got == str(tied).lower()
    assert finding.expected.startswith(str(not tied).lower())


ONE_ACTIVATION = f"one of {', '.join(FUNCTION.one_of)}, such as gelu"


@pytest.mark.parametrize(
    ("case", "key", "value", "expected"),
    [
        *(("llama", "rms_norm_eps", value, "a number above 0 and at most 0.1, such as 1e-06") for value in ("abc", -1.0, 0, 5, True, None, [1])),
        ("bert", "layer_norm_eps", "1e-12", "a number above 0 and at most 0.1, such as 1e-12"),
        ("bert", "hidden_act", 3, ONE_ACTIVATION),
        ("bert", "hidden_act", "nonsense", ONE_ACTIVATION),
        ("gpt2", "layer_norm_epsilon", -1, "a number above 0 and at most 0.1, such as 1e-05"),
        ("t5", "relative_attention_max_distance", 1.5, "an integer above B//2, such as 128"),
        ("dinov2", "layerscale_value", 0, "a number above 0, such as 1.0"),
        ("dinov2", "mlp_ratio", None, "an integer above 0, such as 4"),
        *(("mistral", "sliding_window", value, "an integer of at least 1, such as 4096") for value in (None, 0, "5", -4096)),
    ],
)  # fmt: skip
def test_config_json_has_the_values_that_set_accepts(
    case: str, key: str, value: Any, expected: str, tmp_path: Path
) -> None:
    """A sliding window of null: the flax code negates it (``jnp.triu(mask, k=-sliding_window)``), so no such model ran."""
    source = changed(case, tmp_path / "source", **{key: value})
    with pytest.raises(convert.PlanError) as refused:
        convert.plan_conversion(case, source)
    findings = {finding.problem: finding for finding in refused.value.findings}
    finding = findings[f"{key} in the config.json of the checkpoint"]
    assert (finding.code, finding.expected, finding.got) == ("config-conflict", expected, json.dumps(value))
    assert not any(finding.fix == "correct the letter" for finding in refused.value.findings)
    good = {"hidden_act": "relu", "layerscale_value": 0.5, "mlp_ratio": 2, "sliding_window": 4}.get(key, 0.001)
    good = 100 if key == "relative_attention_max_distance" else good
    plan = convert.plan_conversion(case, source, settings={key: good})
    assert plan.facts[key] == good
    if value is not None:
        with pytest.raises(OptionError) as setting:
            convert.plan_conversion(case, checkpoint(case), settings={key: value})
        assert setting.value.findings[0].expected == expected


@pytest.mark.parametrize(
    ("case", "change", "told"),
    [
        ("llama", {"num_attention_heads": 8}, "the tree has K = 12 (the width of all key heads together): expected num_key_value_heads*H to be 12, got num_key_value_heads = 2; H = 3, by num_attention_heads*H = E = 24"),
        ("llama-model", {"num_key_value_heads": 6}, "got num_key_value_heads = 6; H = 6, by num_attention_heads*H = E = 24"),
        ("mistral", {"num_key_value_heads": 4}, "got num_key_value_heads = 4; H = 6, by num_attention_heads*H = E = 24"),
        ("gemma-flax", {"head_dim": 5}, "has head_dim = 5, and the tree has H = 10"),
        ("gemma-flax-untied", {"num_attention_heads": 8}, "the tree has H ="),
        ("dinov2", {"mlp_ratio": 4}, "the tree has F = 48 (width of the feed-forward block): expected mlp_ratio*D to be 48"),
        ("dinov2-classification", {"image_size": 24}, "has image_size = 24, and the tree has Z = 12"),
        ("dinov2-classification", {"id2label": {"0": "cat"}}, "has num_labels = 1 (the entries of id2label), and the tree has C = 5"),
        ("bert-classification", {"label2id": {"cat": 0, "dog": 1}}, "has num_labels = 2 (the entries of label2id), and the tree has C = 5"),
        ("whisper", {"decoder_attention_heads": 7}, "the tree has D = 24 (model width): expected decoder_attention_heads to be a positive integer that divides 24"),
        ("whisper", {"is_encoder_decoder": False}, "is_encoder_decoder in the config.json of the checkpoint contradicts the tree: expected true"),
        ("t5", {"is_encoder_decoder": False}, "is_encoder_decoder in the config.json of the checkpoint contradicts the tree: expected true"),
        ("t5", {"d_kv": 3}, "has d_kv = 3, and the tree has H ="),
    ],
)  # fmt: skip
def test_config_json_that_the_tree_contradicts_is_refused(
    case: str, change: dict[str, Any], told: str, tmp_path: Path
) -> None:
    with pytest.raises(convert.PlanError) as refused:
        convert.plan_conversion(case.split("-")[0], changed(case, tmp_path / "source", **change))
    assert told in str(refused.value)
    assert convert.plan_conversion(case.split("-")[0], checkpoint(case)).config


def test_what_is_set_is_not_said_to_be_assumed(tmp_path: Path) -> None:
    source = without_config("dinov2", tmp_path / "source")
    settings = {"num_attention_heads": 3, "mlp_ratio": 2}
    (note,) = (note for note in convert.plan_conversion("dinov2", source, settings=settings).notes if "assume" in note)
    assert "mlp_ratio" not in note and "layer_norm_eps 1e-06" in note


@pytest.mark.parametrize("tied", [True, False])
def test_t5_without_a_head_stays_without_one(tied: bool, tmp_path: Path) -> None:
    """Its tree is that of T5 with a tied head."""
    source = of_class("t5", tmp_path / "source", ["T5Model"], tie_word_embeddings=tied)
    out = tmp_path / "out"
    convert.convert("t5", source, out)
    made = json.loads((out / "config.json").read_text())
    assert made["architectures"] == ["T5Model"] and made["tie_word_embeddings"] is tied
    assert type(load(out)).__name__ == "T5Model"


@pytest.mark.parametrize(
    ("case", "written", "other"),
    [
        ("t5", "T5ForConditionalGeneration", "T5Model"),
        ("bert-classification", "BertForSequenceClassification", "BertForMultipleChoice"),
    ],
)
@pytest.mark.parametrize("architectures", [None, []])
def test_a_class_that_is_not_named_is_noted(
    case: str, written: str, other: str, architectures: Any, tmp_path: Path
) -> None:
    plan = convert.plan_conversion(case.split("-")[0], of_class(case, tmp_path / "source", architectures))
    assert plan.config is not None and plan.config["architectures"] == [written]
    assert any(written in note and other in note for note in plan.notes)
    assert not any(other in note for note in convert.plan_conversion(case.split("-")[0], checkpoint(case)).notes)


def test_set_goes_before_config_json() -> None:
    plan = convert.plan_conversion("bert", checkpoint("bert"), settings={"hidden_act": "relu", "layer_norm_eps": 1e-3})
    assert plan.config is not None and plan.config["hidden_act"] == "relu" and plan.config["layer_norm_eps"] == 1e-3
    said = {layer["activation"] for layer in plan.layers if "activation" in layer}
    assert said == {"relu"}


def test_what_config_json_says_is_what_a_layer_is_checked_by() -> None:
    plan = convert.plan_conversion("bert", checkpoint("bert-answers"))
    assert {layer["activation"] for layer in plan.layers if "activation" in layer} == {"gelu_tanh"}
    assert {layer["epsilon"] for layer in plan.layers if "epsilon" in layer} == {1e-3}


@pytest.mark.parametrize(
    ("case", "change", "message"),
    [
        ("bert", {"num_hidden_layers": 5}, "has num_hidden_layers = 5, and the tree has i = 3"),
        ("bert", {"position_embedding_type": "relative_key"}, 'position_embedding_type in the config.json of the checkpoint: expected "absolute", got "relative_key"'),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx in the config.json of the checkpoint: expected false, got true"),
        ("gpt2", {"model_type": "gpt_neo"}, 'expected "gpt2", got "gpt_neo"'),
        ("whisper", {"scale_embedding": True}, "scale_embedding in the config.json of the checkpoint: expected false, got true"),
        ("t5", {"d_kv": 3}, "has d_kv = 3, and the tree has H = 7"),
    ],
)  # fmt: skip
def test_a_config_json_of_another_model_is_refused(
    case: str, change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    shutil.copytree(checkpoint(case), source)
    said = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**said, **change}))
    with pytest.raises(convert.PlanError) as caught:
        convert.plan_conversion(case, source)
    assert caught.value.code == "config-conflict" and message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"model_type": "bert"', "JSON"),
        ("[" * 100_000, "JSON"),
        ("[1]", "a JSON object"),
        (" " * (MAX_BYTES + 1), f"at most {MAX_BYTES} bytes"),
        ("\udcff", "JSON"),
    ],
)
def test_a_damaged_config_json_is_an_error(text: str, expected: str, tmp_path: Path) -> None:
    alone = without_config("bert", tmp_path / "alone")
    (alone.parent / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(convert.CheckpointError) as caught:
        convert.plan_conversion("bert", alone)
    (finding,) = caught.value.findings
    assert (finding.code, finding.path) == ("sidecar-invalid", str(alone.parent / "config.json"))
    assert finding.expected == expected and finding.got


def test_a_file_beside_is_a_name_not_a_path(tmp_path: Path) -> None:
    rules = tmp_path / "r.yaml"
    rules.write_text(
        "model: m\ntitle: M\ntargets: {t: {loads: m}}\nsidecar: {file: ../config.json}\nrules:\n- {from: a, parameter: a}\n"
    )
    with pytest.raises(convert.RuleError, match=r"r.yaml:4:17: expected a file name without a folder"):
        convert.load_rules(rules)


def test_shards_with_an_index_give_the_same_bytes(tmp_path: Path) -> None:
    tree = serialization.msgpack_restore((checkpoint("gpt2") / "flax_model.msgpack").read_bytes())
    source = tmp_path / "source"
    source.mkdir()
    shutil.copy(checkpoint("gpt2") / "config.json", source)
    inner = tree["transformer"]
    names = ["flax_model-00001-of-00002.msgpack", "flax_model-00002-of-00002.msgpack"]
    parts: list[dict[str, Any]] = [{"transformer": {"h": inner["h"]}}, {"transformer": {k: v for k, v in inner.items() if k != "h"}}]  # fmt: skip
    for name, part in zip(names, parts, strict=True):
        (source / name).write_bytes(serialization.to_bytes(part))
    leaves = open_source(checkpoint("gpt2")).leaves
    index = {"metadata": {}, "weight_map": {leaf: names["/h/" not in leaf] for leaf in leaves}}
    (source / "flax_model.msgpack.index.json").write_text(json.dumps(index))
    convert.convert("gpt2", source, tmp_path / "a.safetensors")
    convert.convert("gpt2", checkpoint("gpt2"), tmp_path / "b.safetensors")
    from safetensors.numpy import load_file

    a, b = load_file(tmp_path / "a.safetensors"), load_file(tmp_path / "b.safetensors")
    assert a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


def tree_of(case: str) -> dict[str, Any]:
    tree: dict[str, Any] = serialization.msgpack_restore((checkpoint(case) / "flax_model.msgpack").read_bytes())
    return tree


def test_gpt2_with_a_head_of_its_own(tmp_path: Path) -> None:
    tree, source = tree_of("gpt2"), tmp_path / "source"
    shutil.copytree(checkpoint("gpt2"), source)
    kernel = np.random.default_rng(0).standard_normal((24, 61)).astype(np.float32)
    (source / "flax_model.msgpack").write_bytes(serialization.to_bytes({**tree, "lm_head": {"kernel": kernel}}))
    convert.convert("gpt2", source, tmp_path / "out")
    convert.convert("gpt2", checkpoint("gpt2"), tmp_path / "tied")
    untied, tied = load(tmp_path / "out"), load(tmp_path / "tied")
    ids = torch.tensor(golden_io("gpt2")["input_ids"]).long()
    with torch.no_grad():
        hidden = tied.transformer(ids).last_hidden_state.numpy()  # type: ignore[operator,union-attr]
        assert relative_error(untied(ids).logits.numpy(), hidden @ kernel) < BOUND


@pytest.mark.slow
def test_the_encoder_of_t5_alone(tmp_path: Path) -> None:
    tree = tree_of("t5")
    source, other = (
        of_class("t5", tmp_path / name, [name]) for name in ("T5EncoderModel", "T5ForConditionalGeneration")
    )
    alone = {name: tree[name] for name in ("shared", "encoder")}
    for folder in (source, other):
        (folder / "flax_model.msgpack").write_bytes(serialization.to_bytes(alone))
    with pytest.raises(convert.PlanError) as refused:  # a class that has a decoder
        convert.plan_conversion("t5", other)
    assert [(f.expected, f.got) for f in refused.value.findings] == [("T5EncoderModel", "T5ForConditionalGeneration")]
    convert.convert("t5", source, tmp_path / "out")
    convert.convert("t5", checkpoint("t5"), tmp_path / "whole")
    encoder, whole = load(tmp_path / "out"), load(tmp_path / "whole")
    assert type(encoder).__name__ == "T5EncoderModel"
    ids = torch.tensor(golden_io("t5")["input_ids"]).long()
    with torch.no_grad():
        want = whole.encoder(ids).last_hidden_state.numpy()  # type: ignore[operator,union-attr]
        assert relative_error(encoder(ids).last_hidden_state.numpy(), want) < BOUND


def test_a_head_of_its_own_that_the_rules_do_not_know_is_refused() -> None:
    """The tree of an untied BERT has one leaf more."""
    from support.goldens import SpecsOnly

    leaves = open_source(checkpoint("bert")).leaves
    specs = {name: (leaf.spec.shape, leaf.spec.dtype) for name, leaf in leaves.items()}
    with pytest.raises(convert.PlanError, match="cls/predictions/decoder/kernel"):
        convert.plan_conversion("bert", SpecsOnly({**specs, "cls/predictions/decoder/kernel": ((24, 67), "float32")}))
