"""The golden Gemma checkpoints: converted, loaded by transformers, compared with the recorded logits of the JAX models."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import convert
from convert.rules.library import find_rules, shipped_rules_dir
from convert.writing.execute import execute
from convert.writing.transfer import used_leaves
from support.gemma_models import BOUND, CASES, directory, error, load, settings
from support.gemma_trees import SIZES, arrays, published, refuse
from support.goldens import checkpoint
from support.marks import slow_but
from support.memory_source import MemorySource, run
from support.paths import GOLDEN


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_transformers_reproduces_the_jax_logits(case: str, tmp_path: Path) -> None:
    assert error(case, directory(case, tmp_path / "out")) < BOUND


@pytest.mark.slow
@pytest.mark.parametrize("case", ["gemma1-mqa", "gemma2-9b", "gemma3-stacked"])
def test_twice_is_the_same_byte_for_byte(case: str, tmp_path: Path) -> None:
    a, b = directory(case, tmp_path / "a", jobs=1), directory(case, tmp_path / "b", jobs=3)
    names = sorted(p.name for p in a.iterdir())
    assert names == ["README.md", "config.json", "generation_config.json", "model.safetensors"]
    assert all((a / name).read_bytes() == (b / name).read_bytes() for name in names)
    card = (a / "README.md").read_text()
    sha = find_rules("gemma1")[0].sha256
    assert f"sha256 `{sha}`" in card and str(tmp_path) not in card and "vocab_size = 256" in card


def test_the_layouts_give_the_same_weights(tmp_path: Path) -> None:
    """STACKED, KAULDRON and FLAT of one tree; the stack of a depth that the pattern does not divide included."""
    nested = arrays("gemma3")
    eleven = {k: v for k, v in nested.items() if not k.startswith("layer_11/")}
    flat = {
        f"transformer/{k}/w" if k.endswith(("mlp/linear", "mlp/gating_einsum")) else f"transformer/{k}": v
        for k, v in eleven.items()
    }
    stacked: dict[str, np.ndarray] = {}
    for name, x in flat.items():
        if "layer_" not in name:
            stacked[name] = x
    for p in range(6):
        for name in (n for n in flat if n.startswith("transformer/layer_0/")):
            rest = name.removeprefix("transformer/layer_0/")
            slices = [flat[f"transformer/layer_{i}/{rest}"] for i in range(p, 11, 6)]
            stacked[f"transformer/stacked_layers/attention_type_{p}/{rest}"] = np.stack(slices)
    assert {x.shape[0] for n, x in stacked.items() if "attention_type_5" in n} == {1}
    kauldron = {**{f"params/{k}": v for k, v in eleven.items()}, "step": np.int32(7) * np.ones((), np.int32)}
    kauldron |= {f"opt_state/{k}": v for k, v in eleven.items()}
    said = settings("gemma3")
    files = []
    for k, tree in enumerate((eleven, flat, stacked, kauldron)):
        plan = convert.plan_conversion("gemma", MemorySource(tree), settings=said)
        assert plan.sizes["i"] == 11 and plan.rules.model == "gemma3"
        assert {d.reason for d in plan.dropped} == ({"optimizer state", "the training step"} if k == 3 else set())
        convert.convert("gemma3", MemorySource(tree), tmp_path / f"{k}.safetensors", settings=said)
        files.append(load_file(tmp_path / f"{k}.safetensors"))
    for other in files[1:]:
        assert other.keys() == files[0].keys() and all(torch.equal(other[n], files[0][n]) for n in other)


def test_a_stacked_leaf_is_read_once(tmp_path: Path) -> None:
    class Counting(MemorySource):
        reads: dict[str, int]

        def read(self, name: str) -> np.ndarray:
            self.reads[name] = self.reads.get(name, 0) + 1
            return super().read(name)

    source = Counting(arrays("gemma3-stacked"))
    source.reads = {}
    plan = convert.plan_conversion("gemma", source, settings=settings("gemma3-stacked"))
    assert sum(len(work) for work in used_leaves(plan).values()) == 158
    for _ in execute(plan, tmp_path / "out.safetensors"):
        pass
    assert set(source.reads.values()) == {1} and len(source.reads) == len(source.leaves)


# ---- planted faults: they load, and the logits tell


@dataclasses.dataclass(frozen=True)
class Fault:
    name: str
    case: str
    edits: tuple[tuple[str, str], ...]


NORM = "transformers: {module: model.norm, multiplies_by: 1+weight}"
FAULTS = (
    Fault("1+scale added although the target adds it", "gemma2-2b", ((NORM, "transformers: {module: model.norm}"),)),
    Fault("q and k norms swapped", "gemma3", (("self_attn.{q,k}_norm\", mult", "self_attn.{k,q}_norm\", mult"),)),
    Fault("k and v swapped", "gemma3", (("self_attn.{k,v}_proj", "self_attn.{v,k}_proj"),)),
    Fault("gate and up swapped", "gemma3-stacked", (("mlp.{gate,up}_proj", "mlp.{up,gate}_proj"),)),
    Fault("heads and features of q swapped", "gemma2-9b", (("BTD,NDH->BTNH", "BTD,NDH->BTHN"),)),
    Fault("heads and features of o swapped", "gemma1-mha", (("BTNH,NHD->BTD", "BTHN,NHD->BTD"),)),
    Fault("norms around the MLP swapped", "gemma2-2b", (("{post_attention,pre_feedforward,post_feedforward}_layernorm", "{post_attention,post_feedforward,pre_feedforward}_layernorm"),)),
    Fault("layers counted the other way", "gemma3-stacked", (("order: [s, p], period: $attention_pattern", "order: [p, s]"),)),
    Fault("windows in the wrong layers", "gemma3", (("[sliding_attention, sliding_attention, sliding_attention, sliding_attention, sliding_attention, full_attention]", "[full_attention, sliding_attention, sliding_attention, sliding_attention, sliding_attention, sliding_attention]"),)),
    Fault("erf in place of tanh", "gemma1-mqa", (("hidden_act: gelu_pytorch_tanh", "hidden_act: gelu_python"),)),
    Fault("no soft cap", "gemma2-9b", (("final_logit_softcapping: $final_logit_softcapping", "final_logit_softcapping: null"),)),
    Fault("RoPE bases swapped", "gemma3", (("rope_theta: $rope_theta_local", "rope_theta: $rope_theta_global"),)),
)  # fmt: skip


@pytest.mark.parametrize("fault", slow_but(FAULTS[::3], FAULTS), ids=lambda fault: f"{fault.name} ({fault.case})")
def test_logits_tell_the_fault(fault: Fault, tmp_path: Path) -> None:
    text = (shipped_rules_dir() / "gemma.yaml").read_text()
    for old, new in fault.edits:
        assert old in text, old
        text = text.replace(old, new)
    rules = tmp_path / "gemma.yaml"
    rules.write_text(text)
    assert error(fault.case, directory(fault.case, tmp_path / "out", str(rules))) > 2 * BOUND


# ---- other targets


GEMMA_PYTORCH = {  # google/gemma_pytorch@014acb7 gemma/model.py, lines 172-254, 355-456, 524-527: module -> its parameters
    "embedder": ("embedder.weight",),
    "layer": (
        "self_attn.qkv_proj.weight",
        "self_attn.o_proj.weight",
        "mlp.gate_proj.weight",
        "mlp.up_proj.weight",
        "mlp.down_proj.weight",
        "input_layernorm.weight",
        "post_attention_layernorm.weight",
    ),
    "layer of 2 and 3": ("pre_feedforward_layernorm.weight", "post_feedforward_layernorm.weight"),
    "layer of 3": ("self_attn.query_norm.weight", "self_attn.key_norm.weight"),
    "end": ("model.norm.weight",),
}


@pytest.mark.parametrize("case", slow_but(["gemma2-2b", "gemma3"], CASES))
def test_gemma_pytorch_has_the_same_weights_fused(case: str, tmp_path: Path) -> None:
    """Rows q, k, v of `qkv_proj` as upstream splits them; every other tensor is that of transformers, which has parity."""
    files = {}
    for to in ("transformers", "gemma_pytorch"):
        out = tmp_path / f"{to}.safetensors"
        convert.convert("gemma", checkpoint(case), out, to=to, settings=settings(case))
        files[to] = load_file(out)
    ours, theirs = files["transformers"], files["gemma_pytorch"]
    layers = 1 + max(int(name.split(".")[2]) for name in ours if ".layers." in name)
    names = [*GEMMA_PYTORCH["layer"]]
    names += GEMMA_PYTORCH["layer of 2 and 3"] if not case.startswith("gemma1") else ()
    names += GEMMA_PYTORCH["layer of 3"] if case.startswith("gemma3") else ()
    wanted = {*GEMMA_PYTORCH["embedder"], *GEMMA_PYTORCH["end"]}
    wanted |= {f"model.layers.{i}.{name}" for i in range(layers) for name in names}
    assert theirs.keys() == wanted
    for name, x in theirs.items():
        if "qkv_proj" in name:
            want = torch.cat([ours[name.replace("qkv", part)] for part in "qkv"])
        else:
            there = name.replace("query_norm", "q_norm").replace("key_norm", "k_norm")
            want = ours["model.embed_tokens.weight" if name == "embedder.weight" else there]
        assert torch.equal(x, want), name


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_plain_norms_have_the_one_folded_in(dtype: str | None, tmp_path: Path) -> None:
    case, out = "gemma3", tmp_path / "out.safetensors"
    plan = convert.plan_conversion("gemma", checkpoint(case), to="plain_norms", dtype=dtype, settings=settings(case))
    norm = next(step for step in plan.steps if step.name == "model.norm.weight")
    assert norm.arithmetic == "+ 1" and norm.loses == ("rounded from float32 to bfloat16" if dtype else "")
    convert.convert("gemma", checkpoint(case), out, to="plain_norms", dtype=dtype, settings=settings(case))
    scale = arrays(case)["final_norm/scale"]
    want = torch.tensor(scale + np.float32(1)).to(getattr(torch, dtype or "float32"))
    assert torch.equal(load_file(out)["model.norm.weight"], want)


def test_dtypes_and_overflow(tmp_path: Path) -> None:
    out = directory("gemma1-mqa", tmp_path / "half", dtype="float16")
    assert json.loads((out / "config.json").read_text())["dtype"] == "float16"
    assert {x.dtype for x in load_file(out / "model.safetensors").values()} == {torch.float16}
    tree = arrays("gemma1-mqa")
    tree["transformer/final_norm/scale"] = tree["transformer/final_norm/scale"] * 0 + 70000
    with pytest.raises(
        convert.PlanError, match=r"model\.norm\.weight: from transformer/final_norm/scale: .* do not fit float16"
    ):
        convert.convert("gemma", MemorySource(tree), tmp_path / "x", dtype="float16", settings=settings("gemma1-mqa"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["half"]


# ---- published sizes, from shapes alone


@pytest.mark.parametrize("version", slow_but(list(SIZES)[::4], SIZES))
def test_published_sizes_need_no_setting_and_match_transformers(version: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    plan = convert.plan_conversion("gemma", published(version))
    assert plan.version == version
    config = plan.config
    assert config is not None
    rows = 262144 if version.startswith("3") else 256000
    assert config["vocab_size"] == rows
    cut = [note for note in plan.notes if "keeps rows 0 to 255999 of 256128" in note]
    assert len(cut) == (0 if version.startswith("3") else 1)
    made = AutoConfig.for_model(**config)
    with torch.device("meta"):
        state = AutoModelForCausalLM.from_config(made).state_dict()
    state.pop("lm_head.weight")  # tied: stored once
    assert {name: tuple(x.shape) for name, x in state.items()} == {step.name: step.spec.shape for step in plan.steps}
    if version in ("2-27b", "3-27b"):
        assert config["query_pre_attn_scalar"] == config["hidden_size"] // config["num_attention_heads"]
    if version.startswith("3"):
        assert made.rope_parameters["full_attention"]["factor"] == (8.0 if int(SIZES[version][0]) > 26 else 1.0)
        assert [k for k, kind in enumerate(made.layer_types) if kind == "full_attention"][:2] == [5, 11]


# ---- bad input: each an error that names what, and nothing is written


def test_a_tree_of_another_generation(tmp_path: Path) -> None:
    said = refuse(checkpoint("gemma2-2b"), "gemma3", tmp_path / "x", settings=settings("gemma2-2b"))
    assert "transformer/layer_{i}/attn/_{query,key}_norm/scale (rms_norm, weight): expected a leaf" in said
    assert (
        "The tree is that of gemma2 (Gemma 2): name gemma2 in place of gemma3, or gemma to have it recognized" in said
    )
    said = refuse(checkpoint("gemma3"), "gemma1", tmp_path / "x", settings={"vocab_size": 256})
    assert "no rule matches this leaf" in said and "The tree is that of gemma3" in said


def test_truncated_stacks(tmp_path: Path) -> None:
    options = {"settings": settings("gemma3-stacked")}
    tree = arrays("gemma3-stacked")
    name = "transformer/stacked_layers/attention_type_2/attn/q_einsum/w"
    one = {**tree, name: tree[name][:1]}
    said = refuse(MemorySource(one), "gemma", tmp_path / "x", **options)
    assert "attn/q_einsum/w: no leaf for {i} = 8, which other leaves have; the stack of layers is truncated" in said
    kind = {n: x[:1] if "attention_type_2/" in n else x for n, x in tree.items()}
    said = refuse(MemorySource(kind), "gemma", tmp_path / "x", **options)
    assert "{i} runs from 0 to 11 in the tree, without 8 (units of 6: {p} from 0 to 5); the stack of layers" in said
    gone = {n: x for n, x in tree.items() if n != name}
    said = refuse(MemorySource(gone), "gemma", tmp_path / "x", **options)
    assert f"{name} [leaf-missing]: this leaf is not in the checkpoint" in said
    nested = {n: x for n, x in arrays("gemma3").items() if n != "layer_7/attn/kv_einsum/w"}
    said = refuse(MemorySource(nested), "gemma", tmp_path / "x", **options)
    assert "layer_7/attn/kv_einsum/w: this leaf is not in the checkpoint" in said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("version", "rows", "known"), [("2-2b", 257152, "256000 or 256128"), ("3-1b", 262145, "262144")]
)
def test_a_vocabulary_that_fits_neither_size(version: str, rows: int, known: str, tmp_path: Path) -> None:
    said = refuse(published(version, rows), "gemma", tmp_path / "x")
    assert f"it has {rows} rows, and the vocabulary {known}; --set vocab_size={rows} keeps all of them" in said
    said = refuse(published(version, rows), "gemma", tmp_path / "x", settings={"vocab_size": rows + 1})
    assert f"it has {rows} rows, fewer than --set vocab_size={rows + 1}; rows cannot be added" in said
    plan = convert.plan_conversion("gemma", published(version, rows), settings={"vocab_size": rows - 100})
    table = next(step for step in plan.steps if step.name == "model.embed_tokens.weight")
    assert table.spec.shape[0] == rows - 100


def test_padding_is_cut_off_and_nothing_else(tmp_path: Path) -> None:
    tree = arrays("gemma2-9b")
    table = tree["embedder/input_embedding"]
    tree["embedder/input_embedding"] = np.concatenate([table, np.full((8, 48), np.nan, np.float32)])
    convert.convert("gemma", MemorySource(tree), tmp_path / "x.safetensors", settings=settings("gemma2-9b"))
    assert torch.equal(load_file(tmp_path / "x.safetensors")["model.embed_tokens.weight"], torch.tensor(table))


@pytest.mark.slow
def test_an_unpublished_size_is_asked_for_by_name(tmp_path: Path) -> None:
    said = refuse(checkpoint("gemma3"), "gemma", tmp_path / "x", settings={"vocab_size": 256})
    for name in ("sliding_window", "query_pre_attn_scalar", "rope_factor_global", "context_length"):
        assert f"--set {name}=..." in said
    assert "or write only the weights, to a .safetensors file" in said
    convert.convert("gemma", checkpoint("gemma3"), tmp_path / "x.safetensors", settings={"vocab_size": 256})


@pytest.mark.parametrize("value", [30, 30.0])
def test_a_soft_cap_that_is_given_as_an_integer_is_written_as_a_float(value: float) -> None:
    """transformers refuses a config.json with `30`: the module could not be made."""
    given = {**settings("gemma2-2b"), "attn_logit_softcapping": value, "sliding_window": 8}
    plan = convert.plan_conversion("gemma", checkpoint("gemma2-2b"), settings=given)
    assert plan.config is not None and repr(plan.config["attn_logit_softcapping"]) == "30.0"
    assert repr(plan.config["sliding_window"]) == "8"


@pytest.mark.slow
def test_a_sharded_directory_loads_and_stores_the_tied_table_once(tmp_path: Path) -> None:
    out = directory("gemma2-2b", tmp_path / "out", max_shard_bytes=100_000)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert "lm_head.weight" not in index["weight_map"] and len(set(index["weight_map"].values())) > 2
    model = load(out)
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert (GOLDEN / "gemma2-2b" / "case.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("case", ["gemma1-mha", "gemma2-9b", "gemma3"])
def test_a_tree_of_quantization_aware_training_has_the_same_weights(case: str) -> None:
    """The names that gemma 4.0.1 gives them: gm/ckpts/_quantization.py, convert_to_qat_checkpoint."""
    source, said = convert.open_source(checkpoint(case)), settings(case)

    def renamed(name: str) -> str:
        for key in ("gating_einsum", "linear"):
            if name.removesuffix("/w").endswith(f"mlp/{key}"):
                return f"{name.removesuffix('/w').removesuffix(key)}_SimulateQuantizedEinsum_{key}/kernel"
        return f"{name.removesuffix('/w')}/_SimulateQuantizedEinsum_0/kernel" if name.endswith("/w") else name

    tree = {renamed(name): source.read(name) for name in source.leaves}
    made = run(convert.plan_conversion("gemma", MemorySource(tree), settings=said))
    wanted = run(convert.plan_conversion("gemma", source, settings=said))
    assert made.keys() == wanted.keys() and all(np.array_equal(x, wanted[name]) for name, x in made.items())
