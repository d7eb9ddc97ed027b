"""What training code saves beside the weights is left out with the reason, and the weights below `params` are the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import convert
from support import flax_families, siglip2
from support.drawn_cases import DrawnCases
from support.goldens import SpecsOnly
from support.memory_source import MemorySource
from support.paths import GOLDEN

# The heads of some stand beside the part that their rules begin in.
CASES = {
    "bert.BertForMaskedLM": "bert",
    "bert.cross": "bert",
    "dinov2.Dinov2ForImageClassification": "dinov2",
    "gemma.untied": "gemma",
    "gpt2.untied": "gpt2",
    "llama.LlamaForCausalLM": "llama",
    "mistral.MistralForCausalLM": "mistral",
    "roberta.RobertaForMaskedLM": "flax-transformers",
    "t5.v1.1": "t5",
    "whisper.WhisperForConditionalGeneration": "whisper",
}


@pytest.mark.parametrize(("case", "model"), CASES.items())
def test_a_train_state_of_a_flax_model_gives_the_same_tensors(case: str, model: str, tmp_path: Path) -> None:
    """`step`, `params` and `opt_state` are flax's `TrainState`; transformers' training scripts add `dropout_rng`."""
    alone = flax_families.specs(case, tmp_path)
    weights = {name: (leaf.spec.shape, leaf.spec.dtype) for name, leaf in alone.leaves.items()}
    beside = {"step": ((), "int32"), "dropout_rng": ((2,), "uint32"), "opt_state/0/count": ((), "int32")}
    moments = {f"opt_state/0/{name}/{leaf}": spec for name in ("mu", "nu") for leaf, spec in weights.items()}
    state = SpecsOnly({f"params/{name}": spec for name, spec in weights.items()} | beside | moments)
    state.path = tmp_path
    plan, whole = (convert.plan_conversion(model, source) for source in (alone, state))
    assert {step.name: step.spec for step in whole.steps} == {step.name: step.spec for step in plan.steps}
    assert whole.rules.model == plan.rules.model
    assert {drop.leaf for drop in whole.dropped} == {*beside, *moments}
    assert {drop.reason for drop in whole.dropped} == {"optimizer state", "state of training"}


# Of other packages: golden and case -> the name that the user gives, and what only the configuration says.
OTHERS: dict[tuple[str, str], tuple[str, dict[str, Any]]] = {
    ("openpi", "pi0-lora"): ("openpi", {"action_horizon": 3, "lora_alpha": 6}),
    ("recurrentgemma", ""): ("recurrentgemma", {}),
    ("t5x", "t5-1.1"): ("t5x", {"feed_forward_proj": "gated-gelu"}),
    ("t5x", "umt5"): ("t5x", {"feed_forward_proj": "gated-gelu"}),
    ("t5x", "switch"): ("t5x", {"expert_capacity": 1000}),
    ("t5x", "pix2struct"): ("pix2struct", {}),
    ("tips", "text"): ("tips", {}),
    ("tips", "image"): ("tips", {"mlp_ratio": 2}),
    ("tunix", "gemma3"): ("tunix", {}),
    ("videoprism", "lvt"): ("videoprism", {}),
}


@pytest.mark.parametrize(("folder", "case"), OTHERS)
def test_a_train_state_of_a_model_of_another_package_gives_the_same_tensors(folder: str, case: str) -> None:
    model, settings = OTHERS[folder, case]
    source = None if case else convert.open_source(GOLDEN / folder / "ckpt")
    weights = DrawnCases(GOLDEN / folder).leaves(case) if source is None else {x: source.read(x) for x in source.leaves}
    bare = {name.removeprefix("target/").removeprefix("params/"): x for name, x in weights.items()}
    first = next(iter(bare))
    beside = {"step": np.int32(3), "opt_state/0/count": np.int32(3), f"opt_state/0/mu/{first}": bare[first]}
    state = {f"params/{name}": x for name, x in bare.items()} | beside
    plans = [convert.plan_conversion(model, MemorySource(tree), settings=settings) for tree in (weights, state)]
    assert [(step.name, step.spec) for step in plans[0].steps] == [(step.name, step.spec) for step in plans[1].steps]
    assert {drop.leaf for drop in plans[1].dropped} >= set(beside)


CHRONO = ("accum_program_time", "accum_train_time", "accum_pause_time", "accum_examples_seen")


@pytest.mark.parametrize("case", ["siglip", "siglip2", "clippo", "paligemma1"])
def test_what_big_vision_saves_while_it_trains_is_left_out(case: str) -> None:
    """Its train.py saves `params`, `opt` and the times of `chrono`."""
    if case in ("siglip", "paligemma1"):
        source = convert.open_source(GOLDEN / case / "ckpt.npz")
        leaves = {name: source.read(name) for name in source.leaves}
    else:
        folder, name = (siglip2.GOLD, siglip2.CASE) if case == "siglip2" else (DrawnCases(GOLDEN / case), case)
        leaves = {f"params/{leaf}": x for leaf, x in folder.leaves(name).items()}
    beside = {"opt/0/count": np.int32(3), **{f"chrono/{name}": np.float32(1) for name in CHRONO}}
    model = "gemma" if case == "paligemma1" else case
    said = {"vocab_size": 101} if case == "paligemma1" else {}
    plans = [convert.plan_conversion(model, MemorySource(tree), settings=said) for tree in (leaves, leaves | beside)]
    assert [step.name for step in plans[0].steps] == [step.name for step in plans[1].steps]
    assert {drop.leaf for drop in plans[1].dropped} - {drop.leaf for drop in plans[0].dropped} == set(beside)


ENCLOSED = {
    "bert.BertForMaskedLM": ("bert", "model"),
    "gpt2.untied": ("gpt2", "params"),
    "mistral.MistralForCausalLM": ("mistral", "target"),
    "regnet.RegNetModel": ("flax-transformers", "state"),
    "resnet.ResNetForImageClassification": ("flax-transformers", "params"),
    "roberta.RobertaForMaskedLM": ("flax-transformers", "params"),
}


@pytest.mark.parametrize(("case", "model", "key"), [(case, *one) for case, one in ENCLOSED.items()])
def test_a_model_below_a_key_that_the_rules_do_not_name_is_found(
    case: str, model: str, key: str, tmp_path: Path
) -> None:
    """A train state is one key of what was saved, or its params are those that `init` returned, with all collections."""
    alone = flax_families.specs(case, tmp_path)
    inner = {
        name if name.startswith("batch_stats/") else f"params/{name.removeprefix('params/')}": (leaf.spec.shape, leaf.spec.dtype)
        for name, leaf in alone.leaves.items()
    }  # fmt: skip
    plan = convert.plan_conversion(model, alone)
    outer = {"step": ((), "int32"), "opt_state/0/count": ((), "int32")}
    state = SpecsOnly({f"{key}/{name}": spec for name, spec in (inner | outer).items()} | outer)
    state.path = tmp_path
    whole = convert.plan_conversion(model, state)
    assert {step.name: step.spec for step in whole.steps} == {step.name: step.spec for step in plan.steps}
    assert any(f"lies below {key}," in note for note in whole.notes)
    assert {drop.leaf for drop in whole.dropped} == {*outer, *(f"{key}/{name}" for name in outer)}


@pytest.mark.parametrize(("case", "model"), [("bert.BertModel", "bert"), ("vit.ViTModel", "flax-transformers")])
def test_of_two_such_keys_none_is_guessed(case: str, model: str, tmp_path: Path) -> None:
    specs = {name: (leaf.spec.shape, leaf.spec.dtype) for name, leaf in flax_families.specs(case, tmp_path).leaves.items()}  # fmt: skip
    two = SpecsOnly({f"{key}/params/{name}": spec for key in ("model", "ema_model") for name, spec in specs.items()})
    two.path = tmp_path
    with pytest.raises(convert.PlanError, match=r"lies below model and ema_model: choose one with `root: model`"):
        convert.plan_conversion(model, two)
