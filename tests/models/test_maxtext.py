"""MaxText's trees, scanned and not: converted, loaded by transformers, compared with what MaxText's equations give."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import convert
from convert.core.findings import Finding
from convert.rules.library import shipped_rules_dir
from convert.rules.parse import parse_models
from convert.verify.layers.level import check_layers
from convert.writing.written import open_written
from support.command_line import Run
from support.gemma_models import BOUND, load
from support.goldens import SpecsOnly, relative_error
from support.maxtext_models import PADDED, TOKENS, D, F, H, K, Model, N, V, flat, logits, train_state
from support.memory_source import MemorySource
from support.weights_level import check_weights

pytestmark = pytest.mark.slow

FAMILIES = {"gemma2": 6, "gemma3": 8, "llama3": 3, "llama3.1": 3}  # layers; 8 are a unit of six and two layers more
SCANNED = {family: Model(family, layers, scan=True) for family, layers in FAMILIES.items()}
MODELS = (*SCANNED.values(), *(Model(family, layers, scan=False) for family, layers in FAMILIES.items()), Model("gemma3", 12, scan=True))  # fmt: skip


def called(model: Model) -> str:
    return f"{model.family}, {model.layers} layers, {'scanned' if model.scan else 'not scanned'}"


@cache
def state(model: Model) -> dict[str, Any]:
    return train_state(model)


@cache
def source(model: Model) -> MemorySource:
    return MemorySource(flat(state(model)))


@cache
def wanted(model: Model) -> np.ndarray:
    return logits(model, state(model)["params"])


def converted(model: Model, out: Path, rules: str | None = None, **options: Any) -> Path:
    convert.convert(rules or model.rules, source(model), out, settings=model.settings, **options)
    return out


def error(model: Model, out: Path) -> float:
    with torch.no_grad():
        got = load(out)(torch.tensor(TOKENS)).logits.numpy()
    return relative_error(got, wanted(model))


@pytest.mark.parametrize("model", MODELS, ids=called)
def test_transformers_computes_what_maxtext_does(model: Model, tmp_path: Path) -> None:
    assert error(model, converted(model, tmp_path / "out")) < BOUND


@pytest.mark.parametrize("family", FAMILIES)
def test_scanned_or_not_gives_the_same_bytes(family: str, tmp_path: Path) -> None:
    files = [
        load_file(converted(Model(family, FAMILIES[family], scan), tmp_path / f"{scan}.safetensors"))
        for scan in (True, False)
    ]
    assert files[0].keys() == files[1].keys() and all(torch.equal(x, files[1][name]) for name, x in files[0].items())


def test_units_of_five_layers_are_not_counted_anew(tmp_path: Path) -> None:
    """A scan without its last layer: the others would come to lie in places of another kind."""
    tree = {k: v for k, v in flat(state(SCANNED["gemma3"])).items() if "layers/layers_5/" not in k and "opt_" not in k}
    with pytest.raises(convert.PlanError) as refused:
        convert.convert("maxtext", MemorySource(tree), tmp_path / "x", settings=SCANNED["gemma3"].settings)
    assert "{i} runs from 0 to 7 in the tree, without 5 (units of 6: {p} from 0 to 5)" in str(refused.value)
    assert not list(tmp_path.iterdir())


def test_a_train_state_on_disk(tmp_path: Path) -> None:
    """Written by Orbax as MaxText does it, a composite of items in a directory for each step."""
    import orbax.checkpoint as ocp

    model = SCANNED["llama3.1"]
    with ocp.CheckpointManager(tmp_path / "checkpoints", item_names=("items",)) as manager:
        manager.save(7, args=ocp.args.Composite(items=ocp.args.PyTreeSave(state(model))))
    plan = convert.plan_conversion(model.rules, tmp_path / "checkpoints", settings=model.settings)
    assert {d.reason for d in plan.dropped} == {"optimizer state", "the training step"}
    assert plan.root == "params/params" and len(plan.steps) == 3 * 9 + 3
    convert.convert(model.rules, tmp_path / "checkpoints", tmp_path / "disk.safetensors", settings=model.settings)
    ours = load_file(converted(model, tmp_path / "memory.safetensors"))
    theirs = load_file(tmp_path / "disk.safetensors")
    assert ours.keys() == theirs.keys() and all(torch.equal(x, theirs[name]) for name, x in ours.items())


# ---- planted faults: each loads strictly; the logits tell, and a file that has one is diagnosed


@dataclasses.dataclass(frozen=True)
class Fault:
    """A rule file with a mistake, and what the weights level calls it."""

    name: str
    family: str
    old: str
    new: str
    diagnosis: str


QUERY = "prescaled_by: 1/sqrt(H)                  # attentions.py does not scale scores"
UNITS = """      - - {path: "layers/layers_{p}", stacked: {s: 1}, order: [s, p], period: $attention_pattern}    # followed by the layers of an incomplete unit
        - {path: "layers_remainder/layers_{q}", order: [q]}"""
REMAINDER_FIRST = """      - - {path: "layers_remainder/layers_{q}", order: [q]}
        - {path: "layers/layers_{p}", stacked: {s: 1}, order: [s, p], period: $attention_pattern}"""
FAULTS = (
    Fault("no -1", "gemma2", 'rms_norm: {module: model.norm, multiplies_by: 1+weight}', "rms_norm: model.norm", "1+scale on a plain norm"),
    Fault("no -1 in the norms of q and k", "gemma3", 'self_attn.{q,k}_norm", multiplies_by: 1+weight}', 'self_attn.{q,k}_norm"}', "1+scale on a plain norm"),
    Fault("no sqrt(H)", "gemma2", QUERY, "# attentions.py divides", "prescale not removed"),
    Fault("sqrt(H) the wrong way", "gemma2", QUERY, "prescaled_by: sqrt(H) # divides", "prescale applied twice"),
    Fault("no sqrt(D)", "gemma3", "prescaled_by: sqrt(D)", "", "prescale not removed"),
    Fault("a factor taken out that is not in", "llama3.1", "key/kernel\n  rope: {H: interleaved}", "key/kernel\n  prescaled_by: 1/sqrt(H)\n  rope: {H: interleaved}", "weight rescaled although the source does not prescale it"),
    Fault("not de-interleaved", "llama3.1", "rope: {H: interleaved}              # embeddings.py", "rope: {H: half-split} # embeddings.py", "RoPE pairs still interleaved"),
    Fault("keys not de-interleaved", "llama3.1", "key/kernel\n  rope: {H: interleaved}", "key/kernel", "RoPE pairs still interleaved"),
    Fault("de-interleaved needlessly", "llama3", "rope: {H: half-split}               # embeddings.py", "rope: {H: interleaved} #", "RoPE pairs de-interleaved needlessly"),
    Fault("local and global swapped", "gemma2", "{p:local,global}", "{p:global,local}", "of another layer"),
    Fault("units counted the other way", "gemma3", "order: [s, p], period: $attention_pattern", "order: [p, s]", "of another layer"),
    Fault("the remainder first", "gemma3", UNITS, REMAINDER_FIRST, "of another layer"),
    Fault("gate and up swapped", "llama3", "{wi_0,wi_1}", "{wi_1,wi_0}", "of another tensor"),
)  # fmt: skip


def model_of(fault: Fault) -> Model:
    return Model("gemma3", 14, scan=True) if "units" in fault.name else SCANNED[fault.family]


def faulty(fault: Fault) -> convert.RuleFile:
    """The rules of the fault's model, in a file with its mistake."""
    file = "maxtext-gemma.yaml" if "gemma" in fault.family else "maxtext.yaml"
    text = (shipped_rules_dir() / file).read_text()
    assert fault.old in text
    models = parse_models(text.replace(fault.old, fault.new), "faulty.yaml")
    return next(rules for rules in models if rules.model == model_of(fault).rules)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.name} ({fault.family})")
