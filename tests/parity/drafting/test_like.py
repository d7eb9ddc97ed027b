"""Drafts that a target answers: `convert rules new --like`, from a real checkpoint to the same forward pass, without an edit."""

from __future__ import annotations

import itertools
import json
import random
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from convert import Plan, PlanError, draft_rules, parse_rules, plan_conversion
from convert.drafting.like.target import TargetModel, TargetModule, model_of_tensors
from convert.planning.matching.match import cover
from convert.planning.planner import make_plan
from convert.verify.target_model import read_target
from support.command_line import Run
from support.drafts import tree
from support.marks import slow_but
from support.memory_source import MemorySource, run
from support.paths import GOLDEN


@pytest.fixture
def convert(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    return Run(monkeypatch, capsys)


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], nn.Module]], str]:
    """Makes a class or function importable, as a user's own module is."""

    def named(make: Callable[[], nn.Module]) -> str:
        module = ModuleType("my_target")
        module.make = make  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "my_target", module)
        return "my_target:make"

    return named


# ---- transformers


CASES = ("gpt2", "gpt2-model", "bert", "bert-pretraining", "whisper", "t5", "drafts/vit", "drafts/dinov2", "drafts/gemma", "drafts/llama", "drafts/resnet")  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_flax_models_of_transformers_need_no_edit(case: str, tmp_path: Path, convert: Run) -> None:
    """The directory has a config.json and no weights; the result loads strictly, and computes what flax computed."""
    transformers = pytest.importorskip("transformers")
    ckpt = GOLDEN / case / "ckpt"
    _, said = convert("rules", "new", ckpt, tmp_path / "rules.yaml", "--like", ckpt)
    assert ", 0 questions open" in said
    convert("plan", tmp_path / "rules.yaml", ckpt)
    convert(tmp_path / "rules.yaml", ckpt, tmp_path / "out.safetensors")
    config = transformers.AutoConfig.from_pretrained(ckpt)
    module = getattr(transformers, config.architectures[0].removeprefix("Flax"))(config)
    loaded = module.load_state_dict(load_file(tmp_path / "out.safetensors"), strict=False)
    assert not loaded.unexpected_keys
    missing = {name for name in loaded.missing_keys if not name.endswith("num_batches_tracked")}
    stored = {id(p) for name, p in module.state_dict(keep_vars=True).items() if name not in missing}
    assert all(id(module.state_dict(keep_vars=True)[name]) in stored for name in missing)  # tied
    with np.load(GOLDEN / case / "io.npz") as io:
        inputs = {name: torch.from_numpy(x).long() if x.dtype.kind == "i" else torch.from_numpy(x) for name, x in io.items() if name not in OUTPUTS}  # fmt: skip
        with torch.no_grad():
            made = module.eval()(**inputs)
        for name in OUTPUTS & set(io.files):
            keep = io["attention_mask"].astype(bool) if "attention_mask" in io.files and io[name].ndim == 3 else ...
            keep = ... if case in ("t5", "whisper") else keep
            np.testing.assert_allclose(made[name].numpy()[keep], io[name][keep], atol=3e-5, rtol=3e-4)


OUTPUTS = {"logits", "last_hidden_state", "pooler_output", "prediction_logits", "seq_relationship_logits"}


# ---- the shipped rules know the truth

SHIPPED = ("bert", "bert-pretraining", "gpt2", "t5", "whisper", "siglip", "mistral", "timesfm-1.0", "timesfm-2.5", "gemma1-mqa", "gemma2-2b", "gemma3", "gemma3-kauldron", "paligemma1")  # fmt: skip
LARGE = ("gemma3-stacked", "recurrentgemma")
ENTRIES = {"gemma": 256, "paligemma": 97}


def shipped(case: str, facts: Mapping[str, Any]) -> Plan:
    family = re.sub(r"[0-9.]*(-.*)?$", "", case)
    names = {"gemma": "gemma3" if case.startswith("gemma3") else "gemma", "paligemma": "paligemma1"}
    settings = {**({"vocab_size": ENTRIES[family]} if family in ENTRIES else {}), **facts}
    at = next(path for path in (GOLDEN / case / "ckpt", GOLDEN / case / "ckpt.npz", GOLDEN / case) if path.exists())
    names |= {"t": "t5", "gpt": "gpt2"}
    return plan_conversion(names.get(family, family), at, settings=settings)


