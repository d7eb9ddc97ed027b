"""All flax models of transformers 4: real checkpoints of 39 families and every class, through rules that name no module.

Each case was recorded by the flax class itself; the PyTorch class of transformers 5 loads the output, and computes the same.
"""

from __future__ import annotations

import hashlib
import json
import re
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import convert
from convert.rules.library import shipped_rules_dir
from convert.rules.parse import parse_rules
from convert.verify.recording.record import write_recording
from convert.verify.run import check
from convert.verify.sides.evidence import Evidence
from support import flax_families, flax_table
from support.command_line import Run
from support.marks import slow_but
from support.paths import GOLDEN
from support.value_mistakes import assert_mistakes_are_named, tensor_of, turned

FAMILY = "flax-transformers"
QUICK = ("bert.untied", "gpt2.cross", "resnet.basic", "whisper.untied", "encoder_decoder")
# What the flax classes lack and PyTorch's have: tables that transformers computes, and poolers that the outputs do not need.
ABSENT = re.compile(
    r"embed_positions\.weight|distilbert\.embeddings\.position_embeddings\.weight|bert\.pooler\.(weight|bias)"
)


@pytest.mark.parametrize("case", slow_but(QUICK, flax_families.CASES))
def test_pytorch_computes_what_the_flax_class_recorded(case: str, tmp_path: Path) -> None:
    source = flax_families.write(case, tmp_path / "source")
    written = hashlib.sha256((source / "flax_model.msgpack").read_bytes()).hexdigest()
    assert written == flax_families.DIGESTS[case]["sha256"], "these are not the bytes that save_pretrained wrote"
    convert.convert(FAMILY, source, tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert flax_families.digest(tensors) == flax_families.FROM_FLAX[case]["tensors"]
    model, info = flax_table.loaded(tmp_path / "out")
    assert not info["unexpected_keys"] and not info["mismatched_keys"]
    assert [name for name in info["missing_keys"] if not ABSENT.search(name)] == []
    assert flax_table.error(model, case) < flax_table.BOUND


@pytest.mark.parametrize(
    ("case", "model", "keys"),
    [
        ("t5.T5ForConditionalGeneration", "t5", {"scale_decoder_outputs": False}),
        ("t5.v1.1", FAMILY, {"scale_decoder_outputs": True}),
        ("longt5.LongT5ForConditionalGeneration", FAMILY, {"scale_decoder_outputs": False}),
        ("bloom.BloomForCausalLM", FAMILY, {"pretraining_tp": 2, "slow_but_exact": True}),
        ("gpt2.GPT2LMHeadModel", FAMILY, {"is_causal": False}),
        ("llama.LlamaForCausalLM", FAMILY, {"is_causal": False}),
        ("gemma.GemmaForCausalLM", FAMILY, {"is_causal": False, "use_bidirectional_attention": True}),
        ("t5.T5EncoderModel", FAMILY, {"is_decoder": True}),
        ("mt5.MT5EncoderModel", FAMILY, {"is_decoder": True}),
        ("albert.AlbertModel", FAMILY, {"chunk_size_feed_forward": 3}),
        ("bart.BartModel", FAMILY, {"is_encoder_decoder": False}),
        ("t5.T5Model", FAMILY, {"is_encoder_decoder": False}),
        ("pegasus.PegasusForConditionalGeneration", FAMILY, {"is_encoder_decoder": False}),
    ],
)
def test_keys_that_only_the_pytorch_class_reads_do_not_change_what_it_computes(
    case: str, model: str, keys: dict[str, Any], tmp_path: Path
) -> None:
    """The flax class scales the outputs of a tied head and of no other, computes BLOOM's products in one piece, and has its masks in its code."""
    convert.convert(model, flax_families.write(case, tmp_path / "source", **keys), tmp_path / "out")
    loaded, _ = flax_table.loaded(tmp_path / "out")
    assert flax_table.error(loaded, case) < flax_table.BOUND


EXPLAINED = {  # tensors that `from_flax=True` does not give, which docs/models/flax-transformers.md explains
    "llama.LlamaForCausalLM": "lm_head",
    "llama.biased": "lm_head",
    "llama.square": "lm_head",
    "whisper.untied": "proj_out",
    "resnet.basic": "encoder.stages",
    "dinov2.Dinov2ForImageClassification": "lambda1",
    "dinov2.Dinov2Model": "lambda1",
    "dinov2.square": "lambda1",
}


def test_transformers_4_gives_the_same_tensors_but_for_what_is_explained() -> None:
    """Measured by make_from_flax.py; the digest of the output is compared below."""
    apart = {case: said["differ"] for case, said in flax_families.FROM_FLAX.items() if said.get("differ")}
    failed = {case for case, said in flax_families.FROM_FLAX.items() if "error" in said}
    assert set(flax_families.FROM_FLAX) == set(flax_families.CASES) and failed == {"bert.causal", "bert.cross"}
    assert apart.keys() == EXPLAINED.keys()
    assert all(part in name for case, part in EXPLAINED.items() for name in apart[case])


def test_the_page_has_a_row_of_every_family() -> None:
    rows = {
        line.split("|")[1].strip(): line for line in flax_table.PAGE.read_text().splitlines() if line.count("|") == 5
    }
    families = flax_table.listed()
    assert len(families) == 39
    for cases in families.values():
        row = rows[flax_families.config(cases[0])["model_type"]]
        assert all(flax_table.shown(case) in row for case in cases)


@pytest.mark.parametrize(
    "family",
    slow_but(["bert", "clip", "gpt2", "whisper"], sorted({case.partition(".")[0] for case in flax_families.CASES})),
)
def test_the_own_name_of_a_family_takes_every_class(family: str, tmp_path: Path) -> None:
    """Rules of a name that do not know a class leave it to the rules of all families."""
    for case in flax_families.CASES:
        stated = flax_families.config(case)
        if case.partition(".")[0] != family:
            continue
        named = re.sub("_(text|vision)_model$", "", stated["model_type"])
        plan = convert.plan_conversion(named, flax_families.specs(case, tmp_path / case))
        (name,) = stated["architectures"]
        assert plan.config is not None and plan.config["architectures"] in (
            [name],
            [name.replace("ForCausalLM", "LMHeadModel")],
        )
        if family == "bert":
            known = case.endswith(
                ("bert.BertModel", "square", "ForMaskedLM", "ForPreTraining", "Classification", "ForQuestionAnswering")
            )
            assert (plan.rules.model != "flax_transformers") is known


@pytest.mark.parametrize(
    ("case", "keys", "told"),
    [
        ("gpt2.cross", {"scale_attn_weights": False}, "scales the scores"),
        ("gpt2.cross", {"scale_attn_by_inverse_layer_idx": True}, "does not divide by the number of the layer"),
        ("whisper.WhisperModel", {"scale_embedding": True}, "does not scale its embeddings"),
        ("blenderbot_small.BlenderbotSmallModel", {"scale_embedding": True}, "does not multiply the embeddings of its decoder"),
        ("encoder_decoder", {"decoder": {"scale_attn_weights": False}}, "scales the scores"),
        ("resnet.ResNetModel", {"downsample_in_bottleneck": True}, "stride in the second convolution"),
        ("electra.ElectraForMultipleChoice", {"summary_type": "last"}, "takes the first token"),
        ("electra.ElectraForMaskedLM", {"hidden_act": "relu"}, "has GELU in front of its head"),
        ("electra.causal", {"hidden_act": "gelu_new"}, "has GELU in front of its head"),
        ("encoder_decoder.projected", {"decoder": {"model_type": "electra", "hidden_act": "relu"}}, "has GELU in front of its head"),
        ("roformer.RoFormerForMultipleChoice", {"summary_type": "first"}, "takes the last token"),
        ("roformer.RoFormerForMultipleChoice", {"summary_activation": "tanh"}, "no activation before its classifier"),
        ("roformer.RoFormerModel", {"add_cross_attention": True}, "no cross-attention"),
        ("roformer.RoFormerForMaskedLM", {"is_decoder": True}, "no causal mask"),
        ("wav2vec2.Wav2Vec2Model", {"do_stable_layer_norm": False}, "norms in front of the blocks"),
        ("wav2vec2.Wav2Vec2ForCTC", {"feat_extract_norm": "group"}, "a norm in each of its convolutions"),
        ("vit.ViTModel", {"pooler_act": "relu"}, "tanh in its pooler"),
        ("marian.MarianMTModel", {"share_encoder_decoder_embeddings": False}, "one embedding for both languages"),
        ("opt.OPTModel", {"enable_bias": False}, "has biases"),
        ("opt.OPTModel", {"layer_norm_elementwise_affine": False}, "have a scale and a bias"),
        ("wav2vec2.Wav2Vec2Model", {"adapter_attn_dim": 16}, "no adapters in its layers"),
        ("xglm.XGLMModel", {"add_cross_attention": True}, "cannot be built with cross-attention"),
        ("xglm.XGLMModel", {"pad_token_id": 5}, "sets the position of this number to zero"),
        ("wav2vec2.Wav2Vec2Model", {"layer_norm_eps": 1e-2}, "in the norms of the convolutions"),
        ("encoder_decoder", {"encoder": {"model_type": "roberta"}}, "counts the positions of its texts from 0"),
        ("encoder_decoder.projected", {"decoder": {"model_type": "xlm-roberta"}}, "counts the positions of its texts from 0"),
        ("vision_encoder_decoder", {"decoder": {"model_type": "roberta"}}, "counts the positions of its texts from 0"),
        ("speech_encoder_decoder", {"decoder": {"model_type": "roberta-prelayernorm"}}, "counts the positions of its texts from 0"),
        ("vision_text_dual_encoder", {"vision_config": {"model_type": "dinov2", "layerscale_value": 0.5}}, "multiplies by its square"),
        ("encoder_decoder", {"encoder": {"model_type": "llama", "rope_theta": 500000.0}}, "has 10000 in its code"),
        ("encoder_decoder", {"decoder": {"is_causal": False}}, "earlier ones alone"),
        ("clip.CLIPModel", {"text_config": {"is_causal": False}}, "earlier ones alone"),
        ("marian.MarianModel", {"decoder_vocab_size": 28}, "with a pad_token_id that is no token of these"),
        ("roberta.RobertaModel", {"pad_token_id": 19}, "does not compute as the flax class does: .* no row of its table of positions"),
        ("roberta.causal", {"pad_token_id": 20}, "no row of its table of positions"),
        ("roberta_prelayernorm.RobertaPreLayerNormModel", {"pad_token_id": 19}, "no row of its table of positions"),
        ("xlm_roberta.XLMRobertaForMaskedLM", {"pad_token_id": 28}, "no row of its table of positions"),
        ("bart.causal", {"encoder_layers": 2, "num_hidden_layers": 2}, "makes a cache of as many layers as this key states"),
        ("speech_encoder_decoder", {"decoder": {"encoder_layers": 2, "num_hidden_layers": 2}}, "makes a cache of as many layers as this key states"),
        ("speech_encoder_decoder", {"encoder": {"add_adapter": True}, "decoder": {"model_type": "gpt2", "n_embd": 12}}, "does not compute as the flax class does: transformers 5.23 stops in the cross-attention of GPT-2"),
        ("speech_encoder_decoder", {"encoder": {"output_hidden_size": 10}}, "encoder.output_hidden_size = 10 and decoder.d_model = 12: .* then has enc_to_dec_proj, which the tree lacks"),
        ("bert.BertModel", {"num_hidden_layers": None}, "has no num_hidden_layers, which then is 12, and the tree has 2 layers"),
        ("gpt_neo.GPTNeoModel", {"num_layers": 3}, "has num_layers = 3, and the tree has 2 layers in h"),
        ("clip.CLIPModel", {"text_config": {"num_hidden_layers": 3}}, "and the tree has 2 layers in text_model.encoder.layers"),
        ("resnet.ResNetModel", {"depths": [3, 2]}, r"has depths = .3, 2., and the tree has \d layers in encoder.stages.0.layers"),
        ("bert.BertModel", {"hidden_size": 13}, r"has hidden_size = 13, and the tensor \S+ has 12 in axis 0, and so have \d+ others: expected 13 in axis 0, got .12, 12."),
        ("bert.BertModel", {"vocab_size": None}, r"has no vocab_size, which then is 30522, and the tensor embeddings.word_embeddings.weight has 29 in axis 0"),
        ("bert.BertModel", {"num_attention_heads": 5}, "has num_attention_heads = 5, which does not divide hidden_size = 12"),
        ("bart.BartModel", {"num_hidden_layers": 3}, "has num_hidden_layers = 3, and the tree has 2 layers in encoder.layers"),  # it wins over encoder_layers
        ("gpt_neo.GPTNeoModel", {"attention_types": [[["global"], 3]]}, "has attention_types = 3, and the tree has 2 layers in h"),
        ("regnet.RegNetModel", {"groups_width": 8}, r"has hidden_sizes.\d = 8 and groups_width = 8, and the tensor \S+layer.1.convolution.weight has 4 in axis 1"),
        ("clip.CLIPModel", {"text_config_dict": {"vocab_size": 30}}, "has text_config.vocab_size = 30, and the tensor"),
        ("gpt2.GPT2Model", {"hidden_size": 24}, "has hidden_size = 24, and the tensor"),
        ("encoder_decoder", {"encoder": {"vocab_size": 30}}, "has encoder.vocab_size = 30, and the tensor encoder.embeddings"),
        ("mt5.MT5Model", {"feed_forward_proj": "gated-nonsense"}, "no such activation in common"),
        ("longt5.LongT5Model", {"feed_forward_proj": "nonsense"}, "no such activation in common"),
        ("bert.BertForTokenClassification", {"architectures": ["BertForMultipleChoice"]}, "has 1 outputs in classifier, and the tree has 5"),
        ("bert.BertModel", {"architectures": ["RobertaModel"]}, r'contradict each other: expected a class of bert, got RobertaModel; write "architectures": ."BertModel". if the type is right, and the model_type roberta if the class is'),
        ("roberta.RobertaForMaskedLM", {"model_type": "bert"}, r'got RobertaForMaskedLM; write "architectures": ."BertForMaskedLM". if'),
        ("encoder_decoder", {"architectures": ["BertModel"]}, r'expected a class of encoder-decoder, got BertModel; write "architectures": ."EncoderDecoderModel". if'),
        ("encoder_decoder", {"model_type": "bert"}, "expected a class of bert, got EncoderDecoderModel; .*, and the model_type if the class is"),
        ("bert.BertModel", {"hidden_act": "foo"}, r"hidden_act in the config.json of the checkpoint: expected one of gelu, relu, .*, got .foo.; correct the file"),
        ("bart.BartModel", {"activation_function": "gelu_fast"}, "activation_function in the config.json of the checkpoint: expected one of gelu, relu, "),
        ("encoder_decoder", {"decoder": {"activation_function": "foo"}}, "decoder.activation_function in the config.json"),
        ("wav2vec2.Wav2Vec2Model", {"feat_extract_activation": "foo"}, "feat_extract_activation in"),
        ("distilbert.DistilBertModel", {"activation": "foo"}, "activation in the config.json"),
    ],
)  # fmt: skip
def test_keys_and_sizes_of_another_model_are_refused(
    case: str, keys: dict[str, Any], told: str, tmp_path: Path
) -> None:
    parts = {
        key: {**flax_families.config(case)[key.removesuffix("_dict")], **value}
        for key, value in keys.items()
        if isinstance(value, dict)
    }
    source = flax_families.specs(case, tmp_path / "source", **{**keys, **parts})
    with pytest.raises(convert.PlanError, match=told):
        convert.plan_conversion(FAMILY, source)


@pytest.mark.slow
def test_a_class_of_another_type_is_refused_by_the_own_names_too(tmp_path: Path) -> None:
    """`bert` has rules of its own in bert.yaml; RoBERTa's leaves are the same, and its positions begin at 2."""
    for name in ("bert", "roberta", FAMILY):
        for keys in ({"architectures": ["RobertaModel"]}, {"model_type": "roberta"}):
            source = flax_families.specs("bert.BertModel", tmp_path / "source", **keys)
            with pytest.raises(convert.PlanError):
                convert.plan_conversion(name, source)


def test_clips_older_key_of_a_part_counts(tmp_path: Path) -> None:
    text = flax_families.config("clip.CLIPModel")["text_config"]
    keys = {"text_config": {**text, "hidden_size": 768}, "text_config_dict": text, "vision_config_dict": None}
    assert convert.plan_conversion(FAMILY, flax_families.specs("clip.CLIPModel", tmp_path, **keys)).steps


@pytest.mark.parametrize(
    ("case", "keys", "path"),
    [
        ("bert.BertModel", {"use_cache": None}, "use_cache"),
        ("bert.BertModel", {"hidden_size": None}, "hidden_size"),
        ("whisper.WhisperModel", {"decoder_start_token_id": None}, "decoder_start_token_id"),
        ("encoder_decoder", {"encoder": {"hidden_act": None}}, "encoder.hidden_act"),
        ("bert.BertModel", {"pad_token_id": None, "classifier_dropout": None, "some_key": None}, None),
        ("gpt2.GPT2Model", {"n_inner": None, "pad_token_id": None}, None),
    ],
)
def test_a_null_that_the_class_refuses_is_an_error(case: str, keys: dict[str, Any], path: str | None, tmp_path: Path) -> None:  # fmt: skip
    source, stated = flax_families.specs(case, tmp_path), flax_families.config(case)
    more = {key: {**stated[key], **value} if isinstance(value, dict) else value for key, value in keys.items()}
    (tmp_path / "config.json").write_text(json.dumps({**stated, **more}))
    if path is None:
        config = convert.plan_conversion(FAMILY, source).config
        assert config is not None and all(config[key] is None for key in keys)
        return
    with pytest.raises(convert.PlanError) as refused:
        convert.plan_conversion(FAMILY, source)
    assert [one.path for one in refused.value.findings if one.got == "null"] == [path]


def test_the_nulls_that_are_refused_are_those_that_transformers_refuses() -> None:
    import transformers

    table = json.loads((shipped_rules_dir() / "transformers-classes.json").read_text())["nulls"]
    for key in table["bert"]:
        with pytest.raises(Exception, match=f"Validation error for field '{key}'"):
            transformers.BertConfig.from_dict({key: None})
    assert transformers.BertConfig.from_dict({"pad_token_id": None}).pad_token_id is None


def test_t5s_siblings_take_the_activations_that_t5_takes() -> None:
    table = json.loads((shipped_rules_dir() / "transformers-classes.json").read_text())["classes"]
    stated = re.findall(r"&\w+ \{feed_forward_proj: \[(.*?)\]", (shipped_rules_dir() / "t5.yaml").read_text())
    assert len(stated) == 2
    for name in ("MT5Model", "LongT5Model", "T5Model"):
        (values, _) = table[name]["refuses"]["feed_forward_proj"]
        assert set(values["other_than"]) == {word for words in stated for word in words.split(", ")}


def test_the_default_of_a_missing_activation_is_that_of_the_class(tmp_path: Path) -> None:
    """MT5's class is gated by default, T5's and LongT5's are not."""
    gated = flax_families.config("mt5.MT5Model")["feed_forward_proj"].startswith("gated-")
    source = flax_families.specs("mt5.MT5Model", tmp_path / "mt5", feed_forward_proj=None)
    assert gated and convert.plan_conversion(FAMILY, source).steps


def test_a_number_of_heads_that_is_missing_is_said(tmp_path: Path) -> None:
    source = flax_families.specs("bert.BertModel", tmp_path / "source", num_attention_heads=None)
    (note,) = [x for x in convert.plan_conversion(FAMILY, source).notes if "num_attention_heads" in x]
    assert note.endswith("`BertModel` then has 12, and no leaf shows the number")


def case_of(family: str) -> str:
    """Return the first case of a family whose rules are the generic ones."""
    return next(case for case in flax_families.CASES if case.partition(".")[0] == family)


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", slow_but(["roberta"], sorted({case.partition(".")[0] for case in flax_families.CASES}))
)
def test_faults_are_named(family: str, tmp_path: Path) -> None:
    case = case_of(family)
    source = flax_families.write(case, tmp_path / "source")
    convert.convert(FAMILY, source, tmp_path / "out")
    assert assert_mistakes_are_named(tmp_path / "out", source) >= 9


