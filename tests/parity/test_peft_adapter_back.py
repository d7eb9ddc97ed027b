"""PEFT's adapters back to the leaves of JAX code: the same bits, the function that peft computes, or one error with its reason."""

from __future__ import annotations

import json
import random
import warnings
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

import convert
from convert.core.errors import ConvertError
from convert.peft.grafted import FORMS
from convert.peft.selection import read_selection
from convert.planning.adapters.peft_config import IGNORED, READ, REFUSED, read_settings
from convert.reversing.source import ReversedSource
from parity.test_peft_adapter import deltas
from support.command_line import Run
from support.goldens import checkpoint, relative_error
from support.memory_source import MemorySource, rule_file, run
from support.paths import GOLDEN

RANK, ALPHA = 3, 6.0
PREFIX = "base_model.model."
Tree = dict[str, np.ndarray]
QWIX = """
- {einsum: "...D,DNH->...NH", from: q/kernel, linear: q}
- {einsum: "...NH,NHD->...D", from: o/kernel, linear: o}
- {einsum: "BTD,CKDH->CBTKH", from: e/kernel, linear: "{k,v}"}
- {einsum: "...D,DF->...F", from: up/kernel, linear: up}
- {dimension_numbers: "NWC,WIO->NWC", axes: WDF, from: conv/kernel, conv: conv}
"""
SHAPES = {"q": (16, 4, 8), "o": (4, 8, 16), "e": (2, 2, 16, 8), "up": (16, 24), "conv": (3, 16, 24)}


def base(rng: np.random.Generator) -> Tree:
    return {f"{name}/kernel": rng.standard_normal(shape).astype("float32") for name, shape in SHAPES.items()}


class Layers(torch.nn.Module):
    """The modules that the rules of qwix's layers name."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"q": (16, 32), "o": (32, 16), "k": (16, 16), "v": (16, 16), "up": (16, 24)}
        for name, size in sizes.items():
            self.add_module(name, torch.nn.Linear(*size, bias=False))
        self.conv = torch.nn.Conv1d(16, 24, 3, bias=False)


def trained(out: Path, module: torch.nn.Module, seed: int = 0, **config: Any) -> torch.nn.Module:
    """An adapter as peft saves it, with values in both matrices."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(
            module, LoraConfig(**{"r": RANK, "lora_alpha": ALPHA, "init_lora_weights": False, **config})
        )  # type: ignore[arg-type]
        for name, value in model.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(value, std=0.2)
        model.save_pretrained(str(out))
    return model.eval()


def filled(tree: Tree) -> Layers:
    module = Layers()
    tensors = run(convert.plan_conversion(rule_file(QWIX), MemorySource(tree)))
    module.load_state_dict({name: torch.tensor(value) for name, value in tensors.items()})
    return module


def leaves_of(plan: Any) -> Tree:
    source = ReversedSource(plan)
    return {name: source.read(name) for name in source.leaves}


def written(out: Path, tensors: Tree, **config: Any) -> Path:
    out.mkdir(exist_ok=True)
    save_file({f"{PREFIX}{name}": value for name, value in tensors.items()}, out / "adapter_model.safetensors")
    content = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "bias": "none"} | config
    (out / "adapter_config.json").write_text(json.dumps(content))
    return out


# ---- computed by the libraries


def with_qwix(tree: Tree, given: Tree) -> Tree:
    """What flax nnx layers with qwix's LoRA compute from these leaves."""
    import jax.numpy as jnp
    import qwix
    from flax import nnx

    made, results = nnx.Rngs(0), {}
    layers: dict[str, Any] = {
        "q": nnx.LinearGeneral(16, (4, 8), use_bias=False, rngs=made),
        "o": nnx.LinearGeneral((4, 8), 16, axis=(-2, -1), use_bias=False, rngs=made),
        "e": nnx.Einsum("BTD,CKDH->CBTKH", (2, 2, 16, 8), rngs=made),
        "up": nnx.Linear(16, 24, use_bias=False, rngs=made),
        "conv": nnx.Conv(16, 24, (3,), use_bias=False, padding="VALID", rngs=made),
    }
    for name, layer in layers.items():
        provider = qwix.LoraProvider(module_path=".*", rank=tree[f"{name}/kernel_lora_b"].shape[0], alpha=ALPHA)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            adapted = qwix.apply_lora_to_model(layer, provider, jnp.asarray(given[name]), rngs=nnx.Rngs(1))
            state = nnx.state(adapted)
            for (key,), leaf in nnx.to_flat_state(state):
                assert leaf.shape == tree[f"{name}/{key}"].shape, (name, key)
                leaf[...] = jnp.asarray(tree[f"{name}/{key}"])
            nnx.update(adapted, state)
            results[name] = np.asarray(adapted(jnp.asarray(given[name])), np.float64)
    return results


