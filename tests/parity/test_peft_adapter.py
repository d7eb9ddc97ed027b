"""LoRA pairs as PEFT's adapter, unmerged: loaded by peft itself, and equal to what the merge makes of the same tree."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

import convert
from convert.core.errors import ConvertError
from convert.planning.planner import make_plan
from support.command_line import Run
from support.goldens import checkpoint, golden_io, relative_error
from support.marks import slow_but
from support.maxtext_models import Model, flat, train_state
from support.memory_source import MemorySource, rule_file, run
from support.paths import GOLDEN

RANK, ALPHA = 3, 6.0
Tree = dict[str, np.ndarray]


def adapter(out: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    return json.loads((out / "adapter_config.json").read_text()), load_file(out / "adapter_model.safetensors")


def deltas(out: Path) -> dict[str, np.ndarray]:
    """What PEFT adds to each weight (peft 0.21 tuners/lora/layer.py, get_delta_weight), in float64."""
    config, tensors = adapter(out)
    made = {}
    for name, down in tensors.items():
        if not name.endswith(".lora_A.weight"):
            continue
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        up = tensors[name.replace("lora_A", "lora_B")].astype(np.float64)
        rank = config["rank_pattern"].get(module, config["r"])
        assert (down.shape[0], up.shape[1]) == (rank, rank)
        scale = config["alpha_pattern"].get(module, config["lora_alpha"]) / rank
        product = scale * up.reshape(len(up), rank) @ down.astype(np.float64).reshape(rank, -1)
        made[f"{module}.weight"] = product.T if config["fan_in_fan_out"] else product
    return made


def agree(rules: Any, tree: Tree, out: Path, expect: int, **options: Any) -> None:
    """The merged weight less the weight alone is what the adapter adds, in every module; and no other weight is merged."""
    settings = options.pop("settings", {"lora_alpha": ALPHA})
    if "lora_alpha" in settings:
        alone = {key: value for key, value in settings.items() if key != "lora_alpha"}
    else:
        alone = settings
    convert.convert_adapter(rules, MemorySource(tree), out, settings=settings, **options)
    made = deltas(out)
    merged = run(convert.plan_conversion(rules, MemorySource(tree), settings=settings, dtype="float32", **options))
    base = run(convert.plan_conversion(rules, MemorySource(tree), settings={**alone, "adapter": "base"}, dtype="float32", **options))  # fmt: skip
    differ = {name for name, x in merged.items() if not np.array_equal(x, base[name])}
    assert differ == made.keys() and len(made) == expect
    for name, product in made.items():
        want = merged[name].astype(np.float64) - base[name]
        assert relative_error(product.reshape(want.shape), want) < 1e-5, name


def with_pairs(tree: Tree, paths: Mapping[str, tuple[int, tuple[int, ...]]], rng: np.random.Generator) -> Tree:
    """The leaves that qwix adds to kernels of dot_general: path -> (input axes of the kernel, stacked axes)."""
    found = dict(tree)
    for name, (inputs, stacked) in paths.items():
        shape = [n for axis, n in enumerate(tree[name].shape) if axis not in stacked]
        sizes = [[math.prod(shape[:inputs]), RANK], [RANK, math.prod(shape[inputs:])]]
        for end, size in zip("ab", sizes, strict=True):
            for axis in stacked:
                size.insert(axis, tree[name].shape[axis])
            found[f"{name}_lora_{end}"] = rng.standard_normal(size).astype(np.float32) / 4
    return found


# ---- models


@pytest.mark.slow
def test_gemma_by_peft(tmp_path: Path) -> None:
    """peft loads the adapter over the converted base: the recorded logits of gemma 3.3.0, without and with its adapter."""
    from peft import PeftModel

    from support.gemma_models import BOUND, load, logits, settings

    case, said = "gemma3-lora", settings("gemma3-lora")
    convert.convert("gemma", checkpoint(case), tmp_path / "base", settings={**said, "adapter": "base"})
    result = convert.convert_adapter("gemma", checkpoint(case), tmp_path / "adapter", settings=said)
    assert result.modules == 14 and sorted(file.name for file in result.out.iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    recorded, base = golden_io(case), load(tmp_path / "base")
    assert relative_error(logits(base, case), recorded["base_logits"]) < BOUND
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = PeftModel.from_pretrained(base, tmp_path / "adapter")
        assert relative_error(logits(model.eval(), case), recorded["logits"]) < BOUND
        assert relative_error(logits(model.merge_and_unload(), case), recorded["logits"]) < BOUND
    config, tensors = adapter(tmp_path / "adapter")
    assert (config["r"], config["lora_alpha"], config["task_type"]) == (RANK, RANK, "CAUSAL_LM")
    names = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert config["target_modules"] == names and len(tensors) == 28


@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.parametrize("family", slow_but(["llama3.1"], ["llama3.1", "llama3", "gemma2", "gemma3"]))
def test_maxtext(family: str, scan: bool, tmp_path: Path) -> None:
    """RoPE's pairs, 1/sqrt(H) of the queries, heads and stacked layers: those of the weight, on the rows of lora_B."""
    model = Model(family, {"gemma2": 6, "gemma3": 8}.get(family, 3), scan)
    tree = flat(train_state(model))
    kernels = [
        name for name in tree if name.startswith("params/") and name.endswith("/kernel") and "logits" not in name
    ]
    stacked = {name: (1,) if scan and "remainder" not in name else () for name in kernels}
    paths = {name: (2 if "/out/" in name else 1, stacked[name]) for name in kernels}
    tree = with_pairs(tree, paths, np.random.default_rng(1))
    agree(model.rules, tree, tmp_path / "out", 7 * model.layers, settings={**model.settings, "lora_alpha": ALPHA})