@pytest.mark.parametrize(
    "case",
    slow_but(
        ["vit.ViTModel"], [case_of(family) for family in flax_table.listed() if family not in flax_families.OWN_RULES]
    ),
)
def test_the_model_level_compares_with_a_recording(case: str, tmp_path: Path) -> None:
    source = flax_families.write(case, tmp_path / "source")
    plan = convert.plan_conversion("flax_transformers", source)
    convert.convert("flax_transformers", source, tmp_path / "out")
    values = {name: x.astype(np.float64) for name, x in flax_families.values(case, "out").items()}
    evidence = Evidence(flax_families.values(case, "in"), None, values, {})
    write_recording(plan, evidence, tmp_path / "recorded.safetensors", outputs=tuple(values))

    def verdicts() -> dict[str, str]:
        report = check(tmp_path / "out", source, recorded=tmp_path / "recorded.safetensors")
        return {level.level: level.verdict.value for level in report.levels}

    assert set(verdicts().values()) == {"passed"}
    assert check(tmp_path / "out", source, levels=["model"]).levels[-1].verdict.value == "skipped"
    file = tmp_path / "out" / "model.safetensors"
    with safe_open(file, "np") as opened:
        metadata = opened.metadata()
    tensors = load_file(file)
    name, _ = tensor_of(tensors)
    save_file({**tensors, name: turned(tensors[name]) * 3}, file, metadata=metadata)
    assert verdicts()["model"] == "failed"