@pytest.mark.slow
def test_qwix_computes_what_peft_does(tmp_path: Path) -> None:
    """An adapter that peft trained, in the leaves of qwix's layers: of einsum, dot_general and a convolution."""
    rng = np.random.default_rng(3)
    tree = base(rng)
    ends = {"q": ((16, RANK), (RANK, 32)), "o": ((32, RANK), (RANK, 16)), "e": ((16, RANK), (RANK, 2, 2, 8)), "up": ((16, RANK), (RANK, 24)), "conv": ((3, 16, RANK), (RANK, 24))}  # fmt: skip
    like = tree | {f"{name}/kernel_lora_{end}": np.zeros(shape, "float32") for name, pair in ends.items() for end, shape in zip("ab", pair, strict=True)}  # fmt: skip
    peft = trained(tmp_path / "adapter", filled(tree), target_modules=["q", "o", "k", "v", "up", "conv"])
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    tensors[f"{PREFIX}v.lora_A.weight"] = tensors[f"{PREFIX}k.lora_A.weight"]  # the einsum has one A for both
    save_file(tensors, tmp_path / "adapter" / "adapter_model.safetensors")
    peft.load_state_dict(
        {name.replace(".weight", ".default.weight"): torch.tensor(x) for name, x in tensors.items()}, strict=False
    )
    plan = convert.plan_reverse(rule_file(QWIX), tmp_path / "adapter", like=MemorySource(like))
    leaves = leaves_of(plan)
    assert all(leaves[name].any() for name in like)
    given = {
        name: rng.standard_normal((2, 5, 4, 8) if name == "o" else (2, 5, 16)).astype("float32") for name in SHAPES
    }
    got, inner = with_qwix(leaves, given), peft.base_model.model
    for name in ("q", "o", "up"):
        x = torch.tensor(given[name]).reshape(2, 5, -1)
        assert relative_error(getattr(inner, name)(x).detach().numpy(), got[name].reshape(2, 5, -1)) < 2e-6
    for row, name in enumerate("kv"):
        want = getattr(inner, name)(torch.tensor(given["e"])).detach().numpy()
        assert relative_error(want, got["e"][row].reshape(2, 5, -1)) < 2e-6
    conv = inner.conv(torch.tensor(given["conv"].swapaxes(1, 2))).detach().numpy().swapaxes(1, 2)
    assert relative_error(conv, got["conv"]) < 2e-6


@pytest.mark.slow
def test_flax_nnx_computes_what_peft_does(tmp_path: Path) -> None:
    """`nnx.LoRALinear` has no factor, so alpha 6 at rank 3 doubles B, which is exact; the base checkpoint has no pair."""
    import jax.numpy as jnp
    from flax import nnx

    tree = {"up/kernel": base(np.random.default_rng(1))["up/kernel"]}
    rules = rule_file('- {einsum: "...D,DF->...F", from: up/kernel, linear: up}')
    module = torch.nn.ModuleDict({"up": torch.nn.Linear(16, 24, bias=False)})
    module["up"].weight.data = torch.tensor(tree["up/kernel"].T)
    peft = trained(tmp_path / "adapter", module, target_modules=["up"])
    plan = convert.plan_reverse(rules, tmp_path / "adapter", like=MemorySource(tree), settings={"adapter": "flax.nnx"})
    leaves = leaves_of(plan)
    assert leaves.keys() == {"up/kernel", "up/lora/lora_a", "up/lora/lora_b"} and "multiplied by 2" in plan.notes[1]
    layer = nnx.LoRALinear(16, 24, lora_rank=RANK, use_bias=False, rngs=nnx.Rngs(0))
    layer.kernel[...] = jnp.asarray(leaves["up/kernel"])
    layer.lora.lora_a[...] = jnp.asarray(leaves["up/lora/lora_a"])
    layer.lora.lora_b[...] = jnp.asarray(leaves["up/lora/lora_b"])
    x = np.random.default_rng(2).standard_normal((5, 16)).astype("float32")
    want = peft.base_model.model["up"](torch.tensor(x)).detach().numpy()
    assert relative_error(np.asarray(layer(jnp.asarray(x))), want) < 2e-6