def test_a_fault_shows_and_is_named(fault: Fault, tmp_path: Path) -> None:
    model, out = model_of(fault), tmp_path / "out"
    convert.convert(faulty(fault), source(model), out, settings=model.settings)
    assert error(model, out) > 100 * BOUND
    plan, written = convert.plan_conversion(model.rules, source(model), settings=model.settings), open_written(out)
    weights, layers = check_weights(plan, written), check_layers(plan, written)
    named = [f for f in weights.findings if f.code != "provenance-differs"]
    tried = [f for f in named if f.data.get("tried", True)]
    assert {f.data["diagnosis"] for f in tried} == {fault.diagnosis}, weights.findings
    assert tensors(layers.findings) == tensors(named)  # every wrong tensor, and no other


def tensors(findings: Iterable[Finding]) -> set[str]:
    return {name for finding in findings for name in finding.data.get("tensors", [finding.path])}


@pytest.mark.parametrize(
    ("model", "dtype"), [*((model, None) for model in SCANNED.values()), (SCANNED["llama3.1"], "bfloat16")]
)
def test_right_files_pass(model: Model, dtype: str | None, tmp_path: Path) -> None:
    written = open_written(converted(model, tmp_path / "out.safetensors", dtype=dtype))
    plan = convert.plan_conversion(model.rules, source(model), settings=model.settings, dtype=dtype)
    for report in (check_weights(plan, written), check_layers(plan, written)):
        assert report.verdict == "passed", report.findings


