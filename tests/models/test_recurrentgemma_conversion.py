"""RecurrentGemma: what upstream's flax code wrote, in upstream's PyTorch code and in transformers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import convert
from convert.planning.planner import make_plan
from convert.rules.library import find_rules
from support import goldens, recurrentgemma
from support.memory_source import MemorySource
from support.recurrentgemma import CASE, SETTINGS


@pytest.fixture(scope="module")
def hugging(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recurrentgemma.converted("transformers", tmp_path_factory.mktemp("out"))


@pytest.mark.slow
def test_from_pretrained_computes_what_jax_computed(hugging: Path) -> None:
    model = recurrentgemma.load("transformers", hugging)
    assert type(model).__name__ == "RecurrentGemmaForCausalLM"
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    single, double = recurrentgemma.errors("transformers", hugging)
    assert single < 2e-6 and double < 1e-12


@pytest.mark.slow
def test_upstreams_torch_computes_what_jax_computed(tmp_path: Path) -> None:
    out = recurrentgemma.converted("recurrentgemma", tmp_path)
    single, double = recurrentgemma.errors("recurrentgemma", out)
    assert single < 2e-6 and double < 1e-12


def test_config_is_complete(hugging: Path) -> None:
    config = json.loads((hugging / "config.json").read_text())
    assert config["block_types"] == ["recurrent", "recurrent", "attention"] * 3 + ["recurrent"] * 2
    assert config["attention_window_size"] == 6  # transformers counts the position itself
    assert config["intermediate_size"] == 88  # transformers halves it
    assert config["num_key_value_heads"] == 1


def test_keys_with_dots_keep_their_layers() -> None:
    """``blocks.10`` lies before ``blocks.2`` on disk."""
    plan = convert.plan_conversion(CASE, goldens.checkpoint(CASE), settings=SETTINGS)
    for step in plan.steps:
        if found := re.match(r"model\.layers\.(\d+)\.", step.name):
            assert step.parts[0].leaf.startswith(f"params/blocks.{found[1]}/")


def published(layers: int, width: int, heads: int, **changes: tuple[int, ...]) -> dict[str, np.ndarray]:
    """A tree of the published kind, as views of one number."""
    block, shapes = width // heads, dict[str, tuple[int, ...]]()
    shapes["embedder/input_embedding"], shapes["final_norm/scale"] = (256_000, width), (width,)
    for i in range(layers):
        b = f"blocks.{i}"
        shapes |= {f"{b}/{name}_pre_norm/scale": (width,) for name in ("temporal", "channel")}
        shapes |= {
            f"{b}/mlp_block/ffw_up/w": (2, width, 3 * width),
            f"{b}/mlp_block/ffw_up/b": (2, 1, 1, 3 * width),
            f"{b}/mlp_block/ffw_down/kernel": (3 * width, width),
            f"{b}/mlp_block/ffw_down/bias": (width,),
        }
        if i % 3 == 2:
            shapes |= {f"{b}/attention_block/proj_{x}/kernel": (width, block) for x in "kv"}
            shapes |= {f"{b}/attention_block/proj_{x}/kernel": (width, width) for x in ("q", "final")}
            shapes[f"{b}/attention_block/proj_final/bias"] = (width,)
            continue
        r = f"{b}/recurrent_block"
        for name in ("linear_x", "linear_y", "linear_out"):
            shapes |= {f"{r}/{name}/kernel": (width, width), f"{r}/{name}/bias": (width,)}
        shapes |= {f"{r}/conv_1d/w": (4, width), f"{r}/conv_1d/b": (width,), f"{r}/rg_lru/a_param": (width,)}
        for gate in ("input_gate", "a_gate"):
            shapes |= {f"{r}/rg_lru/{gate}/w": (heads, block, block), f"{r}/rg_lru/{gate}/b": (heads, block)}
    return {f"params/{name}": np.broadcast_to(np.float32(0), shape) for name, shape in (shapes | changes).items()}


@pytest.mark.parametrize(("version", "layers", "width", "heads"), [("2b", 26, 2560, 10), ("9b", 38, 4096, 16)])
def test_published_sizes_need_no_settings(version: str, layers: int, width: int, heads: int) -> None:
    (rules,) = find_rules(CASE)
    plan = make_plan(rules, MemorySource(published(layers, width, heads)))
    assert plan.version == version
    assert plan.config is not None
    assert (plan.config["attention_window_size"], plan.config["logits_soft_cap"]) == (2049, 30.0)
    with torch.device("meta"):
        from transformers import RecurrentGemmaConfig, RecurrentGemmaForCausalLM

        model = RecurrentGemmaForCausalLM(RecurrentGemmaConfig(**plan.config))
    wanted = {name: tuple(x.shape) for name, x in model.state_dict().items() if name != "lm_head.weight"}
    assert {step.name: step.spec.shape for step in plan.steps} == wanted


def test_an_unpublished_size_is_asked_for_by_name() -> None:
    plan = convert.plan_conversion(CASE, goldens.checkpoint(CASE))
    with pytest.raises(convert.PlanError) as refused:
        _ = plan.config
    assert "config.json needs attention_window, logits_soft_cap, which the tree does not hold" in str(refused.value)
    assert "--set attention_window=... --set logits_soft_cap=..." in str(refused.value)
    assert plan.generation_config == {"bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0}


def lose_a_block(tree: dict[str, Any]) -> None:
    for name in [name for name in tree if name.startswith("params/blocks.4/recurrent_block/")]:
        del tree[name]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lose_a_block, "layer {i} = 4: expected params/blocks.{i}/recurrent_block/** (recurrent) or"),
        (
            lambda tree: tree.pop("params/blocks.3/recurrent_block/rg_lru/a_gate/b"),
            "params/blocks.3/recurrent_block/rg_lru/a_gate/b: this leaf is not in the checkpoint",
        ),
        (
            lambda tree: tree.update({"params/blocks.2/attention_block/proj_k/kernel": np.zeros((48, 16), np.float32)}),
            "float32[48,16] as D H) makes it 16",
        ),
    ],
)
def test_damaged_trees_are_refused(damage: Callable[[dict[str, Any]], Any], message: str) -> None:
    (rules,) = find_rules(CASE)
    tree = published(6, 48, 6)
    make_plan(rules, MemorySource(tree))
    damage(tree)
    with pytest.raises(convert.PlanError) as refused:
        make_plan(rules, MemorySource(tree))
    assert message in str(refused.value)