@pytest.mark.slow
@pytest.mark.parametrize(("form", "modules"), [("gemma", ["q_proj", "v_proj"]), ("qwix.einsum", "all-linear")])
def test_gemma_s_tree_has_the_adapter_that_peft_merges(form: str, modules: Any, tmp_path: Path) -> None:
    """PEFT's usual adapters: keys and values apart, or values alone, where the tree has one leaf for both."""
    from transformers import AutoModelForCausalLM

    from support.gemma_models import settings

    ckpt, said = checkpoint("gemma3"), settings("gemma3")
    convert.convert("gemma", ckpt, tmp_path / "hf", settings=said)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    peft = trained(tmp_path / "adapter", model, target_modules=modules, r=4, lora_alpha=8)
    with pytest.raises(convert.PlanError) as refused:
        convert.load_pytree("gemma", tmp_path / "adapter", like=ckpt, settings={**said, "adapter": form})
    assert all("lora_blocks=true" in found.fix for found in refused.value.findings)
    options = {**said, "adapter": form, "lora_blocks": True}
    convert.convert_back("gemma", tmp_path / "adapter", tmp_path / "ckpt", like=ckpt, settings=options)
    plan = convert.plan_reverse("gemma", tmp_path / "adapter", like=ckpt, settings=options)
    alpha = plan.forward.settings.get("lora_alpha")  # of keys and values together, rank 8 and alpha 16
    assert alpha == (None if form == "gemma" else 16 if modules == "all-linear" else 8)
    said = {**said, "lora_alpha": alpha} if alpha else said
    merged = run(convert.plan_conversion("gemma", tmp_path / "ckpt", settings=said, dtype="float32"))
    want = peft.merge_and_unload().state_dict()  # type: ignore[operator]
    for name, value in merged.items():
        assert relative_error(value, want[name].numpy().astype(np.float64)) < 1e-6, name


# ---- bit for bit


@pytest.mark.slow
def test_gemma_s_adapter_comes_back(tmp_path: Path, run: Run) -> None:
    """There, back and there again: the leaves of the golden, the files of the adapter; orbax restores the tree."""
    import orbax.checkpoint as ocp

    from support.gemma_models import settings

    ckpt = checkpoint("gemma3-lora")
    said = [part for key, value in settings("gemma3-lora").items() for part in ("--set", f"{key}={value}")]
    run("gemma", ckpt, tmp_path / "adapter", *said, "--adapter", "peft")
    _, text = run("gemma", tmp_path / "adapter", tmp_path / "back", "--to", "orbax", "--like", ckpt, *said)
    assert "10 LoRA pairs of rank 3" in text
    run("gemma", tmp_path / "back", tmp_path / "again", *said, "--adapter", "peft")
    first, second = convert.open_source(ckpt), convert.open_source(tmp_path / "back")
    assert list(first.leaves) == list(second.leaves)
    assert [name for name in first.leaves if first.read(name).tobytes() != second.read(name).tobytes()] == []
    for file in (tmp_path / "adapter").iterdir():
        assert file.read_bytes() == (tmp_path / "again" / file.name).read_bytes(), file.name
    # without the pairs in the tree: the form is named, and orbax restores leaves that its metadata did not have
    alone = {name for name in first.leaves if "lora" not in name}
    run("gemma", ckpt, tmp_path / "hf", *said, "--adapter", "base")
    run("gemma", tmp_path / "hf", tmp_path / "base", "--to", "orbax", "--layout", "NESTED", *said)
    assert convert.open_source(tmp_path / "base").leaves.keys() == alone
    run("gemma", tmp_path / "adapter", tmp_path / "named", "--to", "orbax", "--like", tmp_path / "base", "--adapter", "gemma", *said)  # fmt: skip
    restored = ocp.StandardCheckpointer().restore(tmp_path / "named")
    for name in first.leaves:
        value = restored
        for key in name.split("/"):
            value = value[key]
        assert np.asarray(value).tobytes() == first.read(name).tobytes(), name


