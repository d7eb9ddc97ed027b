"""The flax classes of diffusers: UNet, VAE and ControlNet of Stable Diffusion, through rules that name no module.

Each case was recorded by the flax class itself; the PyTorch class of diffusers loads the output, and computes the same.
"""

from __future__ import annotations

import hashlib
import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

import convert
from convert.checkpoints import open_source
from convert.numerics.lift_torch import lifted
from convert.outputs.integrity import verify_output
from convert.reversing.source import ReversedSource
from convert.verify.run import check
from support import diffusers_cases
from support.diffusers_cases import CASES, DIGESTS
from support.goldens import SpecsOnly, ends_of_modules
from support.paths import GOLDEN
from support.rule_mistakes import assert_mistake_is_named, report_of_mistake
from support.value_mistakes import assert_mistakes_are_named

pytestmark = pytest.mark.slow

FAMILY = "flax-diffusers"


@pytest.mark.parametrize("case", CASES)
def test_pytorch_computes_what_the_flax_class_recorded(case: str, tmp_path: Path) -> None:
    source = diffusers_cases.write(case, tmp_path / "source")
    written = hashlib.sha256((source / "diffusion_flax_model.msgpack").read_bytes()).hexdigest()
    assert written == DIGESTS[case]["sha256"], "these are not the bytes that save_pretrained wrote"
    convert.convert(FAMILY, source, tmp_path / "out")
    model = diffusers_cases.loaded(tmp_path / "out")
    as_it_is = diffusers_cases.errors(model, case)
    same = diffusers_cases.errors(diffusers_cases.as_flax(model), case)
    drift = diffusers_cases.drift(case)  # of the flax class itself; PyTorch is nearer to the exact outputs
    assert same < max(2e-6, 1.5 * drift)
    assert diffusers_cases.errors(model, case, "out64") < max(2e-6, drift)
    with lifted():
        assert diffusers_cases.errors(model.double(), case, "out64") < 1e-12
    notes = convert.plan_conversion(FAMILY, source).config_notes
    if case.startswith("vae"):
        assert as_it_is == same and notes == ()
    else:  # what no config.json can say
        assert as_it_is > 5e-5 and len(notes) == 1 and "GELU with erf" in notes[0]


@pytest.mark.parametrize("case", CASES)
def test_the_way_back_gives_the_tree_of_the_flax_class(case: str, tmp_path: Path) -> None:
    source, out = diffusers_cases.write(case, tmp_path / "source"), tmp_path / "out"
    convert.convert(FAMILY, source, out)
    back, first = ReversedSource(convert.plan_reverse("flax_diffusers", out)), open_source(source)
    assert back.leaves.keys() == first.leaves.keys()
    assert [name for name in first.leaves if back.read(name).tobytes() != first.read(name).tobytes()] == []


@pytest.mark.parametrize("case", ["vae", "unet", "controlnet"])
def test_faults_are_named(case: str, tmp_path: Path) -> None:
    source = diffusers_cases.write(case, tmp_path / "source")
    convert.convert(FAMILY, source, tmp_path / "out")
    levels = {level.level: level.verdict.value for level in check(tmp_path / "out", source).levels}
    assert levels == {"coverage": "passed", "weights": "passed", "layers": "passed", "model": "skipped"}
    assert assert_mistakes_are_named(tmp_path / "out", source) >= 9


SLIPS = (  # case, a text of the rules, what stands there instead, what the check calls it
    ("vae", "NHWC,HWIO->NHWC", "NHWC,WHIO->NHWC", "spatial axes exchanged"),
    ("vae", "    query: to_q\n    key: to_k", "    query: to_k\n    key: to_q", "of another tensor"),
    ("vae", "    query: to_q\n    key: to_k\n    value: to_v", "    query: to_v\n    key: to_k\n    value: to_q", "of another tensor"),
    ("vae", "multiplies_by: scale", "multiplies_by: 1+scale", "1+scale on a plain norm"),
    ("unet", 'LayerNorm\n  from: "{module}/scale"\n  bias: "{module}/bias"', 'LayerNorm\n  from: "{module}/bias"\n  bias: "{module}/scale"', "scale and bias exchanged"),
    ("unet", 'GroupNorm\n  from: "{module}/scale"\n  bias: "{module}/bias"', 'GroupNorm\n  from: "{module}/bias"\n  bias: "{module}/scale"', "scale and bias exchanged"),
    ("vae", "...I,IO->...O", "...O,IO->...I", "transposed"),
    ("controlnet", "...I,IO->...O", "...I,IO->...O\n  prescaled_by: 2.0", "multiplied by a number"),
)  # fmt: skip


