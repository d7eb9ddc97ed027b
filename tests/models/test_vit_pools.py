"""ViT of big_vision, scenic and vit_jax, of each pooling: what upstream's own code computed, and what the converted file gives.

So are timm's outputs, and its tensors with those for transformers.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from safetensors.torch import load_file as load_tensors

import convert
from convert.core.errors import ConvertError
from convert.verify.run import check
from support import timm_models, vit
from support.rule_mistakes import assert_mistake_is_named
from support.timm_tower import renamed
from support.value_mistakes import assert_mistakes_are_named

pytestmark = pytest.mark.slow

TRANSFORMERS = (
    "tok",
    "tok-rep",
    "gap",
    "tok-sincos2d",
    "gap-sincos2d",
    "tok-headless",
    "tok-sincos2d-headless",
    "vit-token",
    "vit-token-rep",
    "vit-gap",
    *vit.JAX_CASES,
    *vit.TABLES,
)


def float64_limit(case: str) -> float:
    """A table of positions that is computed is written in float32, rounded once: 6e-8 of its largest value, 1."""
    return 1e-7 if case in vit.COMPUTED or case in vit.TABLES else 1e-12


@pytest.mark.parametrize("case", TRANSFORMERS)
def test_transformers_computes_what_upstream_did(case: str, tmp_path: Path) -> None:
    _, out = vit.converted(case, tmp_path)
    single, double = vit.errors(case, out)
    assert single < 2e-6 and double < float64_limit(case)


@pytest.mark.parametrize("case", [*timm_models.VITS, *vit.COMPUTED, *vit.HEADLESS, "vit-gap-1d", "vit-gap-none"])
def test_timm_computes_what_upstream_did(case: str, tmp_path: Path) -> None:
    _, out = vit.converted(case, tmp_path, "timm")
    single, double = timm_models.errors(case, out)
    assert single < 2e-6 and double < float64_limit(case)


@pytest.mark.parametrize("case", ["gap", "vit-gap", "jax-gap", "gap-sincos2d", "vit-gap-1d"])
def test_timm_gets_the_tensors_that_transformers_gets(case: str, tmp_path: Path) -> None:
    """Pooled by the mean; the norm comes before it in both."""
    folders = {to: tmp_path / to for to in ("timm", "transformers")}
    for to, folder in folders.items():
        folder.mkdir()
        vit.converted(case, folder, to)
    timm, hf = (load_tensors(folder / "out" / "model.safetensors") for folder in folders.values())
    for role in ("weight", "bias"):
        assert torch.equal(timm.pop(f"head.{role}"), hf.pop(f"classifier.{role}"))
    found = {f"vision_model.{name}": x for name, x in renamed(timm).items()}
    assert found.keys() == hf.keys() and all(torch.equal(x, hf[name]) for name, x in found.items())
    args = json.loads((folders["timm"] / "out" / "config.json").read_text())["model_args"]
    assert (args["global_pool"], args["fc_norm"], args["class_token"]) == ("avg", False, False)


def test_the_class_token_of_big_vision_has_no_position(tmp_path: Path) -> None:
    """timm adds none (`no_embed_class`); transformers adds a row of zeros."""
    tables = {}
    for to, name in (("timm", "pos_embed"), ("transformers", "vit.embeddings.position_embeddings")):
        (tmp_path / to).mkdir()
        _, out = vit.converted("tok", tmp_path / to, to)
        tables[to] = load_file(out / "model.safetensors")[name]
    assert json.loads((tmp_path / "timm" / "out" / "config.json").read_text())["model_args"]["no_embed_class"] is True
    assert tables["timm"].shape == (1, 25, 24) and not tables["transformers"][:, 0].any()
    assert np.array_equal(tables["transformers"][:, 1:], tables["timm"])


@pytest.mark.parametrize("case", ["tok", "tok-rep", "gap", "map"])
def test_stacked_layers_give_the_same_bytes_and_go_back(case: str, tmp_path: Path) -> None:
    """All leaves go back, but for the head behind `pre_logits`, which ViTModel has not."""
    to = "timm" if case == "map" else "transformers"
    source, out = vit.converted(case, tmp_path, to)
    with np.load(source) as first, np.load(back(case, out, tmp_path, "BIG_VISION", to)) as second:
        lost = {"params/head/kernel", "params/head/bias"} if case == "tok-rep" else set()
        assert set(first.files) == {*second.files, *lost} and lost.isdisjoint(second.files)
        assert all(np.array_equal(first[name], second[name]) for name in second.files)
    scanned = back(case, out, tmp_path, "BIG_VISION_SCANNED", to)
    with np.load(scanned) as stored:
        assert stored["params/Transformer/encoderblock/LayerNorm_0/scale"].shape == (3, 24)
        leaves = {name: stored[name] for name in stored.files}
    if case == "tok-rep":
        with np.load(source) as first:
            np.savez(scanned, **leaves, **{name: first[name] for name in lost})
    convert.convert("vit-jax", scanned, tmp_path / "again", to=to, settings=vit.settings(case, to))
    one, two = (load_file(folder / "model.safetensors") for folder in (out, tmp_path / "again"))
    assert one.keys() == two.keys() and all(np.array_equal(x, two[name]) for name, x in one.items())


def back(case: str, out: Path, folder: Path, layout: str, to: str) -> Path:
    target = folder / f"{layout}.npz"
    model = convert.plan_conversion("vit-jax", folder / "vit.npz", to=to, settings=vit.settings(case, to)).rules.model
    convert.convert_back(model, out, target, layout=layout, form="npz", settings=vit.settings(case, to))
    return target


@pytest.mark.parametrize("case", ["gap", "gap-sincos2d"])
def test_the_mean_without_a_head_is_timms_alone(case: str, tmp_path: Path) -> None:
    """Its tensors are those of the case with a head."""
    headless, computed = f"{case}-headless", vit.settings(case)
    with pytest.raises(convert.PlanError, match="does not load without one.*--to timm"):
        convert.plan_conversion("vit-jax", vit.write(headless, tmp_path), to="transformers", settings=computed)
    tensors = {}
    for each in (case, headless):
        (tmp_path / each).mkdir()
        vit.converted(each, tmp_path / each, "timm")
        tensors[each] = load_file(tmp_path / each / "out" / "model.safetensors")
    args = json.loads((tmp_path / headless / "out" / "config.json").read_text())["model_args"]
    assert args["num_classes"] == 0 and tensors[case].keys() - tensors[headless].keys() == {"head.weight", "head.bias"}


@pytest.mark.parametrize("case", vit.COMPUTED)
@pytest.mark.parametrize(
    "given",
    [
        {},
        {"image_size": 20},
        {"posemb": "sincos2d"},
        {"image_size": 20, "posemb": "sincos3d"},
        {"image_size": 21, "posemb": "sincos2d"},
    ],
)
def test_computed_positions_are_named_by_the_user(case: str, given: dict[str, object], tmp_path: Path) -> None:
    """A tree without a table does not say which one the code computes, nor of how many patches."""
    ratio = {"mlp_ratio": 5 / 3} if case.startswith("map") or case == "gap-sincos2d-headless" else {}
    with pytest.raises(convert.PlanError) as refused:
        convert.plan_conversion(
            "vit-jax", vit.write(case, tmp_path), to="timm" if ratio else "transformers", settings={**given, **ratio}
        )
    (found,) = refused.value.findings
    named = "image_size" if given.get("posemb") == "sincos2d" else "posemb"
    asked = f"--set {named}={given.get(named, '')}"
    assert found.code == "setting-invalid" and asked in f"{found.fix} {found.path}"


def test_the_table_of_another_formula_is_another_function(tmp_path: Path) -> None:
    """The planted faults: rows before columns, and the class token's row of zeros left out of its place."""
    _, out = vit.converted("tok-sincos2d", tmp_path)
    name = "vit.embeddings.position_embeddings"
    tensors = load_file(out / "model.safetensors")
    table = tensors[name]
    quarters = np.split(table, 4, axis=-1)
    for wrong in (np.concatenate([*quarters[2:], *quarters[:2]], -1), np.roll(table, -1, 1), table * 2):
        save_file({**tensors, name: np.ascontiguousarray(wrong)}, out / "model.safetensors", {"format": "pt"})
        assert vit.errors("tok-sincos2d", out)[0] > 1e-3