def test_a_fused_tensor_has_the_pairs_of_its_leaves(tmp_path: Path) -> None:
    """google/gemma_pytorch has q, k and v as rows of one weight: the ranks add up, each block on its rows."""
    from support.gemma_models import settings
    from support.gemma_trees import arrays

    said = settings("gemma3-lora")
    agree("gemma", arrays("gemma3-lora"), tmp_path / "out", 10, to="gemma_pytorch", settings=said)
    config, tensors = adapter(tmp_path / "out")
    assert config["rank_pattern"] == {f"model.layers.{i}.self_attn.qkv_proj": 2 * RANK for i in range(2)}
    up = tensors["base_model.model.model.layers.0.self_attn.qkv_proj.lora_B.weight"]
    assert up.shape == (64, 6) and not up[:32, 3:].any() and not up[32:, :3].any() and up[32:, 3:].all()


def test_pairs_for_each_head(tmp_path: Path) -> None:
    """openpi: B of the output projection is summed, and the blocks of a head become elements of the rank."""
    recorded = dict(np.load(GOLDEN / "lora" / "openpi.npz"))
    leaves = {key.removeprefix("leaf/"): recorded[key] for key in recorded if key.startswith("leaf/")}
    rules = rule_file("""
- {einsum: "BTD,NDH->BTNH", from: q_einsum/w, linear: q}
- {einsum: "BSD,CKDH->CBSKH", from: kv_einsum/w, linear: "{k,v}"}
- {einsum: "BTNH,NHD->BTD", from: attn_vec_einsum/w, linear: o}
- {einsum: "...D,GDF->...GF", from: mlp/gating_einsum, linear: "{gate,up}"}
- {einsum: "...F,FD->...D", from: mlp/linear, linear: down}
""")
    agree(rules, leaves, tmp_path / "out", 7)
    config, _ = adapter(tmp_path / "out")
    assert config["rank_pattern"] == {"k": 2 * RANK, "v": 2 * RANK, "q": 4 * RANK}
    assert config["target_modules"] == ["down", "gate", "k", "o", "q", "up", "v"]


# ---- modules


def loaded(module: torch.nn.Module, out: Path) -> torch.nn.Module:
    """As peft loads an adapter for any module; every tensor must have found its place."""
    from peft import PeftModel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return PeftModel.from_pretrained(module, out).eval()


class Layers(torch.nn.Module):
    """Two linear layers, a convolution, and a layer whose weight has its inputs first."""

    def __init__(self) -> None:
        from transformers.pytorch_utils import Conv1D

        super().__init__()
        self.up, self.other = torch.nn.Linear(16, 24, bias=False), torch.nn.Linear(16, 24, bias=False)
        self.conv, self.first = torch.nn.Conv1d(16, 24, 3, bias=False), Conv1D(24, 16)
        self.first.bias.data.zero_()


RULES = """
- {einsum: "...D,DF->...F", from: "{up,other}/kernel", linear: "{up,other}"}
- {dimension_numbers: "NWC,WIO->NWC", axes: WDF, from: conv/kernel, conv: conv}
"""
CONV1D = '- {einsum: "...D,DF->...F", from: first/kernel, linear: {module: first, einsum: "...D,DF->...F"}}'


