"""Sizes in the config.json of diffusers' flax models: one that the tree contradicts is refused by one error that names both sides."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import convert
from support import config_numbers, diffusers_cases
from support.goldens import SpecsOnly
from support.paths import GOLDEN

FAMILY = "flax-diffusers"
# Keys of numbers of which another one, or none, is accepted -> why.
NO_SIZE = {
    r"sample_size|freq_shift|scaling_factor": "how the class computes: no leaf shows the number",
    r"attention_head_dim(\.\d)?": "a number of heads: divides the width; no leaf shows it",
    r"addition_embed_type_num_heads": "of a kind of embedding that no flax class has",
    r"addition_time_embed_dim": "the pooled text has the rest of the width",
    r"norm_num_groups": "divides the widths; no leaf shows it",
    r"conditioning_embedding_out_channels\.[12]": "between the first and the last: not compared",
}  # fmt: skip
# The same of one case.
OTHER_PART = {
    "unet.sdxl": {
        ("transformer_layers_per_block.0", False): "its block has no attention",
        ("projection_class_embeddings_input_dim", True): "the class says that it needs one",
    }
}
# Numbers that are the class's defaults, so that the key may be missing.
DEFAULTS = ("in_channels", "out_channels", "latent_channels", "layers_per_block", "transformer_layers_per_block")


def specs(case: str, folder: Path, **keys: Any) -> SpecsOnly:
    """Write the config.json of a case, and return its leaves without values beside it."""
    found = SpecsOnly({name: (shape, "float32") for name, shape in diffusers_cases.ALL.shapes(case).items()})
    found.path = folder
    (folder / "config.json").write_text(json.dumps(diffusers_cases.ALL.config(case) | keys))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("case", diffusers_cases.CASES)
def test_each_size_is_compared_with_the_tree(case: str, tmp_path: Path) -> None:
    stated = diffusers_cases.ALL.config(case)
    found = config_numbers.accepted(FAMILY, stated, specs(case, tmp_path))
    wrong = [
        (key, removed)
        for key, removed in found
        if not any(re.fullmatch(one, key) for one in NO_SIZE)
        and not (removed and key in DEFAULTS)
        and (key, removed) not in OTHER_PART.get(case, {})
    ]
    assert wrong == []


def plus(value: Any, more: float) -> Any:
    """Return the value with something added to its integers, which makes them numbers with a decimal point."""
    if isinstance(value, list):
        return [plus(one, more) for one in value]
    return value + more if isinstance(value, int) and not isinstance(value, bool) else value


@pytest.mark.parametrize("more", [0.0, 0.5])
@pytest.mark.parametrize("case", ["unet.sdxl", "vae", "controlnet"])
def test_no_size_is_a_fraction(case: str, more: float, tmp_path: Path) -> None:
    """Copied into config.json, 32.0 stops the class as it makes its layers."""
    stated = diffusers_cases.ALL.config(case)
    wrong = {
        key: plus(value, more) for key, value in stated.items() if json.dumps(plus(value, more)) != json.dumps(value)
    }
    assert len(wrong) > 6
    with pytest.raises(convert.PlanError) as error:
        convert.plan_conversion(FAMILY, specs(case, tmp_path, **wrong))
    found = {one.problem.partition(" in the config.json")[0]: one for one in error.value.findings}
    assert found.keys() == wrong.keys()
    assert all(
        "integer" in one.expected and one.got == json.dumps(wrong[key]) and one.fix for key, one in found.items()
    )


@pytest.mark.parametrize(
    ("case", "keys", "says"),
    [
        ("unet", {"block_out_channels": [32, 96]}, "has block_out_channels.1 = 96, and the tensor down_blocks.1.resnets.0.time_emb_proj.weight has 64 in axis 0"),
        ("unet", {"cross_attention_dim": 13}, "has cross_attention_dim = 13, and the tensor down_blocks.0.attentions.0.transformer_blocks.0.attn2.to_k.weight has 12 in axis 1"),
        ("unet", {"only_cross_attention": True}, "has cross_attention_dim = 12, as only_cross_attention is true, and the tensor down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_k.weight has 32 in axis 1"),
        ("unet.linear", {"only_cross_attention": False}, "has block_out_channels.0 = 32, as only_cross_attention is false, and the tensor down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_k.weight has 12 in axis 1"),
        ("unet", {"attention_head_dim": 5}, "has attention_head_dim = 5, which does not divide block_out_channels.0 = 32"),
        ("unet.linear", {"attention_head_dim": [2, 5]}, "has attention_head_dim.1 = 5, which does not divide block_out_channels.1 = 64"),
        ("unet.sdxl", {"projection_class_embeddings_input_dim": 59}, "has projection_class_embeddings_input_dim = 59, and the tensor add_embedding.linear_1.weight has 58 in axis 1"),
        ("vae", {"latent_channels": 5}, "has latent_channels = 5, and the tensor decoder.conv_in.weight has 4 in axis 1"),
        ("controlnet", {"in_channels": 3}, "has in_channels = 3, and the tensor conv_in.weight has 4 in axis 1"),
    ],
)  # fmt: skip
def test_one_error_names_both_sides(case: str, keys: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(convert.PlanError) as error:
        convert.plan_conversion(FAMILY, specs(case, tmp_path, **keys))
    (found,) = error.value.findings
    assert found.code == "config-conflict" and says in found.problem


@pytest.mark.parametrize(
    ("case", "key", "wrong", "expected"),
    [
        ("unet", "freq_shift", "0", "an integer of at least 0 or null"),
        *((case, "cross_attention_dim", [12, 12], "an integer of at least 1 or null") for case in ("unet", "unet.linear", "controlnet")),
        ("unet", "flip_sin_to_cos", "no", "true or false or null"),
        ("unet", "use_linear_projection", "no", "true or false or null"),
        ("unet", "attention_head_dim", True, "an integer of at least 1 or a list of down_block_types = 2 integers, each at least 1 or null"),
        ("unet.linear", "attention_head_dim", [2], "a list of down_block_types = 2 integers"),
        ("unet.linear", "attention_head_dim", [2, 4, 4], "a list of down_block_types = 2 integers"),
        ("unet.linear", "only_cross_attention", [True], "true or false or a list of down_block_types = 2 flags or null"),
        ("unet.linear", "only_cross_attention", "yes", "true or false or a list"),
        ("unet.sdxl", "transformer_layers_per_block", [1, 3, 3], "a list of down_block_types = 2 integers"),
        ("unet.sdxl", "addition_embed_type", "zzz", "text_time or null"),
        ("unet.sdxl", "addition_time_embed_dim", 10, "below projection_class_embeddings_input_dim/6 = 9.66667"),
        ("unet.sdxl", "addition_time_embed_dim", 0, "an integer of at least 1"),
        ("controlnet", "controlnet_conditioning_channel_order", "gbr", "rgb or bgr or null"),
        ("controlnet.linear", "attention_head_dim", [2], "a list of down_block_types = 2 integers"),
        ("controlnet", "freq_shift", 0.5, "an integer of at least 0"),
    ],
)  # fmt: skip
def test_a_value_that_no_model_has_is_refused(case: str, key: str, wrong: Any, expected: str, tmp_path: Path) -> None:
    """The class of the output stops at it, or computes something else than the flax class did."""
    with pytest.raises(convert.ConvertError) as error:
        convert.plan_conversion(FAMILY, specs(case, tmp_path, **{key: wrong}))
    (found,) = (one for one in error.value.findings if one.problem.startswith(key))
    assert found.code == "config-conflict" and expected in found.expected and found.got == json.dumps(wrong)


def test_a_key_that_the_class_refuses_is_named(tmp_path: Path) -> None:
    with pytest.raises(convert.PlanError) as error:
        convert.plan_conversion(FAMILY, specs("unet", tmp_path, num_attention_heads=4))
    (found,) = error.value.findings
    assert found.code == "target-requirement" and "num_attention_heads" in str(found.path)


def test_the_numbers_of_sdxl_need_a_width(tmp_path: Path) -> None:
    """Without it, the class loads the output and stops when it runs."""
    with pytest.raises(convert.PlanError) as error:
        convert.plan_conversion(FAMILY, specs("unet.sdxl", tmp_path, addition_time_embed_dim=None))
    (found,) = error.value.findings
    assert found.code == "target-requirement" and "text_time needs the width" in found.problem
    assert found.path == "addition_time_embed_dim of config.json" and found.got == "null"


NULLS = json.loads((GOLDEN.parents[1] / "rules" / "diffusers-classes.json").read_text())["nulls"]


@pytest.mark.slow
@pytest.mark.parametrize("case", ["unet.sdxl", "vae", "controlnet"])
def test_a_null_that_stops_the_class_is_refused(case: str, tmp_path: Path) -> None:
    stated = diffusers_cases.ALL.config(case)
    keys = [key for key in NULLS[stated["_class_name"].removeprefix("Flax")] if key in stated]
    assert len(keys) > 7
    for key in keys:
        with pytest.raises(convert.ConvertError) as error:
            convert.plan_conversion(FAMILY, specs(case, tmp_path, **{key: None}))
        assert error.value.findings, key


def test_the_null_is_named(tmp_path: Path) -> None:
    """The switch and the block that are off do not stop the class."""
    with pytest.raises(convert.ConvertError) as error:
        convert.plan_conversion(FAMILY, specs("vae", tmp_path, latent_channels=None))
    (found,) = error.value.findings
    assert (found.code, found.path, found.got) == ("config-conflict", "latent_channels", "null")
    assert "which the class of diffusers refuses" in found.problem
    plan = convert.plan_conversion(FAMILY, specs("unet.equal", tmp_path, use_linear_projection=None))
    assert plan.config is not None and plan.config["mid_block_type"] is plan.config["use_linear_projection"] is None
