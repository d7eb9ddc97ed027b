"""Keys that are left out of the written config.json at the top are left out of the configurations of its parts, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import convert
from support import flax_families, flax_table

OF_THE_WRITER = {
    "architectures": ["BertModel"], "torch_dtype": "float16", "dtype": "float16", "_name_or_path": "somewhere", "_commit_hash": "0",
    "transformers_version": "4.0.0", "quantization_config": {"load_in_8bit": True, "quant_method": "bitsandbytes"},
}  # fmt: skip


def written(case: str, part: str, keys: dict[str, Any], folder: Path) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Plan a case with more keys in a part; return the part as it is written, and the notes."""
    own = {key: value for key, value in flax_families.config(case)[part].items() if key not in OF_THE_WRITER}
    plan = convert.plan_conversion("flax-transformers", flax_families.specs(case, folder, **{part: own | keys}))
    assert plan.config is not None
    return plan.config[part], plan.notes


@pytest.mark.parametrize(
    ("case", "part"),
    [("encoder_decoder", "encoder"), ("encoder_decoder", "decoder"), ("vision_text_dual_encoder", "text_config"), ("clip.CLIPModel", "vision_config")],
)  # fmt: skip
def test_keys_about_the_code_that_wrote_the_file(case: str, part: str, tmp_path: Path) -> None:
    found, notes = written(case, part, OF_THE_WRITER, tmp_path)
    assert not found.keys() & OF_THE_WRITER.keys() and found["model_type"]
    assert found == written(case, part, {}, tmp_path)[0] and not any("_config" in note for note in notes)


@pytest.mark.parametrize(
    ("case", "part", "key", "value"),
    [
        ("encoder_decoder", "encoder", "chunk_size_feed_forward", 4),
        ("encoder_decoder.projected", "decoder", "chunk_size_feed_forward", 4),
        ("encoder_decoder", "encoder", "is_causal", False),
        ("vision_text_dual_encoder", "text_config", "chunk_size_feed_forward", 4),
    ],
)
def test_keys_that_the_flax_class_does_not_read(case: str, part: str, key: str, value: Any, tmp_path: Path) -> None:
    """A class of transformers reads them: with chunks it stops at a text whose length they do not divide."""
    found, notes = written(case, part, {key: value}, tmp_path)
    assert key not in found
    (note,) = (note for note in notes if f"{part}.{key}" in note)
    assert "and that of the output none: the flax c" in note


@pytest.mark.slow
def test_a_part_with_chunks_computes_what_the_flax_class_did(tmp_path: Path) -> None:
    case = "encoder_decoder"
    encoder = flax_families.config(case)["encoder"] | {"chunk_size_feed_forward": 4}
    convert.convert("flax-transformers", flax_families.write(case, tmp_path / "in", encoder=encoder), tmp_path / "out")
    loaded, _ = flax_table.loaded(tmp_path / "out")
    assert flax_table.error(loaded, case) < flax_table.BOUND


def test_labels_are_no_configuration(tmp_path: Path) -> None:
    """A label may be called as a key."""
    case = "bert.BertForSequenceClassification"
    labels = {f"LABEL_{k}": k for k in range(1, len(flax_families.config(case)["label2id"]))} | {"dtype": 0}
    plan = convert.plan_conversion("flax-transformers", flax_families.specs(case, tmp_path, label2id=labels))
    assert plan.config is not None and plan.config["label2id"] == labels
