"""Gemma 4 with its towers for images and sound: what gemma 4.0.1's own code computed, and what transformers computes from the converted directory."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import convert
from convert.reversing.source import ReversedSource
from support.gemma_drawn import ALL as TEXT
from support.gemma_drawn import published
from support.gemma_towers import ALL, CASES, OF_IMAGES, OF_SOUND, all_errors, converted, differences, settings
from support.goldens import SpecsOnly, relative_error
from support.memory_source import MemorySource
from support.rule_mistakes import report_of_mistake

pytestmark = pytest.mark.slow

MODELS = {
    "gemma4-31b": "gemma4_vision",
    "gemma4-26b-a4b": "gemma4_moe_vision",
    "gemma4-e2b": "gemma4_e_towers",
    "gemma4-e4b": "gemma4_e_towers",
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("towers")
    return cache(lambda case: converted(case, folder / case))


@pytest.mark.parametrize("case", CASES)
def test_transformers_computes_what_gemma_does(case: str, made: Any) -> None:
    """Embeddings of images, of padded images and of sounds, and the logits of a text with them."""
    found = all_errors(case, made(case)[1])
    rounded, exact = (ALL.values(case, kind) for kind in ("out", "out64"))
    for name, (single, double) in found.items():
        assert single < 4 * max(relative_error(rounded[name], exact[name]), 5e-7), (name, single)
        assert double < (1e-9 if "features" in ALL.values(case, "in") else 1e-12), (name, double)


@pytest.mark.parametrize("case", ("gemma4-31b", "gemma4-e2b"))
def test_where_transformers_differs_the_plan_says_so(case: str, made: Any) -> None:
    """Images without padding are the same without any help; the rest differs, and each difference has a note until it is confirmed."""
    source, out = made(case)
    found = {name: exact for name, (_, exact) in all_errors(case, out, gemma=False).items()}
    same, other = ("image_tokens", "logits"), ("padded_tokens",)
    if "audio_tokens" in found:
        same, other = ("image_tokens",), ("padded_tokens", "audio_tokens", "logits")
    assert max(found[name] for name in same) < 1e-12 and min(found[name] for name in other) > 1e-3, found
    said = settings(case)
    silent = " ".join(convert.plan_conversion("gemma", source, settings=said).config_notes)
    for fact, value in differences(case).items():
        told = convert.plan_conversion("gemma", source, settings={k: x for k, x in said.items() if k != fact})
        assert any(f"--set {fact}={value}" in note for note in told.config_notes) and fact not in silent
        with pytest.raises(convert.PlanError, match="its|it masks"):
            convert.plan_conversion("gemma", source, settings=said | {fact: 13 if value == 12 else "otherwise"})


@pytest.mark.parametrize("case", CASES)
def test_the_tree_tells_the_model_and_comes_back(case: str, made: Any) -> None:
    source, out = made(case)
    plan = convert.plan_conversion("gemma", source, settings=settings(case))
    assert plan.rules.model == MODELS[case] and not plan.dropped
    back = ReversedSource(convert.plan_reverse("gemma", out, layout="NESTED"))
    leaves = ALL.leaves(case)
    assert back.leaves.keys() == leaves.keys()
    assert all(np.array_equal(back.read(name), x) for name, x in leaves.items())


@pytest.mark.parametrize("case", CASES)
def test_a_text_model_leaves_the_towers_out(case: str) -> None:
    source, text = MemorySource(ALL.leaves(case)), MODELS[case].rpartition("_")[0]
    said = {k: x for k, x in settings(case).items() if k not in OF_IMAGES | OF_SOUND}
    plan = convert.plan_conversion(text, source, settings=said)
    assert plan.rules.model == text and {x.leaf for x in plan.dropped} == ALL.leaves(case).keys() - TEXT.leaves(case).keys()  # fmt: skip
    assert all("which a text model does not have" in x.reason for x in plan.dropped)


V, A = "encoder.layers.{j}", "audio_tower.layers.{k}"
RULE_MISTAKES = {  # a text of the rules, what stands there instead, a tensor that it spoils, what the check calls it
    "gemma4-31b": (
        (f"{V}.self_attn.{{k,v}}_proj", f"{V}.self_attn.{{v,k}}_proj", "encoder.layers.0.self_attn.k_proj", "of another tensor"),
        (f"{V}.mlp.{{gate,up}}_proj", f"{V}.mlp.{{up,gate}}_proj", "encoder.layers.0.mlp.gate_proj", "of another tensor"),
        (f"{V}.self_attn.{{q,k}}_norm", f"{V}.self_attn.{{k,q}}_norm", "encoder.layers.0.self_attn.q_norm", "of another tensor"),
        ("multiplies_by: scale                # vision", "multiplies_by: 1+scale                # vision", "encoder.layers.0.input_layernorm", "1 added|1\\+scale"),
        ("...AB,ABW->...W", "...BA,ABW->...W", "encoder.layers.0.self_attn.o_proj", "transposed|laid out|exchanged|axes|order"),
        ("vision_tower.std_{bias,scale}", "vision_tower.std_{scale,bias}", "vision_tower.std_bias", "of another tensor"),
    ),
    "gemma4-e2b": (
        (f"{V}.self_attn.{{q,o}}_proj.{{input,output}}_{{min", f"{V}.self_attn.{{q,o}}_proj.{{output,input}}_{{min", "encoder.layers.0.self_attn.q_proj.input_min", "of another tensor"),
        (f"{A}.self_attn.{{q,k,v}}_proj.linear", f"{A}.self_attn.{{k,q,v}}_proj.linear", "audio_tower.layers.0.self_attn.q_proj", "of another tensor"),
        ("...XE,XEU->...U", "...EX,XEU->...U", "input_proj_linear", "transposed|laid out|exchanged|axes|order"),
        (f"{A}.feed_forward{{1,2}}.ffw_layer_1.linear", f"{A}.feed_forward{{2,1}}.ffw_layer_1.linear", "layers.0.feed_forward1.ffw_layer_1", "of another (tensor|layer)"),
        (f"{A}.norm_{{pre,post}}_attn", f"{A}.norm_{{post,pre}}_attn", "layers.0.norm_pre_attn", "of another tensor"),
        (f"{A}.lconv1d.{{pre_layer_norm,conv_norm}}", f"{A}.lconv1d.{{conv_norm,pre_layer_norm}}", "layers.0.lconv1d.conv_norm", "of another tensor"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", RULE_MISTAKES)
def test_wrong_rules_are_named(case: str, made: Any, tmp_path: Path) -> None:
    """All of a case at once: each is named at its place."""
    source, _ = made(case)
    right = wrong = convert.plan_conversion("gemma", source, settings=settings(case)).rules.text
    for old, new, *_ in RULE_MISTAKES[case]:
        assert old in wrong
        wrong = wrong.replace(old, new)
    report = report_of_mistake("gemma", source, right, wrong, tmp_path / "out", settings=settings(case))
    said = [str(finding) for finding in report.findings]
    for *_, place, words in RULE_MISTAKES[case]:
        assert any(place in text and re.search(words, text) for text in said), (place, said)


PUBLISHED = {  # gm/nn/gemma4/_gemma4.py: width, layers, heads, feed-forward block of the vision tower
    "4-31b": ("gemma4-31b", (1152, 27, 16, 4304)),
    "4-26b-a4b": ("gemma4-26b-a4b", (1152, 27, 16, 4304)),
    "4-e2b": ("gemma4-e2b", (768, 16, 12, 3072)),
    "4-e4b": ("gemma4-e4b", (768, 16, 12, 3072)),
}


@pytest.mark.parametrize("version", PUBLISHED)
def test_published_sizes_need_no_setting(version: str) -> None:
    from transformers import AutoConfig

    case, (width, layers, heads, hidden) = PUBLISHED[version]
    text = {name: (leaf.spec.shape, "bfloat16") for name, leaf in published(version).leaves.items()}
    model = text["embedder/input_embedding"][0][1]
    towers: dict[str, tuple[tuple[int, ...], str]] = {}
    head, B = width // heads, "vision_encoder/transformer/stacked_layers/block"
    shapes: dict[str, tuple[int, ...]] = {
        "vision_encoder/entry/input_projection/w": (768, width), "vision_encoder/entry/pos_emb": (10240, 2, width),
        f"{B}/attn/q_einsum/w": (heads, width, head), f"{B}/attn/kv_einsum/w": (2, heads, width, head), f"{B}/attn/attn_vec_einsum/w": (heads, head, width),
        f"{B}/attn/query_norm/scale": (head,), f"{B}/attn/key_norm/scale": (head,), f"{B}/mlp/gating_einsum/w": (2, hidden, width), f"{B}/mlp/linear/w": (hidden, width),
        "embedder/mm_input_projection/w": (width, model), "embedder/audio_input_projection/w": (1536, model),
        "audio_encoder/output_projection/kernel": (1024, 1536), "audio_encoder/output_projection/bias": (1536,),
    }  # fmt: skip
    large = {24: 1024, 96: 4096, 48: 2048, 3: 8, 8: 128}  # of the audio tower's layers
    for name, x in ALL.leaves(case).items():
        if name.startswith(("vision_encoder", "embedder/mm", "embedder/audio", "audio_encoder/output")):
            shape = shapes.get(name, () if "clip_" in name else (width,))
            towers[name] = ((layers, *shape) if name.startswith(B) else shape, "float32")
        elif name.startswith("audio_encoder/conformer"):
            shape = tuple(large.get(size, size) for size in x.shape)
            towers |= {name.replace("layers_0", f"layers_{k}"): (shape, "float32") for k in range(12) if "layers_0" in name}  # fmt: skip
        elif name.startswith("audio_encoder"):
            towers[name] = (tuple(1024 if size == 24 else size for size in x.shape), "float32")
    plan = convert.plan_conversion("gemma", SpecsOnly(text | towers))
    assert (plan.rules.model, plan.version) == (MODELS[case], version) and plan.config is not None
    config = AutoConfig.for_model(plan.config["model_type"], **{k: x for k, x in plan.config.items() if k != "model_type"})  # fmt: skip
    vision = config.vision_config
    assert (vision.hidden_size, vision.num_hidden_layers, vision.num_attention_heads, vision.intermediate_size) == (width, layers, heads, hidden)  # fmt: skip
    assert (vision.patch_size, vision.position_embedding_size, vision.head_dim) == (16, 10240, head)
    assert config.text_config.hidden_size == model
    if config.audio_config is not None:
        default = type(config.audio_config)()
        assert {k: x for k, x in plan.config["audio_config"].items() if k != "model_type"}.items() <= default.to_dict().items()  # fmt: skip
