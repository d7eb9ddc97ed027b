"""A fact that one formula of the rules and the tree determine is not asked for; one that they leave open is."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

import convert
from support import maxtext
from support.drawn_cases import DrawnCases
from support.goldens import SpecsOnly, checkpoint
from support.paths import GOLDEN

IMAGE = {"image_size": 12}


def vit(width: int) -> SpecsOnly:
    """The golden of a ViT with a class token, of width 12, with another width of its feed-forward blocks."""
    shapes = DrawnCases(GOLDEN / "vit").shapes("vit")
    return SpecsOnly({name: (tuple(width if size == 24 else size for size in x), "float32") for name, x in shapes.items()})  # fmt: skip


def config(source: SpecsOnly, to: str, **said: Any) -> dict[str, Any]:
    plan = convert.plan_conversion("vit-jax", source, to=to, settings=IMAGE | said)
    assert plan.config is not None
    return dict(plan.config)


@pytest.mark.parametrize("width", [12, 24, 36, 48])
def test_a_whole_ratio_of_widths_is_that_of_the_tree(width: int) -> None:
    assert config(vit(width), "timm")["model_args"]["mlp_ratio"] == width / 12


@pytest.mark.parametrize("width", [7, 20, 53])
def test_another_ratio_is_asked_for_by_the_class_that_needs_it(width: int) -> None:
    """So a ViT-g: 1408 and 6144. The class of transformers takes the width itself."""
    assert config(vit(width), "transformers")["intermediate_size"] == width
    with pytest.raises(convert.PlanError) as refused:
        config(vit(width), "timm")
    (finding,) = refused.value.findings
    assert finding.code == "fact-missing" and "--set mlp_ratio=" in finding.fix
    assert config(vit(width), "timm", mlp_ratio=width / 12 + 0.01)["model_args"]["mlp_ratio"] > 0
    with pytest.raises(convert.PlanError) as refused:
        config(vit(width), "timm", mlp_ratio=width / 12 + 0.1)
    assert [one.code for one in refused.value.findings] == ["size-conflict"]


def test_what_several_numbers_solve_is_asked_for() -> None:
    """Images of 12 to 15 pixels have three patches of 4 along each side."""
    plan = convert.plan_conversion("vit-jax", vit(24))
    with pytest.raises(convert.PlanError) as refused:
        assert plan.config
    assert [one.code for one in refused.value.findings] == ["fact-missing"] and "image_size" in str(refused.value)


@pytest.mark.parametrize("case", ["deepseek2", "deepseek3"])
def test_parts_of_a_head_follow_from_one_another(case: str) -> None:
    """R + qk_rope_head_dim is a size of the tree, and so is qk_nope_head_dim + qk_rope_head_dim."""
    parts = ("qk_nope_head_dim", "qk_rope_head_dim")
    settings = maxtext.settings(case)
    plan = convert.plan_conversion(maxtext.rules(case), maxtext.checkpoint(case), settings=settings)
    others = {name: value for name, value in settings.items() if name not in parts}
    assert others != settings
    again = convert.plan_conversion(maxtext.rules(case), maxtext.checkpoint(case), settings=others)
    assert again.config == plan.config and all(again.facts[name] == settings[name] for name in parts)


def test_key_heads_that_config_json_lacks_are_those_of_the_tree(tmp_path: Path) -> None:
    """LLaMA 1's configuration has no such key; the width of all key heads is in the tree, and that of one follows from the query heads."""
    folder = shutil.copytree(checkpoint("llama"), tmp_path / "ckpt")
    given = json.loads((folder / "config.json").read_text())
    del given["num_key_value_heads"]
    (folder / "config.json").write_text(json.dumps(given))
    convert.convert("llama", folder, tmp_path / "out")
    convert.convert("llama", checkpoint("llama"), tmp_path / "whole")
    made, whole = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("out", "whole"))
    assert made == whole
    assert (
        load_file(tmp_path / "out/model.safetensors").keys() == load_file(tmp_path / "whole/model.safetensors").keys()
    )
