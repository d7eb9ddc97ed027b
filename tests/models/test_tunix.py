"""Tunix: what its own Gemma 3 computed, and what transformers computes from the converted file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import convert
from convert.rules import library
from convert.verify.recording.record import write_recording
from convert.verify.run import check
from convert.verify.sides.evidence import Evidence
from support import tunix
from support.goldens import relative_error
from support.rule_mistakes import assert_mistake_is_named
from support.value_mistakes import assert_mistakes_are_named, replace_tensors, tensor_of, turned

pytestmark = pytest.mark.slow

MODEL = "tunix-gemma3"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return tunix.write(tmp_path)


@pytest.fixture
def out(source: Path, tmp_path: Path) -> Path:
    convert.convert(MODEL, source, tmp_path / "out", settings=tunix.SET)
    return tmp_path / "out"


def test_transformers_computes_what_tunix_did(out: Path) -> None:
    wanted = (tunix.GOLD.values(tunix.CASE, kind)["logits"] for kind in ("out", "out64"))
    drift = relative_error(*wanted)
    single, double = tunix.errors(out)
    assert drift < 5e-6 and single < 2 * drift and double < 1e-8


def test_forth_and_back_gives_the_same_leaves(source: Path, out: Path, tmp_path: Path) -> None:
    convert.convert_back(MODEL, out, tmp_path / "back.npz", source, form="npz")
    first, second = dict(np.load(source)), dict(np.load(tmp_path / "back.npz"))
    assert sorted(first) == sorted(second)
    assert all(first[name].tobytes() == second[name].tobytes() for name in first)


def test_a_step_of_tunix_has_the_item_model_params(out: Path, tmp_path: Path) -> None:
    leaves = {f"model_params/{name}": x for name, x in tunix.GOLD.leaves(tunix.CASE).items()}
    np.savez(tmp_path / "step.npz", **leaves)  # type: ignore[arg-type]
    convert.convert(MODEL, tmp_path / "step.npz", tmp_path / "again", settings=tunix.SET)
    one, two = (load_file(folder / "model.safetensors") for folder in (out, tmp_path / "again"))
    assert one.keys() == two.keys() and all(np.array_equal(one[name], two[name]) for name in one)


def test_as_many_key_heads_as_query_heads_share_a_leaf() -> None:
    """Attention of Tunix has then one `qkv_einsum`; its code was read, and this tree was not run."""
    from support.memory_source import MemorySource, run

    leaves = tunix.GOLD.leaves(tunix.CASE)
    fused = {name: x for name, x in leaves.items() if "q_einsum" not in name and "kv_einsum" not in name}
    for layer in range(7):
        q = leaves[f"layers/{layer}/attn/q_einsum/w"]
        fused[f"layers/{layer}/attn/qkv_einsum/w"] = np.stack([q, q + 1, q + 2])
    made = run(convert.plan_conversion(MODEL, MemorySource(fused), settings=tunix.SET))
    q = leaves["layers/3/attn/q_einsum/w"]
    for part, name in enumerate("qkv"):
        wanted = np.moveaxis(q + np.float32(part), 1, 2).reshape(16, 16)
        assert np.array_equal(made[f"model.layers.3.self_attn.{name}_proj.weight"], wanted)


def test_mistakes_in_the_file_are_named(source: Path, out: Path) -> None:
    assert assert_mistakes_are_named(out, source) >= 9


def test_all_levels_pass_with_a_recording_of_tunix(source: Path, out: Path, tmp_path: Path) -> None:
    values = tunix.GOLD.values(tunix.CASE, "out64")
    evidence = Evidence(
        {"input_ids": tunix.GOLD.values(tunix.CASE, "in")["tokens"]}, None, {"logits": values["logits"]}, {}
    )
    plan = convert.plan_conversion(MODEL, source, settings=tunix.SET)
    write_recording(plan, evidence, tmp_path / "recorded.safetensors", outputs=("logits",))

    def verdicts(*levels: str) -> list[str]:
        report = check(out, source, recorded=tmp_path / "recorded.safetensors", levels=levels)
        return [level.verdict.value for level in report.levels]

    assert verdicts("coverage", "weights", "layers", "model") == ["passed"] * 4
    tensors = load_file(out / "model.safetensors")
    name, _ = tensor_of(tensors)
    replace_tensors(out, {name: turned(tensors[name]) * 3})
    assert verdicts("model") == ["failed"]


ATTENTION = "from: layers/{i}/attn/attn_vec_einsum/w"
RULE_MISTAKES = (  # a text of the rules, what stands there instead, what the check calls it
    ("self_attn.{k,v}_proj", "self_attn.{v,k}_proj", "of another tensor"),
    ("mlp.{gate,up}_proj\n\n", "mlp.{up,gate}_proj\n\n", "of another tensor"),
    ("einsum: BTNH,NHD->BTD", "einsum: BTHN,NHD->BTD", "axes of a head swapped"),
    ("module: model.norm, multiplies_by: 1+weight", "module: model.norm, multiplies_by: weight", "1+scale doubled"),
    ("{post_attention,pre_feedforward,post_feedforward}", "{pre_feedforward,post_attention,post_feedforward}", "of another tensor"),
    (ATTENTION, f"prescaled_by: sqrt(H)\n  {ATTENTION}", "multiplied by a number"),
)  # fmt: skip


@pytest.mark.parametrize(("old", "new", "name"), RULE_MISTAKES)
def test_a_mistake_in_the_rules_is_named(old: str, new: str, name: str, source: Path, tmp_path: Path) -> None:
    assert (library.shipped_rules_dir() / "tunix.yaml").read_text().count(old) == 1
    assert_mistake_is_named(MODEL, source, old, new, name, tmp_path / "out", settings=tunix.SET)