def wrong_modules(text: str, plan: Plan) -> list[tuple[str, str]]:
    """Leaf and module of each match in a draft that the shipped rules make otherwise."""
    wrong = []
    for matched in cover(parse_rules(text), plan.source).matched:
        rule = matched.rule
        if rule.kind_name in rule.asked or rule.targets[None].packed_in is not None:
            continue
        path, module = rule.path, rule.targets[None].path
        for (indices, choices), leaf in matched.leaves[rule.lead].items():
            known = dict(zip(path.indices, indices, strict=True)) | dict.fromkeys(rule.stacked, 0)
            parts = [*choices[: len(module.groups)], *[0] * (len(module.groups) - len(choices))]
            name = module.fill(known, tuple(parts))
            made = {step.name for step in plan.steps if any(part.leaf == leaf for part in step.parts)}
            if name not in (made if rule.kind_name == "parameter" else {of.rpartition(".")[0] for of in made}):
                wrong.append((leaf, name))
    return wrong


@pytest.mark.parametrize("case", [*SHIPPED, *(pytest.param(case, marks=pytest.mark.slow) for case in LARGE)])
def test_no_match_contradicts_the_shipped_rules(case: str) -> None:
    """From names and shapes alone: what is not asked is right, and every leaf still has a rule."""
    plan = shipped(case, {})
    text = draft_rules(plan.source, like=model_of_tensors({step.name: step.spec.shape for step in plan.steps}, "x"))
    assert wrong_modules(text, plan) == []
    assert cover(parse_rules(text), plan.source).claimed == len(plan.source.leaves)


FACTS = {"context_length": 32, "query_pre_attn_scalar": 12, "sliding_window": 8, "rope_factor_global": 1.0}
NEEDED = {"gemma1-mha": slice(0, 1), "gemma2-2b": slice(1, 3), "gemma3": slice(0, 4), "mistral": slice(0, 0)}


@pytest.mark.parametrize("case", NEEDED)
def test_a_draft_from_a_config_gives_the_tensors_of_the_shipped_rules(case: str, tmp_path: Path) -> None:
    """Gemma 1 calls the norm before its MLP post_attention_layernorm, as Gemma 2 calls the one after attention: it is asked."""
    pytest.importorskip("transformers")
    plan = shipped(case, dict(list(FACTS.items())[NEEDED[case]]))
    (tmp_path / "config.json").write_text(json.dumps(plan.config))
    text = draft_rules(plan.source, like=read_target(str(tmp_path)))
    assert wrong_modules(text, plan) == []
    if case == "gemma1-mha":
        paths = {path for key, path in asked(text) if key == "rms_norm"}
        assert paths == {f"transformer/layer_{{i}}/pre_{x}_norm/scale" for x in ("attention", "ffw")}
        return
    theirs, ours = run(plan), made_by(text, plan.source)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        np.testing.assert_array_equal(ours[name], value, err_msg=name)


@pytest.mark.parametrize("names", [("pre_norm", "post_norm"), ("up_a", "down_a"), ("encoder_out", "decoder_out")])
def test_opposite_words_are_no_match(names: tuple[str, str], target: Any) -> None:
    """The one name that is close is the opposite."""
    source = tree(**dense(names[0], "mid"))
    text = drafted(source, module_of(**{names[1]: nn.Linear(6, 6), "other": nn.Linear(6, 6)}), target)
    assert {path for key, path in asked(text) if key == "linear"} == {f"{names[0]}/kernel", "mid/kernel"}