def refused(source: Path, model: str = FAMILY) -> tuple[convert.Finding, ...]:
    with pytest.raises(convert.ConvertError) as error:
        convert.plan_conversion(model, source)
    return error.value.findings


@pytest.mark.slow
def test_a_class_or_type_that_is_not_known_names_the_next_step(tmp_path: Path) -> None:
    case = "roberta.RobertaForMaskedLM"
    (finding,) = refused(flax_families.write(case, tmp_path / "type", model_type="deberta"))
    assert finding.code == "class-unknown" and finding.got == '"deberta"' and "convert rules new" in finding.fix
    (finding,) = refused(flax_families.write(case, tmp_path / "class", architectures=["RobertaForMaskedLN"]))
    assert finding.code == "class-unknown" and finding.got == "RobertaForMaskedLN"
    assert finding.fix.startswith("did you mean 'RobertaForMaskedLM'? Otherwise draft rules from its PyTorch class: ")
    alone = flax_families.write(case, tmp_path / "alone")
    (alone / "config.json").unlink()
    assert [finding.got for finding in refused(alone)] == ["no config.json"]
    for text, got in (("{}", "no such key"), ('{"architectures": []}', "[]"), ('{"architectures": null}', "null")):
        (alone / "config.json").write_text(text)
        (finding,) = refused(alone)
        assert finding.got == got
        assert ("that was saved with the checkpoint" in finding.fix) is (got == "no such key")


