"""Gemma 4 and Gemma 3n: what gemma 4.0.1's own code computed, and what transformers computes from the converted directory."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import convert
from convert.reversing.source import ReversedSource
from support import gemma_drawn
from support.gemma_drawn import ALL, CASES, converted, errors, settings
from support.goldens import SpecsOnly, relative_error
from support.memory_source import MemorySource
from support.rule_mistakes import report_of_mistake
from support.value_mistakes import assert_mistakes_are_named

pytestmark = pytest.mark.slow

MODELS = {
    "gemma3n": "gemma3n",
    "gemma4-e2b": "gemma4_e",
    "gemma4-e4b": "gemma4_e",
    "gemma4-31b": "gemma4",
    "gemma4-26b-a4b": "gemma4_moe",
}


@pytest.mark.parametrize("case", CASES)
def test_transformers_computes_what_gemma_does(case: str, tmp_path: Path) -> None:
    """In float32 as far as JAX itself is from its float64: scores are not divided, so the rounding of RoPE's angles is seen in the logits."""
    _, out = converted(case, tmp_path)
    single, double = errors(case, out)
    drift = relative_error(ALL.values(case, "out")["logits"], ALL.values(case, "out64")["logits"])
    assert drift < 4e-5 and single < 4 * drift
    assert double < 1e-12


def test_the_router_of_transformers_gets_what_lies_before_the_norm(tmp_path: Path) -> None:
    """gemma 4.0.1 differs in this alone; the plan says so."""
    _, out = converted("gemma4-26b-a4b", tmp_path)
    assert errors("gemma4-26b-a4b", out, as_gemma=False)[1] > 0.1
    said = settings("gemma4-26b-a4b")
    source = MemorySource(ALL.leaves("gemma4-26b-a4b"))
    silent = convert.plan_conversion("gemma", source, settings=said)
    told = convert.plan_conversion("gemma", source, settings={k: x for k, x in said.items() if k != "router_input"})
    assert not any("pre_ffw_norm" in note for note in silent.config_notes)
    assert any("pre_ffw_norm" in note for note in told.config_notes)
    with pytest.raises(convert.PlanError, match="router"):
        convert.plan_conversion("gemma", source, settings=said | {"router_input": "normed"})


@pytest.mark.parametrize("case", CASES)
def test_the_tree_tells_the_model_and_comes_back(case: str, tmp_path: Path) -> None:
    source, out = converted(case, tmp_path)
    plan = convert.plan_conversion("gemma", source, settings=settings(case))
    assert plan.rules.model == MODELS[case]
    back = ReversedSource(convert.plan_reverse("gemma", out, layout="NESTED"))
    leaves = ALL.leaves(case)
    assert back.leaves.keys() == leaves.keys()
    assert all(np.array_equal(back.read(name), x) for name, x in leaves.items())


def test_the_layout_of_the_releases(tmp_path: Path) -> None:
    """FLAT has a `w` for each matrix; the bytes are the same."""
    _, out = converted("gemma4-e2b", tmp_path)
    paths = {"mlp/gating_einsum": "mlp/gating_einsum/w", "mlp/linear": "mlp/linear/w"}
    flat = {}
    for name, x in ALL.leaves("gemma4-e2b").items():
        for short, long in paths.items():
            name = f"{name.removesuffix(short)}{long}" if name.endswith(short) else name
        flat[f"transformer/{name}"] = x
    convert.convert("gemma", MemorySource(flat), tmp_path / "flat", settings=settings("gemma4-e2b"))
    first, second = (load_file(folder / "model.safetensors") for folder in (out, tmp_path / "flat"))
    assert first.keys() == second.keys() and all(np.array_equal(x, second[name]) for name, x in first.items())


