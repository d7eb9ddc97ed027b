"""Keys of config.json that the rules do not write: each is compared with the class's default, or listed."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from convert.api import convert, plan_conversion
from convert.core.findings import Finding
from convert.planning.plan import Plan
from convert.verify.comparison import load_reference
from convert.verify.config.compare import Facts, check_facts
from convert.verify.config.hf_config import HARMLESS, harmless
from convert.verify.config.same_value import same
from convert.verify.coverage.level import check_coverage
from convert.verify.run import check
from convert.writing.written import Written, open_written
from support import flax_families
from support.gemma_models import settings
from support.goldens import checkpoint

ABSENT = "not asked"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """golden -> plan and directory for transformers; each made once."""
    known: dict[str, tuple[Plan, Written]] = {}

    def make(case: str) -> tuple[Plan, Written]:
        if case not in known:
            out = tmp_path_factory.mktemp("keys") / "out"
            said = settings(case) if case.startswith("gemma") else {}
            rules = {"timesfm-2.5": "timesfm", "gemma3": "gemma", "gemma1-mha": "gemma"}.get(case, case.split("-")[0])
            convert(rules, checkpoint(case), out, to="transformers", settings=said)
            plan = plan_conversion(rules, checkpoint(case), to="transformers", settings=said)
            known[case] = plan, open_written(out)
        return known[case]

    return make


def facts(made: Any, case: str, *removed: str, **added: Any) -> Facts:
    """With other keys in config.json."""
    plan, written = made(case)
    config = {key: value for key, value in {**written.config, **added}.items() if key not in removed}
    return check_facts(plan, dataclasses.replace(written, config=config), ABSENT)


def only(found: Facts) -> Finding:
    assert len(found.findings) == 1, [str(finding) for finding in found.findings]
    return found.findings[0]


@pytest.mark.parametrize("case", ["timesfm-2.5", "gemma3", "gpt2", "bert", "t5", "t5-v1.1", "whisper"])
def test_what_we_write_has_no_such_key(made: Any, case: str) -> None:
    found = facts(made, case)
    assert not found.findings and not any("not compared: " in note and " = " in note for note in found.notes), found


@pytest.mark.parametrize(
    ("case", "added", "said"),
    [
        ("timesfm-2.5", {"force_flip_invariance": False}, "expected true (the default of transformers), got false"),
        ("timesfm-2.5", {"infer_is_positive": False}, "expected true (the default of transformers), got false"),
        ("timesfm-2.5", {"use_continuous_quantile_head": False}, "expected true (the default of transformers)"),
        ("gemma3", {"use_bidirectional_attention": True}, "expected false (the default of transformers)"),
        ("gemma3", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, "rope_parameters.full_attention.factor is 4.0"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "expected false (the sidecar of the source), got true"),
        ("gpt2", {"num_attention_heads": 1}, "n_head is 1, not "),  # an alias
        ("bert", {"is_decoder": True}, "expected false (the default of transformers), got true"),
        ("t5", {"dense_act_fn": "gelu"}, 'expected "relu" (the sidecar of the source), got "gelu"'),
        ("t5", {"scale_decoder_outputs": False}, "expected true (the default of transformers), got false"),
        ("t5-v1.1", {"scale_decoder_outputs": True}, "expected false (the default of transformers), got true"),
    ],
)  # fmt: skip
def test_a_key_that_changes_what_is_loaded(made: Any, case: str, added: dict[str, Any], said: str) -> None:
    finding = only(facts(made, case, **added))
    (key,) = added
    assert said in str(finding) and finding.path == key and finding.data["key"] == key, str(finding)
    assert finding.fix.startswith("set it back" if "sidecar" in said else "remove the key")


def test_a_default_that_is_written_out_is_no_finding(made: Any) -> None:
    """As other code writes a configuration: every key of the class."""
    from transformers import AutoConfig

    for case in ("timesfm-2.5", "gemma3", "gpt2", "bert", "t5-v1.1"):
        _, written = made(case)
        given = {key: value for key, value in written.config.items() if key not in ("model_type", "architectures")}
        full = json.loads(AutoConfig.for_model(written.config["model_type"], **given).to_json_string(use_diff=False))
        found = facts(made, case, **{key: value for key, value in full.items() if key not in written.config})
        assert not found.findings, (case, [str(finding) for finding in found.findings])
        assert not any("not compared: " in note and " = " in note for note in found.notes), found.notes


def test_training_generation_and_labels_are_no_findings(made: Any) -> None:
    added = {
        "attention_dropout": 0.1, "initializer_range": 0.5, "use_cache": False, "sep_token_id": 3, "forced_eos_token_id": [1, 2],
        "id2label": {"0": "a", "1": "b", "2": "c"}, "output_attentions": True, "_name_or_path": "x", "torch_dtype": "float32",
        "transformers_version": "4.1", "chunk_size_feed_forward": 4,
    }  # fmt: skip
    found = facts(made, "gemma3", **added)
    assert not found.findings
    assert harmless("text_config.attention_dropout") and not harmless("sliding_window") and "rope_theta" not in HARMLESS


def test_names_of_classes_are_those_of_the_source(made: Any) -> None:
    """No logit depends on them, and every predicted label does."""
    assert not facts(made, "bert-classification").findings
    labels = {str(k): f"LABEL_{k}" for k in (1, 0, 2, 3, 4)}
    assert not facts(made, "bert-classification", id2label=labels).findings  # in another order
    finding = only(facts(made, "bert-classification", id2label={**labels, "0": "LABEL_1", "1": "LABEL_0"}))
    assert (finding.code, finding.path) == ("generation-differs", "id2label") and "pipelines" in finding.problem


@pytest.mark.parametrize(("case", "default"), [("gemma3", "0.0"), ("bert", "0.1")])
def test_a_rate_of_dropout_counts_for_training_alone(made: Any, case: str, default: str) -> None:
    """The class states the rate of Gemma, the config.json of the source that of BERT."""
    key = "attention_dropout" if case == "gemma3" else "hidden_dropout_prob"
    assert not any("only training" in note for note in facts(made, case).notes)
    found = facts(made, case, **{key: 0.3})
    said = f"only training sees this difference, which --training counts: {key}: "
    assert not found.findings and any(note.startswith(said) for note in found.notes)
    plan, written = made(case)
    changed = dataclasses.replace(written, config={**written.config, key: 0.3})
    finding = only(check_facts(plan, changed, ABSENT, training=True))
    assert (finding.path, finding.expected, finding.got) == (key, default, "0.3")
    assert not check_facts(plan, written, ABSENT, training=True).findings


@pytest.mark.parametrize(
    ("case", "added"),
    [
        ("gemma1-mha", {"rope_scaling": {"rope_type": "default"}}),
        ("gemma1-mha", {"rope_scaling": {"type": "default"}}),
        ("gemma1-mha", {"rope_parameters": {"rope_theta": 10000.0}}),
        ("gemma1-mha", {"partial_rotary_factor": 1.0}),
        ("gemma3", {"hidden_activation": "gelu_new"}),
        ("t5-v1.1", {"dense_act_fn": "gelu_pytorch_tanh"}),
        ("t5-v1.1", {"dense_act_fn": "gelu_fast"}),
        ("t5-v1.1", {"feed_forward_proj": "gated-gelu"}),
        ("gpt2", {"activation_function": "gelu_accurate"}),
        ("bert", {"hidden_act": "gelu_python"}),
        ("whisper", {"activation_function": "gelu_python"}),
    ],
)
def test_another_name_of_the_same_function_is_no_difference(made: Any, case: str, added: dict[str, Any]) -> None:
    assert not facts(made, case, **added).findings


@pytest.mark.parametrize(
    ("case", "added"),
    [
        ("gemma1-mha", {"rope_scaling": {"type": "linear", "factor": 2.0}}),
        ("gemma1-mha", {"partial_rotary_factor": 0.5}),
        ("t5-v1.1", {"dense_act_fn": "gelu"}),
        ("t5-v1.1", {"feed_forward_proj": "gelu_new"}),  # not gated
        ("gpt2", {"activation_function": "gelu"}),
        ("bert", {"hidden_act": "quick_gelu"}),
    ],
)
def test_a_name_of_another_function_is_a_difference(made: Any, case: str, added: dict[str, Any]) -> None:
    assert facts(made, case, **added).findings


def test_the_names_of_one_activation_are_those_of_transformers() -> None:
    """All pairs of ``ACT2FN``: `same` says whether their functions are."""
    import torch
    from transformers.activations import ACT2FN

    x = torch.linspace(-8, 8, 1001, dtype=torch.float64)
    values = {name: ACT2FN[name](x) for name in ACT2FN if name not in ("prelu", "xielu")}  # these two have weights
    for one, two in itertools.combinations(values, 2):
        wide = {"gelu_10", "relu6"} & {one, two}  # equal to another up to 10 and up to 6
        equal = not wide and bool((values[one] - values[two]).abs().max() < 1e-6)
        assert same("hidden_act", one, two) == equal, (one, two)


def test_a_key_that_the_class_does_not_read(made: Any) -> None:
    """Its name says an activation, and nothing reads it: neither a finding nor silence."""
    found = facts(made, "gemma3", hidden_act="silu", my_note=7)
    assert not found.findings
    assert (
        'config.json, not compared: hidden_act = "silu", my_note = 7 (the transformers class does not read them)'
        in found.notes
    )


def test_the_activation_is_repaired_in_the_words_of_transformers(made: Any) -> None:
    finding = only(facts(made, "gemma3", hidden_activation="silu"))
    assert 'set hidden_activation to "gelu_pytorch_tanh" in config.json' in finding.fix


def test_a_quantized_model_is_another(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    added = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}}
    for case in ("gemma3", "gpt2", "bert"):
        finding = only(facts(made, case, **added))
        assert "from_pretrained loads another model" in finding.problem and finding.path == "quantization_config"
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "quantization_config" in str(only(facts(made, "gemma3", **added)))


def test_without_transformers_keys_are_listed(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    found = facts(made, "timesfm-2.5", force_flip_invariance=False)
    assert not found.findings
    said = "config.json, not compared: force_flip_invariance = false (the defaults of the class are unknown: transformers is not installed)"
    assert said in found.notes


def test_a_key_that_the_class_refuses(made: Any) -> None:
    finding = only(facts(made, "gemma3", use_bidirectional_attention="maybe"))
    assert "the transformers class rejects this value" in finding.problem and finding.got == '"maybe"'


@pytest.mark.parametrize(
    ("key", "value", "path"),
    [
        ("num_attention_heads", 1, "text_config.num_attention_heads"),
        ("max_position_embeddings", None, "text_config"),
    ],
)
def test_a_key_of_a_part_is_named_with_the_part(key: str, value: int | None, path: str, tmp_path: Path) -> None:
    """Or the part alone, where its key is lost and the class takes a default."""
    source = flax_families.write("clip.CLIPModel", tmp_path / "source")
    convert("clip", source, tmp_path / "out")
    written = open_written(tmp_path / "out")
    config = dict(written.config or {})
    text = {name: x for name, x in {**config["text_config"], key: value}.items() if x is not None}
    changed = dataclasses.replace(written, config={**config, "text_config": text})
    found = only(check_facts(plan_conversion("clip", source), changed, ABSENT))
    assert (found.path, found.data["changes"]) == (path, [f"text_config.{key}"])


@pytest.mark.slow
def test_what_follows_from_another_key_is_said_to(made: Any, tmp_path: Path) -> None:
    """Both directions halve the window in the module, though config.json has the right one."""
    plan, written = made("gemma3")
    changed = dataclasses.replace(written, config={**written.config, "use_bidirectional_attention": True})
    reference = load_reference(dataclasses.replace(plan, written_config=changed.config), None)
    assert not isinstance(reference, str)
    key, window = check_facts(plan, changed, reference).findings
    assert key.path == "use_bidirectional_attention" and window.data["fact"] == "sliding_window"
    assert "remove use_bidirectional_attention from config.json" in window.fix
    assert "configure it with" not in str(window)


@pytest.mark.parametrize("case", ["gemma3", "bert", "gpt2"])
def test_a_configuration_that_names_no_class(made: Any, case: str) -> None:
    """from_pretrained needs no `architectures`; AutoModel, but no class of its own, needs `model_type`."""
    plan, written = made(case)
    for absent in ("architectures", "model_type"):
        config = {key: value for key, value in written.config.items() if key != absent}
        less = dataclasses.replace(written, config=config)
        reference = load_reference(dataclasses.replace(plan, written_config=config), None)
        assert not isinstance(reference, str), reference
        level = check_coverage(plan, less, reference)
        said = [str(finding) for finding in level.findings]
        assert len(said) == (absent == "model_type") and all(
            "config.json has no model_type, by which" in s for s in said
        )
        assert not check_facts(plan, less, ABSENT).findings
        assert any("load_state_dict(strict=True)" in note for note in level.notes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "key", "value"), [("gpt2", "reorder_and_upcast_attn", True), ("bert", "chunk_size_feed_forward", 4)]
)
def test_how_a_model_is_run_is_no_difference(made: Any, tmp_path: Path, case: str, key: str, value: Any) -> None:
    """Legal settings of the same function, which in transformers raise in float64, or for lengths that are no multiple."""
    _, written = made(case)
    shutil.copytree(written.path, tmp_path / "out")
    (tmp_path / "out" / "config.json").write_text(json.dumps({**written.config, key: value}))
    report = check(tmp_path / "out", checkpoint(case), levels=("layers", "model"), require=("layers", "model"))
    assert report.exit_code == 0, [str(finding) for level in report.levels for finding in level.findings]
    said = f"config.json, not compared: {key} = {json.dumps(value)} (it changes how the same function is computed"
    assert any(note.startswith(said) for note in report.levels[0].notes)


# ---- what only generate() reads


def generation(made: Any, case: str, tmp_path: Path, **added: Any) -> Facts:
    """With other keys in generation_config.json."""
    plan, written = made(case)
    shutil.copytree(written.path, tmp_path / "out")
    file = tmp_path / "out" / "generation_config.json"
    stated = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**stated, **added}))
    return check_facts(plan, dataclasses.replace(written, path=tmp_path / "out"), ABSENT)


SETTINGS = [
    ("do_sample", True, False),
    ("temperature", 0.7, 1.0),
    ("top_k", 3, 50),
    ("repetition_penalty", 1.3, 1.0),
    ("decoder_start_token_id", 5, None),
    ("suppress_tokens", [1, 2], None),
    ("num_beams", 4, 1),
]


@pytest.mark.parametrize(("key", "value", "default"), SETTINGS)
def test_a_setting_of_generate_that_the_source_does_not_have(
    made: Any, tmp_path: Path, key: str, value: Any, default: Any
) -> None:
    for found, file in (
        (facts(made, "gpt2", **{key: value}), "config.json"),
        (generation(made, "t5", tmp_path, **{key: value}), "generation_config.json"),
    ):
        finding = only(found)
        assert (finding.code, finding.path) == ("generation-differs", key)
        assert (finding.expected, finding.got) == (json.dumps(default), json.dumps(value))
        assert file in finding.problem and file in finding.fix


@pytest.mark.parametrize(("key", "value", "default"), SETTINGS)
def test_a_default_of_generate_is_no_finding(made: Any, tmp_path: Path, key: str, value: Any, default: Any) -> None:
    assert not facts(made, "gpt2", **{key: default}).findings
    assert not generation(made, "t5", tmp_path, **{key: default}).findings


def test_a_setting_of_the_source_that_is_lost(made: Any, tmp_path: Path) -> None:
    """In config.json, and with generation_config.json itself."""
    plan, written = made("t5")
    source = dataclasses.replace(plan.sidecar, config={**plan.sidecar.config, "num_beams": 4})
    finding = only(check_facts(dataclasses.replace(plan, sidecar=source), written, ABSENT))
    assert (finding.path, finding.expected, finding.got) == ("num_beams", "4", "1")
    shutil.copytree(written.path, tmp_path / "out")
    (tmp_path / "out" / "generation_config.json").unlink()
    source = dataclasses.replace(plan.sidecar, generation={**plan.sidecar.generation, "suppress_tokens": [3]})
    without = dataclasses.replace(written, path=tmp_path / "out")
    finding = only(check_facts(dataclasses.replace(plan, sidecar=source), without, ABSENT))
    assert (finding.path, finding.expected, finding.got) == ("suppress_tokens", "[3]", "null")


def test_settings_of_generate_are_listed_where_the_source_has_no_file(made: Any, tmp_path: Path) -> None:
    found = facts(made, "gemma3", do_sample=True, temperature=0.7)
    assert not found.findings
    assert any(note.startswith("not verified: do_sample true, temperature 0.7 of config.json") for note in found.notes)
    found = generation(made, "gemma3", tmp_path, top_k=3)
    assert not found.findings
    assert any(note.startswith("not verified: top_k 3 of generation_config.json") for note in found.notes)
    assert not any("generate()" in note for note in facts(made, "gemma3").notes)


@pytest.mark.slow
def test_a_check_fails_with_another_setting_of_generate(made: Any, tmp_path: Path) -> None:
    _, written = made("t5")
    shutil.copytree(written.path, tmp_path / "out")
    file = tmp_path / "out" / "generation_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "do_sample": True}))
    report = check(tmp_path / "out", checkpoint("t5"), levels=["layers"])
    assert report.exit_code == 1
    assert [finding.code for level in report.levels for finding in level.findings] == ["generation-differs"]


def test_the_advice_for_a_setting_of_generate_works(made: Any, tmp_path: Path) -> None:
    """A value from the file next to the checkpoint is changed there: --set has no such name."""
    for case, key, value, advice in (
        ("t5", "pad_token_id", 7, "change generation_config.json next to the checkpoint and convert again"),
        ("gemma3", "eos_token_id", 7, "convert with --set eos_token_id=7"),
        ("gemma3", "eos_token_id", None, "correct eos_token_id in `generation` of "),
    ):
        plan, written = made(case)
        planned = {"pad_token_id": 0, "top_k": 50}
        if case == "t5":
            plan = dataclasses.replace(plan, sidecar=dataclasses.replace(plan.sidecar, generation=planned))
        out = tmp_path / f"{case}-{value}"
        shutil.copytree(written.path, out)
        file = out / "generation_config.json"
        file.write_text(json.dumps({**plan.generation_config, key: value}))
        (finding,) = check_coverage(plan, dataclasses.replace(written, path=out), ABSENT).findings
        assert finding.path == key and advice in finding.fix
        stated = "the file next to the checkpoint" if case == "t5" else "the rules"
        assert finding.problem == f"generation_config.json and {stated} disagree"
