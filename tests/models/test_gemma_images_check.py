"""Models with images through `convert check`: the plain-JAX reference is what the real code computed, and transformers agrees."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from transformers import AutoConfig

import convert
from convert.references.gemma import images
from convert.references.gemma.text import model_of
from convert.rules.library import shipped_rules_dir
from convert.verify.report.report import Report, Verdict
from convert.verify.run import check
from convert.verify.sides.run_jax import jax_weights
from faults.catalogue import one_thread
from support.gemma_image_models import CASES, directory, path
from support.goldens import golden_io, relative_error

pytestmark = pytest.mark.slow  # takes long, as each test starts programs or models of its own

IMAGES = ("gemma3-vision", "paligemma1", "paligemma2")


@pytest.mark.parametrize("case", IMAGES)
def test_the_plain_jax_model_is_what_upstream_recorded(case: str) -> None:
    """Soft tokens and logits; two images in each sequence for Gemma 3, a prefix that all see for PaliGemma."""
    plan = convert.plan_conversion("gemma", path(case), settings=CASES[case][1])
    io = dict(golden_io(case))
    soft = io["soft_tokens"].shape[-2]
    if case == "gemma3-vision":
        image = (io["expanded"] == -2).astype(np.int32)
        tokens, prefix = np.where(image, 0, io["expanded"]), np.zeros_like(image)
    else:
        tokens = np.pad(io["tokens"], ((0, 0), (soft, 0)))
        image = np.pad(np.zeros_like(io["tokens"]), ((0, 0), (soft, 0)), constant_values=1)
        prefix = np.pad(1 - io["mask_ar"], ((0, 0), (soft, 0)), constant_values=1)
    inputs = {
        "tokens": tokens,
        "image": image,
        "prefix": prefix,
        "pixels": io["pixels"].reshape(-1, *io["pixels"].shape[-3:]),
    }
    model = model_of(plan, images.TEXT[plan.rules.model])
    weights = {name: np.asarray(x, np.float32) for name, x in jax_weights(plan).items()}
    with jax.default_matmul_precision("highest"):
        got = images.run_jax(model, 1e-6, soft, weights, {k: jax.numpy.asarray(v) for k, v in inputs.items()})
    logits = np.asarray(got["logits"])[:, -io["logits"].shape[1] :]
    assert relative_error(np.asarray(got[images.PROJECTOR]).reshape(io["soft_tokens"].shape), io["soft_tokens"]) < 3e-6
    assert relative_error(logits, io["logits"]) < 3e-6


def checked(case: str, out: Path, rules: str | None = None, *, levels: tuple[str, ...]) -> Report:
    with one_thread():
        return check(directory(case, out / "model", rules), path(case), model=rules, levels=levels)


@pytest.mark.parametrize("case", IMAGES)
def test_a_correct_conversion_passes(case: str, tmp_path: Path) -> None:
    """The levels between are those of test_gemma_images_conversion.py."""
    report = checked(case, tmp_path, levels=("coverage", "model"))
    assert [level.verdict for level in report.levels] == [Verdict.PASSED] * 2, report
    model = report.levels[-1]
    assert max(m.float64.relative for m in model.measures if m.float64 is not None) < 1e-12
    names = {m.name for m in model.measures}
    assert {"logits", images.PROJECTOR, "model.vision_tower.encoder.layers.1.mlp.fc2:in"} <= names


@pytest.mark.parametrize(
    ("case", "old", "new", "place"),
    [
        ("gemma3-vision", "encoderblock_{j}/LayerNorm_{0,1}", "encoderblock_{j}/LayerNorm_{1,0}", "model.vision_tower.encoder.layers.0.layer_norm1"),
        ("paligemma1", "...AB,ABW->...W", "...BA,ABW->...W", "model.vision_tower.encoder.layers.0.self_attn.out_proj"),
    ],
)  # fmt: skip
def test_a_fault_in_the_rules_is_found_at_its_place(case: str, old: str, new: str, place: str, tmp_path: Path) -> None:
    text = (shipped_rules_dir() / "gemma.yaml").read_text()
    assert old in text
    (tmp_path / "gemma.yaml").write_text(text.replace(old, new))
    model = checked(case, tmp_path, str(tmp_path / "gemma.yaml"), levels=("model",)).levels[-1]
    assert model.level == "model" and model.verdict is Verdict.FAILED
    assert place in {finding.path for finding in model.findings}, model.findings


@pytest.mark.parametrize("case", IMAGES)
def test_what_the_class_saves_is_the_same_configuration(case: str, tmp_path: Path) -> None:
    """Its own defaults stand beside those of the text model, of which a wrong one is found."""
    out = directory(case, tmp_path / "model")
    AutoConfig.from_pretrained(out).save_pretrained(out)

    def facts() -> list[str]:
        report = check(out, path(case), model="gemma", settings=CASES[case][1], levels=("layers",))
        return [finding.data["fact"] for level in report.levels for finding in level.findings]

    assert facts() == []
    config = json.loads((out / "config.json").read_text())
    config["text_config"]["vocab_size"] += 1
    (out / "config.json").write_text(json.dumps(config))
    assert facts() == ["vocab_size"]


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"vision_config": {"hidden_act": "gelu"}}, "model.vision_tower.encoder.layers.0.mlp.fc2:in"),
        ({"text_config": {"sliding_window": 5}}, "model.language_model.layers.0.self_attn.o_proj:in"),
    ],
)
def test_a_wrong_configuration_is_found(change: dict[str, Any], place: str, tmp_path: Path) -> None:
    out = directory("gemma3-vision", tmp_path / "out")
    config = json.loads((out / "config.json").read_text())
    for key, values in change.items():
        config[key] |= values
    (out / "config.json").write_text(json.dumps(config))
    with one_thread():
        report = check(out, path("gemma3-vision"), levels=("model",))
    assert place in {finding.path for level in report.levels for finding in level.findings}
    shutil.rmtree(out)