def layers(rng: np.random.Generator) -> Tree:
    shapes = {"up": ((16, 24), (16, 3), (3, 24)), "other": ((16, 24), (16, 5), (5, 24)), "conv": ((3, 16, 24), (3, 16, 3), (3, 24)), "first": ((16, 24), (16, 3), (3, 24))}  # fmt: skip
    ends = ("", "_lora_a", "_lora_b")
    return {f"{m}/kernel{end}": rng.standard_normal(shape).astype("float32") for m, each in shapes.items() for end, shape in zip(ends, each, strict=True)}  # fmt: skip


@pytest.mark.parametrize(("rules", "names"), [(RULES, ("up", "other", "conv")), (CONV1D, ("first",))])
def test_every_kind_of_module_by_peft(rules: str, names: tuple[str, ...], tmp_path: Path) -> None:
    tree = {name: leaf for name, leaf in layers(np.random.default_rng(5)).items() if name.split("/")[0] in names}
    options: dict[str, Any] = {"settings": {"lora_alpha": ALPHA}}
    module, file = Layers(), rule_file(rules)
    base = run(make_plan(file, MemorySource(tree), settings={"adapter": "base"}))
    merged = run(make_plan(file, MemorySource(tree), **options))
    module.load_state_dict({name: torch.tensor(value) for name, value in base.items()}, strict=False)
    convert.convert_adapter(file, MemorySource(tree), tmp_path / "out", **options)
    config, _ = adapter(tmp_path / "out")
    if "other" in names:  # another rank, and so another alpha for the same factor
        assert (config["r"], config["rank_pattern"]) == (3, {"other": 5})
        assert (config["lora_alpha"], config["alpha_pattern"]) == (6, {})
    adapted = loaded(module, tmp_path / "out").base_model.model
    x = torch.tensor(np.random.default_rng(6).standard_normal((2, 16, 7)), dtype=torch.float32)
    for name in names:
        weight = torch.tensor(merged[f"{name}.weight"])
        rows = x.swapaxes(1, 2).contiguous()
        if name == "conv":
            got, want = getattr(adapted, name)(x), torch.nn.functional.conv1d(x, weight)
        else:
            got, want = getattr(adapted, name)(rows), rows @ (weight if name == "first" else weight.T)
        assert relative_error(got.detach().numpy(), want.detach().numpy()) < 2e-6, name


@pytest.mark.slow
def test_a_module_whose_name_ends_another_s(tmp_path: Path) -> None:
    """PEFT's patterns name every module that ends with them: `up` has another rank and alpha than `tower.up`."""
    from peft import PeftModel

    rng = np.random.default_rng(0)
    rules = rule_file(
        "\n".join(
            f'- {{einsum: "...D,DF->...F", from: {n}/kernel, linear: {n.replace("/", ".")}}}'
            for n in ("up", "tower/up", "tower/top/up")
        )
    )
    shapes = {
        f"{n}/kernel{end}": size
        for n, rank in (("up", 5), ("tower/up", 3), ("tower/top/up", 3))
        for end, size in (("", (16, 24)), ("_lora_a", (16, rank)), ("_lora_b", (rank, 24)))
    }
    tree = {name: rng.standard_normal(size).astype("float32") for name, size in shapes.items()}
    said = {"lora_alpha": "rank"}
    convert.convert_adapter(rules, MemorySource(tree), tmp_path / "a", settings=said)
    layer = partial(torch.nn.Linear, 16, 24, bias=False)
    module = torch.nn.ModuleDict(
        {"up": layer(), "tower": torch.nn.ModuleDict({"up": layer(), "top": torch.nn.ModuleDict({"up": layer()})})}
    )
    base = run(convert.plan_conversion(rules, MemorySource(tree), settings={"adapter": "base"}))
    module.load_state_dict({name: torch.tensor(x) for name, x in base.items()})
    merged = PeftModel.from_pretrained(module, str(tmp_path / "a")).merge_and_unload().state_dict()
    for name, want in run(convert.plan_conversion(rules, MemorySource(tree), settings=said)).items():
        assert relative_error(merged[name].numpy(), want.astype(np.float64)) < 1e-6, name


def test_values_are_those_of_the_leaves(tmp_path: Path) -> None:
    """Nothing is computed where nothing has to be: bfloat16 leaves keep their bits, whole names where a namesake has no pair."""
    import ml_dtypes

    rng = np.random.default_rng(9)
    shapes = {"kernel": (16, 24), "kernel_lora_a": (16, 3), "kernel_lora_b": (3, 24)}
    tree = {f"a/up/{n}": rng.standard_normal(s).astype(ml_dtypes.bfloat16) for n, s in shapes.items()} | {"b/up/kernel": np.zeros((16, 24), "float32")}  # fmt: skip
    rules = rule_file('- {einsum: "...D,DF->...F", from: "{a,b}/up/kernel", linear: "{a,b}.up"}')
    convert.convert_adapter(rules, MemorySource(tree), tmp_path / "out", settings={"lora_alpha": 16})
    config, tensors = adapter(tmp_path / "out")
    assert config["target_modules"] == ["a.up"] and (config["r"], config["lora_alpha"]) == (3, 16)
    for letter, end in (("A", "a"), ("B", "b")):
        got = tensors[f"base_model.model.a.up.lora_{letter}.weight"]
        assert got.tobytes() == np.ascontiguousarray(tree[f"a/up/kernel_lora_{end}"].T).tobytes()


