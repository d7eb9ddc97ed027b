"""Gemma checkpoints, settings and directories that are not right: each is named, and nothing is written or passed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import convert
from convert.cli.options import parse_settings
from convert.rules.library import shipped_rules_dir
from convert.verify.run import check
from convert.writing.model_card import render_card
from faults.catalogue import one_thread
from support.command_line import Run
from support.gemma_image_models import CASES, path
from support.gemma_models import directory, settings
from support.gemma_trees import SIZES, arrays, published, refuse
from support.goldens import SpecsOnly, checkpoint
from support.memory_source import MemorySource

VISION = CASES["gemma3-vision"][1]


def without(tree: dict[str, np.ndarray], part: str) -> dict[str, np.ndarray]:
    return {name: x for name, x in tree.items() if part not in name}


# ---- the layout of the layers


@pytest.mark.parametrize("model", ["gemma", "gemma3"])
def test_a_stack_without_its_last_attention_type(model: str, tmp_path: Path) -> None:
    """Its layers must not be counted anew in units of five: the tree would convert, its layers in other places."""
    tree = without(arrays("gemma3-stacked"), "attention_type_5/")
    said = refuse(MemorySource(tree), model, tmp_path / "x", settings=settings("gemma3-stacked"))
    assert "{i} runs from 0 to 10 in the tree, without 5 (units of 6: {p} from 0 to 5); the stack of layers is" in said


def test_a_stack_with_more_attention_types_than_the_pattern(tmp_path: Path) -> None:
    tree = arrays("gemma3-stacked")
    tree |= {name.replace("type_5/", "type_6/"): x for name, x in tree.items() if "attention_type_5/" in name}
    said = refuse(MemorySource(tree), "gemma3", tmp_path / "x", settings=settings("gemma3-stacked"))
    assert (
        "a unit has 6 layers, so {p} of {i} runs from 0 to 5; the tree has {p} = 6; the checkpoint is of another"
        in said
    )


def truncated(version: str, layers: int) -> SpecsOnly:
    tree = {name: (leaf.spec.shape, leaf.spec.dtype) for name, leaf in published(version).leaves.items()}
    last = range(layers, SIZES[version][0])
    return SpecsOnly({k: v for k, v in tree.items() if not any(f"/layer_{i}/" in k for i in last)})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("version", "layers", "wanted"), [("1-2b", 17, "context_length"), ("3-1b", 25, "sliding_window")]
)
def test_one_layer_less_than_published(version: str, layers: int, wanted: str, tmp_path: Path) -> None:
    """A directory is refused; weights alone come with a warning. The number of layers, or the facts, say that it is meant."""
    tree = truncated(version, layers)
    said = f"the tree has {layers} layers and otherwise the sizes of {version}, which has {layers + 1}: it may be truncated; --set i={layers} confirms"
    refused = refuse(tree, "gemma", tmp_path / "x")
    assert said in refused and f"--set {wanted}=..." in refused
    plan = convert.plan_conversion("gemma", tree)
    assert plan.version is None and plan.notes[0].startswith(said)
    meant = convert.plan_conversion("gemma", tree, settings={"i": layers})
    assert not any("truncated" in note for note in meant.notes)
    facts = {"context_length": 8192, "sliding_window": 512, "query_pre_attn_scalar": 256, "rope_factor_global": 1.0}
    deliberate = convert.plan_conversion(
        "gemma", tree, settings=facts if version == "3-1b" else {"context_length": 8192}
    )
    assert deliberate.config is not None and deliberate.config["num_hidden_layers"] == layers
    assert not any("truncated" in note for note in convert.plan_conversion("gemma", published(version)).notes)


# ---- targets that compute otherwise


@pytest.mark.parametrize("version", ["3-4b", "3-12b", "3-27b"])
def test_gemma_pytorch_does_not_divide_positions(version: str, tmp_path: Path) -> None:
    said = refuse(published(version), "gemma", tmp_path / "x.safetensors", to="gemma_pytorch")
    assert "google/gemma_pytorch `gemma.model.GemmaForCausalLM` supports only one rope_factor_global" in said
    assert "got rope_factor_global = 8.0" in said
    assert "never gives `rope_scaling_factor`" in said and "--to transformers or plain_norms" in said
    assert len(said.splitlines()) == 2


def test_gemma_pytorch_where_the_factor_is_not_known() -> None:
    assert convert.plan_conversion("gemma", published("3-1b"), to="gemma_pytorch").notes == ()
    plan = convert.plan_conversion("gemma", truncated("3-1b", 20), to="gemma_pytorch", settings={"i": 20})
    assert [n for n in plan.notes if "computes with rope_factor_global = 1.0, and the tree does not show it" in n]


def test_a_tower_has_no_place_in_gemma_pytorch(tmp_path: Path) -> None:
    """One line, and not one for each rule of the tower."""
    said = refuse(path("gemma3-vision"), "gemma3_vision", tmp_path / "x", to="gemma_pytorch", settings=VISION)
    (finding,) = [line for line in said.splitlines() if line.startswith("  - ")]
    assert "has no target for 'gemma_pytorch', so /" in finding
    assert finding.endswith("convert all of gemma3_vision with --to transformers")
    assert "Name gemma3 in place of gemma3_vision" in said


# ---- settings


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"tied_embeddings": False}, "--set tied_embeddings: the rules have no such setting"),
        (
            {"rope": "interleaved"},
            "rope describes what the source computes (half-split), and nothing in the output depends on it",
        ),
        ({"embedding_scale": "none"}, "embedding_scale describes what the source computes (sqrt(D)), and nothing"),
        (
            {"eos_token_id": [1, 1.5]},
            "--set eos_token_id=[1, 1.5]: expected the id of a token below vocab_size or a list of such, such as 1",
        ),
        ({"eos_token_id": []}, "expected the id of a token below vocab_size or a list of such, such as 1"),
        ({"sliding_window": "x"}, "--set sliding_window=x: expected an integer of at least 1, such as 512"),
    ],
)
def test_settings_that_nothing_could_follow(setting: dict[str, Any], said: str, tmp_path: Path) -> None:
    """The cause stands first."""
    refused = refuse(checkpoint("gemma3"), "gemma", tmp_path / "x", settings={**settings("gemma3"), **setting})
    assert refused.startswith("rules/gemma.yaml: --set ") and said in refused.splitlines()[0]


@pytest.mark.slow
def test_a_vocabulary_that_does_not_fit_is_named_first(tmp_path: Path) -> None:
    refused = refuse(published("3-1b", 262145), "gemma", tmp_path / "x")
    assert refused.startswith("rules/gemma.yaml (gemma3) does not fit ") and "fits none of" not in refused


def test_rows_that_are_cut_by_hand_are_not_called_padding() -> None:
    cut = convert.plan_conversion("gemma3", checkpoint("gemma3"), settings={"vocab_size": 100}).notes
    assert any(
        "keeps rows 0 to 99 of 256" in n and "the other rows are left out, as --set vocab_size=100 says" in n
        for n in cut
    )
    padding = convert.plan_conversion("gemma", published("2-2b")).notes
    assert any("the other rows are padding" in note for note in padding)


@pytest.mark.slow
def test_tokens_that_end_a_turn(tmp_path: Path) -> None:
    """Instruction-tuned checkpoints stop at two tokens, and no tree tells one from a pretrained one."""
    unsaid = convert.plan_conversion("gemma", checkpoint("gemma3"), settings=settings("gemma3"))
    assert any("--set 'eos_token_id=[1,106]'" in note for note in unsaid.config_notes)
    assert unsaid.config_notes[0] in render_card(unsaid, "tool")
    given = {**settings("gemma3"), **parse_settings(["eos_token_id=[1,106]"])}
    said = convert.plan_conversion("gemma", checkpoint("gemma3"), settings=given)
    assert said.config_notes == () and said.config is not None and said.generation_config is not None
    assert said.config["eos_token_id"] == said.generation_config["eos_token_id"] == [1, 106]
    assert convert.plan_conversion("gemma", published("3-1b"), to="plain_norms").config_notes == ()


@pytest.mark.slow
def test_dry_run_refuses_what_the_conversion_does(run: Run, tmp_path: Path) -> None:
    given = ("gemma", checkpoint("gemma3"), tmp_path / "out", "--set", "vocab_size=256")
    said = [run(*given, *more, code=2)[1] for more in ((), ("--dry-run",))]
    assert said[0] == said[1] and "config.json needs" in said[0]
    run("gemma", checkpoint("gemma3"), tmp_path / "out.safetensors", "--set", "vocab_size=256", "--dry-run", code=0)
    assert not list(tmp_path.iterdir())


def test_paligemma_2_has_no_window_to_ask_for() -> None:
    given = {k: v for k, v in CASES["paligemma2"][1].items() if k != "sliding_window"}
    plan = convert.plan_conversion("gemma", path("paligemma2"), settings=given)
    assert plan.config is not None and set(plan.config["text_config"]["layer_types"]) == {"full_attention"}
    assert [note for note in plan.config_notes if "PaliGemmaProcessor" not in note] == []


# ---- leaves beside the model


def test_leaves_of_training_are_dropped_with_a_reason() -> None:
    leaves = {name: (leaf.spec.shape, leaf.spec.dtype) for name, leaf in published("3-1b").leaves.items()}
    extra = {
        "transformer/embedder/mm_input_embedding_extra": ((1, 1152), "bfloat16"),
        "transformer/embedder/mm_output_embedding": ((1, 1152), "bfloat16"),
        "transformer/embedder/mm_pre_projection_norm/scale": ((1152,), "bfloat16"),
    }
    plan = convert.plan_conversion("gemma", SpecsOnly({**leaves, **extra}))
    assert plan.rules.model == "gemma3" and {d.leaf for d in plan.dropped} == set(extra)
    below = SpecsOnly({f"rlx_networks/policy_network/{name}": spec for name, spec in leaves.items()})
    assert convert.plan_conversion("gemma", below).root == "rlx_networks/policy_network/transformer"


def test_the_moving_average_of_a_train_state_is_left_out() -> None:
    tree = arrays("gemma3-kauldron")
    tree |= {f"ema/{name.removeprefix('params/')}": x for name, x in tree.items() if name.startswith("params/")}
    plan = convert.plan_conversion("gemma", MemorySource(tree), settings=settings("gemma3-kauldron"))
    reasons = {d.reason for d in plan.dropped if d.leaf.startswith("ema/")}
    assert reasons == {"a moving average of the weights; the weights are in the tree as well"}


# ---- the card


def test_the_card_is_the_same_in_any_order_and_names_no_path(tmp_path: Path) -> None:
    rules = tmp_path / "gemma.yaml"
    rules.write_text((shipped_rules_dir() / "gemma.yaml").read_text())
    given = settings("gemma3")
    cards = [
        render_card(plan, "tool")
        for said in (given, dict(reversed(given.items())))
        for plan in choose(str(rules), checkpoint("gemma3"), said)
    ]
    assert cards[0] == cards[1] and str(tmp_path) not in cards[0] and "`gemma.yaml`, model `gemma3`" in cards[0]
    sizes = next(line for line in cards[0].splitlines() if line.startswith("| Sizes"))
    assert (
        "layers (i): 12; " in sizes
        and "model width (D): 48" in sizes
        and "vision" not in sizes
        and "colours" not in sizes
    )
    assert "sliding_window 8, " in cards[0] and "rope_theta_local 10000.0" in cards[0]
    assert 'Gemma3ForCausalLM.from_pretrained("' in cards[0]


def choose(rules: str, path: Path, said: dict[str, Any]) -> list[convert.Plan]:
    return [convert.plan_conversion(rules, path, settings=said)]


def test_several_dtypes_are_said() -> None:
    leaves = {name: (leaf.spec.shape, leaf.spec.dtype) for name, leaf in published("3-1b").leaves.items()}
    leaves["transformer/final_norm/scale"] = ((1152,), "float32")
    plan = convert.plan_conversion("gemma", SpecsOnly(leaves))
    assert any("339 in bfloat16" in note and "1 in float32 (model.norm.weight, ...)" in note for note in plan.notes)
    assert plan.config is not None and "dtype" not in plan.config
    assert not convert.plan_conversion("gemma", SpecsOnly(leaves), dtype="bfloat16").notes


def test_inspect_says_why_rules_do_not_fit(run: Run) -> None:
    said, _ = run("inspect", checkpoint("gemma3"))
    lines = said.splitlines()
    k = lines.index("  gemma3: matches 100% of the leaves")
    assert lines[k - 1] == "Nearest rules that do not fit"
    assert "rules/gemma.yaml:" in lines[k + 1] and "256" in lines[k + 1] and "262144" in lines[k + 1]


# ---- directories that do not load as they should


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return directory("gemma3", tmp_path_factory.mktemp("whole") / "out", max_shard_bytes=400_000)


def edited(name: str, **changes: Any) -> Callable[[Path], None]:
    def edit(out: Path) -> None:
        said = json.loads((out / name).read_text())
        (out / name).write_text(json.dumps({**said, **changes}))

    return edit


INDEX = "model.safetensors.index.json"
DIRECTORIES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no index": (lambda out: (out / INDEX).unlink(), ("directory-not-loadable", INDEX)),
    "no config": (lambda out: (out / "config.json").unlink(), ("directory-not-loadable", "config.json")),
    "other eos": (edited("generation_config.json", eos_token_id=5), ("directory-not-loadable", "eos_token_id")),
    "other dtype": (edited("config.json", dtype="float16"), ("directory-not-loadable", "dtype")),
    "untied": (edited("config.json", tie_word_embeddings=False), ("directory-not-loadable", "lm_head.weight")),
    "other class": (edited("config.json", architectures=["GemmaForCausalLM"]), ("directory-not-loadable", "architectures")),
    "other type": (edited("config.json", model_type="gemma"), ("directory-not-loadable", "model_type")),
    "11 layers of 12 types": (edited("config.json", num_hidden_layers=11), ("module-rejects-file", "out")),
    "no such activation": (edited("config.json", hidden_activation="nope"), ("module-rejects-file", "out")),
    "a width in words": (edited("config.json", hidden_size="x"), ("module-rejects-file", "out")),
    "no JSON": (lambda out: (out / "generation_config.json").write_text("{"), ("directory-not-loadable", "generation_config.json")),
}  # fmt: skip


@pytest.mark.parametrize("fault", DIRECTORIES)
def test_check_names_a_directory_that_does_not_load(fault: str, whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(whole, out)
    damage, wanted = DIRECTORIES[fault]
    damage(out)
    report = check(out, checkpoint("gemma3"), levels=("coverage",))
    findings = [finding for level in report.levels for finding in level.findings]
    assert report.exit_code == 1 and wanted in [(f.code, Path(f.path).name) for f in findings], findings
    assert all(finding.fix or finding.got or finding.problem for finding in findings)


@pytest.mark.slow
def test_check_of_a_directory_of_another_class_ends_with_a_finding(whole: Path, tmp_path: Path, run: Run) -> None:
    out = tmp_path / "out"
    shutil.copytree(whole, out)
    edited("config.json", architectures=["GemmaForCausalLM"])(out)
    said, _ = run("check", out, "--from", checkpoint("gemma3"), code=1)
    assert (
        "architectures" in said
        and "load_state_dict of the target's module was not run: architectures: config.json names another class" in said
    )


@pytest.mark.slow
def test_check_passes_directories_that_load(whole: Path, tmp_path: Path) -> None:
    assert check(whole, checkpoint("gemma3"), levels=("coverage",)).exit_code == 0
    out = directory("gemma1-mqa", tmp_path / "out", dtype="bfloat16")
    edited("config.json", dtype="torch.bfloat16", architectures=["GemmaForCausalLM"])(out)
    (out / "generation_config.json").unlink()  # its tokens are those of config.json then
    assert check(out, checkpoint("gemma1-mqa"), levels=("coverage",)).exit_code == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "repair"),
    [
        ({"sliding_window": 9}, "give this layer an attention window of 8 positions, not 9, or correct the reference"),
        (
            {"rope": ("sliding_attention", "rope_theta", 1e6)},
            "give this layer RoPE of base 10000 in half-split pairs, positions",
        ),
        (
            {"rope": ("full_attention", "factor", 4.0)},
            "give this layer RoPE of base 1e+06 in half-split pairs, positions not",
        ),
    ],
)
def test_the_repair_says_what_to_change(change: dict[str, Any], repair: str, whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(whole, out)
    config = json.loads((out / "config.json").read_text())
    if "rope" in change:
        kind, key, value = change["rope"]
        config["rope_parameters"][kind][key] = value
        change = {"rope_parameters": config["rope_parameters"]}
    edited("config.json", **change)(out)
    with one_thread():
        report = check(out, checkpoint("gemma3"), levels=("model",))
    said = json.dumps(report.to_dict())
    assert report.exit_code == 1 and repair in said, [f.data for level in report.levels for f in level.findings]
