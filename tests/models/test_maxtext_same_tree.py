"""MaxText's configurations whose tree is that of another one: the plan says so, and its settings give theirs (maxtext 0.2.5, configs/models)."""

from __future__ import annotations

import re
from collections.abc import Mapping

import pytest
import yaml

import convert
from support import maxtext
from support.goldens import SpecsOnly

Specs = dict[str, tuple[tuple[int, ...], str]]
DECODER = "params/params/decoder"


def specs(shapes: Mapping[str, tuple[int, ...]], width: int, rows: int) -> SpecsOnly:
    ends = {f"{DECODER}/decoder_norm/scale": (width,), "params/params/token_embedder/embedding": (rows, width)}
    return SpecsOnly({leaf: (shape, "bfloat16") for leaf, shape in {**ends, **shapes}.items()})


def qwen(i: int, d: int, n: int, k: int, f: int, experts: int = 0, h: int = 128, rows: int = 151936) -> SpecsOnly:
    layers = f"{DECODER}/layers"
    shapes: dict[str, tuple[int, ...]] = {
        f"{layers}/{side}_self_attention_layer_norm/scale": (d, i) for side in ("pre", "post")
    }
    shapes |= {f"{layers}/self_attention/{x}/kernel": (d, i, m, h) for x, m in (("query", n), ("key", k), ("value", k))}
    shapes |= {f"{layers}/self_attention/{x}_norm/scale": (h, i) for x in ("query", "key")}
    shapes[f"{layers}/self_attention/out/kernel"] = (n, i, h, d)
    if not experts:
        shapes |= {f"{layers}/mlp/{x}/kernel": (d, i, f) for x in ("wi_0", "wi_1")}
        return specs(shapes | {f"{layers}/mlp/wo/kernel": (f, i, d)}, d, rows)
    shapes |= {f"{layers}/moe_block/{x}": (experts, i, d, f) for x in ("wi_0", "wi_1")}
    shapes |= {f"{layers}/moe_block/gate/kernel": (d, i, experts), f"{layers}/moe_block/wo": (experts, i, f, d)}
    return specs(shapes | {f"{DECODER}/logits_dense/kernel": (d, rows)}, d, rows)


def olmo(i: int = 32, d: int = 4096, n: int = 32, h: int = 128, f: int = 11008, rows: int = 100278) -> SpecsOnly:
    shapes: dict[str, tuple[int, ...]] = {f"{DECODER}/logits_dense/kernel": (d, rows)}
    for layer in (f"{DECODER}/layers_{j}" for j in range(i)):
        shapes |= {f"{layer}/attention/{x}/kernel": (d, n, h) for x in ("query", "key", "value")}
        shapes |= {f"{layer}/attention/{x}_norm/scale": (n * h,) for x in ("query", "key")}
        shapes |= {f"{layer}/mlp/{x}/kernel": (d, f) for x in ("wi_0", "wi_1")}
        shapes |= {f"{layer}/{side}_layer_norm/scale": (d,) for side in ("post_mlp", "post_self_attention")}
        shapes |= {f"{layer}/attention/out/kernel": (n, h, d), f"{layer}/mlp/wo/kernel": (f, d)}
    return specs(shapes, d, rows)


def test_the_scale_of_deepseek_s_experts_is_that_of_the_run() -> None:
    """base_moe's routed_scaling_factor: no leaf holds it; configs/models give it to the published size."""
    source, said = maxtext.checkpoint("deepseek3"), maxtext.settings("deepseek3")
    for settings, factor in ((said, 2.5), (said | {"routed_scaling_factor": 1.25}, 1.25)):
        plan = convert.plan_conversion(maxtext.rules("deepseek3"), source, settings=settings)
        assert plan.config is not None and plan.config["routed_scaling_factor"] == factor


@pytest.mark.parametrize(
    ("tree", "version", "fact", "other", "written"),
    [
        (
            qwen(36, 2560, 32, 8, 9728),
            "3-4b",
            "rope_theta",
            "qwen3-4b-thinking-2507",
            {"rope_theta": 5000000.0, "max_position_embeddings": 262144},
        ),
        (
            qwen(48, 2048, 32, 4, 768, experts=128),
            "3-30b-a3b",
            "rope_theta",
            "qwen3-30b-a3b-base",
            {"rope_theta": 1000000.0},
        ),
        (olmo(), "7b", "rope_factor", "olmo3-7b-pt", {"factor": 1.0, "max_position_embeddings": 8192}),
    ],
    ids=["qwen3-4b-thinking-2507", "qwen3-30b-a3b-base", "olmo3-7b-pt"],
)
def test_the_plan_names_the_other_configuration_of_the_tree(
    tree: SpecsOnly, version: str, fact: str, other: str, written: dict[str, float]
) -> None:
    plan = convert.plan_conversion("maxtext", tree)
    assert plan.version == version
    (note,) = [note for note in plan.config_notes if other in note.split()]
    settings = {key: yaml.safe_load(value) for key, value in re.findall(r"--set (\w+)=(\S+)", note)}
    assert fact in settings, note
    theirs = convert.plan_conversion("maxtext", tree, settings=settings)
    assert not [note for note in theirs.config_notes if other in note], "set: nothing is left to confirm"
    assert theirs.config is not None
    rope = theirs.config["rope_parameters"]
    found = {**theirs.config, **rope, **rope.get("full_attention", {})}
    assert {key: found[key] for key in written} == written
    assert theirs.config != plan.config