# ---- modules of one's own


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(-2, -3) for f in (self.q, self.k, self.v))
        return self.o(nn.functional.scaled_dot_product_attention(q, k, v).transpose(-2, -3).flatten(-2))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(width, eps=1e-6) for _ in range(2))
        self.attn = Attention(width, 3)
        self.fc1, self.fc2 = nn.Linear(width, 20), nn.Linear(20, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.fc2(nn.functional.gelu(self.fc1(self.norm2(x)), approximate="tanh"))


class Transformer(nn.Module):
    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.tok = nn.Embedding(23, width)
        self.pos = nn.Parameter(torch.zeros(1, 7, width))
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.ln_f = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, 5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tok(ids) + self.pos
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln_f(x))


def linen_transformer(folder: Path) -> tuple[Path, np.ndarray, np.ndarray]:
    import flax.linen as fl
    import jax
    import orbax.checkpoint as ocp

    class Layer(fl.Module):
        @fl.compact
        def __call__(self, x: Any) -> Any:
            x = x + fl.MultiHeadDotProductAttention(num_heads=3)(fl.LayerNorm()(x))
            return x + fl.Dense(12)(fl.gelu(fl.Dense(20)(fl.LayerNorm()(x))))

    class Net(fl.Module):
        @fl.compact
        def __call__(self, ids: Any) -> Any:
            x = fl.Embed(23, 12)(ids) + self.param("pos_embedding", fl.initializers.normal(1), (1, 7, 12))
            for k in range(2):
                x = Layer(name=f"encoderblock_{k}")(x)
            return fl.Dense(5, name="classifier")(fl.LayerNorm(name="encoder_norm")(x))

    ids = np.arange(14).reshape(2, 7)
    params = noisy(Net().init(jax.random.key(0), ids)["params"])
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "ckpt", {"params": params})
    with jax.default_matmul_precision("highest"):
        return folder / "ckpt", ids, np.asarray(Net().apply({"params": params}, ids))


def noisy(params: Any) -> Any:
    """Fresh biases and scales are zeros and ones, which hide an exchange."""
    import jax

    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: np.asarray(x) + 0.2 * rng.normal(size=x.shape).astype(np.float32), params)


def conv_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.GroupNorm(4, 8, eps=1e-6), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1, groups=2),
        nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3),
    )  # fmt: skip


def nnx_conv_net(folder: Path) -> tuple[Path, np.ndarray, np.ndarray]:
    import jax
    import orbax.checkpoint as ocp
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.stem = nnx.Conv(3, 8, (3, 3), strides=2, padding=1, rngs=rngs)
            self.group_norm = nnx.GroupNorm(8, num_groups=4, rngs=rngs)
            self.mix = nnx.Conv(8, 8, (3, 3), padding=1, feature_group_count=2, rngs=rngs)
            self.batch_norm = nnx.BatchNorm(8, use_running_average=True, rngs=rngs)
            self.dense = nnx.List([nnx.Linear(8, 8, rngs=rngs), nnx.Linear(8, 8, rngs=rngs)])
            self.head = nnx.Linear(8, 3, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            x = jax.nn.relu(self.group_norm(self.stem(x)))
            x = jax.nn.relu(self.batch_norm(self.mix(x))).mean((1, 2))
            for layer in self.dense:
                x = jax.nn.relu(layer(x))
            return self.head(x)

    net = Net(nnx.Rngs(0))
    graph, state = nnx.split(net)
    state = jax.tree.map(jax.numpy.abs, noisy(state))  # variances are positive
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "ckpt", nnx.to_pure_dict(state))
    x = np.random.default_rng(1).normal(size=(2, 9, 9, 3)).astype(np.float32)
    with jax.default_matmul_precision("highest"):
        return folder / "ckpt", x, np.asarray(nnx.merge(graph, state)(x))


def mlp() -> nn.Module:
    sizes = (5, 16, 16, 16, 3)
    layers = [part for a, b in itertools.pairwise(sizes) for part in (nn.Linear(a, b), nn.Tanh())]
    return nn.Sequential(*layers[:-1])


