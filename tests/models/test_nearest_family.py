"""A checkpoint that lacks a kind of leaf: the error names the model that it is of, and the leaf, not a relative that comes first."""

from __future__ import annotations

import pytest

import convert
from convert.checkpoints import open_source
from convert.core.errors import PlanError
from support import maxtext
from support.drawn_cases import DrawnCases
from support.goldens import SpecsOnly
from support.paths import GOLDEN

Specs = dict[str, tuple[tuple[int, ...], str]]


def drawn(folder: str, case: str, prefix: str) -> Specs:
    return {f"{prefix}{name}": (x, "float32") for name, x in DrawnCases(GOLDEN / folder).shapes(case).items()}


def stored(case: str) -> Specs:
    leaves = open_source(maxtext.checkpoint(case)).leaves
    return {name: (leaf.spec.shape, leaf.spec.dtype) for name, leaf in leaves.items()}


def refused(family: str, specs: Specs, *without: str, **settings: object) -> PlanError:
    kept = {name: spec for name, spec in specs.items() if not any(part in f"{name}$" for part in without)}
    with pytest.raises(PlanError) as error:
        convert.plan_conversion(family, SpecsOnly(kept), settings=settings)
    return error.value


def test_naflex_without_its_temperature_is_no_siglip_1() -> None:
    specs = drawn("siglip2", "naflex", "params/")
    error = refused("siglip2", specs, "params/t$")  # the end of a name
    assert "(siglip2-naflex) does not fit" in error.headline
    assert [finding.problem for finding in error.findings] == ["params/t (parameter, weight)"]
    named = refused("siglip", specs)
    assert named.hint == "The tree is that of siglip2-naflex (SigLIP 2, NaFlex): name siglip2-naflex in place of siglip"


@pytest.mark.slow
def test_a_qwen_3_without_its_norms() -> None:
    error = refused("maxtext", stored("qwen3"), "query_norm", "key_norm", **maxtext.settings("qwen3"))
    assert "maxtext-qwen3-tied matches 100 % and lacks" in error.hint and "{query,key}_norm/scale" in error.hint
    untied = refused("maxtext", stored("qwen3-untied"), "query_norm", **maxtext.settings("qwen3"))
    assert "(maxtext-qwen3) does not fit" in untied.headline and "query_norm/scale" in str(untied.findings[0])


def test_a_gpt_oss_without_its_sinks() -> None:
    error = refused("maxtext", stored("gpt-oss"), "sinks", **maxtext.settings("gpt-oss"))
    assert error.headline.startswith("rules/maxtext-gpt-oss.yaml does not fit")
    assert "GptOssAttention/sinks" in error.findings[0].problem and len(error.findings) == 1


@pytest.mark.parametrize("case", ["deepseek4", "deepseek4-scanned"])
@pytest.mark.parametrize("part", ["indexer/q_proj", "indexer/position_bias", "csa_compressor/kv_norm", "hca_compressor/position_bias"])  # fmt: skip
def test_a_deepseek_4_without_a_part_of_its_compressors(case: str, part: str) -> None:
    """Only some layers have them, so their rules are optional: each was converted without the part, with exit code 0."""
    error = refused("maxtext-deepseek4", stored(case), part, **maxtext.settings(case))
    missing = [finding for finding in error.findings if finding.code == "leaf-missing" and part in finding.path]
    others = [finding for finding in error.findings if finding not in missing]
    assert missing and all("attention_pattern" in finding.path for finding in others)  # no layer is of this type now


@pytest.mark.slow
def test_a_pix2struct_is_named_under_t5x() -> None:
    specs = drawn("t5x", "pix2struct", "target/")
    for family in ("t5x", "t5x-1.1"):
        assert f"The tree is that of pix2struct (Pix2Struct (T5X)): name pix2struct in place of {family}" in refused(family, specs).hint  # fmt: skip
    assert "pix2struct (Pix2Struct (T5X)) is nearer: it matches 100 % of the leaves" in refused("t5x", specs, "patch_projection/bias").hint  # fmt: skip


@pytest.mark.parametrize("case", ["map-sincos2d-headless", "gap-sincos2d", "tok-headless"])
def test_a_vit_without_a_norm_keeps_its_name(case: str) -> None:
    specs = drawn("vit-big-vision", case, "params/")
    settings = {"posemb": "sincos2d", "image_size": 20} if "sincos2d" in case else {}
    right = {"map": "vit-jax-map", "gap": "vit-jax-gap", "tok": "vit-big-vision"}[case[:3]] + case[3:]
    assert f"({right}) does not fit" in refused("vit-jax", specs, "encoder_norm/scale", **settings).headline
