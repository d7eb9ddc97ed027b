"""ViViT: what scenic's own code computed, and what transformers computes from the converted file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import convert
from convert.core.errors import ConvertError
from convert.verify.run import check
from convert.writing.written import open_written
from support.goldens import SpecsOnly
from support.rule_mistakes import assert_mistake_is_named
from support.value_mistakes import assert_mistakes_are_named
from support.vivit import GOLD, SET, converted, errors, write

pytestmark = pytest.mark.slow


def test_transformers_computes_what_scenic_did(tmp_path: Path) -> None:
    _, out = converted(tmp_path)
    single, double = errors(out)
    assert single < 2e-6 and double < 1e-12


def test_a_step_of_today_gives_the_same_bytes(tmp_path: Path) -> None:
    """Published files have the weights in an optimizer, of today's code in `params`."""
    _, out = converted(tmp_path)
    file = tmp_path / "step.npz"
    np.savez(file, **{f"params/{name}": x for name, x in GOLD.leaves("vivit").items()}, global_step=np.int32(3))  # type: ignore[arg-type]
    convert.convert("vivit", file, tmp_path / "again", settings=SET)
    first, second = (open_written(folder) for folder in (out, tmp_path / "again"))
    assert all(np.array_equal(first.read(name), second.read(name)) for name in first.specs)


@pytest.mark.parametrize(("layout", "root"), [("TRAIN_STATE", "params"), ("PUBLISHED", "optimizer/target")])
def test_the_way_back_gives_scenics_leaves(layout: str, root: str, tmp_path: Path) -> None:
    _, out = converted(tmp_path)
    convert.convert_back("vivit", out, tmp_path / "back.npz", layout=layout, form="npz")
    wanted = {f"{root}/{name}": x for name, x in GOLD.leaves("vivit").items()}
    with np.load(tmp_path / "back.npz") as back:
        assert set(back.files) == set(wanted)
        assert all(back[name].tobytes() == x.tobytes() for name, x in wanted.items())


def test_the_published_size_needs_no_setting() -> None:
    size = {15: 768, 22: 3072, 28: 3137, 7: 400}
    specs = {}
    for name, x in GOLD.leaves("vivit").items():
        heads = {3: 12, 5: 64} if "MultiHead" in name else {}
        shape = (2, 16, 16, 3, 768) if name == "embedding/kernel" else tuple({**size, **heads}.get(n, n) for n in x.shape)  # fmt: skip
        for layer in range(12) if "encoderblock_0" in name else [0]:
            if "encoderblock_1" not in name and "encoderblock_2" not in name:
                path = name.replace("encoderblock_0", f"encoderblock_{layer}")
                specs[f"optimizer/target/{path}"] = (shape, "float32")
    plan = convert.plan_conversion("vivit", SpecsOnly(specs))
    assert plan.version == "base-16x2" and plan.config is not None
    assert (plan.config["num_frames"], plan.config["image_size"]) == (32, 224)


def test_a_factorised_encoder_is_refused(tmp_path: Path) -> None:
    """transformers has no class for it."""
    leaves = {name.replace("Transformer/", "SpatialTransformer/"): x for name, x in GOLD.leaves("vivit").items()}
    np.savez(tmp_path / "factorised.npz", **leaves)  # type: ignore[arg-type]
    with pytest.raises(ConvertError, match="SpatialTransformer"):
        convert.plan_conversion("vivit", tmp_path / "factorised.npz", settings=SET)


def test_mistakes_in_the_file_are_named(tmp_path: Path) -> None:
    source, out = converted(tmp_path)
    assert assert_mistakes_are_named(out, source) >= 9


RULE_MISTAKES = (  # a text of the rules, what stands there instead, what the check calls it
    ("{query,key,value}/kernel", "{key,query,value}/kernel", "of another tensor"),
    ("{query,key,value}/bias", "{query,value,key}/bias", "of another tensor"),
    ("layernorm_{before,after}", "layernorm_{after,before}", "of another tensor"),
    ("multiplies_by: scale\n  epsilon: $epsilon\n  axes: D\n  layer_norm: vivit.layernorm", "multiplies_by: 1+scale\n  epsilon: $epsilon\n  axes: D\n  layer_norm: vivit.layernorm", "1+scale on a plain norm"),
    ("NDHWC,DHWIO->NDHWC", "NDHWC,DWHIO->NDHWC", "spatial axes exchanged"),
    ("from: cls", "prescaled_by: sqrt(D)\n  from: cls", "multiplied by a number"),
)  # fmt: skip


@pytest.mark.parametrize(("old", "new", "name"), RULE_MISTAKES)
def test_a_mistake_in_the_rules_is_named(old: str, new: str, name: str, tmp_path: Path) -> None:
    assert_mistake_is_named("vivit", write(tmp_path), old, new, name, tmp_path / "out", settings=SET)


def test_another_gelu_in_config_json_is_named(tmp_path: Path) -> None:
    source, out = converted(tmp_path)
    (out / "config.json").write_text((out / "config.json").read_text().replace("gelu_pytorch_tanh", "gelu"))
    (report,) = check(out, source, levels=["layers"]).levels
    assert report.verdict.value == "failed" and any("hidden_act" in str(f) for f in report.findings)