@pytest.mark.parametrize(
    ("case", "classes"),
    [
        ("roberta.RobertaForTokenClassification", ["RobertaForTokenClassification"]),
        ("roberta.RobertaForQuestionAnswering", ["RobertaForQuestionAnswering"]),
        ("bert.BertForSequenceClassification", ["BertForSequenceClassification"]),  # not of one output, as multiple choice
        ("bert.BertForMaskedLM", ["BertForMaskedLM", "BertLMHeadModel"]),
        ("t5.v1.1", ["T5ForConditionalGeneration"]),
        ("clip.text-projection", ["CLIPTextModelWithProjection"]),
        ("encoder_decoder", ["EncoderDecoderModel"]),
    ],
)  # fmt: skip
def test_without_a_class_those_with_the_modules_of_the_tree_are_named(
    case: str, classes: list[str], tmp_path: Path
) -> None:
    (finding,) = refused(flax_families.specs(case, tmp_path / "source", architectures=None))
    assert finding.code == "class-unknown" and re.findall(r'"architectures": \["(\w+)"\]', finding.fix) == classes


def test_a_tree_of_no_class_has_no_class_suggested(tmp_path: Path) -> None:
    case = "roberta.RobertaForMaskedLM"
    leaves = {**flax_families.leaves(case), "roberta/adapter/kernel": np.ones((2, 2), np.float32)}
    (finding,) = refused(flax_families.write(case, tmp_path / "source", leaves, architectures=None))
    assert "no class of transformers-classes.json has the modules of this tree" in finding.fix


