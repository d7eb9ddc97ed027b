"""A `.keras` archive of Keras Hub holds the configuration that a preset has beside its weights: of a backbone, or of a task below `backbone`.

The archives are written here as `save` of keras-hub 0.32.0 and keras 3.15.1 writes them.
"""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path
from typing import Any

import h5py
import pytest

import convert
from convert.verify.report.report import Verdict
from convert.verify.run import check
from support import keras_hub

TASKS = {
    "gemma": "GemmaCausalLM",
    "gemma2": "GemmaCausalLM",
    "llama": "LlamaCausalLM",
    "llama3.1-tied": "LlamaCausalLM",
    "mistral": "MistralCausalLM",
}
VIT = {"patch_size": [8, 8], "num_layers": 2, "num_heads": 4, "hidden_dim": 16, "mlp_dim": 24, "use_class_token": True}


def task_of(backbone: dict[str, Any], name: str, **keys: Any) -> dict[str, Any]:
    """Return the configuration of a task as Keras writes it; that of the backbone is an object of its own in it."""
    return {"module": "keras_hub", "class_name": name, "config": {"backbone": backbone, "preprocessor": None, "name": "task", **keys}, "compile_config": {"loss": {"class_name": "Loss", "config": {"sliding_window": 9}}}}  # fmt: skip


def with_a_task(weights: bytes, name: str) -> bytes:
    """Return the weights with the backbone below its name, as those of a task."""
    written = io.BytesIO()
    with h5py.File(io.BytesIO(weights)) as old, h5py.File(written, "w") as new:
        old.copy("layers", new.create_group(f"layers/{name}"))
        new.create_group("vars")
    return written.getvalue()


def contents(case: str, folder: Path, task: bool) -> dict[str, bytes]:
    """Return the files of the archive of a golden."""
    preset = keras_hub.checkpoint(case, folder)
    weights, config = (preset / "model.weights.h5").read_bytes(), json.loads((preset / "config.json").read_text())
    if task:
        weights = with_a_task(weights, f"{TASKS[case].removesuffix('CausalLM').lower()}_backbone")
        config = task_of(config, TASKS[case])
    return {"metadata.json": b"{}", "config.json": json.dumps(config).encode(), "model.weights.h5": weights}


def of_vit(folder: Path, **keys: Any) -> dict[str, bytes]:
    """Return the files of the archive of a ViTImageClassifier."""
    config = task_of({"class_name": "ViTBackbone", "config": VIT}, "ViTImageClassifier", **keys)
    weights = (keras_hub.checkpoint("vit", folder) / "model.weights.h5").read_bytes()
    return {"config.json": json.dumps(config).encode(), "model.weights.h5": weights}


def written(files: dict[str, bytes], path: Path, compressed: tuple[str, ...] = ()) -> Path:
    """Write an archive, or the folder that unzipping it gives."""
    if path.suffix != ".keras":
        path.mkdir()
        for name, content in files.items():
            (path / name).write_bytes(content)
        return path
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content, zipfile.ZIP_DEFLATED if name in compressed else zipfile.ZIP_STORED)
    return path


def planned(case: str, source: Path) -> convert.Plan:
    return convert.plan_conversion("keras-hub", source, settings=keras_hub.settings(case))


@pytest.mark.parametrize("form", ["model.keras", "unzipped"])
@pytest.mark.parametrize("case", sorted(TASKS))
def test_the_configuration_of_a_task_counts_as_that_of_a_preset(case: str, form: str, tmp_path: Path) -> None:
    of_task = planned(case, written(contents(case, tmp_path, task=True), tmp_path / form))
    preset = planned(case, tmp_path / case)
    assert of_task.rules.model == preset.rules.model
    assert of_task.facts == preset.facts and of_task.config == preset.config and of_task.notes == preset.notes