# ---- published sizes, from shapes alone

SIZES = {  # src/maxtext/configs/models/*.yml, and the vocabularies
    "gemma2-2b": (26, 2304, 8, 4, 256, 9216, 256128),
    "gemma2-27b": (46, 4608, 32, 16, 128, 36864, 256128),
    "gemma3-4b": (34, 2560, 8, 4, 256, 10240, 262144),  # 34 = 5 * 6 + 4
    "gemma3-12b": (48, 3840, 16, 8, 256, 15360, 262144),  # 48 = 8 * 6
    "llama3-8b": (32, 4096, 32, 8, 128, 14336, 128256),
    "llama3.1-405b": (126, 16384, 128, 8, 128, 53248, 128256),
}


def published(name: str) -> tuple[str, SpecsOnly]:
    """The scanned tree of a published size: the small one's names, its axes at other sizes."""
    layers, *rest = SIZES[name]
    family = name.rpartition("-")[0]
    small = Model(family, FAMILIES[family] if family != "gemma3" or layers % 6 else 12, scan=True)
    depth = {"gemma2": layers // 2, "gemma3": layers // 6}.get(family, layers)
    size = dict(zip((D, N, K, H, F, V), rest, strict=True)) | {V + PADDED: rest[-1]}
    specs = {}
    for leaf, x in flat(state(small)["params"], "params").items():
        stacked = "/layers/" in leaf
        shape = [depth if stacked and axis == 1 else size[n] for axis, n in enumerate(x.shape)]
        specs[leaf] = (tuple(shape), "bfloat16")
        if "remainder/layers_0" in leaf:
            for q in range(layers % 6):
                specs[leaf.replace("layers_0", f"layers_{q}")] = (tuple(shape), "bfloat16")
    return small.rules, SpecsOnly(specs)


@pytest.mark.parametrize("name", SIZES)
def test_published_sizes_need_no_setting_and_match_transformers(name: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    rules, tree = published(name)
    plan = convert.plan_conversion(rules, tree)
    assert plan.version == name.removeprefix("gemma").removeprefix("llama")
    config = plan.config
    assert config is not None
    assert config["vocab_size"] == (256000 if name.startswith("gemma2") else SIZES[name][-1])
    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).state_dict()
    if config["tie_word_embeddings"]:
        made.pop("lm_head.weight")
    assert {key: tuple(x.shape) for key, x in made.items()} == {step.name: step.spec.shape for step in plan.steps}
    if name == "gemma3-4b":
        last = next(step for step in plan.steps if step.name == "model.layers.33.self_attn.q_proj.weight")
        assert last.parts[0].leaf.endswith("decoder/layers_remainder/layers_3/self_attention/query/kernel")


# ---- what a user reads


def test_the_family_recognises_gemma_and_asks_about_llama(tmp_path: Path) -> None:
    for family in ("gemma2", "gemma3"):
        model = SCANNED[family]
        assert convert.plan_conversion("maxtext", source(model), settings=model.settings).rules.model == model.rules
    with pytest.raises(convert.PlanError) as refused:
        convert.plan_conversion("maxtext", source(SCANNED["llama3"]))
    assert refused.value.code == "rules-ambiguous"
    assert "fits maxtext-llama3 and maxtext-llama3.1 and maxtext-mistral; name one of them" in str(refused.value)


def test_truncated_stacks() -> None:
    tree = dict(source(SCANNED["gemma3"]).arrays)
    name = "params/params/decoder/layers/layers_2/mlp/wo/kernel"
    gone = {key: x for key, x in tree.items() if key != name}
    with pytest.raises(convert.PlanError, match=rf"{name} \[leaf-missing\]: this leaf is not in the checkpoint"):
        convert.plan_conversion("maxtext-gemma3", MemorySource(gone), settings=SCANNED["gemma3"].settings)
    tree = dict(source(SCANNED["llama3"]).arrays)
    name = "params/params/decoder/layers/mlp/wo/kernel"
    with pytest.raises(convert.PlanError, match=r"makes i = 2 \(layers\)"):
        convert.plan_conversion("maxtext-llama3", MemorySource({**tree, name: tree[name][:, :2]}))


def test_the_plan_says_it_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    import orbax.checkpoint as ocp

    model = SCANNED["llama3.1"]
    with ocp.PyTreeCheckpointer() as saver:
        saver.save(tmp_path / "ckpt", state(model))
    said, _ = Run(monkeypatch, capsys)("plan", model.rules, tmp_path / "ckpt", "--full")
    lines = said.splitlines()
    at = next(k for k, line in enumerate(lines) if "layers.0.self_attn.q_proj.weight" in line)
    assert "(x 2.82843, as the source's weight carries 1/sqrt(H))" in lines[at]
    assert lines[at + 1].endswith("D i N H -> i (N H) D, H from interleaved to half-split pairs")
    facts = next(line for line in lines if line.strip().startswith("model.layers.{i}.self_attn.q_proj"))
    assert "weight_carries 1/sqrt(H), source_rope interleaved, target_rope half-split" in facts


@pytest.mark.parametrize("model", MODELS, ids=called)
def test_the_rules_give_maxtext_s_tree_for_tensors_of_other_code(model: Model, tmp_path: Path) -> None:
    """Its paths and shapes, scanned or not. The factors in its weights round, so bfloat16 tensors become float32 leaves, as MaxText's are."""
    file = converted(model, tmp_path / "out.safetensors", dtype="bfloat16")
    tensors = load_file(file)
    save_file(tensors, file)
    layout = "SCANNED" if model.scan else "UNSCANNED"
    tree = convert.load_pytree(model.rules, file, layout=layout, dtype="float32", settings={"N": N, "K": K, "H": H})
    back = flat(tree)
    weights = {name: x for name, x in source(model).arrays.items() if name.startswith("params/")}
    assert back.keys() == weights.keys()
    for name, x in weights.items():
        padding = PADDED if name.endswith("token_embedder/embedding") and model.family == "gemma2" else 0
        assert back[name].shape == (x.shape[0] - padding, *x.shape[1:]) and back[name].dtype == np.float32, name
        assert np.allclose(back[name], x[: x.shape[0] - padding], rtol=0.01, atol=0.01), name
    convert.convert(model.rules, MemorySource(back), tmp_path / "again.safetensors", dtype="bfloat16", settings=model.settings)  # fmt: skip
    again = load_file(tmp_path / "again.safetensors")
    assert again.keys() == tensors.keys() and all(torch.equal(again[name], tensors[name]) for name in tensors)
