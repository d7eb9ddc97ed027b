"""OWL-ViT and OWLv2: what scenic's own code computed, and what transformers computes from the converted files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from flax.training.checkpoints import save_checkpoint
from flax.traverse_util import flatten_dict
from safetensors.numpy import load_file

import convert
from convert.verify.run import check
from support.goldens import SpecsOnly
from support.owl_vit import (
    CASES,
    FORMS,
    PUBLISHED,
    converted,
    errors,
    largest,
    leaves,
    loaded,
    outputs,
    settings,
    tree,
    write,
)
from support.rule_mistakes import assert_mistake_is_named
from support.value_mistakes import assert_mistakes_are_named

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("case", CASES)
def test_transformers_computes_what_scenic_did(case: str, tmp_path: Path) -> None:
    """With scenic's GELU and epsilon in its heads; texts are padded, and one is padding alone."""
    _, out = converted(case, tmp_path)
    single, double = errors(case, out)
    assert single < 2e-5 and double < 1e-7


@pytest.mark.parametrize("case", CASES)
def test_the_heads_of_transformers_differ_by_gelu_and_epsilon(case: str, tmp_path: Path) -> None:
    """The notes say so, until --set confirms them."""
    source, out = converted(case, tmp_path)
    found = outputs(case, loaded(case, out), torch.float32)
    boxes = largest(case, {"pred_boxes": found["pred_boxes"]}, "out")
    rest = largest(case, {name: x for name, x in found.items() if name not in ("pred_boxes", "objectness_logits")}, "out")  # fmt: skip
    assert 2e-5 < boxes < 1e-3 and 2e-6 < rest < 1e-4
    told = convert.plan_conversion("owl-vit", source, settings={"image_size": settings(case)["image_size"]})
    silent = convert.plan_conversion("owl-vit", source, settings=settings(case))
    for words in ("tanh approximation of GELU", "epsilon 1e-6"):
        assert any(words in note for note in told.config_notes) and not any(words in note for note in silent.config_notes)  # fmt: skip
    for other in ({"head_activation": "gelu_tanh"}, {"merged_epsilon": 1e-6}):
        with pytest.raises(convert.PlanError, match="its class has one epsilon|heads of its class"):
            convert.plan_conversion("owl-vit", source, settings={**settings(case), **other})


@pytest.mark.parametrize("case", CASES)
def test_each_form_of_the_file_gives_the_same_tensors(case: str, tmp_path: Path) -> None:
    """Names of today's code, of OWLv2's files and of OWL-ViT's; the last with the weights in an optimizer."""
    made = {}
    for form in FORMS:
        (tmp_path / form).mkdir()
        _, out = converted(case, tmp_path / form, form)
        made[form] = load_file(out / "model.safetensors")
        assert json.loads((out / "config.json").read_text())["model_type"] == case
    first = made.pop("today")
    for other in made.values():
        assert other.keys() == first.keys() and all(np.array_equal(x, first[name]) for name, x in other.items())


def test_a_train_state_of_today_is_read(tmp_path: Path) -> None:
    """scenic's `save_checkpoint` calls flax's, which writes with Orbax today."""
    state = {"opt_state": {"mu": np.ones(2, np.float32)}, "model_state": {}, "rng": np.zeros(2, np.uint32)}
    path = save_checkpoint(tmp_path / "steps", {**tree("owlv2", "today"), **state}, 7)
    plan = convert.plan_conversion("owl-vit", path, settings=settings("owlv2"))
    assert plan.rules.model == "owlv2" and {drop.leaf.split("/")[0] for drop in plan.dropped} == {"opt_state", "rng", "global_step"}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_way_back_gives_scenics_leaves(case: str, tmp_path: Path) -> None:
    """Without a checkpoint: with the names of the published OWLv2, or of today's code."""
    _, out = converted(case, tmp_path)
    for layout, form in (("PUBLISHED", "OWLv2"), ("LINEN", "today")):
        convert.convert_back("owl-vit", out, tmp_path / "back.npz", layout=layout, form="npz", overwrite=True)
        wanted = flatten_dict({"params": tree(case, form)["params"]}, sep="/")
        with np.load(tmp_path / "back.npz") as back:
            assert set(back.files) == set(wanted)
            assert all(back[name].tobytes() == np.asarray(x).tobytes() for name, x in wanted.items())


def test_masks_and_old_leaves_are_left_out(tmp_path: Path) -> None:
    file = tmp_path / "more.npz"
    own = {f"params/{name}": x for name, x in leaves("owlvit").items()}
    more = ("class_head/padding", "class_head/padding_bias", "obj_mask_head/Dense_0/kernel")
    np.savez(file, **own, **{f"params/{name}": np.ones(3, np.float32) for name in more})  # type: ignore[arg-type]
    plan = convert.plan_conversion("owl-vit", file, settings=settings("owlvit"))
    assert {drop.leaf for drop in plan.dropped} == {f"params/{name}" for name in more}


