"""T5Gemma: what gemma 4.0.1's own code computed, and what transformers computes from the converted directory."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import convert
from convert.reversing.source import ReversedSource
from support.goldens import SpecsOnly
from support.memory_source import MemorySource
from support.rule_mistakes import report_of_mistake
from support.t5gemma import ALL, CASES, converted, errors, settings
from support.value_mistakes import assert_mistakes_are_named

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("case", CASES)
def test_transformers_computes_what_gemma_does(case: str, tmp_path: Path) -> None:
    """Texts are longer than the window, and one is padded."""
    _, out = converted(case, tmp_path)
    single, double = errors(case, out)
    assert single < 4e-5
    assert double < 1e-12


def test_the_window_of_the_encoder_is_one_less(tmp_path: Path) -> None:
    """transformers 5.23 masks what is farther than the window, gemma what is as far."""
    _, out = converted("t5gemma-2b-2b", tmp_path)
    config = json.loads((out / "config.json").read_text())
    assert (config["encoder"]["sliding_window"], config["decoder"]["sliding_window"]) == (3, 4)
    config["encoder"]["sliding_window"] = 4
    (out / "config.json").write_text(json.dumps(config))
    assert errors("t5gemma-2b-2b", out)[1] > 1e-3


@pytest.mark.parametrize("case", CASES)
def test_the_tree_tells_the_model_and_comes_back(case: str, tmp_path: Path) -> None:
    source, out = converted(case, tmp_path)
    plan = convert.plan_conversion("gemma", source, settings=settings(case))
    assert plan.rules.model == "t5gemma"
    large = {"encoder_gating": "FD"} if case == "t5gemma-9b-2b" else {}
    back = ReversedSource(convert.plan_reverse("gemma", out, settings=large))
    leaves = ALL.leaves(case)
    assert back.leaves.keys() == leaves.keys()
    assert all(np.array_equal(back.read(name), x) for name, x in leaves.items())


SIZES = {  # research/t5gemma/config.py: layers, width, heads, key heads, width of a head, of the feed-forward block
    "2b": (26, 2304, 8, 4, 256, 9216),
    "9b": (42, 3584, 16, 8, 256, 14336),
    "s": (8, 512, 8, 8, 64, 1024),
    "b": (12, 768, 12, 12, 64, 2048),
    "l": (24, 1024, 16, 16, 64, 2816),
    "ml": (26, 1152, 4, 4, 256, 6912),
    "xl": (24, 2048, 32, 32, 64, 5120),
}


def half(name: str, size: str, encoder: str | None = None) -> dict[str, tuple[tuple[int, ...], str]]:
    """The tree of an encoder, or of the decoder of an encoder, at a published size."""
    layers, D, N, K, H, F = SIZES[size]
    gating = (2, F, D) if size == "9b" else (2, D, F)
    own = {"qkv_einsum": (3, N, D, H)} if N == K else {"q_einsum": (N, D, H), "kv_einsum": (2, K, D, H)}
    shapes = {f"attn/{name}/w": shape for name, shape in {**own, "attn_vec_einsum": (N, H, D)}.items()}
    norms = ["pre_attention", "post_attention", "pre_ffw", "post_ffw"]
    if encoder is not None:
        other = {"q_einsum": (N, D, H), "kv_einsum": (2, K, SIZES[encoder][1], H), "attn_vec_einsum": (N, H, D)}
        shapes |= {f"cross_attn/{name}/w": shape for name, shape in other.items()}
        norms += ["pre_cross_attention", "post_cross_attention"]
    shapes |= {f"{norm}_norm/scale": (D,) for norm in norms}
    shapes |= {"mlp/gating_einsum": gating, "mlp/linear": (F, D)}
    found = {f"layer_{i}/{leaf}": shape for i in range(layers) for leaf, shape in shapes.items()}
    found |= {"embedder/input_embedding": (256128, D), "final_norm/scale": (D,)}
    return {f"{name}/{leaf}": (shape, "bfloat16") for leaf, shape in found.items()}


@pytest.mark.parametrize("version", ["2b-2b", "9b-9b", "9b-2b", "s-s", "b-b", "l-l", "ml-ml", "xl-xl"])
def test_published_sizes_need_no_setting(version: str) -> None:
    from transformers import AutoConfig, T5GemmaForConditionalGeneration

    encoder, decoder = version.split("-")
    plan = convert.plan_conversion("gemma", SpecsOnly(half("encoder", encoder) | half("decoder", decoder, encoder)))
    assert plan.version == version and plan.config is not None
    with torch.device("meta"):
        made = T5GemmaForConditionalGeneration(AutoConfig.for_model(**plan.config)).state_dict()
    head = "lm_head.out_proj.weight"  # the decoder's table
    assert {name: tuple(x.shape) for name, x in made.items() if name != head} == {
        step.name: step.spec.shape for step in plan.steps
    }


RULE_MISTAKES = (  # a text of the rules, what stands there instead, what the check calls it
    ("encoder.layers.{i}.self_attn.{k,v}_proj", "encoder.layers.{i}.self_attn.{v,k}_proj", "of another tensor"),
    ("cross_attn.{k,v}_proj", "cross_attn.{v,k}_proj", "of another tensor"),
    ("decoder.layers.{j}.{self_attn,cross_attn}.o_proj", "decoder.layers.{j}.{cross_attn,self_attn}.o_proj", "of another tensor"),
    ("decoder.layers.{j}.mlp.{gate,up}_proj", "decoder.layers.{j}.mlp.{up,gate}_proj", "of another tensor"),
    ("{pre_self_attn,post_self_attn,pre_cross_attn,", "{post_self_attn,pre_self_attn,pre_cross_attn,", "of another tensor"),
    ("{module: model.encoder.norm, multiplies_by: 1+weight}", "model.encoder.norm", "1 added|1\\+|added to"),
)  # fmt: skip


@pytest.mark.parametrize("mistake", RULE_MISTAKES, ids=range(len(RULE_MISTAKES)))
def test_wrong_rules_are_named(mistake: tuple[str, str, str], tmp_path: Path) -> None:
    text, wrong, words = mistake
    case = "t5gemma-2b-2b"
    source = MemorySource(ALL.leaves(case))
    report = report_of_mistake("gemma", source, text, wrong, tmp_path / "out", settings=settings(case))
    said = " ".join(map(str, report.findings))
    assert re.search(words, said), said


@pytest.mark.parametrize("case", CASES)
def test_mistakes_in_the_file_are_named(case: str, tmp_path: Path) -> None:
    source, out = converted(case, tmp_path)
    assert assert_mistakes_are_named(out, source) >= 9