def haiku_mlp(folder: Path) -> tuple[Path, np.ndarray, np.ndarray]:
    import haiku as hk
    import jax

    net = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([16, 16, 16, 3], activation=jax.numpy.tanh)(x)))
    x = np.random.default_rng(1).normal(size=(4, 5)).astype(np.float32)
    params = noisy(net.init(jax.random.key(0), x))
    flat = {f"{module}/{name}": value for module, own in params.items() for name, value in own.items()}
    np.savez(folder / "ckpt.npz", **flat)
    with jax.default_matmul_precision("highest"):
        return folder / "ckpt.npz", x, np.asarray(net.apply(params, x))


def equinox_mlp(folder: Path) -> tuple[Path, np.ndarray, np.ndarray]:
    import equinox as eqx
    import jax

    net = eqx.nn.MLP(5, 3, 16, 3, activation=jax.numpy.tanh, key=jax.random.key(0))
    flat = {
        f"layers/{k}/{name}": np.asarray(getattr(layer, name))
        for k, layer in enumerate(net.layers)
        for name in ("weight", "bias")
    }
    np.savez(folder / "ckpt.npz", **flat)
    x = np.random.default_rng(1).normal(size=(4, 5)).astype(np.float32)
    with jax.default_matmul_precision("highest"):
        return folder / "ckpt.npz", x, np.asarray(jax.vmap(net)(x))


