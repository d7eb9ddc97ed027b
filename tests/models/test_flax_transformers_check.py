"""BERT, GPT-2, T5, Whisper, Llama, Mistral, Gemma and DINOv2 through `convert check`: the plain-JAX references are what the flax classes computed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
from flax import serialization
from safetensors.torch import load_file, save_file
from transformers.models.t5.modeling_t5 import T5Attention

import convert
from convert.numerics.lift_jax import lift
from convert.references.flax_transformers import t5, t5_and_whisper_variants
from convert.references.flax_transformers.equations import t5 as equations
from convert.references.protocol import Reference
from convert.verify.comparison import load_reference
from convert.verify.recording.record import record
from convert.verify.report.report import Verdict
from convert.verify.run import check
from convert.verify.sides.run_jax import jax_weights
from convert.writing.written import open_written
from faults.catalogue import one_thread
from support import flax_families
from support.goldens import checkpoint, golden_io, relative_error

pytestmark = pytest.mark.slow

CASES = ("bert", "bert-model", "bert-pretraining", "bert-classification", "bert-tokens", "bert-answers", "gpt2", "gpt2-model", "t5", "t5-v1.1", "whisper", "llama", "llama-model", "mistral", "mistral-model", "gemma-flax", "gemma-flax-untied", "gemma-flax-model", "dinov2", "dinov2-classification")  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_plain_jax_model_is_what_the_flax_classes_recorded(case: str) -> None:
    plan = convert.plan_conversion(case.split("-")[0], checkpoint(case))
    reference = load_reference(plan, None)
    assert not isinstance(reference, str)
    io = golden_io(case)
    inputs = {
        name: jax.numpy.asarray(io[name]) for name in io if name.endswith(("_ids", "_mask", "_features", "_values"))
    }
    with jax.default_matmul_precision("highest"), jax.disable_jit():
        got = reference.jax_side()(jax_weights(plan), inputs)
    for name in reference.outputs:
        assert relative_error(got[name], io[name]) < 3e-6, name


@pytest.mark.parametrize(
    "case",
    [
        "bert",
        "bert-pretraining",
        "gpt2",
        "gpt2-model",
        "t5",
        "t5-v1.1",
        "whisper",
        "llama",
        "llama-model",
        "mistral",
        "mistral-model",
        "gemma-flax",
        "gemma-flax-untied",
        "dinov2",
        "dinov2-classification",
        "gemma-flax-model",
    ],
)
def test_a_correct_conversion_passes_all_levels(case: str, tmp_path: Path) -> None:
    convert.convert(case.split("-")[0], checkpoint(case), tmp_path / "out")
    with one_thread():
        report = check(tmp_path / "out", checkpoint(case))
    assert [level.verdict for level in report.levels] == [Verdict.PASSED] * 4
    model = report.levels[-1]
    assert not any("could not be computed in float64" in note for note in model.notes)
    assert all(m.float64 is not None for m in model.measures)
    assert max(m.float64.relative for m in model.measures if m.float64 is not None) < 1e-13
    assert max(m.difference.relative for m in model.measures) < 5e-6


@pytest.mark.parametrize(
    ("case", "output"),
    [("llama.biased", "logits"), ("llama.biased-headless", "last_hidden_state"), ("gemma.biased", "logits")],
)
def test_biases_of_the_attention(case: str, output: str, tmp_path: Path) -> None:
    """`attention_bias: true`: the plain JAX model is what the Flax class recorded, and the check names a bias that is lost or exchanged."""
    source = flax_families.write(case, tmp_path / "source")
    convert.convert("flax-transformers", source, tmp_path / "out")
    reference = load_reference(convert.plan_conversion("flax-transformers", source), None)
    assert not isinstance(reference, str)
    inputs = {name: jax.numpy.asarray(x) for name, x in flax_families.values(case, "in").items()}
    with jax.default_matmul_precision("highest"), jax.disable_jit():
        got = reference.jax_side()(flax_families.leaves(case), inputs)
    assert relative_error(got[output], flax_families.values(case, "out")[output]) < 3e-6
    with one_thread():
        assert [level.verdict for level in check(tmp_path / "out", source).levels] == [Verdict.PASSED] * 4
    file = tmp_path / "out" / "model.safetensors"
    right, metadata = load_file(file), dict(open_written(file).metadata)
    prefix = "layers.1.self_attn." if output != "logits" else "model.layers.1.self_attn."
    exchanged = {f"{prefix}{one}_proj.bias": right[f"{prefix}{other}_proj.bias"] for one, other in ("kv", "vk")}
    for wrong in ({f"{prefix}o_proj.bias": right[f"{prefix}o_proj.bias"] * 0}, exchanged):
        save_file({**right, **wrong}, file, metadata=metadata)
        with one_thread():
            said = " ".join(map(str, check(file.parent, source).levels[1].findings))
        assert all(name in said for name in wrong)


@pytest.mark.parametrize(
    ("case", "stated"), [("llama.biased", False), ("llama.LlamaModel", True), ("gemma.biased", None)]
)
def test_a_switch_for_biases_that_the_tree_contradicts(case: str, stated: bool | None, tmp_path: Path) -> None:
    source = flax_families.write(case, tmp_path / "source", attention_bias=stated)
    with pytest.raises(convert.PlanError, match="attention_bias in the config.json of the checkpoint: expected"):
        convert.plan_conversion("flax-transformers", source)


@pytest.mark.parametrize(("case", "masked"), [("Dinov2Model", True), ("Dinov2Model", False), ("Dinov2ForImageClassification", True), ("Dinov2ForImageClassification", False)])  # fmt: skip
def test_dinov2_without_biases_of_queries_keys_and_values(case: str, masked: bool, tmp_path: Path) -> None:
    """`qkv_bias: false`: the plain JAX model adds none, and the file passes against it; exchanged queries and keys do not."""
    biases = tuple(f"/{part}/bias" for part in ("query", "key", "value"))
    given = {name: x for name, x in flax_families.leaves(f"dinov2.{case}").items() if not name.endswith(biases)}
    given = {name: x for name, x in given.items() if masked or "mask_token" not in name}
    keys = {"qkv_bias": False, "use_mask_token": masked}
    source = flax_families.write(f"dinov2.{case}", tmp_path / "source", given, **keys)
    out = tmp_path / "out"
    convert.convert("flax-transformers", source, out)
    assert json.loads((out / "config.json").read_text())["qkv_bias"] is False
    with one_thread():
        assert [level.verdict for level in check(out, source).levels] == [Verdict.PASSED] * 4
    file = out / "model.safetensors"
    right, metadata = load_file(file), dict(open_written(file).metadata)
    names = [next(name for name in right if name.endswith(f"layer.1.attention.{part}_proj.weight")) for part in "qk"]
    save_file({**right, names[0]: right[names[1]], names[1]: right[names[0]]}, file, metadata=metadata)
    with one_thread():
        said = " ".join(map(str, check(out, source).levels[1].findings))
    assert all(name in said for name in names)


@pytest.mark.parametrize("stated", [True, False])
def test_biases_of_dinov2_that_the_tree_contradicts(stated: bool, tmp_path: Path) -> None:
    leaves = flax_families.leaves("dinov2.Dinov2Model")
    given = {name: x for name, x in leaves.items() if not (stated and name.endswith("/query/bias"))}
    source = flax_families.write("dinov2.Dinov2Model", tmp_path / "source", given, qkv_bias=stated)
    with pytest.raises(convert.PlanError, match=r"/query/bias" if stated else "qkv_bias in the config.json"):
        convert.plan_conversion("flax-transformers", source)


def test_the_encoder_of_t5_alone(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(checkpoint("t5-v1.1"), source)
    config = json.loads((source / "config.json").read_text()) | {"architectures": ["T5EncoderModel"]}
    (source / "config.json").write_text(json.dumps(config))
    tree = serialization.msgpack_restore((source / "flax_model.msgpack").read_bytes())
    (source / "flax_model.msgpack").write_bytes(serialization.to_bytes({k: tree[k] for k in ("shared", "encoder")}))
    convert.convert("t5", source, tmp_path / "out")
    with one_thread():
        report = check(tmp_path / "out", source)
    assert report.model == "t5_encoder" and [level.verdict for level in report.levels] == [Verdict.PASSED] * 4


def test_an_activation_that_the_reference_does_not_have(tmp_path: Path) -> None:
    """The model level is skipped with the reason; in a release before, its JAX side ended with a KeyError."""
    source = tmp_path / "source"
    shutil.copytree(checkpoint("bert"), source)
    config = json.loads((source / "config.json").read_text()) | {"hidden_act": "quick_gelu"}
    (source / "config.json").write_text(json.dumps(config))
    convert.convert("bert", source, tmp_path / "out")
    with one_thread():
        *_, layers, model = check(tmp_path / "out", source).levels
    assert layers.verdict is Verdict.PASSED
    assert model.verdict is Verdict.SKIPPED and "got quick_gelu" in model.reason and "hidden_act" in model.reason


def test_t5_without_a_head(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(checkpoint("t5"), source)
    config = json.loads((source / "config.json").read_text()) | {"architectures": ["FlaxT5Model"]}
    (source / "config.json").write_text(json.dumps(config))
    convert.convert("t5", source, tmp_path / "out")
    with one_thread():
        report = check(tmp_path / "out", source)
    assert report.model == "t5_model" and [level.verdict for level in report.levels] == [Verdict.PASSED] * 4


@pytest.mark.parametrize(("count", "furthest"), [(32, 128), (12, 17), (8, 20), (64, 256)])
@pytest.mark.parametrize("causal", [False, True])
def test_distances_fall_into_the_same_buckets_in_every_precision(count: int, furthest: int, causal: bool) -> None:
    """Bounds of buckets are whole numbers (8, 16, 32, ... of the published 128): a rounding there would be another row."""
    steps = furthest + 40
    distance = torch.arange(steps)[None, :] - torch.arange(steps)[:, None]
    want = T5Attention._relative_position_bucket(distance, not causal, count, furthest).numpy()
    ours = jax.numpy.asarray(equations.buckets(steps, steps, count, furthest, causal=causal))
    lifted = lift(lambda: {"at": equations.buckets(steps, steps, count, furthest, causal=causal)})()["at"]
    wide = t5_and_whisper_variants.buckets(steps, steps, count, furthest, causal=causal)
    for made in (ours, lifted, wide):
        assert np.array_equal(np.asarray(made), want)
    assert want.max() == count - 1 and len(np.unique(want)) == count - (not causal)


def test_the_inputs_reach_what_the_models_tell_apart() -> None:
    """Texts longer than distances are told apart, of different lengths; padding; a sound as long as there are positions."""
    t5, whisper = (reference_of(case) for case in ("t5", "whisper"))
    given = t5.inputs(0)
    assert given["input_ids"].shape == (2, 23) and given["decoder_input_ids"].shape == (2, 21)
    assert all(given[f"{side}attention_mask"].sum(1).tolist() == [n, n - 4] for side, n in (("", 23), ("decoder_", 21)))
    assert whisper.inputs(0)["input_features"].shape == (2, 10, 28)


def test_rules_of_another_model_and_facts_that_nobody_told(tmp_path: Path) -> None:
    with pytest.raises(convert.ConvertError) as error:
        t5.reference(convert.plan_conversion("gpt2", checkpoint("gpt2")))
    (finding,) = error.value.findings
    assert finding.code == "reference-unavailable" and finding.got == "gpt2_lm"
    assert finding.expected == "t5_tied or t5_untied or t5_model or t5_encoder"
    alone = shutil.copy(checkpoint("whisper") / "flax_model.msgpack", tmp_path)
    convert.convert("whisper", alone, tmp_path / "out.safetensors")
    model = check(tmp_path / "out.safetensors", alone, levels=["model"]).levels[-1]
    assert model.verdict is Verdict.SKIPPED
    assert "--set encoder_attention_heads=..." in model.reason


def reference_of(case: str) -> Reference:
    reference = load_reference(convert.plan_conversion(case.split("-")[0], checkpoint(case)), None)
    assert not isinstance(reference, str)
    return reference


def test_a_recording_takes_along_what_lies_beside_the_checkpoint(tmp_path: Path) -> None:
    """Where it is checked there is no config.json, and the number of heads is needed."""
    plan = convert.plan_conversion("gpt2", checkpoint("gpt2-model"))
    reference = load_reference(plan, None)
    assert not isinstance(reference, str)
    record(plan, reference, tmp_path / "recorded.safetensors")
    convert.convert("gpt2", checkpoint("gpt2-model"), tmp_path / "out.safetensors")
    with one_thread():
        report = check(tmp_path / "out.safetensors", recorded=tmp_path / "recorded.safetensors")
    verdicts = {level.level: level.verdict for level in report.levels}
    assert verdicts["model"] is verdicts["coverage"] is Verdict.PASSED
