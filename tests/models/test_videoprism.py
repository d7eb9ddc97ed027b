"""VideoPrism: what upstream's own code computed for videos and texts, and what transformers computes from the converted directory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

import convert
from convert.core.errors import PlanError
from convert.writing.written import open_written
from support.goldens import SpecsOnly
from support.rule_mistakes import assert_mistake_is_named
from support.value_mistakes import assert_mistakes_are_named, replace_tensors
from support.videoprism import ALL, CASES, SET, converted, errors, loaded, write
from support.weights_level import check_weights

pytestmark = pytest.mark.slow

MODEL = {"encoder": "videoprism-encoder", "encoder-unscanned": "videoprism-encoder", "lvt": "videoprism-lvt"}


@pytest.mark.parametrize("case", CASES)
def test_transformers_computes_what_upstream_did(case: str, tmp_path: Path) -> None:
    """One video has fewer frames and larger images than the tables of positions; texts are padded. The table of sinusoids is float32 in any precision."""
    _, out = converted(case, tmp_path)
    single, double = errors(case, out)
    assert single < 2e-6 and double < (1e-7 if case == "lvt" else 1e-13)


@pytest.mark.parametrize("case", CASES)
def test_the_tree_says_which_model_it_is_and_comes_back(case: str, tmp_path: Path) -> None:
    source, out = converted(case, tmp_path)
    plan = convert.plan_conversion("videoprism", source, settings=SET)
    assert plan.rules.model == MODEL[case] and (plan.sizes["P"], plan.sizes["T"], plan.sizes["M"]) == (3, 4, 5)
    layout = "UNSCANNED" if case == "encoder-unscanned" else "REPEATED"
    convert.convert_back(MODEL[case], out, tmp_path / "back.npz", layout=layout, form="npz", settings=SET)
    first, second = dict(np.load(source)), dict(np.load(tmp_path / "back.npz"))
    assert sorted(first) == sorted(second)
    assert all(first[name].tobytes() == second[name].tobytes() for name in first)


def test_the_class_would_compute_other_positions_of_the_text(tmp_path: Path) -> None:
    """Its own timescales end one step before the last of upstream; the file has upstream's, and the class keeps them."""
    from transformers import VideoPrismTextModel

    _, out = converted("lvt", tmp_path)
    model = loaded(out).text_model
    own = VideoPrismTextModel(model.config).embeddings.position_embedding
    assert (model.embeddings.position_embedding - own).abs().max() > 0.5
    k = np.arange(9)
    angles = np.arange(64)[:, None] * 10000.0 ** (-k / 8)
    upstream = np.concatenate([np.sin(angles), np.cos(angles)], 1)
    assert np.abs(model.embeddings.position_embedding.numpy() - upstream).max() < 1e-7
    ids = load_file(out / "model.safetensors")["text_model.embeddings.position_ids"]
    assert ids.dtype == np.int64 and ids.tolist() == [list(range(64))]


def test_wrong_numbers_of_positions_are_found(tmp_path: Path) -> None:
    name = "text_model.embeddings.position_ids"
    source, out = converted("lvt", tmp_path)
    replace_tensors(out, {name: 1 + load_file(out / "model.safetensors")[name]})
    report = check_weights(convert.plan_conversion("videoprism", source, settings=SET), open_written(out))
    (found,) = report.findings
    assert (found.path, found.data["diagnosis"], found.data["values"]) == (name, "another buffer", 64)


def test_a_module_is_filled(tmp_path: Path) -> None:
    """Also its buffers."""
    from transformers import AutoConfig, VideoPrismClipModel

    source, out = converted("lvt", tmp_path)
    model = VideoPrismClipModel(AutoConfig.from_pretrained(out))
    convert.load_into(model, "videoprism", source, settings=SET)
    tensors = load_file(out / "model.safetensors")
    assert all(np.array_equal(x.numpy(), tensors[name]) for name, x in model.state_dict().items())


PUBLISHED = {  # models.py, CONFIGS: layers in space, in time, width, heads, feed-forward width, frames
    "base": (12, 4, 768, 12, 3072, 16),
    "large": (24, 4, 1024, 16, 4096, 8),
    "giant": (40, 4, 1408, 16, 6144, 8),
}
Specs = dict[str, tuple[int, ...]]