def test_a_sidecar_without_settings_is_not_called_missing(tmp_path: Path) -> None:
    source = flax_families.write("bert.BertForMaskedLM", tmp_path / "source")
    (source / "config.json").write_text("{}")
    notes = convert.plan_conversion("bert", source).notes
    assert any("config.json next to the checkpoint states no setting" in note for note in notes)
    assert not any("there is no config.json" in note for note in notes)


def test_rules_for_each_module_are_checked() -> None:
    text = (shipped_rules_dir() / "flax-transformers.yaml").read_text()

    def codes(old: str, new: str) -> list[str]:
        with pytest.raises(convert.RuleError) as error:
            parse_rules(text.replace(old, new, 1))
        return [finding.code for finding in error.value.findings]

    assert set(codes('linear: "{module}"', "linear: head")) == {"rule-index-mismatch"}
    assert set(codes("- each: Linear\n  einsum", "- einsum")) == {"rule-index-mismatch"}
    start, end = text.index("modules:\n"), text.index("axes:\n")
    assert set(codes(text[start:end], "")) == {"rule-missing-key"}


def test_a_family_has_its_own_name(tmp_path: Path) -> None:
    source = flax_families.write("roberta.untied", tmp_path / "source")
    assert convert.plan_conversion("roberta", source).steps == convert.plan_conversion(FAMILY, source).steps
    (finding,) = refused(source, "bart")
    assert finding.code == "class-unknown" and finding.expected == "bart"


def test_what_the_tree_lacks_is_said_before_data_is_read(tmp_path: Path) -> None:
    case = "roberta.RobertaForMaskedLM"
    every = flax_families.leaves(case)
    norm = {name: x for name, x in every.items() if not name.startswith("roberta/encoder/layer/1/output/LayerNorm/")}
    (finding,) = refused(flax_families.write(case, tmp_path / "norm", norm))
    assert (finding.code, finding.path) == ("leaf-missing", "roberta.encoder.layer.1.output.LayerNorm")
    bias = {name: x for name, x in every.items() if name != "roberta/encoder/layer/1/output/dense/bias"}
    (finding,) = refused(flax_families.write(case, tmp_path / "bias", bias))
    assert (finding.code, finding.path) == ("leaf-missing", "roberta/encoder/layer/1/output/dense/bias")
    layer = {name: x for name, x in every.items() if not name.startswith("roberta/encoder/layer/1/")}
    (finding,) = refused(flax_families.write(case, tmp_path / "layer", layer))
    assert finding.code == "config-conflict" and "num_hidden_layers = 2, and the tree has 1 layers" in finding.problem
    more = {**every, "roberta/adapter/kernel": every["lm_head/dense/kernel"]}
    (finding,) = refused(flax_families.write(case, tmp_path / "more", more))
    assert (finding.code, finding.path) == ("leaf-without-rule", "roberta/adapter/kernel")
    (finding,) = refused(flax_families.write(case, tmp_path / "head", architectures=["RobertaForTokenClassification"]))[
        :1
    ]
    assert (finding.code, finding.path) == ("leaf-missing", "classifier")