def drawn(seed: int, out: Path) -> tuple[Any, Tree, set[str]]:
    """Rules of some layers, their tree, and an adapter for some of the modules, of one rank or of several."""
    rng, draw = np.random.default_rng(seed), random.Random(seed)
    chosen = sorted(draw.sample(sorted(SHAPES), draw.randint(1, 5)))
    rules = [rule for rule in QWIX.strip().splitlines() if any(f"from: {name}/" in rule for name in chosen)]
    tree = {name: x for name, x in base(rng).items() if name.split("/")[0] in chosen}
    tensors = run(convert.plan_conversion(rule_file("\n" + "\n".join(rules)), MemorySource(tree)))
    modules = [name.removesuffix(".weight") for name in tensors]
    adapted = set(draw.sample(modules, draw.randint(1, len(modules))))
    ranks = {name: draw.choice((RANK, 5)) if draw.random() < 0.2 else RANK for name in adapted}
    dtype = draw.choice(("float32", "float16"))
    made: Tree = {}
    for name in sorted(adapted):
        outputs, *inputs = tensors[f"{name}.weight"].shape
        shared = "k" if name == "v" and "k" in adapted and ranks["k"] == ranks["v"] and draw.random() < 0.5 else ""
        a = rng.standard_normal((ranks[name], *inputs))
        made[f"{name}.lora_A.weight"] = made["k.lora_A.weight"] if shared else a.astype(dtype)
        made[f"{name}.lora_B.weight"] = rng.standard_normal((outputs, ranks[name], *(1 for _ in inputs[1:]))).astype(
            dtype
        )
    pattern = {name: rank for name, rank in ranks.items() if rank != RANK}
    config = {"rank_pattern": pattern, "use_rslora": draw.random() < 0.2, "alpha_pattern": {draw.choice(modules): 24} if draw.random() < 0.2 else {}}  # fmt: skip
    written(out, made, **config)
    return rule_file("\n" + "\n".join(rules)), tree, adapted


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_every_adapter_comes_back_or_is_refused(form: str, tmp_path: Path) -> None:
    """Random layers, modules, ranks and factors: PEFT -> JAX -> PEFT gives the same tensors, or one error says why not. Rearranged, the
    products are those of the adapter."""
    same, refused, rearranged = 0, set(), 0
    for seed in range(16):
        out = tmp_path / f"{seed}"
        rules, tree, adapted = drawn(seed, out)
        want = deltas_of(out)
        for blocks in (False, True):
            said: dict[str, Any] = {"adapter": form} | ({"lora_blocks": True} if blocks else {})
            try:
                plan = convert.plan_reverse(rules, out, like=MemorySource(tree), settings=said)
                leaves = leaves_of(plan)
            except convert.PlanError as error:
                refused |= {found.code for found in error.findings}
                continue
            assert all(np.array_equal(leaves[name], x) for name, x in tree.items())
            alpha = plan.forward.settings.get("lora_alpha")
            settings = {} if alpha is None else {"lora_alpha": alpha}
            again = tmp_path / f"{seed}-{blocks}"
            convert.convert_adapter(rules, MemorySource(leaves), again, settings=settings)
            made = deltas(again)
            for name, product in want.items():
                assert relative_error(made[f"{name}.weight"], product) < 1e-6, (seed, name)
            assert not any(made[name].any() for name in made if name.removesuffix(".weight") not in adapted)
            if not blocks:
                before, after = (load_file(folder / "adapter_model.safetensors") for folder in (out, again))
                factor = any("lora_B is multiplied" in note for note in plan.notes)
                assert before.keys() == after.keys()
                assert all(after[n].tobytes() == x.tobytes() for n, x in before.items() if not factor or "lora_A" in n)
            same, rearranged = same + (not blocks), rearranged + blocks
    assert refused <= {"adapter-not-importable", "tied-weights-differ", "value-not-reversible", "tensor-spec-differs"}
    assert rearranged >= 4 and same >= (1 if form == "openpi" else 4), (same, rearranged)


def deltas_of(out: Path) -> Tree:
    """What PEFT adds to each weight, with its configuration's patterns."""
    config = json.loads((out / "adapter_config.json").read_text())
    tensors, made = load_file(out / "adapter_model.safetensors"), {}
    for name, down in tensors.items():
        if "lora_A" in name:
            module = name.removeprefix(PREFIX).removesuffix(".lora_A.weight")
            rank = len(down)
            alpha = config["alpha_pattern"].get(module, config["lora_alpha"])
            up = tensors[name.replace("lora_A", "lora_B")].astype(np.float64).reshape(-1, rank)
            scale = alpha / (rank**0.5 if config["use_rslora"] else rank)
            made[module] = scale * up @ down.astype(np.float64).reshape(rank, -1)
    return made


def test_a_value_of_the_adapter_is_in_its_leaf_and_no_other(tmp_path: Path) -> None:
    """The planted fault: one changed value changes one element of one leaf."""
    recorded = dict(np.load(GOLDEN / "lora" / "openpi.npz"))
    tree = {key.removeprefix("leaf/"): recorded[key] for key in recorded if key.startswith("leaf/")}
    rules = rule_file("""
- {einsum: "BTD,NDH->BTNH", from: q_einsum/w, linear: q}
- {einsum: "BSD,CKDH->CBSKH", from: kv_einsum/w, linear: "{k,v}"}
- {einsum: "BTNH,NHD->BTD", from: attn_vec_einsum/w, linear: o}
- {einsum: "...D,GDF->...GF", from: mlp/gating_einsum, linear: "{gate,up}"}
- {einsum: "...F,FD->...D", from: mlp/linear, linear: down}
""")
    said = {"lora_alpha": ALPHA}
    convert.convert_adapter(rules, MemorySource(tree), tmp_path / "a", settings=said)
    file = tmp_path / "a" / "adapter_model.safetensors"
    tensors = load_file(file)

    def back(**changed: np.ndarray) -> Tree:
        save_file(tensors | {f"{PREFIX}{name.replace('__', '.')}.weight": x for name, x in changed.items()}, file)
        return leaves_of(convert.plan_reverse(rules, tmp_path / "a", like=MemorySource(tree), settings=said))

    assert all(x.tobytes() == tree[name].tobytes() for name, x in back().items())  # also the sums over heads
    up = tensors[f"{PREFIX}down.lora_B.weight"].copy()
    up[3, 1] += 1
    differ = {name: np.flatnonzero(x != tree[name]) for name, x in back(down__lora_B=up).items()}
    assert {name: len(at) for name, at in differ.items() if len(at)} == {"mlp/linear_lora_b": 1}
    assert differ["mlp/linear_lora_b"] == [1 * 16 + 3]
    blocks = tensors[f"{PREFIX}q.lora_B.weight"].copy()
    assert blocks[0, -1] == 0  # an element of the first head, in the block of the last
    blocks[0, -1] = 1
    with pytest.raises(convert.PlanError) as refused:
        back(q__lora_B=blocks)
    assert refused.value.code == "value-not-reversible"


