"""Gemma 4 and Gemma 3n: what gemma 4.0.1's own code computed, and what transformers computes from the converted directory."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import convert
from convert.reversing.source import ReversedSource
from support import gemma_drawn
from support.gemma_drawn import ALL, CASES, SIZES, converted, errors, published, settings
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


def test_only_the_layers_of_gemma3n_that_share_keys_may_lack_them() -> None:
    leaves, said = ALL.leaves("gemma3n"), settings("gemma3n")
    layers, shared = ALL.config("gemma3n")["layers"], said["kv_shared_layers"]
    own = [f"layer_{i}/attn/{rest}" for i in range(layers) for rest in ("kv_einsum/w", "key_norm/scale")]
    last = own[2 * (layers - shared) :]
    less = MemorySource({name: x for name, x in leaves.items() if name not in last})
    assert convert.plan_conversion("gemma", less, settings=said).rules.model == "gemma3n"
    for name in own[: 2 * (layers - shared)]:
        with pytest.raises(convert.PlanError) as refused:
            convert.plan_conversion(
                "gemma", MemorySource({k: x for k, x in leaves.items() if k != name}), settings=said
            )
        assert [(finding.code, finding.path) for finding in refused.value.findings] == [("leaf-missing", name)]


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
