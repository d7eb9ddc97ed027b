"""SigLIP 2: what big_vision's own code computed for images of three shapes, and what transformers computes from the converted file."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import convert
from convert.core.errors import ConvertError
from support import siglip2
from support.paths import GOLDEN
from support.rule_mistakes import assert_mistake_is_named
from support.value_mistakes import assert_mistakes_are_named

pytestmark = pytest.mark.slow

MODEL = "siglip2-naflex"
SET = {"mlp_ratio": 40 / 24}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return siglip2.write(tmp_path)


def test_transformers_computes_what_big_vision_did(source: Path, tmp_path: Path) -> None:
    """The table of positions is resized to 4 x 4, 3 x 5 and 2 x 8, with antialiasing; transformers does so in float32 in any precision."""
    convert.convert("siglip2", source, tmp_path / "out")
    single, double = siglip2.errors(tmp_path / "out")
    assert single < 2e-6 and double < 2e-7


def test_the_tree_says_which_of_both_it_is(source: Path) -> None:
    plan = convert.plan_conversion("siglip2", source)
    assert plan.rules.model == MODEL and (plan.sizes["P"], plan.sizes["T"]) == (2, 4)
    assert convert.plan_conversion("siglip2", GOLDEN / "siglip" / "ckpt.npz").rules.model == "siglip"
    with pytest.raises(ConvertError):
        convert.plan_conversion("siglip", source)


def test_forth_and_back_gives_the_same_leaves(source: Path, tmp_path: Path) -> None:
    convert.convert("siglip2", source, tmp_path / "out")
    convert.convert_back(MODEL, tmp_path / "out", tmp_path / "back.npz", source, form="npz")
    first, second = dict(np.load(source)), dict(np.load(tmp_path / "back.npz"))
    assert sorted(first) == sorted(second)
    assert all(first[name].tobytes() == second[name].tobytes() for name in first)


def test_stacked_layers_give_the_same_tensors(source: Path, tmp_path: Path) -> None:
    convert.convert("siglip2", source, tmp_path / "out")
    convert.convert_back(MODEL, tmp_path / "out", tmp_path / "scanned.npz", layout="SCANNED", form="npz")
    assert "img/Transformer/encoderblock/LayerNorm_0/scale" in "".join(np.load(tmp_path / "scanned.npz").files)
    convert.convert(MODEL, tmp_path / "scanned.npz", tmp_path / "again")
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "again"))
    assert one.keys() == two.keys() and all(np.array_equal(one[name], two[name]) for name in one)


def test_mistakes_in_the_file_are_named(source: Path, tmp_path: Path) -> None:
    convert.convert("siglip2", source, tmp_path / "out")
    assert assert_mistakes_are_named(tmp_path / "out", source) >= 9


NORM = "\n  epsilon: $epsilon\n  axes: W\n  layer_norm: vision_model.post_layernorm"
FEED = "from: txt/Encoder_0/encoderblock_{i}/MlpBlock_0/Dense_0/kernel"
RULE_MISTAKES = (  # a text of the rules, what stands there instead, what the check calls it
    ("axes: (T X)W", "axes: (X T)W", "axes of a head swapped"),
    ("self_attn.{q,k,v}_proj\n\n- einsum: ...AB", "self_attn.{k,q,v}_proj\n\n- einsum: ...AB", "of another tensor"),
    (f"multiplies_by: scale{NORM}", f"multiplies_by: 1+scale{NORM}", "1+scale on a plain norm"),
    ("layers.{j}.layer_norm{1,2}", "layers.{j}.layer_norm{2,1}", "of another tensor"),
    (FEED, f"prescaled_by: 2\n  {FEED}", "multiplied by a number"),
    ("- from: img/MAPHead_0/probe", "- prescaled_by: sqrt(W)\n  from: img/MAPHead_0/probe", "multiplied by a number"),
)  # fmt: skip


@pytest.mark.parametrize(("old", "new", "name"), RULE_MISTAKES)
def test_a_mistake_in_the_rules_is_named(old: str, new: str, name: str, source: Path, tmp_path: Path) -> None:
    assert_mistake_is_named(MODEL, source, old, new, name, tmp_path / "out")


TIMM = {  # parts of timm's names -> those of transformers' vision tower, the first that fit first
    "embeds.proj": "embeddings.patch_embedding",
    "embeds.pos_embed": "embeddings.position_embedding.weight",
    "attn_pool.latent": "head.probe",
    "attn_pool.proj": "head.attention.out_proj",
    "attn_pool.norm": "head.layernorm",
    "attn_pool": "head",
    "blocks": "encoder.layers",
    "attn.proj": "self_attn.out_proj",
    ".norm": ".layer_norm",
}


def test_the_image_tower_for_timm_has_the_tensors_of_transformers_tower(source: Path, tmp_path: Path) -> None:
    convert.convert("siglip2", source, tmp_path / "one")
    convert.convert("siglip2", source, tmp_path / "out", to="timm", settings=SET)
    one, made = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "out"))
    seen = set()
    for name, x in made.items():
        for part, other in TIMM.items():
            name = name.replace(part, other)
        name = f"vision_model.{name}" if not name.startswith("norm.") else f"vision_model.post_layer{name}"
        role = name.rpartition(".")[2]
        if "attn.qkv" in name:
            names = [name.replace("attn.qkv", f"self_attn.{of}_proj") for of in "qkv"]
            wanted = np.concatenate([one[of] for of in names])
        elif name in (f"vision_model.head.q.{role}", f"vision_model.head.kv.{role}"):
            names = [f"vision_model.head.attention.in_proj_{role}"]
            wanted = one[names[0]][: len(x)] if ".q." in name else one[names[0]][-len(x) :]
        else:
            names, wanted = [name], one[name]
        seen |= set(names)
        assert np.array_equal(x.reshape(wanted.shape), wanted), name
    assert seen == {name for name in one if name.startswith("vision_model.")}
    args = json.loads((tmp_path / "out" / "config.json").read_text())["model_args"]
    assert (args["pos_embed_grid_size"], args["pos_embed_interp_mode"], args["patch_size"]) == ([4, 4], "bilinear", 2)
    assert assert_mistakes_are_named(tmp_path / "out", source, settings=SET) >= 9
    for old, new, name in ((".TXW", ".XTW", "axes permuted"), ("norm{1,2}", "norm{2,1}", "of another tensor")):
        assert_mistake_is_named("siglip-naflex-image", source, old, new, name, tmp_path / f"wrong{new[-4:-1]}", settings=SET)  # fmt: skip