@pytest.mark.parametrize("case", [*sorted(TASKS), "bert"])
def test_the_configuration_of_a_backbone_is_read_from_the_archive(case: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    files = contents(case, tmp_path, task=False)
    archive = written(files, tmp_path / "folder" / "model.keras", compressed=("config.json",))
    preset = planned(case, tmp_path / case)
    (tmp_path / "folder" / "config.json").write_text('{"class_name": "Other", "config": {"num_layers": 7}}')
    for source in (archive, archive.parent):  # what lies beside the archive may be of another checkpoint
        plan = planned(case, source)
        assert plan.rules.model == preset.rules.model
        assert plan.facts == preset.facts and plan.config == preset.config and plan.notes == preset.notes


@pytest.mark.parametrize("form", ["model.keras", "unzipped"])
def test_what_a_classifier_pools_and_puts_behind_the_logits_is_read(form: str, tmp_path: Path) -> None:
    source = written(of_vit(tmp_path, pooling="token", activation="softmax"), tmp_path / form)
    plan = planned("vit", source)
    assert not any("pooling" in note for note in plan.config_notes)
    assert any('activation "softmax"' in note for note in plan.notes)
    assert any("pooling" in note for note in planned("vit", tmp_path / "vit").config_notes)  # weights alone
    (tmp_path / "gap").mkdir()
    with pytest.raises(convert.PlanError, match="class token"):
        planned("vit", written(of_vit(tmp_path / "gap", pooling="gap"), tmp_path / "gap" / form))


@pytest.mark.parametrize("form", ["model.keras", "unzipped"])
def test_a_configuration_of_another_model_or_size_is_refused(form: str, tmp_path: Path) -> None:
    files = contents("gemma2", tmp_path, task=True)
    config = json.loads(files["config.json"])
    backbone = config["config"]["backbone"]
    for number, other in enumerate(({**backbone, "class_name": "Gemma3Backbone"}, {**backbone, "config": {**backbone["config"], "num_layers": 3}})):  # fmt: skip
        changed = json.dumps({**config, "config": {"backbone": other}}).encode()
        folder = tmp_path / f"{number}"
        folder.mkdir()
        with pytest.raises(convert.PlanError, match=r"Gemma3Backbone|num_layers = 3"):
            planned("gemma2", written({**files, "config.json": changed}, folder / form))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "the archive has no config.json"),
        (b"{", "invalid JSON"),
        (b"[]", "a JSON object"),
        (b" " * (1 << 21), "too large"),
    ],
)
def test_an_archive_without_a_readable_configuration_is_refused(
    content: bytes | None, said: str, tmp_path: Path
) -> None:
    files = contents("gemma", tmp_path, task=False)
    files = {**files, "config.json": content} if content else {n: f for n, f in files.items() if n != "config.json"}
    with pytest.raises(convert.CheckpointError, match=said) as refused:
        planned("gemma", written(files, tmp_path / "model.keras", compressed=("config.json",)))
    assert "model.keras" in str(refused.value)


def test_a_damaged_configuration_is_refused(tmp_path: Path) -> None:
    archive = written(contents("gemma", tmp_path, task=False), tmp_path / "model.keras")
    archive.write_bytes(archive.read_bytes().replace(b"final_logit_soft_cap", b"final_logit_soft_cup"))
    with pytest.raises(convert.CheckpointError, match="checksum is wrong"):
        planned("gemma", archive)


@pytest.mark.slow
def test_a_window_that_the_archive_contradicts_is_found_in_the_output(tmp_path: Path) -> None:
    archive = written(contents("mistral", tmp_path, task=True), tmp_path / "model.keras")
    convert.convert("keras-hub", archive, tmp_path / "out", settings=keras_hub.settings("mistral"))
    config = tmp_path / "out" / "config.json"
    for window, verdict in (
        (4, Verdict.PASSED),
        (512, Verdict.FAILED),
    ):  # 512 is what the rules assume of weights alone
        config.write_text(json.dumps({**json.loads(config.read_text()), "sliding_window": window}))
        (layers,) = check(tmp_path / "out", archive, levels=["layers"]).levels
        assert layers.verdict is verdict and ("sliding_window" in str(layers.findings)) == (window == 512)