@pytest.mark.parametrize(("case", "old", "new", "name"), SLIPS)
def test_slips_in_the_rules_are_named(case: str, old: str, new: str, name: str, tmp_path: Path) -> None:
    source = diffusers_cases.write(case, tmp_path / "source")
    assert_mistake_is_named(FAMILY, source, old, new, name, tmp_path / "out")


@pytest.mark.parametrize(
    ("old", "new", "code"),
    [
        ("NHWC,HWIO->NHWC", "NHWC,HWOI->NHWC", "shape-mismatch"),
        ("    value: to_v\n", "    value: to_q\n", "leaf-missing"),
        ('blocks}_{i}": "{down_blocks,up_blocks', 'blocks}_{i}": "{up_blocks,down_blocks', "leaf-missing"),
    ],
)
def test_slips_in_the_rules_that_no_tree_fits_are_refused(old: str, new: str, code: str, tmp_path: Path) -> None:
    source = diffusers_cases.write("vae", tmp_path / "source")
    with pytest.raises(convert.PlanError) as error:
        report_of_mistake(FAMILY, source, old, new, tmp_path / "out")
    assert code in {found.code for found in error.value.findings}


@pytest.mark.parametrize("case", ["unet.sdxl", "vae", "controlnet"])
def test_each_block_and_each_module_is_needed(case: str, tmp_path: Path) -> None:
    """Of modules that differ in numbers alone, the first and the last is removed, with all that lies in it."""
    shapes, config = diffusers_cases.ALL.shapes(case), diffusers_cases.ALL.config(case)
    (tmp_path / "config.json").write_text(json.dumps(config))
    removed = ends_of_modules(shapes)
    assert {name for name in removed if re.fullmatch(r"(encoder/|decoder/)?(down|up)_blocks_\d", name)}
    for without in (inside for name, inside in removed.items() if name not in shapes):
        source = SpecsOnly({name: (shape, "float32") for name, shape in shapes.items() if name not in without})
        source.path = tmp_path
        with pytest.raises(convert.ConvertError):
            convert.plan_conversion(FAMILY, source)
            pytest.fail(f"the plan does not need {without}")


def refused(source: Path) -> tuple[convert.Finding, ...]:
    with pytest.raises(convert.ConvertError) as error:
        convert.plan_conversion(FAMILY, source)
    return error.value.findings


@pytest.mark.parametrize(
    ("case", "without", "code", "path"),
    [
        ("vae", "encoder/down_blocks_1/resnets_0/conv_shortcut", "leaf-missing", "encoder.down_blocks.1.resnets.0.conv_shortcut"),
        ("vae", "encoder/down_blocks_0/downsamplers_0", "leaf-missing", "encoder.down_blocks.0.downsamplers.0.conv"),
        ("vae", "decoder/up_blocks_0/resnets_2", "config-conflict", "layers_per_block+1 = 3, and the tree has 2 layers in decoder.up_blocks.0.resnets"),
        ("unet.sdxl", "add_embedding/linear_2", "leaf-missing", "add_embedding.linear_2"),
        ("unet.sdxl", "mid_block/attentions_0/transformer_blocks_2", "config-conflict", "transformer_layers_per_block.1 = 3, and the tree has 2 layers"),
        ("unet.sdxl", "down_blocks_1/attentions_0", "config-conflict", "layers_per_block = 1, and the tree has 0 layers in down_blocks.1.attentions"),
        ("controlnet", "controlnet_down_blocks_3", "config-conflict", "down_block_types*layers_per_block+down_block_types = 4, and the tree has 3 layers"),
    ],
)  # fmt: skip
def test_what_the_tree_lacks_is_said_before_data_is_read(case: str, without: str, code: str, path: str, tmp_path: Path) -> None:  # fmt: skip
    leaves = {name: x for name, x in diffusers_cases.ALL.leaves(case).items() if not name.startswith(f"{without}/")}
    findings = refused(diffusers_cases.write(case, tmp_path / "source", leaves))
    assert {found.code for found in findings} == {code}
    assert any(path in (found.path or found.problem) or path in found.problem for found in findings)