# ---- refused

UP = '- {einsum: "...D,DF->...F", from: up/kernel, linear: up}'


def pair(rank: int = RANK) -> Tree:
    rng = np.random.default_rng(0)
    return {f"up.lora_{end}.weight": rng.standard_normal(shape).astype("float32") for end, shape in (("A", (rank, 16)), ("B", (24, rank)))}  # fmt: skip


def refusal(out: Path, **more: Any) -> Any:
    tree = {"up/kernel": np.zeros((16, 24), "float32")}
    options = {"settings": {"adapter": "qwix.einsum"}, "like": MemorySource(tree)} | more
    with pytest.raises(ConvertError) as refused:
        convert.load_pytree(rule_file(UP), out, **options)
    return refused.value.findings[0]


def test_every_key_of_peft_s_configuration_is_known() -> None:
    from peft import LoraConfig

    assert {field.name for field in fields(LoraConfig)} <= IGNORED | READ | REFUSED.keys()
    assert not IGNORED & READ and not (IGNORED | READ) & REFUSED.keys()


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        *(({key: True}, reason) for key, reason in REFUSED.items()),
        ({"bias": "all"}, "biases of the model"),
        ({"peft_type": "IA3"}, "no LoRA"),
        ({"init_lora_weights": "pissa_niter_4"}, "changes the base weights"),
        ({"r": 4}, "states rank 4"),
        ({"r": "8"}, 'r is "8"'),
        ({"r": 3.0}, "r is 3.0"),
        ({"r": None}, "has no r"),
        ({"lora_alpha": 0}, "lora_alpha is 0"),
        ({"lora_alpha": "6"}, 'lora_alpha is "6"'),
        ({"use_rslora": "false"}, 'use_rslora is "false"'),
        ({"init_lora_weights": "new"}, "changes the base weights"),
        ({"use_newra": True}, "no setting of PEFT"),
        ({"rank_pattern": {"up": 2}}, "states rank 2"),
        ({"rank_pattern": {"u.*": 2}}, "states rank 2"),
        ({"rank_pattern": {"u(*": 3}}, "regular expressions"),
        ({"rank_pattern": [3]}, "not names of modules"),
        ({"alpha_pattern": {"up": "6"}}, 'alpha_pattern of up is "6"'),
        ({"target_modules": ["down"]}, "does not load the pair"),
        ({"target_modules": ".*down"}, "does not load the pair"),
        ({"target_modules": 3}, "not names of modules"),
        ({"exclude_modules": ["up"]}, "does not load the pair"),
        ({"layers_to_transform": [True]}, "not numbers of layers"),
    ],
)
def test_a_configuration_that_is_no_product(config: dict[str, Any], reason: str, tmp_path: Path) -> None:
    finding = refusal(written(tmp_path / "a", pair(), **config))
    assert finding.code == "adapter-not-importable" and reason in finding.problem and finding.fix


NAMES = ["up", "q", "layers.1.up", "model.layers.0.mlp.up", "model.layers.11.q", "h.3.experts.1.up", "group.up"]
CHOICES: dict[str, list[Any]] = {
    "target_modules": ["up", ".*up", r".*\.(up|q)", ["up"], ["up", "q"], ["model.layers.0.mlp.up"], ["layers.1.up"]],
    "exclude_modules": [None, None, "up", ["q"], r".*\.0\..*"],
    "layers_to_transform": [None, 1, [0, 3], []],
    "layers_pattern": [None, "layers", ["layers", "h"], ["blocks"], []],
    "alpha_pattern": [{}, {"up": 8}, {"^up": 8}, {r"layers\.\d+\..*": 5, "up": 8}, {"p": 3}, {"mlp.up": 9, "q|up": 2}],
    "rank_pattern": [{}, {"q": 4}, {"^model.*up": 5}],
}