@pytest.mark.parametrize("case", vit.TABLES)
def test_a_table_of_scenic_is_no_other(case: str, tmp_path: Path) -> None:
    """The planted faults: each of the other tables, whose name the tree does not tell."""
    source, out = vit.converted(case, tmp_path)
    for other in {"sincos2d", *vit.TABLES.values()} - {vit.TABLES[case]}:
        settings = {**vit.settings(case), "posemb": other}
        convert.convert("vit-jax", source, out, to="transformers", settings=settings, overwrite=True)
        assert vit.errors(case, out)[0] > 1e-3, other


def test_timm_has_no_row_for_the_class_token_that_a_table_counts(tmp_path: Path) -> None:
    """Scenic's `sinusoidal_1d` gives it the first position, and timm's `no_embed_class` none."""
    with pytest.raises(convert.PlanError, match="a position for the class token, and the target's has no row for it"):
        vit.converted("vit-token-1d", tmp_path, "timm")
    (tmp_path / "2d").mkdir()
    (tmp_path / "hf").mkdir()
    _, timm = vit.converted("vit-token-2d", tmp_path / "2d", "timm")
    _, hf = vit.converted("vit-token-2d", tmp_path / "hf")
    tables = load_file(timm / "model.safetensors")["pos_embed"], load_file(hf / "model.safetensors")["vit.embeddings.position_embeddings"]  # fmt: skip
    assert np.array_equal(tables[0], tables[1][:, 1:]) and not tables[1][:, 0].any()