def test_a_class_or_block_that_had_no_flax_code_is_named(tmp_path: Path) -> None:
    (found,) = refused(diffusers_cases.write("vae", tmp_path / "class", _class_name="FlaxAutoencoderTiny"))
    assert (found.code, found.got) == ("class-unknown", "AutoencoderTiny")
    types = ["AttnDownEncoderBlock2D", "DownEncoderBlock2D"]
    (found,) = refused(diffusers_cases.write("vae", tmp_path / "block", down_block_types=types))
    assert (found.code, found.got) == ("class-unknown", "down_block_types: AttnDownEncoderBlock2D")
    (found,) = refused(diffusers_cases.write("vae", tmp_path / "none", _class_name=None))
    assert found.code == "class-unknown" and '"_class_name": "AutoencoderKL"' in found.fix
    for key, value in (("down_block_types", {}), ("block_out_channels", -1), ("layers_per_block", [])):
        assert refused(diffusers_cases.write("vae", tmp_path / key, **{key: value}))
    for value, got in ((None, "null"), ("many", '"many"')):
        (found,) = refused(diffusers_cases.write("vae", tmp_path / got, norm_num_groups=value))
        assert (found.code, found.got) == ("class-unknown", got) and "norm_num_groups" in found.problem


def test_keys_that_the_flax_class_does_not_read_are_left_out_where_they_say_something_else(tmp_path: Path) -> None:
    kept = {"mid_block_add_attention": True, "force_upcast": False}
    source = diffusers_cases.write("vae", tmp_path / "source", act_fn="gelu", use_quant_conv=False, **kept)
    plan = convert.plan_conversion(FAMILY, source)
    config: Any = plan.config
    assert config["_class_name"] == "AutoencoderKL" and kept.items() <= config.items()
    assert not {"act_fn", "use_quant_conv", "dtype"} & config.keys()
    assert sorted(note.partition(":")[0] for note in plan.notes) == [
        'config.json of the checkpoint has act_fn "gelu", and that of the output none',
        "config.json of the checkpoint has use_quant_conv false, and that of the output none",
    ]


def test_shards_have_the_names_that_diffusers_looks_for(tmp_path: Path) -> None:
    source = diffusers_cases.write("vae", tmp_path / "source")
    convert.convert(FAMILY, source, tmp_path / "out", max_shard_bytes=40_000)
    names = {path.name for path in (tmp_path / "out").glob("*.safetensors*")}
    index = "diffusion_pytorch_model.safetensors.index.json"
    assert index in names and all(name.startswith("diffusion_pytorch_model-0000") for name in names - {index})
    assert diffusers_cases.errors(diffusers_cases.loaded(tmp_path / "out"), "vae") < 2e-6
    assert verify_output(tmp_path / "out").intact
    assert check(tmp_path / "out", source, levels=["coverage", "weights"]).exit_code == 0


def test_the_lists_of_modules_are_those_of_the_classes() -> None:
    script = runpy.run_path(str(GOLDEN / "make_diffusers_classes.py"))
    table = json.loads((GOLDEN.parents[1] / "rules" / "diffusers-classes.json").read_text())
    script["verify"](table)
    for name, listed in table["nulls"].items():
        assert [key for key in script["nulls"](name) if key not in table["classes"][name]["unread"]] == listed
    block = table["blocks"]["DownBlock2D"]
    (linear,) = (heading for heading in block["modules"] if heading.startswith("Linear"))
    names = block["modules"].pop(linear)
    block["modules"][linear] = [f"{name} -bias" for name in names]
    with pytest.raises(AssertionError, match="time_emb_proj"):
        script["verify"](table)
    block["modules"] |= {linear: [], linear.replace("4*first", "8*first"): names}
    with pytest.raises(AssertionError, match="time_emb_proj"):
        script["verify"](table)


def test_another_model_takes_the_place_of_the_first(tmp_path: Path) -> None:
    """`--overwrite` kept the first model's weights, whose file has the name that diffusers gives it."""
    for name, out in (("unet", "out"), ("vae", "out"), ("vae", "alone")):
        source = diffusers_cases.write(name, tmp_path / f"{name}-for-{out}")
        convert.convert("flax-diffusers", source, tmp_path / out, overwrite=(tmp_path / out).exists())
    files = ("diffusion_pytorch_model.safetensors", "config.json")
    assert all((tmp_path / "out" / file).read_bytes() == (tmp_path / "alone" / file).read_bytes() for file in files)