@pytest.mark.slow
def test_patterns_and_selections_are_peft_s() -> None:
    """Random settings: the modules that PEFT adapts, and their alpha and rank, as its own functions say."""
    from peft import LoraConfig
    from peft.tuners.tuners_utils import check_target_module_exists
    from peft.utils.other import get_pattern_key

    draw, seen = random.Random(0), set()
    for _ in range(400):
        config = {"r": 3, "lora_alpha": 6} | {key: draw.choice(values) for key, values in CHOICES.items()}
        settings, selected = read_settings(config), read_selection(config)
        try:
            theirs = LoraConfig(**config)
        except ValueError:  # layers of a target that is a regular expression
            theirs = LoraConfig(**{**config, "layers_to_transform": None, "layers_pattern": None})
            selected = replace(selected, layers=())
        theirs.target_modules = config["target_modules"]  # PEFT makes a set of a list
        for name in NAMES:
            wanted = check_target_module_exists(theirs, name)
            found = bool(wanted) and "Excluded" not in type(wanted).__name__
            assert selected.has(name) is found, (config, name)
            alphas, ranks = config["alpha_pattern"], config["rank_pattern"]
            assert settings.alpha_of(name) == alphas.get(get_pattern_key(alphas.keys(), name), 6), (config, name)
            assert settings.rank_of(name) == ranks.get(get_pattern_key(ranks.keys(), name), 3), (config, name)
            seen.add((found, settings.alpha_of(name)))
    assert len(seen) > 8


@pytest.mark.slow
@pytest.mark.parametrize("rslora", [False, True])
def test_patterns_multiply_as_peft_merges(rslora: bool, tmp_path: Path) -> None:
    """Regular expressions for alpha and rank: the tree's own code computes what PEFT's `merge_and_unload` gives."""
    tree = base(np.random.default_rng(3))
    tree = {name: x for name, x in tree.items() if name.split("/")[0] in ("q", "o", "up")}
    rules = rule_file(
        "\n".join(line for line in QWIX.splitlines() if any(f"from: {k}/" in line for k in ("q", "o", "up")))
    )
    module = torch.nn.ModuleDict(
        {k: torch.nn.Linear(*n, bias=False) for k, n in {"q": (16, 32), "o": (32, 16), "up": (16, 24)}.items()}
    )
    tensors = run(convert.plan_conversion(rules, MemorySource(tree)))
    module.load_state_dict({name: torch.tensor(x) for name, x in tensors.items()})
    config = {"r": 4, "lora_alpha": 8, "alpha_pattern": {"[qo]": 16}, "rank_pattern": {"^u.*": 16, "q": 8}, "use_rslora": rslora}  # fmt: skip
    peft = trained(tmp_path / "a", module, target_modules=["q", "o", "up"], **config)
    said = {"adapter": "qwix.einsum"}
    if rslora:  # the ratios of the factors are no powers of two
        with pytest.raises(ConvertError, match="rounds the values of lora_B"):
            convert.plan_reverse(rules, tmp_path / "a", like=MemorySource(tree), settings=said)
        return
    plan = convert.plan_reverse(rules, tmp_path / "a", like=MemorySource(tree), settings=said)
    settings = {"lora_alpha": plan.forward.settings["lora_alpha"]}
    merged = run(convert.plan_conversion(rules, MemorySource(leaves_of(plan)), settings=settings))
    want = peft.merge_and_unload().state_dict()  # type: ignore[operator]
    for name, value in merged.items():
        assert relative_error(value, want[name].numpy().astype(np.float64)) < 1e-6, name


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({"up.lora_A.weight": pair()["up.lora_A.weight"]}, "the pair has no lora_B"),
        (pair() | {"up.lora_magnitude_vector": np.ones(24, "f4")}, "no lora_A or lora_B"),
        (pair() | {"up.bias": np.ones(24, "f4")}, "no lora_A or lora_B"),
        ({name.replace("up", "upp"): x for name, x in pair().items()}, "no such module"),
        ({**pair(), "up.lora_A.weight": np.ones((RANK, 15), "f4")}, ""),
        ({}, "no tensor"),
    ],
)
def test_tensors_that_are_no_pair_of_the_model(tensors: Tree, reason: str, tmp_path: Path) -> None:
    finding = refusal(written(tmp_path / "a", tensors))
    assert (finding.code == "tensor-spec-differs") if not reason else reason in finding.problem