OWN = {
    "linen transformer": (linen_transformer, Transformer, lambda x: x),
    "nnx convolutions": (nnx_conv_net, conv_net, lambda x: x.permute(0, 3, 1, 2)),
    "haiku MLP": (haiku_mlp, mlp, lambda x: x),
    "equinox MLP": (equinox_mlp, mlp, lambda x: x),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", slow_but(["equinox MLP"], OWN))
def test_a_module_with_other_names_needs_no_edit(
    name: str, tmp_path: Path, convert: Run, target: Callable[[Callable[[], nn.Module]], str]
) -> None:
    pytest.importorskip("jax")
    save, make, given = OWN[name]
    ckpt, x, y = save(tmp_path)
    _, said = convert("rules", "new", ckpt, tmp_path / "rules.yaml", "--like", target(make))
    assert ", 0 questions open" in said, (tmp_path / "rules.yaml").read_text()
    convert("plan", tmp_path / "rules.yaml", ckpt)
    convert(tmp_path / "rules.yaml", ckpt, tmp_path / "out.safetensors")
    module = make()
    module.load_state_dict(load_file(tmp_path / "out.safetensors"), strict=True)
    with torch.no_grad():
        made = module.eval()(given(torch.from_numpy(x)))
    np.testing.assert_allclose(made.numpy(), y, rtol=2e-4, atol=2e-5)


# ---- what decides, and what stays open


def drafted(
    source: MemorySource, make: Callable[[], nn.Module], target: Callable[[Callable[[], nn.Module]], str]
) -> str:
    return draft_rules(source, like=read_target(target(make)))


def made_by(text: str, source: MemorySource) -> dict[str, np.ndarray]:
    return run(plan_conversion(parse_rules(text), source))


def asked(text: str) -> set[tuple[str, str]]:
    return {(q.key, q.path) for q in parse_rules(text).questions}


def module_of(**parts: nn.Module) -> Callable[[], nn.Module]:
    return lambda: nn.ModuleDict(parts)


def dense(*names: str, sizes: tuple[int, int] = (6, 6), bias: bool = True) -> dict[str, tuple[int, ...]]:
    shapes = {f"params__{name}__kernel": sizes for name in names}
    return shapes | ({f"params__{name}__bias": sizes[1:] for name in names} if bias else {})


def test_two_modules_of_one_shape_and_foreign_names_are_asked(target: Any) -> None:
    source = tree(**dense("Dense_0", "Dense_1"))
    text = drafted(source, module_of(up=nn.Linear(6, 6), down=nn.Linear(6, 6)), target)
    assert asked(text) == {("linear", "Dense_0/kernel"), ("linear", "Dense_1/kernel"), ("einsum", "Dense_0/kernel")}
    assert text.count("# linear: up") == text.count("# linear: down") == 2
    assert {"# up.weight", "# down.bias"} <= set(text.splitlines())


@pytest.mark.parametrize(("first", "second"), [("fc1", "fc2"), ("fc_0", "fc_1"), ("a_3", "a_7")])
def test_numbers_of_equal_families_decide(first: str, second: str, target: Any) -> None:
    source = tree(**dense("Dense_0", "Dense_1"), **dense("head", sizes=(6, 3)))
    make = module_of(**{second: nn.Linear(6, 6), first: nn.Linear(6, 6), "last": nn.Linear(6, 3)})
    text = drafted(source, make, target)
    assert not asked(text)
    made = made_by(text, source)
    np.testing.assert_array_equal(made[f"{first}.weight"], source.arrays["params/Dense_0/kernel"].T)
    np.testing.assert_array_equal(made[f"{second}.weight"], source.arrays["params/Dense_1/kernel"].T)


def test_numbers_of_families_of_other_sizes_do_not_decide(target: Any) -> None:
    """Three layers, and two numbered modules of the three that fit."""
    source = tree(**dense("Dense_0", "Dense_1", "Dense_2"), **dense("head", sizes=(6, 3)))
    parts = {"fc1": nn.Linear(6, 6), "fc2": nn.Linear(6, 6), "first": nn.Linear(6, 6), "last": nn.Linear(6, 3)}
    text = drafted(source, module_of(**parts), target)
    assert {path for key, path in asked(text) if key == "linear"} == {f"Dense_{k}/kernel" for k in range(3)}


def test_a_free_tensor_with_its_axes_in_another_order_is_named(target: Any) -> None:
    """A leaf whose name does not say what it is, beside others."""
    source = tree(**dense("Dense_0", "Dense_1", sizes=(6, 9)), o=(5, 3), s=(4,))
    parts = {"first": nn.Linear(6, 9), "second": nn.Linear(6, 9), "head": nn.Linear(5, 3, bias=False)}
    text = drafted(source, module_of(**parts), target)
    assert text.count("No free module of the target has these shapes") == 2
    moved = "these shapes as they are stored; with its axes in another order it may be head.weight"
    assert f"{moved}\n  # parameter: o" in text


def test_names_decide_where_shapes_do_not(target: Any) -> None:
    source = tree(
        **dense("query", "key", "value", "out"), **dense("mlp_in", sizes=(6, 9)), **dense("spare", sizes=(4, 5))
    )
    parts = {name: nn.Linear(6, 6) for name in ("to_v", "to_q", "proj", "to_k")} | {"up": nn.Linear(6, 9)}
    text = drafted(source, module_of(**parts), target)
    assert asked(text) == {("linear", "spare/kernel")}, text
    assert "No free module of the target has these shapes" in text
    rules = {str(rule.path): str(rule.targets[None].path) for rule in parse_rules(text).rules}
    assert rules["{query,key,value}/kernel"] == "to_{q,k,v}" and rules["out/kernel"] == "proj"
    assert "linear: proj    # guess: " in text and "linear: up    # guess: " in text


OPAQUE = ("zim", "kol", "bax", "tuk", "fel", "gob", "sar", "nim", "vok", "hul", "pel", "dax", "ruk")


@pytest.mark.parametrize("seed", range(6))
def test_names_that_tell_nothing_lead_to_questions_and_never_to_a_wrong_module(seed: int, target: Any) -> None:
    """Every word of the target's names is replaced. What is not asked is what the true names give."""
    from dataclasses import replace

    source = transformer_tree()
    model = read_target(target(Transformer))
    whole = plan_conversion(parse_rules(draft_rules(source, like=model)), source)
    truth = {step.name: tuple((part.leaf, part.at) for part in step.parts) for step in whole.steps}
    words = sorted({w for m in model.modules for w in re.findall("[a-z_]+", m.name)})
    table = dict(zip(words, np.random.default_rng(seed).permutation(OPAQUE), strict=False))

    def other(name: str) -> str:
        return re.sub("[a-z_]+", lambda found: str(table[found[0]]), name)

    text = draft_rules(
        source, like=replace(model, modules=tuple(replace(m, name=other(m.name)) for m in model.modules))
    )
    back = {other(m.name): m.name for m in model.modules}
    for matched in cover(parse_rules(text), source).matched:
        if matched.rule.kind_name in matched.rule.asked or matched.rule.kind_name == "parameter":
            continue
        path, module = matched.rule.path, matched.rule.targets[None].path
        for (indices, choices), leaf in matched.leaves["weight"].items():
            name = module.fill(dict(zip(path.indices, indices, strict=True)), choices[: len(module.groups)])
            assert leaf in {of for of, _ in truth[f"{back[name]}.weight"]}, (leaf, name, back[name])


def transformer_tree() -> MemorySource:
    shapes: dict[str, tuple[int, ...]] = {
        "embed/embedding": (23, 12),
        "pos_embedding": (1, 7, 12),
        "head/kernel": (12, 5),
    }
    shapes |= {"head/bias": (5,), "LayerNorm_0/scale": (12,), "LayerNorm_0/bias": (12,)}
    for k in range(2):
        attention = f"Block_{k}/MultiHeadDotProductAttention_0"
        for n in range(2):
            shapes |= {f"Block_{k}/LayerNorm_{n}/{x}": (12,) for x in ("scale", "bias")}
        for name in ("query", "key", "value"):
            shapes |= {f"{attention}/{name}/kernel": (12, 3, 4), f"{attention}/{name}/bias": (3, 4)}
        shapes |= {f"{attention}/out/kernel": (3, 4, 12), f"{attention}/out/bias": (12,)}
        shapes |= {f"Block_{k}/Dense_0/kernel": (12, 20), f"Block_{k}/Dense_0/bias": (20,)}
        shapes |= {f"Block_{k}/Dense_1/kernel": (20, 12), f"Block_{k}/Dense_1/bias": (12,)}
    return tree(**{f"params__{name.replace('/', '__')}": shape for name, shape in shapes.items()})


@pytest.mark.slow
def test_attention_as_torch_has_it_and_fused(target: Any) -> None:
    source = transformer_tree()

    class Fused(Transformer):
        def __init__(self) -> None:
            super().__init__()
            for block in self.blocks:
                del block.attn.q, block.attn.k, block.attn.v
                block.attn.qkv = nn.Linear(12, 36)

    class Torch(Transformer):
        def __init__(self) -> None:
            super().__init__()
            for block in self.blocks:
                block.attn = nn.MultiheadAttention(12, 3)

    kernels = [
        source.arrays[f"params/Block_1/MultiHeadDotProductAttention_0/{n}/kernel"] for n in ("query", "key", "value")
    ]
    for make, name in ((Fused, "blocks.1.attn.qkv.weight"), (Torch, "blocks.1.attn.in_proj_weight")):
        text = drafted(source, make, target)
        assert not asked(text), text
        made = made_by(text, source)
        np.testing.assert_array_equal(made[name], np.concatenate([x.reshape(12, 12).T for x in kernels]))
        assert made.keys() == make().state_dict().keys()
    assert "attention: blocks.{i}.attn" in text
    assert "order of the rows" in drafted(source, Fused, target)


def test_a_tied_head_is_written_with_its_table(target: Any) -> None:
    source = tree(params__embed__embedding=(23, 12), params__norm__scale=(12,))

    def make() -> nn.Module:
        net = nn.ModuleDict(
            {"tok": nn.Embedding(23, 12), "head": nn.Linear(12, 23, bias=False), "norm": nn.RMSNorm(12, eps=1e-6)}
        )
        net["head"].weight = net["tok"].weight
        return net

    text = drafted(source, make, target)
    assert "embedding: {module: tok, tied: head}" in text
    assert asked(text) == {("multiplies_by", "norm/scale")}  # what the source multiplies by, no target tells


def test_modules_that_are_configured_differently_get_rules_of_their_own(target: Any) -> None:
    """One shape, other strides: the facts of the first are not written for all."""
    shapes = {f"params__conv_{k}__kernel": (3, 3, 6, 6) for k in range(3)}
    source = tree(**shapes)
    parts = {f"conv_{k}": nn.Conv2d(6, 6, 3, stride=1 + (k == 0), padding=1, bias=False) for k in range(3)}
    text = drafted(source, module_of(**parts), target)
    assert not asked(text)
    rules = {str(rule.path): rule for rule in parse_rules(text).rules}
    assert rules.keys() == {"conv_0/kernel", "conv_{1,2}/kernel"}
    assert [rule.kind.geometry.strides for rule in rules.values()] == [(2, 2), (1, 1)]  # type: ignore[attr-defined]
    assert made_by(text, source).keys() == {f"conv_{k}.weight" for k in range(3)}


def test_stacked_layers_become_a_list_of_modules(target: Any) -> None:
    source = tree(
        params__layers__norm__scale=(3, 8), params__layers__mlp__kernel=(3, 8, 5), params__layers__mlp__bias=(3, 5), params__head__kernel=(8, 7),
    )  # fmt: skip
    parts = [nn.ModuleDict({"ff": nn.Linear(8, 5), "n": nn.LayerNorm(8, bias=False)}) for _ in range(3)]
    text = drafted(source, module_of(h=nn.ModuleList(parts), out=nn.Linear(8, 7, bias=False)), target)
    assert not asked(text)
    made = made_by(text, source)
    np.testing.assert_array_equal(made["h.2.ff.weight"], source.arrays["params/layers/mlp/kernel"][2].T)
    np.testing.assert_array_equal(made["h.1.n.weight"], source.arrays["params/layers/norm/scale"][1])


def test_a_norm_that_adds_one_in_the_target(target: Any) -> None:
    class PlusOneNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.eps = 1e-5
            self.weight = nn.Parameter(torch.zeros(12))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + self.eps) * (1 + self.weight)

    source = tree(params__norm__scale=(12,))
    text = drafted(source, module_of(norm=PlusOneNorm()), target)
    assert "rms_norm: {module: norm, multiplies_by: 1+weight}" in text and "multiplies_by: 1+scale    # guess" in text
    np.testing.assert_array_equal(made_by(text, source)["norm.weight"], source.arrays["params/norm/scale"])