PUBLISHED_SIZES = {  # configs/, clip/model.py: patch, layers, width, width of the text tower, image
    "patch32-768": ("owlvit", 32, 12, 768, 512, 768),
    "patch16-768": ("owlvit", 16, 12, 768, 512, 768),
    "patch14-840": ("owlvit", 14, 24, 1024, 768, 840),
    "patch14-672": ("owlvit", 14, 24, 1024, 768, 672),
    "patch16-960": ("owlv2", 16, 12, 768, 512, 960),
    "patch14-1008": ("owlv2", 14, 24, 1024, 768, 1008),
}


@pytest.mark.parametrize("version", PUBLISHED_SIZES)
def test_published_sizes_need_no_setting(version: str) -> None:
    """Shapes of the golden's leaves, each number for what it is in the published model; the class has these tensors."""
    import transformers

    case, P, layers, W, D, image = PUBLISHED_SIZES[version]
    size = {128: W, 512: 4 * W, 20: D, 80: 4 * D, 26: (image // P) ** 2 + 1, 43: 49408, 7: 16, 64: 64, 3: 3, 1: 1}
    specs = {}
    for name, x in flatten_dict(tree(case, PUBLISHED[case]), sep="/").items():
        heads = ({2: W // 64} if "visual" in name else {5: D // 64, 4: 64}) if "attn" in name else {4: 4}
        shape = (P, P, 3, W) if "conv1" in name else tuple({**size, **heads}.get(n, n) for n in np.shape(x))
        for layer in range(layers if "visual" in name else 12) if "resblocks.0" in name else [0]:
            if not any(f"resblocks.{k}" in name for k in (1, 2)):
                specs[name.replace("resblocks.0", f"resblocks.{layer}")] = (shape, np.asarray(x).dtype.name)
    plan = convert.plan_conversion("owl-vit", SpecsOnly(specs))
    assert plan.version == version and plan.config is not None and plan.config["vision_config"]["image_size"] == image
    config = transformers.AutoConfig.for_model(**plan.config)
    with torch.device("meta"):
        made = getattr(transformers, plan.config["architectures"][0])(config).state_dict()
    assert {name: tuple(x.shape) for name, x in made.items()} == {step.name: step.spec.shape for step in plan.steps}


@pytest.mark.parametrize("case", CASES)
def test_mistakes_in_the_file_are_named(case: str, tmp_path: Path) -> None:
    source, out = converted(case, tmp_path)
    assert assert_mistakes_are_named(out, source) >= 9


RULE_MISTAKES = (  # a text of the rules, what stands there instead, what the check calls it
    ("visual/transformer/resblocks.{j}/attn/{query,key,value}/kernel", "visual/transformer/resblocks.{j}/attn/{key,query,value}/kernel", "of another tensor"),
    ("owlv2.vision_model.{pre,post}_layernorm", "owlv2.vision_model.{post,pre}_layernorm", "of another tensor"),
    ("NHWC,HWIO->NHWC", "NHWC,WHIO->NHWC", "spatial axes exchanged"),
    ("linear: class_head.logit_{shift,scale}", "linear: class_head.logit_{scale,shift}", "of another tensor"),
    ("multiplies_by: scale\n  epsilon: $merged_epsilon", "multiplies_by: 1+scale\n  epsilon: $merged_epsilon", "1+scale on a plain norm"),
    ("from: backbone/clip/visual/class_embedding", "prescaled_by: sqrt(W)\n  from: backbone/clip/visual/class_embedding", "multiplied by a number"),
    ("text_model.encoder.layers.{i}.self_attn.{q,k,v}_proj", "text_model.encoder.layers.{i}.self_attn.{q,v,k}_proj", "of another tensor"),
)  # fmt: skip


@pytest.mark.parametrize(("old", "new", "name"), RULE_MISTAKES)
def test_a_mistake_in_the_rules_is_named(old: str, new: str, name: str, tmp_path: Path) -> None:
    source = write("owlv2", tmp_path)
    assert_mistake_is_named("owlv2", source, old, new, name, tmp_path / "out", settings=settings("owlv2"))


def test_another_activation_in_config_json_is_named(tmp_path: Path) -> None:
    source, out = converted("owlvit", tmp_path)
    (out / "config.json").write_text((out / "config.json").read_text().replace("quick_gelu", "gelu"))
    (report,) = check(out, source, levels=["layers"]).levels
    assert report.verdict.value == "failed" and any("hidden_act" in str(f) for f in report.findings)