def tower(name: str, layers: int, width: int, heads: int, hidden: int) -> Specs:
    norms = ("layer_norm", "ff_layer/layer_norm")
    shapes: Specs = {f"{norm}/{leaf}": (width,) for norm in norms for leaf in ("scale", "bias")}
    shapes |= attention("self_attention", width, heads, width // heads)
    shapes |= {"ff_layer/ffn_layer1/linear/kernel": (width, hidden), "ff_layer/ffn_layer1/linear/bias": (hidden,)}
    shapes |= {"ff_layer/ffn_layer2/linear/kernel": (hidden, width), "ff_layer/ffn_layer2/linear/bias": (width,)}
    return {f"{name}/x_layers/{leaf}": (layers, *shape) for leaf, shape in shapes.items()}


def attention(name: str, width: int, heads: int, head: int) -> Specs:
    projections = ("query", "key", "value")
    shapes: Specs = {f"{name}/{one}/w": (width, heads, head) for one in (*projections, "post")}
    return shapes | {f"{name}/{one}/b": (heads, head) for one in projections} | {f"{name}/post/b": (width,)}


def encoder(size: str) -> Specs:
    i, j, D, N, F, M = PUBLISHED[size]
    shapes = tower("spatial_encoder/transformers_stack", i, D, N, F) | tower(
        "temporal_encoder/transformers_stack", j, D, N, F
    )
    shapes |= {"patch_projection/linear/kernel": (972, D), "patch_projection/linear/bias": (D,)}
    shapes |= {"spatial_pos_emb/emb_var": (256, D), "temporal_pos_emb/emb_var": (M, D)}
    return shapes | {f"{norm}/{leaf}": (D,) for norm in ("spatial_ln", "temporal_ln") for leaf in ("scale", "bias")}


def lvt(size: str) -> Specs:
    _, _, D, N, F, _ = PUBLISHED[size]
    shapes = {f"vision_encoder/{name}": shape for name, shape in encoder(size).items()}
    shapes |= tower("auxiliary_encoder/transformers_stack", 2, D, N, F)
    shapes |= tower("text_encoder/unimodal_transformer", 12, D, N, 4 * D)
    pooler = "contrastive_vision_pooler"
    shapes |= attention(f"{pooler}/pooling_attention", D, N, 4 * D // N)
    shapes |= {f"{pooler}/pooling_attention_query": (1, D), "text_encoder/cls_emb": (1, 1, D)}
    shapes |= {f"{pooler}/pooling_attention/per_dim_scale/per_dim_scale": (4 * D // N,)}
    shapes |= {"text_encoder/token_emb/emb_var": (32000, D)}
    norms = (f"{pooler}/pooling_attention_layer_norm", "text_encoder/unimodal_ln")
    return shapes | {f"{norm}/{leaf}": (D,) for norm in norms for leaf in ("scale", "bias")}


def specs(shapes: Specs) -> SpecsOnly:
    return SpecsOnly({f"params/{name}": (shape, "float32") for name, shape in shapes.items()})


@pytest.mark.parametrize("size", PUBLISHED)
@pytest.mark.parametrize("made", [encoder, lvt])
def test_published_sizes_need_no_setting(made: object, size: str) -> None:
    """The giant of videos and texts was not published; its pooling has another width than transformers' class gives it."""
    from transformers import AutoConfig, AutoModel

    if (made, size) == (lvt, "giant"):
        with pytest.raises(PlanError, match=r"F = N\*G .*: expected 5632, as .* got 6144"):
            convert.plan_conversion("videoprism", specs(lvt(size)))
        return
    plan = convert.plan_conversion("videoprism", specs(made(size)))  # type: ignore[operator]
    assert plan.version == size and plan.config is not None
    with torch.device("meta"):
        model = AutoModel.from_config(AutoConfig.for_model(**plan.config)).state_dict()
    assert {name: tuple(x.shape) for name, x in model.items()} == {step.name: step.spec.shape for step in plan.steps}


SPACE = "linear: spatial_layers.{i}.attention.{q,k,v}_proj"
RULE_MISTAKES = (  # a text of the rules, what stands there instead, what the check calls it
    (SPACE, SPACE.replace("q,k", "k,q"), "of another tensor"),
    ('"temporal_layers.{j}.{layernorm_before,layernorm_after}"', '"temporal_layers.{j}.{layernorm_after,layernorm_before}"', "of another tensor"),
    ("{module: layernorm1, multiplies_by: 1+weight}", "layernorm1", "1+scale doubled"),
    ("...(P Q R),(P Q R)D->...D", "...(Q P R),(Q P R)D->...D", "axes permuted"),
    ("video_model.head.{q,k,v}_proj", "video_model.head.{q,v,k}_proj", "of another tensor"),
    ("endpoint: included", "endpoint: excluded", "another buffer"),
    ("  from: text_encoder/cls_emb", "  prescaled_by: sqrt(D)\n  from: text_encoder/cls_emb", "multiplied by a number"),
    ("  axes: G\n", "  axes: G\n  prescaled_by: 2\n", "weight rescaled although the source does not prescale it"),
)  # fmt: skip


@pytest.mark.parametrize("mistake", RULE_MISTAKES, ids=range(len(RULE_MISTAKES)))
def test_a_mistake_in_the_rules_is_named(mistake: tuple[str, str, str], tmp_path: Path) -> None:
    old, new, name = mistake
    source = write("lvt", tmp_path)
    assert_mistake_is_named("videoprism", source, old, new, name, tmp_path / "out", settings=SET)


@pytest.mark.parametrize("case", CASES)
def test_mistakes_in_the_file_are_named(case: str, tmp_path: Path) -> None:
    source, out = converted(case, tmp_path)
    assert assert_mistakes_are_named(out, source) >= 9


def test_the_golden_cases_are_these() -> None:
    assert set(CASES) == set(MODEL) and ALL.config("lvt")["num_auxiliary_layers"] == 2