@pytest.mark.parametrize(
    ("case", "lost", "keys", "path"),
    [
        ("roberta.RobertaForMaskedLM", "roberta/embeddings/position_embeddings/", {}, "roberta.embeddings.position_embeddings"),
        ("bart.BartModel", "decoder/embed_positions/", {}, "decoder.embed_positions"),
        ("distilbert.DistilBertModel", "embeddings/position_embeddings/", {}, "embeddings.position_embeddings"),
        ("big_bird.BigBirdForMultipleChoice", "bert/pooler/", {}, "bert.pooler"),
        ("opt.OPTModel", "decoder/final_layer_norm/", {}, "decoder.final_layer_norm"),
        ("opt.projected", "model/decoder/project_in/", {}, "model.decoder.project_in"),
        ("gpt2.cross", "transformer/h/0/crossattention/q_attn/", {}, "transformer.h.0.crossattention.q_attn"),
        ("encoder_decoder.projected", "enc_to_dec_proj/", {}, "enc_to_dec_proj"),
        ("beit.BeitModel", "pooler/layernorm/", {}, "pooler.layernorm"),
        ("longt5.global", "encoder/block/0/layer/0/TransientGlobalSelfAttention/global_input_layer_norm/", {}, "encoder.block.0.layer.0.TransientGlobalSelfAttention.global_input_layer_norm"),
        ("resnet.ResNetModel", "none", {"architectures": ["ResNetForImageClassification"]}, "classifier.1"),
        ("wav2vec2.adapter", "adapter/layers/0/", {}, "adapter.layers.0.conv"),
        ("roberta.RobertaModel", "encoder/layer/1/output/dense/kernel", {}, "encoder/layer/1/output/dense/kernel"),
        ("mt5.MT5Model", "none", {"architectures": ["MT5ForConditionalGeneration"]}, "lm_head"),
        ("t5.v1.1", "lm_head/", {}, "lm_head"),
        ("gpt2.untied", "lm_head/", {}, "lm_head"),
        ("opt.untied", "lm_head/", {}, "lm_head"),
        ("whisper.untied", "lm_head/", {}, "proj_out"),
        ("roberta.untied", "lm_head/decoder/", {}, "lm_head.decoder"),
        ("distilbert.untied", "vocab_projector/kernel", {}, "vocab_projector/kernel"),
    ],
)  # fmt: skip
def test_a_tree_without_a_module_that_the_class_has_is_refused(
    case: str, lost: str, keys: dict[str, Any], path: str, tmp_path: Path
) -> None:
    """Modules that some configurations or some classes lack are needed in those that have them."""
    leaves = flax_families.ALL.shapes(case)
    without = {name for name in leaves if name.startswith(lost)}
    assert without or lost == "none"
    with pytest.raises(convert.PlanError) as error:
        convert.plan_conversion(FAMILY, flax_families.specs(case, tmp_path, without, **keys))
    assert [(finding.code, finding.path) for finding in error.value.findings] == [("leaf-missing", path)]


SWITCHES = (  # a key that the tree contradicts: case, keys, the finding's code, what it says, what to do
    ("t5.v1.1", {"is_gated_act": False}, "config-conflict", r"has is_gated_act = false and feed_forward_proj = gated-gelu: \S+ `T5\w+` then has \S+wi and 4 more, which the tree lacks, and has no \S+wi_\d and 9 more, which the tree has", "write the is_gated_act and feed_forward_proj that the model was trained with"),
    ("mt5.MT5Model", {"feed_forward_proj": "relu", "is_gated_act": None}, "config-conflict", "has feed_forward_proj = relu", "write the feed_forward_proj that"),
    ("longt5.LongT5Model", {"encoder_attention_type": "transient-global"}, "config-conflict", "has encoder_attention_type = transient-global", "write the encoder_attention_type"),
    ("electra.ElectraForMultipleChoice", {"summary_use_proj": False}, "config-conflict", "has summary_use_proj = false: .* has no sequence_summary.summary, which the tree has", "write the summary_use_proj"),
    ("electra.unprojected", {"summary_use_proj": None}, "leaf-missing", "has no summary_use_proj, which then is true: .* has sequence_summary.summary, which the tree lacks", "write the summary_use_proj"),
    ("beit.BeitModel", {"layer_scale_init_value": 0}, "config-conflict", r"has no encoder.layer.0.lambda_1 and 3 more, which the tree has", "write the layer_scale_init_value"),
    ("beit.unscaled", {"layer_scale_init_value": 0.1}, "leaf-missing", "lambda_1 and 3 more, which the tree lacks", "write the layer_scale_init_value"),
    ("beit.BeitModel", {"use_mean_pooling": False}, "config-conflict", "then has layernorm, which the tree lacks, and has no pooler.layernorm, which the tree has", "write the use_mean_pooling"),
    ("beit.positions", {"use_relative_position_bias": False}, "config-conflict", "has no beit.encoder.layer.0.*relative_position_bias_table", "write the use_relative_position_bias"),
    ("vit.ViTModel", {"qkv_bias": False}, "config-conflict", r"has no encoder.layer.0.attention.attention.\w+.bias and 5 more", "write the qkv_bias"),
    ("big_bird.BigBirdModel", {"use_bias": False}, "config-conflict", r"has no encoder.layer.0.attention.self.\w+.bias and 5 more", "write the use_bias"),
    ("bert.cross", {"add_cross_attention": False}, "config-conflict", "has no bert.encoder.layer.0.crossattention", "write the add_cross_attention"),
    ("bert.BertModel", {"add_cross_attention": True, "is_decoder": True}, "leaf-missing", "crossattention.* and 9 more, which the tree lacks", "write the add_cross_attention"),
    ("wav2vec2.adapter", {"add_adapter": False}, "config-conflict", "has no adapter.layers.0.conv and 1 more", "write the add_adapter"),
    ("wav2vec2.Wav2Vec2Model", {"conv_bias": False}, "config-conflict", r"has no feature_extractor.conv_layers.0.conv.bias and 1 more, which the tree has", "write the conv_bias"),
    ("whisper.WhisperForAudioClassification", {"use_weighted_layer_sum": True}, "leaf-missing", "layer_weights", "write the use_weighted_layer_sum"),
    ("bert.untied", {"tie_word_embeddings": True}, "config-conflict", "has no cls.predictions.decoder.weight, which the tree has", "write the tie_word_embeddings"),
    ("distilbert.untied", {"tie_word_embeddings": None}, "config-conflict", "has no tie_word_embeddings, which then is true", "write the tie_word_embeddings"),
    ("whisper.untied", {"tie_word_embeddings": True}, "config-conflict", "has no proj_out.weight, which the tree has", "write the tie_word_embeddings"),
    ("gpt2.GPT2LMHeadModel", {"tie_word_embeddings": False}, "leaf-missing", "lm_head, which the tree lacks", "write the tie_word_embeddings"),
    ("beit.BeitForMaskedImageModeling", {"use_mean_pooling": False}, "target-requirement", "the values of the other as it loads", "other code"),
    ("bert.cross", {"is_decoder": False}, "target-requirement", "with add_cross_attention it must be true", "other code"),
    ("gptj.GPTJForCausalLM", {"tie_word_embeddings": True}, "target-requirement", "cannot be run with a tied head", "other code"),
)  # fmt: skip