SIZES: dict[str, tuple[str, dict[str, int], dict[str, Any]]] = {  # gm/nn/gemma4/_gemma4.py
    "4-e2b": ("gemma4-e2b", {"layers": 35, "period": 5, "D": 1536, "N": 8, "K": 1, "F": 6144, "P": 256, "shared": 20, "wide": 2}, {"num_kv_shared_layers": 20}),
    "4-e4b": ("gemma4-e4b", {"layers": 42, "period": 6, "D": 2560, "N": 8, "K": 2, "F": 10240, "P": 256, "shared": 18, "wide": 1}, {"num_kv_shared_layers": 18}),
    "4-31b": ("gemma4-31b", {"layers": 60, "period": 6, "D": 5376, "N": 32, "K": 16, "L": 4, "F": 21504}, {"num_global_key_value_heads": 4}),
    "4-26b-a4b": ("gemma4-26b-a4b", {"layers": 30, "period": 6, "D": 2816, "N": 16, "K": 8, "L": 2, "F": 2112, "E": 128, "X": 704}, {"top_k_experts": 8, "num_experts": 128}),
}  # fmt: skip


def published(version: str) -> SpecsOnly:
    """The tree of a published model: the golden's names, the shapes of the release."""
    case, size, _ = SIZES[version]
    D, N, K, F, P, L, E, X, layers = (size.get(x, 0) for x in ("D", "N", "K", "F", "P", "L", "E", "X", "layers"))
    shapes: dict[str, tuple[int, ...]] = {
        "embedder/input_embedding": (262144, D),
        "embedder/per_layer_embeddings": (262144, layers, P),
        "embedder/per_layer_model_projection/w": (D, layers, P),
        "embedder/per_layer_projection_norm/scale": (P,),
        "final_norm/scale": (D,),
    }
    names = ALL.leaves(case)
    found = {name: shape for name, shape in shapes.items() if name in names}
    for i in range(layers):
        wide = i % size["period"] == size["period"] - 1
        H, f = 512 if wide else 256, F * (size.get("wide", 1) if i >= layers - size.get("shared", 0) else 1)
        shapes = {
            "attn/q_einsum/w": (N, D, H), "attn/attn_vec_einsum/w": (N, H, D), "attn/kv_einsum/w": (2, K, D, H), "attn/k_einsum/w": (L, D, H),
            "attn/query_norm/scale": (H,), "attn/key_norm/scale": (H,), "skip_scale": (1,), "mlp/gating_einsum": (2, f, D), "mlp/linear": (f, D),
            "mlp2/gating_einsum": (2, f, D), "mlp2/linear": (f, D), "mlp/router_logits/w": (D, E), "mlp/gating_einsum/w": (E, 2, X, D),
            "mlp/linear/w": (E, X, D), "mlp/per_expert_scale": (E,), "per_layer_input_gate/w": (D, P), "per_layer_projection/w": (P, D),
        }  # fmt: skip
        of = f"layer_{int(wide)}/"  # of the golden: local and global layers in turns
        rests = [name.removeprefix(of) for name in names if name.startswith(of)]
        found |= {f"layer_{i}/{rest}": shapes.get(rest, (D,)) for rest in rests}
    return SpecsOnly({name: (shape, "bfloat16") for name, shape in found.items()})


@pytest.mark.parametrize("version", SIZES)
def test_published_sizes_need_no_setting(version: str) -> None:
    from transformers import AutoConfig

    plan = convert.plan_conversion("gemma", published(version))
    assert plan.version == version and plan.config is not None
    _, size, stated = SIZES[version]
    assert stated.items() <= plan.config.items()
    assert (plan.config["head_dim"], plan.config["global_head_dim"], plan.config["intermediate_size"]) == (256, 512, size["F"])  # fmt: skip
    pattern = ["sliding_attention"] * (size["period"] - 1) + ["full_attention"]
    assert plan.config["layer_types"] == (pattern * size["layers"])[: size["layers"]]
    AutoConfig.for_model(plan.config["model_type"], **{k: x for k, x in plan.config.items() if k != "model_type"})