@pytest.mark.parametrize("form", ["msgpack", "npz", "orbax"])
def test_every_format_and_the_file_in_place_of_its_directory(form: str, tmp_path: Path) -> None:
    out, ending = written(tmp_path / "a", pair()), {"orbax": ""}.get(form, f".{form}")
    options: dict[str, Any] = {
        "like": MemorySource({"up/kernel": np.ones((16, 24), "f4")}),
        "settings": {"adapter": "gemma"},
    }
    convert.convert_back(
        rule_file(UP), out / "adapter_model.safetensors", tmp_path / f"ckpt{ending}", form=form, **options
    )
    source = convert.open_source(tmp_path / f"ckpt{ending}")
    a, b = (source.read(f"up/lora/{end}") for end in "ab")
    want = (
        2 * pair()["up.lora_B.weight"] @ pair()["up.lora_A.weight"]
    )  # alpha 6 / rank 3, which gemma does not multiply by
    assert relative_error((a @ b).T, want) < 1e-6 and source.read("up/kernel").all()


def test_files_that_are_missing(tmp_path: Path) -> None:
    out = written(tmp_path / "a", pair())
    (out / "adapter_model.safetensors").rename(out / "adapter_model.bin")
    assert "a pickle (adapter_model.bin) is not loaded" in refusal(out).problem
    out = written(tmp_path / "b", pair())
    (out / "adapter_config.json").unlink()
    assert refusal(out).code == "converted-not-found"


@pytest.mark.parametrize(
    ("more", "code", "message"),
    [
        ({"like": None}, "adapter-not-importable", "neither the tree nor the weights"),
        ({"settings": {}}, "usage", "has no LoRA pairs"),
        *(({"settings": said, "like": MemorySource({"up/kernel_lora_a": np.zeros((16, 3), "f4"), "up/kernel_lora_b": np.zeros((3, 24), "f4")})}, "adapter-alone", "its 2 leaves belong to LoRA pairs") for said in ({}, {"adapter": "qwix.einsum"})),
        ({"settings": {"adapter": "qwix"}}, "usage", ""),
        ({"settings": {"adapter": "gemma", "lora_blocks": 1}}, "setting-invalid", ""),
        ({"layout": "FLAT"}, "usage", "has its layout"),
        ({"like": MemorySource({"up/kernel": np.zeros((16, 24), "f4"), "up/kernel_lora_a": np.zeros((16, 3), "f4"), "up/kernel_lora_b": np.zeros((3, 24), "f4")})}, "usage", "has LoRA pairs, and so their form"),
    ],
)  # fmt: skip
def test_options_that_do_not_fit(more: dict[str, Any], code: str, message: str, tmp_path: Path) -> None:
    finding = refusal(written(tmp_path / "a", pair()), **more)
    assert finding.code == code and message in finding.problem and finding.fix


def test_a_factor_that_would_round(tmp_path: Path) -> None:
    """gemma multiplies by no factor, and 7 / 3 times B is not B's float32; qwix takes alpha 7."""
    out = written(tmp_path / "a", pair(), lora_alpha=7)
    finding = refusal(out, settings={"adapter": "gemma"})
    assert finding.code == "adapter-not-importable" and "rounds the values of lora_B" in finding.problem
    tree = {"up/kernel": np.zeros((16, 24), "float32")}
    plan = convert.plan_reverse(rule_file(UP), out, like=MemorySource(tree), settings={"adapter": "qwix.einsum"})
    assert plan.forward.settings["lora_alpha"] == 7


def test_alpha_of_the_way_back(tmp_path: Path) -> None:
    """Where nobody states it, it follows from the adapter, and the note has all digits; the user's own is obeyed."""
    tree, rules, out = {"up/kernel": np.zeros((16, 24), "float32")}, rule_file(UP), tmp_path / "a"
    for config, alpha in (({}, "6"), ({"use_rslora": True}, repr(6 * 3 / 3**0.5))):
        plan = convert.plan_reverse(
            rules, written(out, pair(), **config), like=MemorySource(tree), settings={"adapter": "qwix.einsum"}
        )
        assert f"(it must get alpha {alpha})" in plan.notes[0] and "--set" not in plan.notes[0]
    said = {"adapter": "qwix.einsum", "lora_alpha": 3}
    plan = convert.plan_reverse(rules, written(out, pair()), like=MemorySource(tree), settings=said)
    assert "multiplied by 2" in plan.notes[1] and np.array_equal(leaves_of(plan)["up/kernel_lora_b"].T, 2 * pair()["up.lora_B.weight"])  # fmt: skip


def test_a_value_that_the_factor_rounds_away(tmp_path: Path) -> None:
    """Below the normal numbers also a power of two rounds: a wider leaf helps, and another arrangement does not."""
    small = pair() | {"up.lora_B.weight": (pair()["up.lora_B.weight"] * 1e-38).astype("f4")}
    like, rules = MemorySource({"up/kernel": np.zeros((16, 24), "f4")}), rule_file(UP)
    out = written(tmp_path / "a", small, lora_alpha=RANK / 1024)
    with pytest.raises(convert.PlanError) as refused:
        leaves_of(convert.plan_reverse(rules, out, like=like, settings={"adapter": "gemma"}))
    (finding,) = refused.value.findings
    assert (
        finding.code == "value-not-reversible" and "wider --dtype" in finding.fix and "lora_blocks" not in finding.fix
    )
    leaves = leaves_of(convert.plan_reverse(rules, out, like=like, settings={"adapter": "gemma"}, dtype="float64"))
    assert np.array_equal(leaves["up/lora/b"].T * 1024, small["up.lora_B.weight"].astype(np.float64))