@pytest.mark.parametrize(("case", "keys", "code", "said", "fix"), SWITCHES)
def test_a_switch_that_the_tree_contradicts_is_named_once(
    case: str, keys: dict[str, Any], code: str, said: str, fix: str, tmp_path: Path
) -> None:
    with pytest.raises(convert.PlanError) as error:
        convert.plan_conversion(FAMILY, flax_families.specs(case, tmp_path, **keys))
    found = [finding for finding in error.value.findings if finding.code == code]
    assert len(found) == 1 and fix in str(found[0].fix)
    assert re.search(said, str(found[0].problem)), found[0].problem
    assert all(finding.code != "leaf-without-rule" for finding in error.value.findings)


@pytest.mark.parametrize("stated", [False, None])  # the default is false
def test_convolutions_of_wav2vec2_without_a_bias_are_those_of_the_class(stated: bool | None, tmp_path: Path) -> None:
    """transformers' classes have none either where `conv_bias` says so; with another value the tree is incomplete."""
    case = "wav2vec2.Wav2Vec2ForCTC"
    biases = [f"wav2vec2/feature_extractor/conv_layers/{layer}/conv/bias" for layer in range(2)]
    plan = convert.plan_conversion(FAMILY, flax_families.specs(case, tmp_path, biases, conv_bias=stated))
    names = {step.name for step in plan.steps}
    assert "wav2vec2.feature_extractor.conv_layers.1.conv.weight" in names
    assert "wav2vec2.feature_extractor.conv_layers.1.conv.bias" not in names
    with pytest.raises(convert.PlanError, match="conv_layers"):
        convert.plan_conversion(FAMILY, flax_families.specs(case, tmp_path, biases, conv_bias=True))


@pytest.mark.parametrize("stated", [True, None])
@pytest.mark.parametrize(("rules", "case"), [("whisper", "whisper.untied"), ("bert", "bert.untied")])
def test_own_rules_of_a_family_name_the_key_of_an_untied_head(
    rules: str, case: str, stated: bool | None, tmp_path: Path
) -> None:
    with pytest.raises(convert.PlanError) as error:
        convert.plan_conversion(rules, flax_families.specs(case, tmp_path, tie_word_embeddings=stated))
    (finding,) = error.value.findings
    assert (finding.code, finding.fix) == (
        "config-conflict",
        "write the tie_word_embeddings that the model was trained with",
    )
    assert convert.plan_conversion(rules, flax_families.specs(case, tmp_path, tie_word_embeddings=False)).steps


@pytest.mark.parametrize(("case", "stated"), [("t5.v1.1", False), ("t5.T5ForConditionalGeneration", True)])
def test_t5s_own_rules_refuse_a_gate_that_the_tree_contradicts(case: str, stated: bool, tmp_path: Path) -> None:
    """The PyTorch class reads it before `feed_forward_proj`, and would keep random matrices."""
    with pytest.raises(convert.PlanError) as error:
        convert.plan_conversion("t5", flax_families.specs(case, tmp_path, is_gated_act=stated))
    (finding,) = error.value.findings
    assert finding.fix == "give the is_gated_act of the model that was trained" and finding.got == str(stated)
    assert convert.plan_conversion("t5", flax_families.specs(case, tmp_path, is_gated_act=None)).steps


def test_a_bias_that_the_class_never_has_is_refused(tmp_path: Path) -> None:
    """It would be written, and the class would not load it."""
    leaves = flax_families.leaves("t5.T5Model")
    name = "encoder/block/0/layer/0/SelfAttention/q/bias"
    (finding,) = refused(flax_families.write("t5.T5Model", tmp_path, {**leaves, name: np.zeros(15, np.float32)}))
    assert (finding.code, finding.path) == ("leaf-without-rule", name)


def test_an_integer_that_the_class_refuses_is_written_as_a_float(tmp_path: Path) -> None:
    import transformers

    case = "beit.unscaled"
    assert type(flax_families.config(case)["layer_scale_init_value"]) is int
    made = convert.plan_conversion(FAMILY, flax_families.specs(case, tmp_path, initializer_range=1)).config
    assert made is not None and [
        type(made[key]) for key in ("layer_scale_init_value", "initializer_range", "hidden_size")
    ] == [float, float, int]
    with pytest.raises(Exception, match="layer_scale_init_value"):
        transformers.BeitConfig.from_dict({**made, "layer_scale_init_value": 0})
    transformers.BeitConfig.from_dict(made)


def test_a_table_of_sines_that_pytorch_writes_goes_back(tmp_path: Path) -> None:
    """A tree may lack it, and PyTorch's file has it."""
    out = tmp_path / "out"
    convert.convert(FAMILY, flax_families.write("distilbert.sinusoidal", tmp_path / "source"), out)
    tensors = load_file(out / "model.safetensors")
    assert not any("position_embeddings" in name for name in tensors)
    table = {"distilbert.embeddings.position_embeddings.weight": np.zeros((19, 12), np.float32)}
    save_file({**tensors, **table}, out / "model.safetensors", {"format": "pt"})
    assert convert.load_pytree(FAMILY, out)