@pytest.mark.parametrize(
    ("version", "layers", "width", "shared"), [("3n-e2b", 30, 8192, 10), ("3n-e4b", 35, 16384, 15)]
)
def test_published_sizes_of_gemma3n_need_no_setting(version: str, layers: int, width: int, shared: int) -> None:
    """gm/nn/gemma3n/_gemma3n.py; the golden has each of its sizes but three once."""
    large = {37: 262144, 16: 2048, 20: width, 6: 256, 3: 64}
    specs: dict[str, tuple[tuple[int, ...], str]] = {}
    for name, x in ALL.leaves("gemma3n").items():
        shape = tuple(large.get(size, size) for size in x.shape)
        top, _, rest = name.partition("/")
        if rest.startswith("attn"):
            shape = {"attn/q_einsum/w": (8, 2048, 256), "attn/kv_einsum/w": (2, 2, 2048, 256), "attn/attn_vec_einsum/w": (8, 256, 2048)}.get(rest, (256,))  # fmt: skip
        if top == "layer_0":
            specs |= {f"layer_{i}/{rest}": (shape, "bfloat16") for i in range(layers)}
        elif not top.startswith("layer_"):
            whole = (shape[0], layers, shape[2]) if "per_layer_input" in name else shape
            specs[name] = (whole, "bfloat16")
    plan = convert.plan_conversion("gemma", SpecsOnly(specs))
    assert plan.version == version and plan.config is not None
    assert plan.config["num_kv_shared_layers"] == shared and len(plan.config["activation_sparsity_pattern"]) == layers
    assert plan.config["layer_types"] == ((["sliding_attention"] * 4 + ["full_attention"]) * 7)[:layers]


RULE_MISTAKES = (  # case, a text of the rules, what stands there instead, what the check calls it
    ("gemma4-e2b", "self_attn.{k,v}_proj", "self_attn.{v,k}_proj", "of another tensor"),
    ("gemma4-e2b", "mlp.{gate,up}_proj", "mlp.{up,gate}_proj", "of another tensor"),
    ("gemma4-e2b", "multiplies_by: scale                # _layers.py", "multiplies_by: 1+scale                # _layers.py", "1 added|1\\+scale"),
    ("gemma4-e2b", "axes: VYP", "prescaled_by: sqrt(P)\n  axes: VYP", "multiplied by"),
    ("gemma4-e2b", "self_attn.{q,k}_norm", "self_attn.{k,q}_norm", "of another tensor"),
    ("gemma4-e2b", "{input,post_attention,post_feedforward}", "{post_attention,input,post_feedforward}", "of another tensor"),
    ("gemma4-26b-a4b", "post_feedforward_layernorm_1,pre_feedforward_layernorm_2", "pre_feedforward_layernorm_2,post_feedforward_layernorm_1", "of another tensor"),
    ("gemma3n", "multiplies_by: scale                # scale_plus_one", "multiplies_by: 1+scale                # scale_plus_one", "1 added|1\\+scale"),
    ("gemma3n", "...A,AIJ->...IJ", "...A,AIJ->...JI", "transposed|laid out|exchanged|axes"),
    ("gemma3n", "layers.{i}.{input,post_attention,pre_feedforward", "layers.{i}.{post_attention,input,pre_feedforward", "of another tensor"),
)  # fmt: skip


@pytest.mark.parametrize("mistake", RULE_MISTAKES, ids=range(len(RULE_MISTAKES)))
def test_wrong_rules_are_named(mistake: tuple[str, str, str, str], tmp_path: Path) -> None:
    case, text, wrong, words = mistake
    source = gemma_drawn.write(case, tmp_path)
    report = report_of_mistake("gemma", source, text, wrong, tmp_path / "out", settings=settings(case))
    said = " ".join(map(str, report.findings))
    assert re.search(words, said), said


@pytest.mark.parametrize("case", CASES)
def test_mistakes_in_the_file_are_named(case: str, tmp_path: Path) -> None:
    source, out = converted(case, tmp_path)
    assert assert_mistakes_are_named(out, source) >= 9
    assert json.loads((out / "config.json").read_text())["architectures"] == [
        f"{case.partition('-')[0].capitalize()}ForCausalLM"
    ]
