"""MaxText's Gemma 4: published sizes from shapes alone, and trees that transformers cannot compute with."""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np
import pytest
import torch
import transformers

import convert
from support import maxtext
from support.goldens import SpecsOnly
from support.memory_source import MemorySource

pytestmark = pytest.mark.slow

TOWER = {"j": 27, "W": 1152, "A": 16, "B": 72, "M": 4304, "S": 16, "T": 768, "Z": 10240, "O": 2}
LARGE = {"s": 10, "V": 262144, "D": 5376, "N": 32, "K": 16, "L": 4, "H": 256, "J": 512, "F": 21504}
EXPERTS = {"s": 5, "V": 262144, "D": 2816, "N": 16, "K": 8, "L": 2, "H": 256, "J": 512, "F": 2112, "E": 128, "X": 704}
SIZES: dict[
    str, tuple[str, dict[str, int]]
] = {  # maxtext 0.2.5 configs/models/gemma4-*.yml: the golden that has its names
    "4-31b": ("gemma4", LARGE),
    "4-31b, unscanned": ("gemma4-unscanned", LARGE),
    "4-31b, vision": ("gemma4-vision", LARGE | TOWER),
    "4-26b-a4b": ("gemma4-moe", EXPERTS),
    "4-26b-a4b, vision": ("gemma4-moe-vision", EXPERTS | TOWER),
    "4-e2b": ("gemma4-e", {"V": 262144, "D": 1536, "N": 8, "K": 1, "F": 6144, "P": 256, "Q": 35 * 256}),
    "4-e4b": ("gemma4-e-4b", {"V": 262144, "D": 2560, "N": 8, "K": 2, "F": 10240, "P": 256, "Q": 42 * 256}),
}
LAYERS = {"4-31b": (60, 6, 0), "4-26b-a4b": (30, 6, 0), "4-e2b": (35, 5, 20), "4-e4b": (42, 6, 18)}


def plan_of(case: str) -> convert.Plan:
    return convert.plan_conversion("maxtext", maxtext.checkpoint(case), settings=maxtext.settings(case))


def published(name: str) -> SpecsOnly:
    """The tree of a published size: the golden's names, the axes of its leaves at other sizes, and more layers."""
    case, sizes = SIZES[name]
    layers, unit, shared = LAYERS[name.partition(",")[0]]
    golden_layers = 12 if case == "gemma4-e-4b" else 10
    axes = {part.leaf: [x for x, _ in part.stored] for step in plan_of(case).steps for part in step.parts}
    specs: dict[str, tuple[tuple[int, ...], str]] = {}

    def add(leaf: str, like: str, own: Mapping[str, int]) -> None:
        kept = {"p": 5} | sizes | own
        specs[leaf] = (tuple(kept.get(x, 1) for x in axes[like]), "bfloat16")

    for leaf in axes:
        number = re.search(r"decoder/layers_(\d+)/", leaf)
        tower = re.search(r"/layer_(\d+)/", leaf)
        if tower:
            for j in range(TOWER["j"]) if tower[1] == "0" else ():
                add(leaf.replace("/layer_0/", f"/layer_{j}/"), leaf, {})
        elif number:
            for i in range(layers):
                last, lacks = i % unit == unit - 1, i >= layers - shared
                alike = (golden_layers - (1 if last else 2)) if lacks else (unit - 1 if last else 0)
                if int(number[1]) == alike:
                    wide = {"F": 2 * sizes["F"]} if lacks and name == "4-e2b" else {}
                    heads = {"H": 512 if last else 256} if case.startswith("gemma4-e") else {}
                    add(leaf.replace(f"layers_{alike}/", f"layers_{i}/"), leaf, wide | heads)
        else:
            add(leaf, leaf, {})
    return SpecsOnly(specs)


@pytest.mark.parametrize("name", SIZES)
def test_published_sizes_need_no_setting_and_match_transformers(name: str) -> None:
    plan = convert.plan_conversion("maxtext", published(name))
    assert plan.version == name.partition(",")[0] and plan.config is not None
    (architecture,) = plan.config["architectures"]
    model_class = getattr(transformers, architecture)
    with torch.device("meta"):
        made = model_class(model_class.config_class(**plan.config)).state_dict()
    made.pop("lm_head.weight")
    assert {key: tuple(x.shape) for key, x in made.items()} == {step.name: step.spec.shape for step in plan.steps}


def test_a_last_layer_with_a_window_is_refused() -> None:
    """transformers gives its last layer none, even if config.json gives it one."""
    plan = plan_of("gemma4-unscanned")
    tree = {name: plan.source.read(name) for name in plan.source.leaves if "rngs" not in name}
    short = {name: x for name, x in tree.items() if "layers_11/" not in name}
    with pytest.raises(convert.PlanError, match="not divisible by 6"):
        convert.plan_conversion("maxtext-gemma4", MemorySource(short), settings=maxtext.settings("gemma4"))


def test_values_of_a_layer_with_a_window_may_not_be_missing() -> None:
    plan = plan_of("gemma4-unscanned")
    tree = {name: plan.source.read(name) for name in plan.source.leaves if "rngs" not in name}
    lost = {name: x for name, x in tree.items() if "layers_7/self_attention/value" not in name}
    with pytest.raises(convert.PlanError, match="layers_7/self_attention/value/kernel"):
        convert.plan_conversion("maxtext-gemma4", MemorySource(lost), settings=maxtext.settings("gemma4"))
    more = tree | {"decoder/layers_5/self_attention/value/kernel/value": np.zeros((12, 2, 16), np.float32)}
    with pytest.raises(convert.PlanError, match="no rule matches this leaf"):
        convert.plan_conversion("maxtext-gemma4", MemorySource(more), settings=maxtext.settings("gemma4"))
