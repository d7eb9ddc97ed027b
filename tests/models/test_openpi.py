"""openpi: what its own JAX code computed, and what transformers computes from the converted file; the tensors are those of openpi's converter."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import convert
from convert.core.tensor_spec import numpy_dtype
from convert.numerics.lift_jax import float64, lift
from convert.reversing.source import ReversedSource
from convert.rules.library import shipped_rules_dir
from convert.rules.parse import parse_models
from convert.verify.comparison import load_reference
from convert.verify.run import check
from convert.verify.sides.run_jax import jax_weights
from support.goldens import relative_error
from support.memory_source import MemorySource, run
from support.openpi import ALPHA, GOLD, converted, errors, loaded, policy_inputs, settings_of, source_of
from support.paths import GOLDEN
from support.rule_mistakes import assert_mistake_is_named
from support.value_mistakes import assert_mistakes_are_named, replace_tensors

pytestmark = pytest.mark.slow

CHECKPOINT = GOLDEN / "openpi-ckpt"
CASES = ("pi0", "pi0-lora", "pi05", "pi05-lora", "pi0-fast")
EXACT = 1e-12
FAST = {"action_horizon": 3, "action_dim": 5}
HEAD = "paligemma_with_expert.gemma_expert.lm_head.weight"


@pytest.mark.parametrize("case", ["pi0", "pi0-lora"])
def test_transformers_computes_what_openpi_does(case: str, tmp_path: Path) -> None:
    """The sines of the time are of angles up to 1571, so JAX loses digits, too: 3e-5."""
    out, wanted = converted(case, tmp_path), GOLD.values(case, "out")
    drift = relative_error(wanted["velocity"], GOLD.values(case, "out64")["velocity"])
    assert drift < 5e-5
    single, double = errors(case, out)
    assert single < drift and double < (2e-6 if case.endswith("-lora") else EXACT)  # a merged weight is rounded
    actions = loaded(out).sample_actions(num_steps=4, **policy_inputs(case))
    assert relative_error(actions.numpy(), wanted["actions"]) < drift


def test_pi0_fast_computes_what_openpi_does(tmp_path: Path) -> None:
    single, double = errors("pi0-fast", converted("pi0-fast", tmp_path))
    assert single < 5e-6 and double < EXACT


def test_the_plain_jax_model_is_what_openpi_recorded() -> None:
    """In float64, with casts removed on both sides; an absent camera and padding are masked."""
    plan = convert.plan_conversion("openpi", source_of("pi0"), settings=settings_of("pi0"))
    given, reference = GOLD.values("pi0", "in"), load_reference(plan, None)
    cameras = [name for name in given if name.startswith("images/")]
    inputs = {
        "pixels": np.stack([given[name] for name in cameras], 1),
        "cameras": np.stack([given[name.replace("images", "image_masks")] for name in cameras], 1).astype(np.int32),
        "tokens": given["tokenized_prompt"],
        "present": given["tokenized_prompt_mask"].astype(np.int32),
        **{name: given[name] for name in ("state", "noise", "time")},
    }
    assert not isinstance(reference, str) and reference.inputs(0).keys() == inputs.keys()
    with float64():
        got = lift(reference.jax_side())(jax_weights(plan), inputs)["velocity"]
    assert relative_error(got, GOLD.values("pi0", "out64")["velocity"]) < EXACT


@pytest.mark.parametrize("case", ["pi0", "pi0-lora", "pi0-fast"])
def test_a_right_file_passes_all_levels(case: str, tmp_path: Path) -> None:
    out = converted(case, tmp_path)
    levels = check(out, source_of(case), model="openpi", settings=settings_of(case)).levels
    assert {level.level: level.verdict.value for level in levels} == dict.fromkeys(
        ("coverage", "weights", "layers", "model"), "passed"
    ), [level.findings for level in levels]


def test_a_wrong_configuration_is_found_at_its_place(tmp_path: Path) -> None:
    out = converted("pi0", tmp_path)
    config = json.loads((out / "config.json").read_text())
    config["dit_config"]["rms_norm_eps"] = 1e-2
    (out / "config.json").write_text(json.dumps(config))
    (level,) = check(out, source_of("pi0"), model="openpi", settings=settings_of("pi0"), levels=["model"]).levels
    assert level.verdict.value == "failed"
    assert "paligemma_with_expert.gemma_expert.model.layers.0.input_layernorm" in {f.path for f in level.findings}


@pytest.mark.parametrize("case", ["pi0", "pi0-lora", "pi05", "pi05-lora"])
def test_the_tensors_are_those_of_openpis_converter(case: str, tmp_path: Path) -> None:
    """By their digest, and without LoRA, which openpi's converter drops. It leaves the head of the expert as it was drawn; here it is zero."""
    more = {"adapter": "base"} if case.endswith("-lora") else {}
    out = tmp_path / "out"
    convert.convert("openpi", source_of(case), out, settings=more, to="openpi")
    weights = load_file(out / "model.safetensors")
    assert not weights.pop(HEAD).any()
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(name.encode() + weights[name].astype("<f4").tobytes())
    assert digest.hexdigest() == GOLD.config(case)["peer"]
    assert not (out / "config.json").exists()