# ---- refused


def pair(**more: np.ndarray) -> MemorySource:
    tree = layers(np.random.default_rng(0))
    return MemorySource({name: leaf for name, leaf in tree.items() if name.startswith("up/")} | more)


def test_what_has_no_place_in_an_adapter(tmp_path: Path) -> None:
    rules = rule_file('- {einsum: "...D,DF->...F", from: up/kernel, linear: {module: up, weight: table}}')
    with pytest.raises(convert.PlanError) as refused:
        convert.convert_adapter(rules, pair(), tmp_path / "out", settings={"lora_alpha": 1})
    (finding,) = refused.value.findings
    assert finding.code == "adapter-not-exportable" and "not the weight of a module" in finding.problem
    assert list(tmp_path.iterdir()) == []


def test_a_tree_without_pairs(tmp_path: Path) -> None:
    rules = rule_file('- {einsum: "...D,DF->...F", from: up/kernel, linear: up}')
    with pytest.raises(convert.PlanError) as refused:
        convert.convert_adapter(rules, MemorySource({"up/kernel": np.zeros((4, 4), "f4")}), tmp_path / "out")
    assert refused.value.findings[0].code == "adapter-not-exportable"


@pytest.mark.parametrize(
    ("out", "options", "message"),
    [
        ("a.safetensors", ["--adapter", "peft"], "expected a directory, for adapter_model.safetensors and adapter_config.json"),
        ("a", ["--adapter", "merged"], "expected peft or base, got merged"),
        ("a", ["--adapter", "peft", "--check"], "--check has no meaning with --adapter peft"),
        ("a", ["--adapter", "peft", "--to", "orbax"], "--to has no meaning with --adapter peft"),
        ("a", ["--set", "adapter=no"], "expected base, got 'no'"),
    ],
)  # fmt: skip
def test_options_that_contradict(out: str, options: list[str], message: str, tmp_path: Path, run: Run) -> None:
    from support.gemma_models import settings

    said = [part for key, value in settings("gemma3-lora").items() for part in ("--set", f"{key}={value}")]
    _, error = run("gemma", checkpoint("gemma3-lora"), tmp_path / out, *said, *options, code=2)
    assert message in error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_base_goes_back_to_the_tree_with_the_pairs(tmp_path: Path, run: Run) -> None:
    """The pairs are those of --like; a merged file cannot be taken apart, and the error says what can."""
    from support.gemma_models import settings

    ckpt = checkpoint("gemma3-lora")
    said = [part for key, value in settings("gemma3-lora").items() for part in ("--set", f"{key}={value}")]
    run("gemma", ckpt, tmp_path / "base", *said, "--adapter", "base")
    run("gemma", tmp_path / "base", tmp_path / "back", "--to", "orbax", "--like", ckpt, *said, "--adapter", "base")
    first, second = convert.open_source(ckpt), convert.open_source(tmp_path / "back")
    assert first.leaves.keys() == second.leaves.keys()
    assert all(np.array_equal(first.read(name), second.read(name)) for name in first.leaves)
    run("gemma", ckpt, tmp_path / "merged", *said)
    _, error = run("gemma", tmp_path / "merged", tmp_path / "no", "--to", "orbax", "--like", ckpt, *said, code=2)
    assert "not-reversible" in error and "--adapter base" in error


def test_an_existing_output_stays(tmp_path: Path) -> None:
    rules = rule_file('- {einsum: "...D,DF->...F", from: up/kernel, linear: up}')
    convert.convert_adapter(rules, pair(), tmp_path / "out", settings={"lora_alpha": 1})
    before = {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}
    with pytest.raises(ConvertError):
        convert.convert_adapter(rules, pair(), tmp_path / "out", settings={"lora_alpha": 2})
    assert {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()} == before
    convert.convert_adapter(rules, pair(), tmp_path / "out", settings={"lora_alpha": 2}, overwrite=True)
    assert adapter(tmp_path / "out")[0]["lora_alpha"] == 2