def test_an_adapter_of_peft_is_no_lora_checkpoint(tmp_path: Path) -> None:
    base = MemorySource({"up/kernel": np.zeros((16, 24), "f4")})
    with pytest.raises(convert.PlanError) as refused:
        convert.plan_conversion(rule_file(UP), base, lora=written(tmp_path / "a", pair()))
    (finding,) = refused.value.findings
    assert (
        finding.code == "adapter-not-joined" and "one of PEFT" in finding.problem and "--to orbax --like" in finding.fix
    )


def test_a_merged_model_and_a_tree_with_pairs(tmp_path: Path) -> None:
    """The way out is the one that exists: alpha would not help."""
    save_file({"up.weight": np.zeros((24, 16), "f4")}, tmp_path / "m.safetensors")
    like = MemorySource({"up/kernel": np.zeros((16, 24), "f4"), "up/kernel_lora_a": np.zeros((16, 3), "f4"), "up/kernel_lora_b": np.zeros((3, 24), "f4")})  # fmt: skip
    with pytest.raises(convert.PlanError) as refused:
        convert.plan_reverse(rule_file(UP), tmp_path / "m.safetensors", like=like)
    (finding,) = refused.value.findings
    assert (
        finding.code == "not-reversible" and "--adapter base again" in finding.fix and "lora_alpha" not in str(finding)
    )
    plan = convert.plan_reverse(rule_file(UP), tmp_path / "m.safetensors", like=like, settings={"adapter": "base"})
    assert set(leaves_of(plan)) == set(like.arrays)


def test_the_form_of_pairs_without_an_adapter(tmp_path: Path, run: Run) -> None:
    from support.gemma_models import settings

    said = [part for key, value in settings("gemma3").items() for part in ("--set", f"{key}={value}")]
    run("gemma", checkpoint("gemma3"), tmp_path / "out.safetensors", *said)
    back = ("gemma", tmp_path / "out.safetensors", tmp_path / "ckpt", "--to", "orbax")
    _, error = run(*back, "--adapter", "gemma", *said, code=2)
    assert "is a form of the pairs of PEFT's adapter" in error
    _, error = run("gemma", written(tmp_path / "a", pair()), tmp_path / "ckpt", "--to", "orbax", code=2)
    assert "adapter-not-importable" in error and "convert the base model first" in error
    assert not (tmp_path / "ckpt").exists()
    _, error = run("check", tmp_path / "a", "--from", checkpoint("gemma3"), code=2)
    assert error.startswith("error[usage]: ") and "an adapter is none" in error and "merge_and_unload" in error


PRESCALED = '- {einsum: "...D,DNH->...NH", prescaled_by: "1/sqrt(H)", from: q/kernel, linear: q}'


@pytest.mark.parametrize(("dtype", "wide"), [("float16", "float32"), ("float16", None), ("float32", "float16")])
def test_a_factor_of_the_weight_needs_wider_leaves(dtype: str, wide: str | None, tmp_path: Path) -> None:
    """MaxText's queries hold 1/sqrt(H), which is no power of two here: B divided by it has a place in wider leaves only."""
    rng = np.random.default_rng(0)
    shapes = {"q.lora_A.weight": (RANK, 16), "q.lora_B.weight": (24, RANK)}
    out = written(tmp_path / "a", {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()})
    options: dict[str, Any] = {"settings": {"adapter": "qwix.dot_general"}, "dtype": wide}
    like = MemorySource({"q/kernel": rng.standard_normal((16, 2, 12)).astype("float32")})
    if wide != "float32":
        with pytest.raises(ConvertError) as refused:
            convert.plan_reverse(rule_file(PRESCALED), out, like=like, **options)
        assert refused.value.findings[0].code == ("dtype-unknown" if wide else "not-reversible")
        return
    leaves = leaves_of(convert.plan_reverse(rule_file(PRESCALED), out, like=like, **options))
    assert leaves["q/kernel_lora_b"].dtype == np.float32 and leaves["q/kernel_lora_b"].shape == (RANK, 24)
    convert.convert_adapter(rule_file(PRESCALED), MemorySource(leaves), tmp_path / "b", settings={"lora_alpha": ALPHA}, dtype=dtype)  # fmt: skip
    one, two = (load_file(tmp_path / name / "adapter_model.safetensors") for name in "ab")
    assert all(two[name].tobytes() == x.tobytes() for name, x in one.items())