# ---- where the target is read from


@pytest.mark.parametrize("sharded", [False, True])
def test_a_safetensors_file_gives_names_and_shapes(sharded: bool, tmp_path: Path, convert: Run) -> None:
    """What a type would tell (epsilon, the kind of norm) stays open."""
    state = {name: x.contiguous() for name, x in Transformer().state_dict().items()}
    path = tmp_path / "model"
    if sharded:
        path.mkdir()
        parts = [dict(list(state.items())[k::2]) for k in range(2)]
        files = [f"model-{k + 1:05}-of-00002.safetensors" for k in range(2)]
        for file, part in zip(files, parts, strict=True):
            save_file(part, path / file)
        index = {name: file for file, part in zip(files, parts, strict=True) for name in part}
        (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    else:
        path = path.with_suffix(".safetensors")
        save_file(state, path)
    source = transformer_tree()
    np.savez(tmp_path / "ckpt.npz", **source.arrays)
    text, _ = convert("rules", "new", tmp_path / "ckpt.npz", "--like", path)
    assert {key for key, _ in asked(text)} <= {"multiplies_by", "epsilon", "layer_norm", "linear", "einsum"}
    assert "linear: blocks.{i}.attn.{q,k,v}" in text and "linear: blocks.{i}.fc1" in text and "embedding: tok" in text


def missing(folder: Path) -> str:
    return str(folder / "absent.safetensors")


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ("no_such_module_at_all:make", "user-code-not-found", "--like no_such_module_at_all:make"),
        ("my_target:other", "user-code-not-found", "has no 'other'"),
        ("my_target:make", "user-code-not-found", "expected a factory without arguments"),
        ("my_target:number", "user-code-not-found", "expected a torch.nn.Module, got int"),
        ("my_target:broken", "user-code-failed", "ValueError: no"),
        ("absent.safetensors", "converted-not-found", "no such file"),
    ],
)
def test_targets_that_cannot_be_read(
    name: str, code: str, words: str, tmp_path: Path, convert: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise ValueError("no")

    module = ModuleType("my_target")
    parts: Mapping[str, Any] = {"make": lambda width: None, "number": lambda: 3, "broken": broken}
    for key, value in parts.items():
        setattr(module, key, value)
    monkeypatch.setitem(sys.modules, "my_target", module)
    np.savez(tmp_path / "ckpt.npz", **{"dense/kernel": np.zeros((3, 4), np.float32)})
    _, err = convert("rules", "new", tmp_path / "ckpt.npz", "--like", name, code=2)
    assert code in err and words in err, err


def test_a_directory_whose_config_names_no_class(tmp_path: Path, convert: Run) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text('{"model_type": "nothing-known"}')
    np.savez(tmp_path / "ckpt.npz", **{"dense/kernel": np.zeros((3, 4), np.float32)})
    _, err = convert("rules", "new", tmp_path / "ckpt.npz", "--like", tmp_path / "hf", code=2)
    assert "transformers does not make a model from config.json" in err


# ---- any tree and any target

KEYS = ("params", "block_0", "block_1", "attn", "query", "key", "value", "out", "lstm", "cell", "vars", "conv", "norm", "batch_norm", "{i}", "a*")  # fmt: skip
LAST = ("kernel", "w", "weight", "bias", "b", "scale", "offset", "mean", "embedding", "gating_einsum", "linear", "0", "1", "step")  # fmt: skip
WORDS = ("h.0", "h.1", "h.2", "attn", "q", "k", "v", "fc1", "fc2", "norm", "ln_1", "ln_2", "head", "conv", "x{i}", "y*")
TYPES = ("", "", "linear", "conv", "embedding", "layer_norm", "rms_norm", "batch_norm", "group_norm", "attention")


def any_case(seed: int) -> tuple[MemorySource, TargetModel]:
    rng = random.Random(seed)
    shapes: dict[str, tuple[int, ...]] = {}
    for _ in range(rng.randint(1, 14)):
        path = "/".join([*(rng.choice(KEYS) for _ in range(rng.randint(0, 3))), rng.choice(LAST)])
        shapes[path] = tuple(rng.choice((1, 2, 3, 4, 12)) for _ in range(rng.randint(0, 5)))
    shapes = {n: s for n, s in shapes.items() if not any(other.startswith(f"{n}/") for other in shapes)}
    modules = {}
    for _ in range(rng.randint(0, 10)):
        shape = rng.choice(list(shapes.values()))
        shape = tuple(rng.sample(shape, len(shape)))
        own = {rng.choice(("weight", "scale", "in_proj_weight", "p")): shape}
        own |= {"bias": shape[:1]} if shape and rng.random() < 0.5 else {}
        facts = {"epsilon": 1e-5, "multiplies_by": rng.choice(("weight", "1+weight")), "num_groups": 1, "padding": rng.choice(("VALID", [[1, 1]]))}  # fmt: skip
        name = ".".join(rng.choice(WORDS) for _ in range(rng.randint(1, 3)))
        modules[name] = TargetModule(
            name, rng.choice(TYPES), own, facts if rng.random() < 0.5 else {}, rng.random() < 0.2
        )
    source = MemorySource({name: np.zeros(shape, np.float32) for name, shape in shapes.items()})
    return source, TargetModel("x", tuple(modules.values()))


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, *(pytest.param(k, marks=pytest.mark.slow) for k in range(8, 160, 8))])
def test_a_draft_like_any_target_covers_its_tree_and_contradicts_nothing(first: int) -> None:
    for seed in range(first, first + 8):
        source, model = any_case(seed)
        rules = parse_rules(draft_rules(source, like=model), f"{seed}.yaml")
        coverage = cover(rules, source)
        assert coverage.claimed == len(source.leaves) and not coverage.findings
        try:
            make_plan(rules, source)
        except PlanError as error:
            open_ones = [question.finding for question in rules.questions]
            assert [*error.findings] == open_ones or error.code == "rules-of-another-model", seed
