"""ViT and AugReg: what vit_jax's own code computed, and what transformers computes from the converted file; timm's tensors beside them.

test_vit_pools.py has timm's outputs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flax.training.checkpoints import convert_pre_linen
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors.numpy import load_file

import convert
from convert.numerics.lift_torch import lifted
from convert.verify.run import check
from support.drawn_cases import DrawnCases
from support.goldens import SpecsOnly, relative_error
from support.paths import GOLDEN
from support.rule_mistakes import assert_mistake_is_named
from support.value_mistakes import assert_mistakes_are_named

pytestmark = pytest.mark.slow

GOLD, CASE = DrawnCases(GOLDEN / "vit"), "vit"
SET = {"image_size": 12}
PUBLISHED = {"LayerNorm_1": "LayerNorm_2", "MlpBlock_0": "MlpBlock_3", "MultiHeadDotProductAttention_0": "MultiHeadDotProductAttention_1"}  # fmt: skip


def published_names() -> dict[str, np.ndarray[Any, Any]]:
    """The leaves with the names of the published files."""
    return {"/".join(PUBLISHED.get(key, key) for key in name.split("/")): x for name, x in GOLD.leaves(CASE).items()}


def write(folder: Path, leaves: dict[str, np.ndarray[Any, Any]] | None = None) -> Path:
    np.savez(folder / "vit.npz", **(published_names() if leaves is None else leaves))  # type: ignore[arg-type]
    return folder / "vit.npz"


def converted(folder: Path, **options: Any) -> tuple[Path, Path]:
    source = write(folder)
    convert.convert("vit-jax", source, folder / "out", settings=SET, **options)
    return source, folder / "out"


def test_transformers_computes_what_vit_jax_did(tmp_path: Path) -> None:
    from transformers import ViTForImageClassification

    _, out = converted(tmp_path)
    model, info = ViTForImageClassification.from_pretrained(out, output_loading_info=True, dtype=torch.float32, attn_implementation="eager")  # fmt: skip
    assert not any(info.values()), info
    pixels = torch.from_numpy(GOLD.values(CASE, "in")["images"]).permute(0, 3, 1, 2)
    model = model.requires_grad_(False).eval()
    assert relative_error(model(pixels).logits.numpy(), GOLD.values(CASE, "out")["logits"]) < 2e-6
    with lifted():
        exact = model.double()(pixels.double()).logits.numpy()
    assert relative_error(exact, GOLD.values(CASE, "out64")["logits"]) < 1e-12


def test_published_names_are_those_that_flax_renames() -> None:
    named = flatten_dict(convert_pre_linen(unflatten_dict(published_names(), sep="/")), sep="/")
    assert named.keys() == GOLD.leaves(CASE).keys()


@pytest.mark.parametrize("to", ["transformers", "timm"])
def test_new_names_and_a_train_state_give_the_same_bytes(to: str, tmp_path: Path) -> None:
    _, out = converted(tmp_path, to=to)
    wanted = load_file(out / "model.safetensors")
    states = {"new": GOLD.leaves(CASE), "state": {f"opt/target/{name}": x for name, x in published_names().items()}}
    for name, leaves in states.items():
        (tmp_path / name).mkdir()
        convert.convert("vit-jax", write(tmp_path / name, leaves), tmp_path / name / "out", settings=SET, to=to)
        again = load_file(tmp_path / name / "out" / "model.safetensors")
        assert again.keys() == wanted.keys() and all(np.array_equal(x, wanted[key]) for key, x in again.items())


def test_timm_has_the_rows_of_q_k_and_v_in_one_tensor(tmp_path: Path) -> None:
    source, out = converted(tmp_path, to="timm")
    convert.convert("vit-jax", source, tmp_path / "hf", settings=SET)
    timm, hf = load_file(out / "model.safetensors"), load_file(tmp_path / "hf" / "model.safetensors")
    place = "vit.encoder.layer.1.attention.attention"
    for role in ("weight", "bias"):
        assert np.array_equal(timm[f"blocks.1.attn.qkv.{role}"], np.concatenate([hf[f"{place}.{part}.{role}"] for part in ("query", "key", "value")]))  # fmt: skip
    assert {name: timm[name].shape for name in ("cls_token", "pos_embed", "patch_embed.proj.weight", "head.weight")} == {
        "cls_token": (1, 1, 12), "pos_embed": (1, 10, 12), "patch_embed.proj.weight": (12, 3, 4, 4), "head.weight": (5, 12)
    }  # fmt: skip


def test_published_sizes_need_no_setting() -> None:
    size = {12: 768, 3: 12, 24: 3072, 10: 577, 5: 1000}
    specs = {}
    for name, x in published_names().items():
        shape = (16, 16, 3, 768) if name == "embedding/kernel" else tuple(64 if n == 4 else size.get(n, n) for n in x.shape)  # fmt: skip
        for layer in range(12) if "encoderblock_0" in name else [0]:
            if "encoderblock_1" not in name and "encoderblock_2" not in name:
                specs[name.replace("encoderblock_0", f"encoderblock_{layer}")] = (shape, "float32")
    plan = convert.plan_conversion("vit-jax", SpecsOnly(specs))
    assert plan.version == "patch16-384" and plan.config is not None and plan.config["image_size"] == 384


@pytest.mark.parametrize("to", ["transformers", "timm"])
def test_mistakes_in_the_file_are_named(to: str, tmp_path: Path) -> None:
    source, out = converted(tmp_path, to=to)
    assert assert_mistakes_are_named(out, source) >= 9


RULE_MISTAKES = (  # a text of the rules, what stands there instead, what the check calls it
    ("{query,key,value}/kernel", "{key,query,value}/kernel", "of another tensor"),
    ("{query,key,value}/bias", "{query,value,key}/bias", "of another tensor"),
    ("multiplies_by: scale\n  epsilon: $epsilon\n  axes: D\n  layer_norm: {transformers: vit.layernorm", "multiplies_by: 1+scale\n  epsilon: $epsilon\n  axes: D\n  layer_norm: {transformers: vit.layernorm", "1+scale on a plain norm"),
    ("NHWC,HWIO->NHWC", "NHWC,WHIO->NHWC", "spatial axes exchanged"),
    ("{query,key,value}/kernel", "{query,value,key}/kernel", "of another tensor"),
    ("from: cls", "prescaled_by: sqrt(D)\n  from: cls", "multiplied by a number"),
)  # fmt: skip


@pytest.mark.parametrize(("old", "new", "name"), RULE_MISTAKES)
def test_a_mistake_in_the_rules_is_named(old: str, new: str, name: str, tmp_path: Path) -> None:
    assert_mistake_is_named("vit-jax", write(tmp_path), old, new, name, tmp_path / "out", settings=SET)


def test_another_gelu_in_config_json_is_named(tmp_path: Path) -> None:
    source, out = converted(tmp_path)
    (out / "config.json").write_text((out / "config.json").read_text().replace("gelu_pytorch_tanh", "gelu"))
    (report,) = check(out, source, levels=["layers"]).levels
    assert report.verdict.value == "failed" and any("hidden_act" in str(f) for f in report.findings)