def test_both_targets_of_pi0_have_the_same_tensors(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    first = load_file(converted("pi0", tmp_path / "hf") / "model.safetensors")
    second = load_file(converted("pi0", tmp_path, to="openpi") / "model.safetensors")
    assert first.keys() == second.keys() and all(np.array_equal(x, second[name]) for name, x in first.items())


@pytest.mark.parametrize("case", ["pi0", "pi05"])
def test_lerobot_gets_the_same_tensors_and_its_own_configuration(case: str, tmp_path: Path) -> None:
    """`tests/golden/read_back_lerobot.py` loads such a directory by lerobot's own classes."""
    out = tmp_path / "out"
    convert.convert("openpi", source_of(case), out, to="lerobot", settings={"action_horizon": 3})
    config = json.loads((out / "config.json").read_text())
    assert (config["type"], config["chunk_size"], config["image_resolution"]) == (case, 3, [8, 8])
    assert config["input_features"]["observation.images.base_0_rgb"] == {"type": "VISUAL", "shape": [3, 8, 8]}
    assert len(config["input_features"]) == 4 and config["output_features"]["action"]["shape"] == [5]
    (tmp_path / "own").mkdir()
    own = load_file(converted(case, tmp_path / "own", to="openpi") / "model.safetensors")
    made = load_file(out / "model.safetensors")
    assert own.keys() == made.keys() and all(np.array_equal(x, made[name]) for name, x in own.items())


def test_lerobot_gets_pi0_fast_with_the_names_of_openpis_class(tmp_path: Path) -> None:
    """Its class copies `lm_head` to the table. Actions are tokens, so their number and their width are asked for."""
    with pytest.raises(convert.PlanError, match="action_horizon, action_dim"):
        convert.convert("openpi", source_of("pi0-fast"), tmp_path / "out", to="lerobot")
    out, own = tmp_path / "out", tmp_path / "own"
    convert.convert("openpi", source_of("pi0-fast"), out, to="lerobot", settings=FAST)
    config = json.loads((out / "config.json").read_text())
    assert (config["type"], config["chunk_size"], config["n_action_steps"], config["max_action_dim"]) == (
        "pi0_fast",
        3,
        3,
        5,
    )
    assert {name.rpartition(".")[2] for name in config["input_features"]} == {"base_0_rgb", "base_1_rgb", "wrist_0_rgb"}
    assert config["output_features"]["action"]["shape"] == [5]
    own.mkdir()
    theirs = load_file(converted("pi0-fast", own) / "model.safetensors")
    made = load_file(out / "model.safetensors")
    renamed = {
        name.replace("paligemma_with_expert.paligemma.", "")
        .replace("vision_tower.vision_model", "vision_tower")
        .replace("lm_head.weight", "model.language_model.embed_tokens.weight"): x
        for name, x in made.items()
    }
    assert renamed.keys() == theirs.keys() and all(np.array_equal(x, theirs[name]) for name, x in renamed.items())


def test_what_save_state_writes(tmp_path: Path) -> None:
    """A step with `params` and `train_state`; frozen leaves are bfloat16, and a weight has the dtype of its leaf after the merge, too."""
    with pytest.raises(convert.CheckpointError, match="--item"):
        convert.plan_conversion("openpi", CHECKPOINT, to="openpi")
    plan = convert.plan_conversion("openpi", CHECKPOINT, to="openpi", item="params", settings={"lora_alpha": ALPHA})
    stored = {name.removesuffix("/value"): leaf.spec.dtype for name, leaf in plan.checkpoint.leaves.items()}
    assert (
        stored["params/PaliGemma/llm/layers/attn/q_einsum/w"]
        == "bfloat16"
        != stored["params/PaliGemma/llm/layers/attn/q_einsum/lora_a"]
    )
    mixed = {f"params/{n}": x.astype(numpy_dtype(stored[f"params/{n}"])) for n, x in GOLD.leaves("pi0-lora").items()}
    wanted = run(convert.plan_conversion("openpi", MemorySource(mixed), to="openpi", settings={"lora_alpha": ALPHA}))
    made = run(plan)
    assert made.keys() == wanted.keys() and all(np.array_equal(x, wanted[name]) for name, x in made.items())
    assert {str(x.dtype) for x in made.values()} == {"bfloat16", "float32"}


def test_a_release_is_a_directory_with_params_and_assets(tmp_path: Path) -> None:
    shutil.copytree(CHECKPOINT / "7" / "params", tmp_path / "pi0_base" / "params")
    (tmp_path / "pi0_base" / "assets").mkdir()
    plan = convert.plan_conversion(
        "openpi", tmp_path / "pi0_base" / "params", settings={"adapter": "base"}, to="openpi"
    )
    assert plan.rules.model == "pi0"


def test_adaptive_norms_and_plain_ones_tell_the_models_apart() -> None:
    plans = {
        case: convert.plan_conversion(
            "openpi", source_of(case), settings=settings_of(case, "x"), to=None if case == "pi0-fast" else "openpi"
        )
        for case in CASES
    }
    assert {case: plan.rules.model for case, plan in plans.items()} == {
        case: case.removesuffix("-lora") for case in CASES
    }


def test_the_horizon_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(convert.PlanError, match="action_horizon"):
        convert.convert("openpi", source_of("pi0"), tmp_path / "out")


def test_zeros_are_a_tensor_of_their_own(tmp_path: Path) -> None:
    plan = convert.plan_conversion("openpi", source_of("pi0"), to="openpi")
    (step,) = [step for step in plan.steps if step.name == HEAD]
    assert step.value == 0.0 and step.spec.shape == (61, 12) and not step.parts
    text = (shipped_rules_dir() / "openpi.yaml").read_text()
    for right, wrong, named in (
        ("axes: VE\n  because", "axes: VO\n  because", "no leaf gives O a size"),
        ("gemma_expert.lm_head.weight", "gemma_expert.lm_head.**", "has a wildcard"),
    ):
        assert text.count(right) == 1
        with pytest.raises(convert.ConvertError, match=named):
            rules = parse_models(text.replace(right, wrong), "wrong.yaml")
            convert.plan_conversion(next(r for r in rules if r.model == "pi0"), source_of("pi0"), to="openpi")


def test_the_class_takes_the_names_that_it_renames(tmp_path: Path) -> None:
    """transformers loads openpi's names under others; a name that it does not know is still one too many."""
    out = converted("pi0", tmp_path)
    assert [level.verdict.value for level in check(out, source_of("pi0"), levels=["coverage"]).levels] == ["passed"]
    tensors = load_file(out / "model.safetensors")
    x = tensors.pop("paligemma_with_expert.gemma_expert.model.norm.weight")
    replace_tensors(out, {"paligemma_with_expert.expert.model.norm.weight": x})
    (level,) = check(out, source_of("pi0"), levels=["coverage"]).levels
    rejected = [finding.got for finding in level.findings if finding.code == "module-rejects-file"]
    assert len(rejected) == 1 and rejected[0].endswith("ForConditionalGeneration: paligemma_with_expert.expert.model.norm.weight")  # fmt: skip


@pytest.mark.parametrize(("case", "to"), [("pi0", "openpi"), ("pi05", "openpi"), ("pi0-fast", "lerobot")])
def test_mistakes_in_the_file_are_named(case: str, to: str, tmp_path: Path) -> None:
    (tmp_path / "ckpt").mkdir()
    np.savez(tmp_path / "ckpt" / "c.npz", **{f"params/{n}": x for n, x in GOLD.leaves(case).items()})
    settings = FAST if case == "pi0-fast" else {}
    convert.convert("openpi", tmp_path / "ckpt" / "c.npz", tmp_path / "out", to=to, settings=settings)
    assert assert_mistakes_are_named(tmp_path / "out", tmp_path / "ckpt" / "c.npz") >= 9


RULE_MISTAKES = (  # case, a text of the rules, what stands there instead, what the check calls it
    ("pi0", "self_attn.{k,v}_proj\n\n- einsum: BTD,SKDH", "self_attn.{v,k}_proj\n\n- einsum: BTD,SKDH", "of another tensor"),
    ("pi0", "{input,post_attention}_layernorm\", multiplies_by: 1+weight}", "{post_attention,input}_layernorm\", multiplies_by: 1+weight}", "of another tensor"),
    ("pi05", "{input,post_attention}_layernorm.dense", "{post_attention,input}_layernorm.dense", "of another tensor"),
    ("pi0", "gemma_expert.model.layers.{i}.mlp.{gate,up}_proj", "gemma_expert.model.layers.{i}.mlp.{up,gate}_proj", "of another tensor"),
    ("pi0", "einsum: ...I,IE->...E\n  from: action_time_mlp_out", "einsum: ...E,IE->...I\n  from: action_time_mlp_out", "transposed"),
    ("pi05", "einsum: ...E,EI->...I\n  from: time_mlp_in", "einsum: ...I,EI->...E\n  from: time_mlp_in", "transposed"),
    ("pi0", "gemma_expert.model.norm, multiplies_by: 1+weight}", "gemma_expert.model.norm, multiplies_by: weight}", "1+scale doubled"),
    ("pi0", "einsum: BTNH,NHD->BTD", "einsum: BTHN,NHD->BTD", "axes of a head swapped"),
)  # fmt: skip


@pytest.mark.parametrize(("case", "old", "new", "name"), RULE_MISTAKES)
def test_a_mistake_in_the_rules_is_named(case: str, old: str, new: str, name: str, tmp_path: Path) -> None:
    assert (shipped_rules_dir() / "openpi.yaml").read_text().count(old) == 1
    assert_mistake_is_named("openpi", source_of(case), old, new, name, tmp_path / "out", to="openpi")


def test_two_ranks_take_no_single_alpha(tmp_path: Path) -> None:
    """The factor of a pair is alpha / rank, and openpi has an alpha for each of the two parts."""
    leaves = {f"params/{name}": x for name, x in GOLD.leaves("pi0-lora").items()}
    for name, x in leaves.items():  # rank 6 in the expert: the same product
        if "_1/lora_a" in name or "_1/lora_b" in name:
            leaves[name] = np.concatenate([x, 0 * x], -1 if name.endswith("a") else -2)
    with pytest.raises(convert.ConvertError, match="ranks 3 and 6"):
        convert.plan_conversion("openpi", MemorySource(leaves), to="openpi", settings={"lora_alpha": ALPHA})
    made = run(convert.plan_conversion("openpi", MemorySource(leaves), to="openpi", settings={"lora_alpha": "rank"}))
    once = run(convert.plan_conversion("openpi", source_of("pi0-lora"), to="openpi", settings={"lora_alpha": 3}))
    assert all(np.array_equal(x, once[name]) for name, x in made.items())


@pytest.mark.parametrize(("case", "to"), [("pi0-lora", "openpi"), ("pi05-lora", None)])
def test_an_adapter_comes_back(case: str, to: str | None, tmp_path: Path) -> None:
    """A pair for each head, B summed over the heads: into the tree with the pairs all bits, into one without them the same adapter."""
    source, said = source_of(case), settings_of(case, to)
    convert.convert_adapter("openpi", source, tmp_path / "a", settings=said, to=to)
    file = tmp_path / "a" / "adapter_model.safetensors"
    back = ReversedSource(convert.plan_reverse("openpi", tmp_path / "a", like=source, settings=said, to=to))
    leaves = {name: source.read(name) for name in source.leaves}
    assert [name for name, x in leaves.items() if back.read(name).tobytes() != x.tobytes()] == []
    base = MemorySource({name: x for name, x in leaves.items() if "lora" not in name})
    alone = {name: value for name, value in said.items() if name != "lora_alpha"}
    named = ReversedSource(convert.plan_reverse("openpi", tmp_path / "a", like=base, settings={**alone, "adapter": "openpi"}, to=to))  # fmt: skip
    assert {n: leaf.spec for n, leaf in named.leaves.items()} == {n: leaf.spec for n, leaf in source.leaves.items()}
    differ = {name for name, x in leaves.items() if named.read(name).tobytes() != x.tobytes()}
    assert all(
        "attn_vec_einsum" in name and name.endswith("lora_b") for name in differ
    )  # of a sum, the first head gets all
    for tree in (back, named):
        convert.convert_adapter("openpi", tree, tmp_path / "b", settings=said, to=to, overwrite=True)
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes()