def test_what_no_class_computes_is_refused(tmp_path: Path) -> None:
    """`pre_logits` in timm, pooling by attention in transformers, another pooling than the mean in SigLIP's class, `pre_logits` behind a mean."""
    for case, to, code in (
        ("tok-rep", "timm", "rule-without-target"),
        ("map", "transformers", "rule-without-target"),
        ("vit-gmp", "transformers", "target-requirement"),
    ):
        with pytest.raises(ConvertError) as refused:
            vit.converted(case, tmp_path, to)
        assert {finding.code for finding in refused.value.findings} == {code}, (case, to)
    given = vit.BIG_VISION.leaves("tok-rep")
    np.savez(tmp_path / "rep.npz", **{name: x for name, x in given.items() if name != "cls"})  # type: ignore[arg-type]
    with pytest.raises(ConvertError, match="pooler is the closest") as unknown:
        convert.plan_conversion("vit-jax", tmp_path / "rep.npz")
    assert [finding.code for finding in unknown.value.findings] == ["leaf-missing"] and "cls" in str(unknown.value)


def test_the_pooling_is_said_to_be_assumed(tmp_path: Path) -> None:
    source = vit.write("gap", tmp_path)
    assumed = convert.plan_conversion("vit-jax", source, to="transformers")
    told = convert.plan_conversion("vit-jax", source, to="transformers", settings={"global_pool": "avg"})
    assert any("how the patches are pooled" in note for note in assumed.config_notes)
    assert not any("pooled" in note for note in told.config_notes)


@pytest.mark.parametrize("case", TRANSFORMERS)
def test_mistakes_in_the_file_are_named(case: str, tmp_path: Path) -> None:
    source, out = vit.converted(case, tmp_path)
    assert assert_mistakes_are_named(out, source) >= 9


@pytest.mark.parametrize("case", ["map", "vit-map"])
def test_mistakes_in_timms_file_are_named(case: str, tmp_path: Path) -> None:
    source, out = vit.converted(case, tmp_path, "timm")
    assert assert_mistakes_are_named(out, source) >= 9


def test_a_table_with_the_zeros_behind_it_is_named(tmp_path: Path) -> None:
    source, out = vit.converted("tok", tmp_path)
    tensors, name = load_file(out / "model.safetensors"), "vit.embeddings.position_embeddings"
    tensors[name] = np.ascontiguousarray(np.roll(tensors[name], -1, axis=1))
    with safe_open(out / "model.safetensors", "np") as written:
        header = written.metadata()
    save_file(tensors, out / "model.safetensors", header)
    (report,) = check(out, source, levels=["weights"]).levels
    assert [(f.code, f.path, f.data["diagnosis"]) for f in report.findings] == [("weights-differ", name, "rows rolled")]


SIGLIPS = "vision_model.encoder.layers.{j}.self_attn."
PLAIN = "multiplies_by: scale\n  epsilon: $epsilon\n  axes: W\n  layer_norm: {timm: norm,"
RULE_MISTAKES = (  # the case, a text of the rules, what stands there instead, what the check calls it
    ("gap", SIGLIPS + "{q,k,v}", SIGLIPS + "{k,q,v}", "of another tensor"),
    ("gap", PLAIN, PLAIN.replace("scale", "1+scale", 1), "1+scale on a plain norm"),
    ("gap", "from: pos_embedding\n  axes: .LW", "prescaled_by: 2\n  from: pos_embedding\n  axes: .LW", "multiplied by a number"),
    ("gap", "layers.{j}.layer_norm{1,2}", "layers.{j}.layer_norm{2,1}", "of another tensor"),
    ("tok", "from: pos_embedding", "prescaled_by: 2\n  from: pos_embedding", "multiplied by a number"),
    ("tok-rep", "from: pre_logits/kernel", "prescaled_by: 2\n  from: pre_logits/kernel", "multiplied by a number"),
    ("tok-rep", "NHWC,HWIO->NHWC", "NHWC,WHIO->NHWC", "spatial axes exchanged"),
)  # fmt: skip


@pytest.mark.parametrize(("case", "old", "new", "name"), RULE_MISTAKES)
def test_a_mistake_in_the_rules_is_named(case: str, old: str, new: str, name: str, tmp_path: Path) -> None:
    assert_mistake_is_named("vit-jax", vit.write(case, tmp_path), old, new, name, tmp_path / "out", to="transformers", settings=vit.settings(case))  # fmt: skip