@pytest.mark.slow
@pytest.mark.parametrize("case", flax_families.GENERIC)
def test_each_module_and_each_leaf_is_needed(case: str, tmp_path: Path) -> None:
    """Of modules that differ in numbers alone, the first is removed."""
    leaves = sorted(flax_families.ALL.shapes(case))
    dropped = {drop.leaf for drop in convert.plan_conversion(FAMILY, flax_families.specs(case, tmp_path)).dropped}
    removed = {re.sub(r"\d+", "#", name): {name} for name in reversed(leaves) if name not in dropped}
    for module in sorted({name.rpartition("/")[0] for name in leaves} - {""}, reverse=True):
        removed[re.sub(r"\d+", "#", f"{module}/")] = {x for x in leaves if x.rpartition("/")[0] == module} - dropped
    for without in removed.values():
        with pytest.raises(convert.PlanError):
            convert.plan_conversion(FAMILY, flax_families.specs(case, tmp_path, without))
            pytest.fail(f"the plan does not need {without}")


def test_what_the_class_computes_otherwise_is_refused(tmp_path: Path) -> None:
    source = flax_families.write("mt5.MT5ForConditionalGeneration", tmp_path / "mt5", tie_word_embeddings=True)
    (finding,) = refused(source)
    assert finding.code == "target-requirement" and "does not scale" in finding.problem
    case = "vision_text_dual_encoder"
    text = flax_families.config(case)["text_config"] | {"model_type": "roberta"}
    assert "target-requirement" in [
        f.code for f in refused(flax_families.write(case, tmp_path / "dual", text_config=text))
    ]


def test_a_parameter_that_the_configuration_does_not_use_is_dropped(tmp_path: Path) -> None:
    case = "wav2vec2.Wav2Vec2ForCTC"
    used = convert.plan_conversion(FAMILY, flax_families.write(case, tmp_path / "used"))
    source = flax_families.write(case, tmp_path / "unused", mask_time_prob=0.0, mask_feature_prob=0.0)
    unused = convert.plan_conversion(FAMILY, source)
    assert [drop.leaf for drop in unused.dropped] == ["wav2vec2/masked_spec_embed"] and not used.dropped
    assert len(used.steps) == len(unused.steps) + 1


def test_the_flax_file_is_read_where_pytorch_has_one_as_well(tmp_path: Path) -> None:
    source = flax_families.write("roberta.RobertaModel", tmp_path / "source")
    convert.convert("roberta", source, tmp_path / "out")
    torch_file = tmp_path / "out" / "model.safetensors"
    tensors = load_file(torch_file)
    for name in ("model.safetensors", "model-00001-of-00001.safetensors"):
        for metadata in ({"format": "pt"}, None):  # a plain `save_file` states no format
            save_file(tensors, source / name, metadata)
            if "-of-" in name:
                index = {"weight_map": dict.fromkeys(tensors, name)}
                (source / "model.safetensors.index.json").write_text(json.dumps(index))
            assert convert.plan_conversion("roberta", source).checkpoint.format == "flax msgpack"
        (source / name).unlink()
    (source / "model.safetensors.index.json").unlink()
    tree = {name.replace("/", "."): x for name, x in flax_families.leaves("roberta.RobertaModel").items()}
    save_file(tree, source / "model.safetensors")  # a tree of flax: it may be meant
    with pytest.raises(convert.CheckpointError, match="2 checkpoints could be meant"):
        convert.plan_conversion("roberta", source)


def test_a_file_that_pytorch_wrote_is_called_so(tmp_path: Path) -> None:
    source = flax_families.write("roberta.RobertaModel", tmp_path / "source")
    convert.convert("roberta", source, tmp_path / "out")
    for name in ("roberta", FAMILY):
        with pytest.raises(convert.PlanError, match="which PyTorch wrote .its tensors go back to JAX with --to orbax"):
            convert.plan_conversion(name, tmp_path / "out")


@pytest.mark.parametrize(
    ("case", "proposed"),
    [
        ("roberta.untied", "Roberta"),
        ("xlm_roberta.XLMRobertaModel", "XLMRoberta"),
        ("clip.text", "CLIPText"),
        ("vision_encoder_decoder", "VisionEncoderDecoderModel"),
    ],
)
def test_a_class_of_the_family_is_proposed_where_none_is_named(case: str, proposed: str, tmp_path: Path) -> None:
    source = flax_families.specs(case, tmp_path / "source", architectures=None)
    with pytest.raises(convert.PlanError, match=f'write "architectures": ."{proposed}'):
        convert.plan_conversion(FAMILY, source)


@pytest.mark.slow
def test_the_table_is_what_the_script_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(GOLDEN))
    script = runpy.run_path(str(GOLDEN / "make_transformers_classes.py"))
    shipped = json.loads((shipped_rules_dir() / "transformers-classes.json").read_text())["classes"]
    made = script["entries"]()
    assert json.loads(json.dumps(made)) == shipped


@pytest.mark.slow
@pytest.mark.parametrize("case", ["vit.ViTModel", "vision_encoder_decoder"])
def test_norms_that_transformers_calls_otherwise_are_compared(case: str, run: Run, tmp_path: Path) -> None:
    """transformers 5 renames ViT's layers as it loads them."""
    source, out = flax_families.write(case, tmp_path / "source"), tmp_path / "out"
    convert.convert(FAMILY, source, out)
    said = "".join(run("check", out, "--from", source, "--level", "coverage,weights,layers"))
    assert "epsilon" not in said
    config = json.loads((out / "config.json").read_text())
    (config if case.startswith("vit.") else config["encoder"])["layer_norm_eps"] = 1e-3
    (out / "config.json").write_text(json.dumps(config))
    said = "".join(run("check", out, "--from", source, "--level", "coverage,weights,layers", code=1))
    assert re.search(r"another epsilon .*encoder\.layer\.(0|\{i\})\.layernorm_(before|after), got 0\.001", said)
