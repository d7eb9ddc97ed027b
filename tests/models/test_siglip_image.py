"""The image towers of SigLIP and SigLIP 2, and CLIPPO, for timm: it computes what big_vision did."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import convert
from convert.core.errors import ConvertError
from convert.rules import library
from support import timm_models
from support.memory_source import MemorySource
from support.paths import GOLDEN
from support.rule_mistakes import assert_mistake_is_named
from support.timm_models import CLIPPO, RATIO
from support.value_mistakes import assert_mistakes_are_named

pytestmark = pytest.mark.slow

GOLD, CASE = CLIPPO, "clippo"
SET = RATIO
SIGLIP = GOLDEN / "siglip"


def converted(folder: Path, **options: Any) -> tuple[Path, Path]:
    return timm_models.converted(CASE, folder, **options)


@pytest.mark.parametrize("case", timm_models.EMBEDDINGS)
def test_timm_computes_what_big_vision_did(case: str, tmp_path: Path) -> None:
    """Images, and of CLIPPO rendered texts, which pass the same tower."""
    _, out = timm_models.converted(case, tmp_path)
    single, double = timm_models.errors(case, out)
    assert single < 2e-6 and double < 1e-12


def test_the_image_tower_of_siglip_leaves_the_text_tower_out() -> None:
    """The family's name takes the rules that support timm."""
    plan = convert.plan_conversion("siglip2", SIGLIP / "ckpt.npz", to="timm", settings=SET)
    assert plan.rules.model == "siglip-image"
    assert {drop.leaf.split("/")[1] for drop in plan.dropped} == {"txt", "t", "b"}


@pytest.mark.parametrize("root", ["params/", ""])
def test_trees_without_params_are_for_timm_too(root: str) -> None:
    """big_vision's files have `params/`; a tree that was saved alone has not."""
    for name, tree in (
        ("siglip2", {k.removeprefix("params/"): x for k, x in _siglip().items()}),
        ("clippo", GOLD.leaves(CASE)),
    ):
        source = MemorySource({f"{root}{leaf}": x for leaf, x in tree.items()})
        plan = convert.plan_conversion(name, source, to="timm", settings=SET)
        assert {drop.leaf.removeprefix(root) for drop in plan.dropped if "txt" not in drop.leaf} == tree.keys() & {
            "t",
            "b",
        }


def _siglip() -> dict[str, Any]:
    with np.load(SIGLIP / "ckpt.npz") as stored:
        return {name: stored[name] for name in stored.files}


def test_timms_ratios_give_the_published_widths() -> None:
    """timm's feed-forward blocks are `int(width * mlp_ratio)` wide."""
    (rules,) = library.find_rules("clippo")
    assert len(rules.versions) == 4
    assert all(int(one.sizes["W"] * one.facts["mlp_ratio"]) == one.sizes["M"] for one in rules.versions)


def test_a_damaged_text_tower_does_not_make_an_image_tower(tmp_path: Path) -> None:
    with np.load(SIGLIP / "ckpt.npz") as stored:
        np.savez(tmp_path / "less.npz", **{name: stored[name] for name in stored.files if "txt/head" not in name})  # type: ignore[arg-type]
    with pytest.raises(ConvertError, match="txt/head"):
        convert.plan_conversion("siglip2", tmp_path / "less.npz", settings=SET)


def test_forth_and_back_gives_the_same_leaves(tmp_path: Path) -> None:
    source, out = converted(tmp_path)
    for layout in ("UNSCANNED", "SCANNED"):
        convert.convert_back("clippo", out, tmp_path / f"{layout}.npz", layout=layout, form="npz", settings=SET)
    with np.load(source) as first, np.load(tmp_path / "UNSCANNED.npz") as second:
        tower = [name for name in first.files if name != "params/t"]
        assert sorted(second.files) == sorted(tower)
        assert all(first[name].tobytes() == second[name].tobytes() for name in tower)
    convert.convert("clippo", tmp_path / "SCANNED.npz", tmp_path / "again", settings=SET)
    one, two = (load_file(folder / "model.safetensors") for folder in (out, tmp_path / "again"))
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def test_mistakes_in_the_file_are_named(tmp_path: Path) -> None:
    source, out = converted(tmp_path)
    assert assert_mistakes_are_named(out, source) >= 9


RULE_MISTAKES = (  # a text of the rules, what stands there instead, what the check calls it
    ("{key,value}/kernel", "{value,key}/kernel", "fused parts in another order"),
    ("Transformer/encoderblock_{j}/MultiHeadDotProductAttention_0/{query,key,value}/bias", "Transformer/encoderblock_{j}/MultiHeadDotProductAttention_0/{query,value,key}/bias", "fused parts in another order"),
    ("blocks.{j}.norm{1,2}", "blocks.{j}.norm{2,1}", "of another tensor"),
    ("NHWC,HWIO->NHWC", "NHWC,WHIO->NHWC", "spatial axes exchanged"),
    ("multiplies_by: scale\n  epsilon: $epsilon\n  axes: W\n  layer_norm: {timm: attn_pool.norm", "multiplies_by: 1+scale\n  epsilon: $epsilon\n  axes: W\n  layer_norm: {timm: attn_pool.norm", "1+scale on a plain norm"),
    ("from: head/kernel", "prescaled_by: 2\n  from: head/kernel", "multiplied by a number"),
)  # fmt: skip


@pytest.mark.parametrize(("old", "new", "name"), RULE_MISTAKES)
def test_a_mistake_in_the_rules_is_named(old: str, new: str, name: str, tmp_path: Path) -> None:
    assert_mistake_is_named("clippo", converted(tmp_path)[0], old, new, name, tmp_path / "wrong", settings=SET)
