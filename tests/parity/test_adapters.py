"""LoRA pairs that no rule names: written by qwix, gemma and openpi themselves, and converted with rules that do not mention them."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

import convert
from convert import PlanError
from convert.core.errors import OptionError
from convert.planning.adapters.joined import joined
from convert.planning.adapters.names import Writer, find_pairs, has_word, place_of
from convert.planning.adapters.peft_config import REFUSED
from convert.planning.low_rank_source import Merge
from convert.planning.planner import make_plan
from convert.verify.layers.level import check_layers
from convert.verify.report.report import Verdict
from convert.verify.run import check
from convert.writing.execute import Result, execute
from convert.writing.written import open_written
from support.goldens import checkpoint, golden_io, relative_error
from support.memory_source import MemorySource, rule_file, run
from support.paths import GOLDEN
from support.weights_level import check_weights

RANK, ALPHA = 3, 6.0
QWIX = """
- {einsum: "...D,DNH->...NH", from: q/kernel, linear: q}
- {einsum: "...NH,NHD->...D", from: o/kernel, linear: o}
- {einsum: "BTD,CKDH->CBTKH", from: e/kernel, linear: "{k,v}"}
- {einsum: "...D,DF->...F", from: up/kernel, linear: up}
- {dimension_numbers: "NWC,WIO->NWC", axes: WDF, from: conv/kernel, conv: conv}
"""
OPENPI = """
- {einsum: "BTD,NDH->BTNH", from: q_einsum/w, linear: q}
- {einsum: "BSD,CKDH->CBSKH", from: kv_einsum/w, linear: "{k,v}"}
- {einsum: "BTNH,NHD->BTD", from: attn_vec_einsum/w, linear: o}
- {einsum: "...D,GDF->...GF", from: mlp/gating_einsum, linear: "{gate,up}"}
- {einsum: "...F,FD->...D", from: mlp/linear, linear: down}
"""


def qwix_layers() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Leaves of five flax nnx layers with qwix's LoRA, an input for each, and what each gives."""
    import jax.numpy as jnp
    import qwix
    from flax import nnx

    made = nnx.Rngs(0)
    layers: dict[str, Any] = {
        "q": nnx.LinearGeneral(16, (4, 8), use_bias=False, rngs=made),
        "o": nnx.LinearGeneral((4, 8), 16, axis=(-2, -1), use_bias=False, rngs=made),
        "e": nnx.Einsum("BTD,CKDH->CBTKH", (2, 2, 16, 8), rngs=made),
        "up": nnx.Linear(16, 24, use_bias=False, rngs=made),
        "conv": nnx.Conv(16, 24, (3,), use_bias=False, padding="VALID", rngs=made),
    }
    rng = np.random.default_rng(3)
    leaves, given, results = {}, {}, {}
    for name, layer in layers.items():
        x = rng.standard_normal((2, 5, 4, 8) if name == "o" else (2, 5, 16)).astype("float32")
        provider = qwix.LoraProvider(module_path=".*", rank=RANK, alpha=ALPHA)
        with warnings.catch_warnings():  # qwix calls methods that flax is going to remove
            warnings.simplefilter("ignore", DeprecationWarning)
            with_pair = qwix.apply_lora_to_model(layer, provider, jnp.asarray(x), rngs=nnx.Rngs(1))
            state = nnx.state(with_pair)
            for (key,), leaf in nnx.to_flat_state(state):
                leaf[...] = jnp.asarray(rng.standard_normal(leaf.shape).astype("float32"))
                leaves[f"{name}/{key}"] = np.asarray(leaf[...])
            nnx.update(with_pair, state)
            given[name], results[name] = x, np.asarray(with_pair(jnp.asarray(x)), np.float64)
    return leaves, given, results


@pytest.fixture(scope="module")
def qwix() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], dict[str, np.ndarray]]:
    return qwix_layers()


def flat(x: np.ndarray) -> np.ndarray:
    return x.reshape(*x.shape[:2], -1).astype(np.float64)


# ---- written by the libraries


@pytest.mark.slow
def test_every_layer_of_qwix(qwix: Any) -> None:
    """dot_general flattens the axes of a kernel, einsum does not, a convolution has them in front: google/qwix@0.1.8."""
    leaves, given, results = qwix
    plan = make_plan(rule_file(QWIX), MemorySource(leaves), settings={"lora_alpha": ALPHA})
    made = run(plan)
    assert len(plan.merges) == 5
    assert plan.notes == (
        "5 LoRA pairs are merged in float32, the product times 2 (alpha 6 (--set lora_alpha) / rank 3); for example q/kernel + "
        "q/kernel_lora_a q/kernel_lora_b",
    )
    for name in ("q", "o", "up"):
        assert relative_error(flat(given[name]) @ made[f"{name}.weight"].T, flat(results[name])) < 2e-6
    for row, name in enumerate("kv"):
        assert relative_error(flat(given["e"]) @ made[f"{name}.weight"].T, flat(results["e"][row])) < 2e-6
    got = torch.nn.functional.conv1d(torch.tensor(given["conv"].swapaxes(1, 2)), torch.tensor(made["conv.weight"]))
    assert relative_error(got.numpy().swapaxes(1, 2), results["conv"]) < 2e-6


def test_every_layer_of_openpi() -> None:
    """Blocks with a pair for each head; B of the output projection is summed over the heads; the feed-forward has no factor."""
    recorded = dict(np.load(GOLDEN / "lora" / "openpi.npz"))
    leaves = {key.removeprefix("leaf/"): recorded[key] for key in recorded if key.startswith("leaf/")}
    made = run(make_plan(rule_file(OPENPI), MemorySource(leaves), settings={"lora_alpha": ALPHA}))
    x = {name: flat(recorded[f"x/{name}"]) for name in ("q_einsum", "kv_einsum", "attn_vec_einsum", "mlp")}
    assert relative_error(x["q_einsum"] @ made["q.weight"].T, flat(recorded["y/q_einsum"])) < 2e-6
    for row, name in enumerate("kv"):
        assert relative_error(x["kv_einsum"] @ made[f"{name}.weight"].T, flat(recorded["y/kv_einsum"][row])) < 2e-6
    assert relative_error(x["attn_vec_einsum"] @ made["o.weight"].T, recorded["y/attn_vec_einsum"]) < 2e-6
    gate, up, down = (torch.tensor(made[f"{name}.weight"]).double() for name in ("gate", "up", "down"))
    inside = torch.tensor(x["mlp"])
    got = (torch.nn.functional.gelu(inside @ gate.T, approximate="tanh") * (inside @ up.T)) @ down.T
    assert relative_error(got.numpy(), recorded["y/mlp"]) < 2e-6


@pytest.mark.slow
def test_a_layer_of_flax_nnx() -> None:
    """`nnx.LoRALinear` multiplies by no factor."""
    import jax.numpy as jnp
    from flax import nnx

    rng = np.random.default_rng(6)
    layer = nnx.LoRALinear(16, 24, lora_rank=RANK, rngs=nnx.Rngs(0))
    leaves = {}
    state = nnx.state(layer)
    for keys, leaf in nnx.to_flat_state(state):
        leaf[...] = jnp.asarray(rng.standard_normal(leaf.shape).astype("float32"))
        leaves["/".join(("up", *keys))] = np.asarray(leaf[...])
    nnx.update(layer, state)
    x = rng.standard_normal((5, 16)).astype("float32")
    rules = rule_file('- {einsum: "...D,DF->...F", from: up/kernel, bias: up/bias, linear: up}')
    made = run(make_plan(rules, MemorySource(leaves)))
    assert relative_error(x.astype(np.float64) @ made["up.weight"].T + made["up.bias"], np.asarray(layer(x))) < 2e-6


def test_gemma_in_its_lora_wrapper(tmp_path: Path) -> None:
    """The whole model of gemma 3.3.0, its logits with the adapter; without it they differ by as much as they are."""
    from support.gemma_models import BOUND, directory, error

    recorded = golden_io("gemma3-lora")
    assert relative_error(recorded["base_logits"], recorded["logits"]) > 0.1
    assert error("gemma3-lora", directory("gemma3-lora", tmp_path / "out")) < BOUND


@pytest.mark.slow
def test_the_merge_is_not_rounded_before_the_end(qwix: Any) -> None:
    """bfloat16 leaves: the sum is rounded once, to the weight's dtype."""
    import ml_dtypes

    leaves = {name: leaf.astype(ml_dtypes.bfloat16) for name, leaf in qwix[0].items()}
    plan = make_plan(rule_file(QWIX), MemorySource(leaves), settings={"lora_alpha": ALPHA})
    base, a, b = (leaves[f"up/kernel{end}"].astype(np.float64) for end in ("", "_lora_a", "_lora_b"))
    want = (base + 2 * a @ b).astype(np.float32).astype(ml_dtypes.bfloat16)
    assert run(plan)["up.weight"].tobytes() == np.ascontiguousarray(want.T).tobytes()


# ---- rank and alpha


def save_json(folder: Path, name: str, content: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(json.dumps(content))


UP = '- {einsum: "...D,DF->...F", from: up/kernel, linear: up}'


def up(folder: Path | None = None) -> MemorySource:
    """A dense layer with the leaves that qwix adds."""
    rng = np.random.default_rng(4)
    shapes = {"kernel": (16, 24), "kernel_lora_a": (16, RANK), "kernel_lora_b": (RANK, 24)}
    source = MemorySource(
        {f"up/{name}": rng.standard_normal(shape).astype("float32") for name, shape in shapes.items()}
    )
    source.path = folder or source.path
    return source


def test_alpha_is_asked_for() -> None:
    with pytest.raises(PlanError) as refused:
        make_plan(rule_file(UP), up())
    (finding,) = refused.value.findings
    assert (finding.code, finding.path) == ("adapter-scale-unknown", "up/kernel_lora_a")
    assert "qwix multiplies the product by alpha / rank, and the checkpoint does not store alpha" in finding.problem
    assert "--set lora_alpha=" in finding.fix


@pytest.mark.parametrize(
    ("name", "content", "scale"),
    [
        ("adapter_config.json", {"lora_alpha": 6, "r": 3}, 2),
        ("adapter_config.json", {"lora_alpha": 6, "use_rslora": True}, 6 / 3**0.5),
        ("_CHECKPOINT_METADATA", {"custom_metadata": {"lora": {"lora_rank": 3, "lora_alpha": 12.0}}}, 4),
        ("_CHECKPOINT_METADATA", {"custom_metadata": {"lora_alpha": 3}}, 1),
    ],
)
@pytest.mark.parametrize("above", [False, True])
def test_alpha_of_files_next_to_the_checkpoint(
    tmp_path: Path, name: str, content: dict[str, Any], scale: float, above: bool
) -> None:
    save_json(tmp_path, name, content)
    folder = tmp_path / "state" if above else tmp_path
    folder.mkdir(exist_ok=True)
    plan = make_plan(rule_file(UP), up(folder))
    assert [merge.scale for merge in plan.merges.values()] == [scale]
    assert name in plan.notes[0]
    given = make_plan(rule_file(UP), up(folder), settings={"lora_alpha": 30, "use_rslora": False})
    assert [merge.scale for merge in given.merges.values()] == [10]


@pytest.mark.parametrize("whole", [False, True])
def test_a_sum_that_float32_cannot_hold_is_refused(whole: bool, tmp_path: Path) -> None:
    """It was written as infinity. So is a sum whose leaf is read at once, as `load_into` does."""
    source = up()
    source.arrays["up/kernel_lora_a"][0, 0] = 3e38
    plan = make_plan(rule_file(UP), source, settings={"lora_alpha": ALPHA})
    with pytest.raises(PlanError) as refused:
        if whole:
            plan.source.read(next(iter(plan.merges)))
        else:
            list(execute(plan, tmp_path / "out.safetensors"))
    (finding,) = refused.value.findings
    assert (finding.code, finding.path) == ("value-overflow", "up/kernel + 2 x up/kernel_lora_a up/kernel_lora_b")
    assert re.fullmatch(
        r"\+ 2 x a LoRA product: \d+ of \d+ values do not fit float32, -?[0-9.e+]+ for example", finding.problem
    )
    assert "--set lora_alpha=" in finding.fix and not list(tmp_path.iterdir())


def test_a_rank_of_another_adapter(tmp_path: Path) -> None:
    save_json(tmp_path, "adapter_config.json", {"lora_alpha": 6, "r": 8})
    with pytest.raises(PlanError) as refused:
        make_plan(rule_file(UP), up(tmp_path))
    (finding,) = refused.value.findings
    assert (finding.code, finding.expected, finding.got) == ("adapter-shape-mismatch", "rank 8", "3, of float32[16,3]")


HOSTILE = (r"((a|b)*)*c", r"(?:up|\w)+", r"(.\*){2,}", ".*" * 6 + "x", ".{0,}" * 6)
STATED: list[tuple[dict[str, Any], str]] = [  # settings beside alpha 6 and rank 3, and what the error says
    ({"lora_alpha": "7"}, 'lora_alpha: expected a number other than 0, got "7"'),
    ({"lora_alpha": True}, "expected a number other than 0, got true"),
    *(({"r": value}, "r: expected a whole number above 0") for value in ("3", 3.0, True, -3, 0)),
    *(({"use_rslora": value}, "use_rslora: expected true or false") for value in ("true", 1)),
    ({"alpha_pattern": {"up": "12"}}, "alpha_pattern of up: expected a number other than 0"),
    ({"alpha_pattern": {"u(*": 12}}, "expected names or regular expressions"),
    *(({"alpha_pattern": {hostile: 12}}, "without a repeated group, and with at most 6 of") for hostile in HOSTILE),
    ({"alpha_pattern": {"down": 12}}, "alpha_pattern names a module that the target does not have"),
    ({"alpha_pattern": ["up"]}, "expected names of modules with numbers"),
    ({"rank_pattern": {"up": 4}}, "states another rank than the leaf has: expected rank 4"),
    *(({key: True}, reason) for key, reason in REFUSED.items()),
    ({"peft_type": "LOHA"}, 'the adapter is no LoRA (peft_type: "LOHA")'),
    ({"bias": "lora_only"}, "has biases of the model"),
    ({"init_lora_weights": "pissa"}, "changes the base weights"),
    ({"use_rsLora": True}, "did you mean 'use_rslora'?"),
    ({"rank": 8}, "no setting of PEFT"),
]


@pytest.mark.parametrize(("config", "message"), STATED)
def test_a_file_that_states_more_than_a_product(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    save_json(tmp_path, "adapter_config.json", {"lora_alpha": 6, "r": 3, "peft_type": "LORA"} | config)
    with pytest.raises(convert.ConvertError) as refused:
        make_plan(rule_file(UP), up(tmp_path))
    assert all(found.fix for found in refused.value.findings)
    assert message in str(refused.value) and str(tmp_path / "adapter_config.json") in str(refused.value)
    assert not make_plan(rule_file(UP), up(tmp_path), settings={"adapter": "base"}).merges  # the weights alone


@pytest.mark.parametrize(
    ("config", "scale"),
    [
        ({"alpha_pattern": {"up": 12}}, 4),
        ({"alpha_pattern": {"^u.*": 12}, "use_rslora": True}, 12 / 3**0.5),
        ({"rank_pattern": {"up": 3}, "r": 8}, 2),
        ({"lora_alpha": -6}, -2),
        *(({key: value}, 2) for key, value in {"fan_in_fan_out": True, "exclude_modules": ["up"], "lora_dropout": 0.1, "init_lora_weights": "eva", "use_dora": False, "alpha_pattern": {}, "use_rslora": None}.items()),
    ],
)  # fmt: skip
def test_what_a_file_states_is_computed(config: dict[str, Any], scale: float, tmp_path: Path) -> None:
    save_json(tmp_path, "adapter_config.json", {"lora_alpha": 6, "r": 3} | config)
    plan = make_plan(rule_file(UP), up(tmp_path))
    assert [merge.scale for merge in plan.merges.values()] == [scale]


def test_modules_of_one_leaf_have_one_alpha(tmp_path: Path, qwix: Any) -> None:
    """Each pair has the alpha that PEFT would take for its module; keys and values are one leaf."""
    source, rules = MemorySource(qwix[0]), rule_file(QWIX)
    source.path = tmp_path
    save_json(tmp_path, "adapter_config.json", {"lora_alpha": 6, "alpha_pattern": {"[kv]": 12, "up": 24}})
    scales = {merge.base: merge.scale for merge in make_plan(rules, source).merges.values()}
    assert scales == {"q/kernel": 2, "o/kernel": 2, "conv/kernel": 2, "e/kernel": 4, "up/kernel": 8}
    save_json(tmp_path, "adapter_config.json", {"lora_alpha": 6, "alpha_pattern": {"v": 12}})
    with pytest.raises(PlanError, match="several alphas: 6 of k, 12 of v"):
        make_plan(rules, source)
    given = make_plan(rules, source, settings={"lora_alpha": 3})
    assert {merge.scale for merge in given.merges.values()} == {1}


@pytest.mark.parametrize(
    ("lora", "config", "message"),
    [
        ({"lora_rank": 3, "lora_alpha": 12}, {"lora_alpha": 6, "r": 3}, "differ in lora_alpha: expected 6, as"),
        ({"lora_rank": 8, "lora_alpha": 6}, {"lora_alpha": 6, "r": 3}, "_CHECKPOINT_METADATA states another rank"),
        ({"lora_rank": 3, "lora_alpha": 6}, {"lora_alpha": 6, "alpha_pattern": {"up": 12}}, "differ in alpha_pattern"),
        ({"lora_alpha": 6, "use_rslora": False}, {"lora_alpha": 6, "use_rslora": True}, "differ in use_rslora: expected true"),
        ({"lora_alpha": "6"}, {"lora_alpha": 6}, "expected a number other than 0"),
        ({"lora_rank": 3.0, "lora_alpha": 6}, {}, "expected a whole number above 0"),
        ({"lora_alpha": 6, "lora_weight_qtype": "nf4"}, {}, 'rounded to this type (lora_weight_qtype: "nf4")'),
    ],
)  # fmt: skip
def test_files_that_contradict_each_other(lora: dict[str, Any], config: dict[str, Any], message: str, tmp_path: Path) -> None:  # fmt: skip
    save_json(tmp_path, "_CHECKPOINT_METADATA", {"custom_metadata": {"lora": lora}})
    save_json(tmp_path, "adapter_config.json", config)
    with pytest.raises(convert.ConvertError) as refused:
        make_plan(rule_file(UP), up(tmp_path))
    assert message in str(refused.value)
    if "lora_alpha" in message:
        plan = make_plan(rule_file(UP), up(tmp_path), settings={"lora_alpha": 6})
        assert [merge.scale for merge in plan.merges.values()] == [2]


def test_openpi_s_two_ranks_have_two_alphas(tmp_path: Path) -> None:
    """One alpha, of --set or of a file, is that of PaliGemma or of the action expert; `alpha_pattern` gives both."""
    shapes = {f"{m}/{k}": s for m, r in (("q_einsum", 3), ("q_einsum_1", 5)) for k, s in {"w": (2, 16, 8), "lora_a": (2, 16, r), "lora_b": (2, r, 8)}.items()}  # fmt: skip
    source = MemorySource({name: np.ones(shape, "float32") for name, shape in shapes.items()})
    source.path = tmp_path
    rules = rule_file("\n".join(f'- {{einsum: "BTD,NDH->BTNH", from: {m}/w, linear: {n}}}' for m, n in (("q_einsum", "q"), ("q_einsum_1", "expert.q"))))  # fmt: skip
    save_json(tmp_path, "adapter_config.json", {"lora_alpha": 3})
    for settings in ({}, {"lora_alpha": 3}):
        with pytest.raises(OptionError, match="expected an alpha for each rank, got 3; --set lora_alpha=rank"):
            make_plan(rules, source, settings=settings)
    save_json(tmp_path, "adapter_config.json", {"lora_alpha": 3, "r": 3, "alpha_pattern": {"expert.*": 10}, "rank_pattern": {"expert.*": 5}})  # fmt: skip
    assert [merge.scale for merge in make_plan(rules, source).merges.values()] == [1, 2]


def test_a_file_with_a_factor_that_the_library_has_not(tmp_path: Path) -> None:
    arrays = up().arrays
    source = MemorySource({"up/kernel": arrays["up/kernel"], "up/lora/a": arrays["up/kernel_lora_a"], "up/lora/b": arrays["up/kernel_lora_b"]})  # fmt: skip
    source.path = tmp_path
    for config in ({"lora_alpha": 6, "r": 3}, {"lora_alpha": 3}, {"lora_alpha": 3, "r": 3, "use_rslora": True}):
        save_json(tmp_path, "adapter_config.json", config)
        with pytest.raises(PlanError, match="gemma, which multiplies their products by no factor"):
            make_plan(rule_file(UP), source)
    save_json(tmp_path, "adapter_config.json", {"lora_alpha": 3, "r": 3})
    assert [merge.scale for merge in make_plan(rule_file(UP), source).merges.values()] == [1]


@pytest.mark.parametrize("given", [".", "1", "1/items"])
def test_every_folder_that_the_error_names_is_read(given: str, tmp_path: Path) -> None:
    """From the arrays to beside the path that the user gave."""
    folder = tmp_path / "run" / "1" / "items"
    folder.mkdir(parents=True)
    source = up(folder)
    source.given_path = tmp_path / "run" / given
    with pytest.raises(PlanError) as refused:
        make_plan(rule_file(UP), source)
    named = [Path(text) for text in refused.value.findings[0].fix.partition(" are read in ")[2].split(", ")]
    assert named[0] == folder and named[-1] == source.given_path.parent and len(named) == len(set(named))
    for place in named:
        save_json(place, "adapter_config.json", {"lora_alpha": 6})
        assert [merge.scale for merge in make_plan(rule_file(UP), source).merges.values()] == [2]
        (place / "adapter_config.json").unlink()


@pytest.mark.parametrize(
    ("settings", "code"),
    [({"lora_alpha": 0}, "setting-invalid"), ({"lora_alpha": "6"}, "setting-invalid"), ({"lora_alpha": True}, "setting-invalid"), ({"lora_alpha": 6, "use_rslora": 1}, "setting-invalid")],
)  # fmt: skip
def test_what_is_no_alpha(settings: dict[str, Any], code: str) -> None:
    with pytest.raises(OptionError) as refused:
        make_plan(rule_file(UP), up(), settings=settings)
    assert refused.value.findings[0].code == code


def test_an_alpha_that_has_no_effect_is_refused() -> None:
    """A tree without pairs knows no such setting, and gemma's code has no factor."""
    leaves = {"up/kernel": up().arrays["up/kernel"]}
    with pytest.raises(OptionError, match="the tree has no LoRA pair"):
        make_plan(rule_file(UP), MemorySource(leaves), settings={"lora_alpha": 6})
    with pytest.raises(OptionError, match="--adapter: the tree has no LoRA pair"):
        make_plan(rule_file(UP), MemorySource(leaves), settings={"adapter": "base"})
    leaves |= {"up/lora/a": up().arrays["up/kernel_lora_a"], "up/lora/b": up().arrays["up/kernel_lora_b"]}
    with pytest.raises(OptionError, match="made by gemma, which multiplies their products by no factor"):
        make_plan(rule_file(UP), MemorySource(leaves), settings={"lora_alpha": 6})


def test_pairs_of_a_tower_that_the_rules_drop(tmp_path: Path) -> None:
    """A text model's rules drop the tower, with its pairs: a setting, or a checkpoint of pairs alone, would have no effect."""
    arrays = up().arrays
    tower = {f"tower/{name}": x for name, x in arrays.items()}
    rules = rule_file(f"{UP}\n- {{drop: tower/**, because: the tower}}")
    base = MemorySource({"up/kernel": arrays["up/kernel"], "tower/up/kernel": arrays["up/kernel"]})
    pairs = MemorySource({name: x for name, x in tower.items() if "lora" in name})
    whole = MemorySource({**base.arrays, **pairs.arrays})
    assert len(make_plan(rules, whole).dropped) == 3
    for source, settings in ((whole, {"lora_alpha": 6}), (whole, {"adapter": "base"}), (joined(base, pairs), {})):
        with pytest.raises(OptionError, match=r"leaves that the rules drop \(the tower\), so that none is merged"):
            make_plan(rules, source, settings=settings)
    both = joined(base, MemorySource({**pairs.arrays, **{name: x for name, x in arrays.items() if "lora" in name}}))
    assert len(make_plan(rules, both, settings={"lora_alpha": 6}).merges) == 1


# ---- never converted without them


@pytest.mark.parametrize("rest", ["- {drop: \"**\", rest: true, because: nothing else is used}", "- {drop: \"**lora**\", because: the adapter}"])  # fmt: skip
def test_a_rule_that_drops_them_does_not(rest: str) -> None:
    plan = make_plan(rule_file(f"{UP}\n{rest}"), up(), settings={"lora_alpha": ALPHA})
    assert len(plan.merges) == 1 and plan.dropped == ()


HALVES = [*(("up/kernel", f"{of}a", f"{of}b") for of in ("up/kernel_lora_", "up/lora/", "up/lora/lora_", "up/lora_"))]
HALVES += [("up/w", "up/_LoRAEinsum_0/lora/a", "up/_LoRAEinsum_0/lora/b")]
HALVES += [(f"{weight}/value", f"{first}/value", f"{second}/value") for weight, first, second in HALVES]


@pytest.mark.parametrize("rest", ["", '\n- {drop: "**", rest: true, because: unused}'])
@pytest.mark.parametrize(("weight", "there", "missing"), [*HALVES, *((weight, b, a) for weight, a, b in HALVES)])
def test_half_a_pair_is_refused(weight: str, there: str, missing: str, rest: str) -> None:
    leaves = {weight: up().arrays["up/kernel"], there: up().arrays["up/kernel_lora_a"]}
    rules = UP.replace("up/kernel", weight.removesuffix("/value"))
    with pytest.raises(PlanError) as refused:
        make_plan(rule_file(f"{rules}{rest}"), MemorySource(leaves))
    (finding,) = refused.value.findings
    assert finding.code == "adapter-dropped" and finding.path == there
    assert finding.expected == f"{missing} beside it, the other leaf of the LoRA pair of {weight}"
    with pytest.raises(PlanError) as with_setting:  # not "the tree has no LoRA pair"
        make_plan(rule_file(f"{rules}{rest}"), MemorySource(leaves), settings={"lora_alpha": ALPHA})
    assert with_setting.value.findings == (finding,)


def test_halves_of_many_pairs_are_one_finding() -> None:
    leaves = {f"l_{i}/kernel{end}": np.zeros((4, 4), "float32") for i in range(5) for end in ("", "_lora_b")}
    with pytest.raises(PlanError) as refused:
        make_plan(rule_file('- {einsum: "...D,DF->...F", from: "l_{i}/kernel", linear: "l.{i}"}'), MemorySource(leaves))
    (finding,) = refused.value.findings
    assert finding.problem.endswith("; so are 4 more") and finding.rule == "r.yaml:5"


@pytest.mark.parametrize("name", ["up/lora_down", "up/lora/weight_1", "lora/up/a"])
def test_an_adapter_with_unknown_names_is_refused(name: str) -> None:
    leaves = {"up/kernel": up().arrays["up/kernel"], name: up().arrays["up/kernel_lora_a"]}
    with pytest.raises(PlanError) as refused:
        make_plan(rule_file(f'{UP}\n- {{drop: "**", rest: true, because: unused}}'), MemorySource(leaves))
    assert [finding.code for finding in refused.value.findings] == ["adapter-dropped"]


@pytest.mark.parametrize("name", ["up/dora_magnitude", "up/hada_w1_a", "up/lokr_w1", "up/ia3_l", "vera_A"])
def test_an_adapter_of_another_kind_is_refused(name: str) -> None:
    leaves = {"up/kernel": up().arrays["up/kernel"], name: up().arrays["up/kernel_lora_a"]}
    with pytest.raises(PlanError) as refused:
        make_plan(rule_file(f'{UP}\n- {{drop: "**", rest: true, because: unused}}'), MemorySource(leaves))
    assert [(finding.code, finding.path) for finding in refused.value.findings] == [("adapter-dropped", name)]


@pytest.mark.parametrize(
    ("weight", "place", "moment"),
    [("q_0/kernel", "q_7", "opt/mu/q_0"), ("l/0/q/kernel", "l/7/q", "opt/mu/l/0/q"), ("q/kernel", "head", "opt/mu/q"), ("p/l_0/q/kernel", "p/l_7/q", "opt/mu/p/l_0/q")],
)  # fmt: skip
def test_a_pair_of_a_layer_that_the_model_lacks_is_refused(weight: str, place: str, moment: str) -> None:
    """A rule for the rest drops moments of the pairs, of which the optimizer has no weight; it does not drop a pair beside the model's layers."""
    arrays = up().arrays
    rules = rule_file(
        f'- {{einsum: "...D,DF->...F", from: {weight}, linear: up}}\n- {{drop: "**", rest: true, because: unused}}'
    )

    def tree(of: str) -> MemorySource:
        return MemorySource(
            {weight: arrays["up/kernel"], **{f"{of}/kernel_lora_{x}": arrays[f"up/kernel_lora_{x}"] for x in "ab"}}
        )

    assert len(make_plan(rules, tree(moment)).dropped) == 2
    with pytest.raises(PlanError, match="the tree has no weight that the pair is added to") as refused:
        make_plan(rules, tree(place))
    assert refused.value.findings[0].path == f"{place}/kernel_lora_a"


def test_pairs_of_a_user_s_own_layers_have_the_factor_that_was_given() -> None:
    """`x/lora_a` beside `x/kernel` does not make every other pair one of openpi's feed-forward layers, which have no factor."""
    arrays, names = up().arrays, ("q/kernel", "mlp/wi")
    tree = dict.fromkeys(names, arrays["up/kernel"])
    tree |= {f"{name}{x}": arrays[f"up/kernel_lora_{x}"] for name in ("q/lora_", "mlp/wi_lora_") for x in "ab"}
    rules = "\n".join(f'- {{einsum: "...D,DF->...F", from: {name}, linear: {name[0]}}}' for name in names)
    plan = make_plan(rule_file(rules), MemorySource(tree), settings={"lora_alpha": 6})
    assert [merge.scale for merge in plan.merges.values()] == [2, 2]


def test_the_pairs_of_a_dropped_tree_are_dropped_with_it() -> None:
    """The moments of an optimizer have the names of the parameters."""
    source = up()
    leaves = {**source.arrays, **{f"opt/mu/{name}": leaf for name, leaf in source.arrays.items()}, "opt/nu/x_lora_a": source.arrays["up/kernel"]}  # fmt: skip
    rules = rule_file(f"{UP}\n- {{drop: /opt/**, because: the optimizer}}")
    plan = make_plan(rules, MemorySource(leaves), settings={"lora_alpha": ALPHA})
    assert len(plan.merges) == 1 and len(plan.dropped) == 4
    assert {drop.reason for drop in plan.dropped} == {"the optimizer"}


def test_rules_that_name_a_pair_have_the_last_word() -> None:
    rules = """
- einsum: "...D,DF->...F"
  from: up/kernel
  plus: {einsum: "...D,DR,RF->...F", from: up/kernel_lora_a, times: up/kernel_lora_b, scale: 5}
  linear: up
"""
    plan = make_plan(rule_file(rules), up())
    assert [merge.scale for merge in plan.merges.values()] == [5]


# ---- what cannot be merged


def test_a_pair_of_a_layer_that_is_not_linear() -> None:
    with pytest.raises(PlanError) as refused:
        make_plan(rule_file("- {from: up/kernel, axes: VD, embedding: table}"), up(), settings={"lora_alpha": ALPHA})
    assert [finding.code for finding in refused.value.findings] == ["adapter-not-linear"]


def test_shapes_that_the_library_does_not_make() -> None:
    """The names say which is A: an exchanged pair of another rank does not fit, and is not guessed to be one."""
    leaves = dict(up().arrays)
    leaves["up/kernel_lora_a"], leaves["up/kernel_lora_b"] = leaves["up/kernel_lora_b"], leaves["up/kernel_lora_a"]
    with pytest.raises(PlanError) as refused:
        make_plan(rule_file(UP), MemorySource(leaves), settings={"lora_alpha": ALPHA})
    (finding,) = refused.value.findings
    assert finding.code == "adapter-shape-mismatch"
    assert (finding.expected, finding.got) == (
        "(16, r) and (r, 24), with one number for the rank r",
        "float32[3,24] and float32[16,3]",
    )


def test_layers_that_are_stacked() -> None:
    """nn.scan stacks the leaves of a pair on the axis on which it stacks the weight (MaxText: 1), or on the first."""
    rng = np.random.default_rng(0)
    layers, rules = 5, '- {einsum: "...D,DF->...F", from: "up/{i}/kernel", linear: "up.{i}"}'
    single = {f"up/{i}/kernel{end}": rng.standard_normal(shape).astype("f4") for i in range(layers) for end, shape in (("", (16, 24)), ("_lora_a", (16, 3)), ("_lora_b", (3, 24)))}  # fmt: skip
    want = run(make_plan(rule_file(rules), MemorySource(single), settings={"lora_alpha": ALPHA}))
    for weight, pair in ((0, 0), (1, 1), (1, 0), (2, 2)):
        stacked = {
            f"up/kernel{end}": np.stack([single[f"up/{i}/kernel{end}"] for i in range(layers)], pair if end else weight)
            for end in ("", "_lora_a", "_lora_b")
        }
        one = rule_file(f'- {{einsum: "...D,DF->...F", from: up/kernel, stacked: {{i: {weight}}}, linear: "up.{{i}}"}}')
        got = run(make_plan(one, MemorySource(stacked), settings={"lora_alpha": ALPHA}))
        assert all(np.array_equal(got[name], want[name]) for name in want), (weight, pair)


# ---- names


@pytest.mark.parametrize(
    ("first", "base", "writer"),
    [
        ("layers/0/attn/q_einsum/w_lora_a", "layers/0/attn/q_einsum/w", Writer.QWIX),
        ("q/kernel_lora_a/value", "q/kernel/value", Writer.QWIX),
        ("kernel_lora_a", "kernel", Writer.QWIX),
        ("q_einsum/_LoRAEinsum_0/lora/a", "q_einsum/w", Writer.GEMMA),
        ("mlp/_LoRAEinsum_gating_einsum/lora/a", "mlp/gating_einsum", Writer.GEMMA),
        ("mlp/_LoRAEinsum_linear/lora/a", "mlp/linear/w", Writer.GEMMA),
        ("dense/lora/a", "dense/kernel", Writer.GEMMA),
        ("q_einsum/lora_a", "q_einsum/w", Writer.OPENPI),
        ("dense/lora/lora_a", "dense/kernel", Writer.FLAX),
    ],
)
def test_names_of_the_libraries(first: str, base: str, writer: Writer) -> None:
    second = first.replace("_a", "_b") if "_a" in first else first[:-1] + "b"
    pairs = find_pairs([base, first, second, "other/kernel"])
    assert [(pair.base, pair.first, pair.second, pair.writer) for pair in pairs.values()] == [
        (base, first, second, writer)
    ]


@pytest.mark.parametrize("name", ["flora/kernel", "explorable_a", "q_proj/kernel", "colorado/w"])
def test_words_that_only_contain_the_letters(name: str) -> None:
    assert not has_word(name)


def test_where_the_weight_of_an_adapter_lies() -> None:
    assert place_of("a/q/_LoRAEinsum_0/lora/a") == "a/q" and place_of("a/q/kernel_lora_a/value") == "a/q"


# ---- what the check says of a wrong one

LAYERS = '- {einsum: "...D,DF->...F", from: "up/{i}/kernel", linear: "up.{i}"}'
Wide = dict[str, np.ndarray]


def kept(t: Wide, i: int = 0) -> np.ndarray:
    return t[f"up/{i}/kernel"]


def pair(t: Wide, i: int = 0) -> np.ndarray:
    return 2 * t[f"up/{i}/kernel_lora_a"] @ t[f"up/{i}/kernel_lora_b"]


def rounded(x: np.ndarray) -> np.ndarray:
    import ml_dtypes

    return x.astype(ml_dtypes.bfloat16)


FAULTS: dict[str, Callable[[Wide], np.ndarray]] = {
    "LoRA pair not merged": kept,
    "LoRA pair merged twice": lambda t: kept(t) + 2 * pair(t),
    "LoRA pair subtracted": lambda t: kept(t) - pair(t),
    "LoRA pair without its weight": pair,
    "LoRA pair exchanged": lambda t: kept(t) + 2 * t["up/0/kernel_lora_b"] @ t["up/0/kernel_lora_a"],
    "LoRA pair of another layer": lambda t: kept(t) + pair(t, 1),
    "LoRA pair merged in bfloat16": lambda t: rounded(kept(t)) + rounded(pair(t)),
    "the scale not divided by the rank": lambda t: kept(t) + 8 * pair(t),
    "the product without its scale": lambda t: kept(t) + pair(t) / 2,
    "transposed": lambda t: (kept(t) + pair(t)).T,
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_named(name: str, tmp_path: Path) -> None:
    """Square weights with a square pair: no shape tells A from B, or one layer from another."""
    rng = np.random.default_rng(7)
    ends = ("", "_lora_a", "_lora_b")
    leaves = {f"up/{i}/kernel{end}": rng.standard_normal((8, 8)).astype("float32") for i in range(3) for end in ends}
    plan, out = (
        make_plan(rule_file(LAYERS), MemorySource(leaves), settings={"lora_alpha": 16}),
        tmp_path / "m.safetensors",
    )
    assert isinstance(list(execute(plan, out))[-1], Result)
    tensors = load_file(out)
    assert check_weights(plan, open_written(out)).verdict is Verdict.PASSED
    assert check_layers(plan, open_written(out)).verdict is Verdict.PASSED
    wrong = FAULTS[name]({key: leaf.astype(np.float64) for key, leaf in leaves.items()})
    tensors["up.0.weight"] = np.ascontiguousarray(wrong.astype("float32").T)
    save_file(tensors, out, {"format": "pt"})
    (finding,) = check_weights(plan, open_written(out)).findings
    if "scale" in name:
        assert finding.data["diagnosis"] == "another scale of a pair" and name in str(finding)
    else:
        assert finding.data["diagnosis"] == name
    assert finding.path == "up.0.weight" and finding.rule == "r.yaml:5"
    assert check_layers(plan, open_written(out)).verdict is Verdict.FAILED


@pytest.mark.parametrize(
    ("config", "right", "wrong"),
    [
        ({"alpha_pattern": {"up.0": 32}}, 4, 2),  # the pattern is not obeyed
        ({"alpha_pattern": {"up.1": 48}}, 2, 6),  # it is that of another module
        (
            {"alpha_pattern": {r"^up\.[02]": 32}, "use_rslora": True},
            32 / 8**0.5,
            4,
        ),  # the root of the rank is forgotten
    ],
)
def test_a_wrong_alpha_of_one_module_is_named(config: dict[str, Any], right: float, wrong: float, tmp_path: Path) -> None:  # fmt: skip
    rng = np.random.default_rng(7)
    ends = ("", "_lora_a", "_lora_b")
    source = MemorySource({f"up/{i}/kernel{end}": rng.standard_normal((8, 8)).astype("float32") for i in range(3) for end in ends})  # fmt: skip
    source.path = tmp_path / "ckpt"
    save_json(source.path, "adapter_config.json", {"lora_alpha": 16, "r": 8, **config})
    plan, out = make_plan(rule_file(LAYERS), source), tmp_path / "m.safetensors"
    assert isinstance(list(execute(plan, out))[-1], Result)
    assert check_weights(plan, open_written(out)).verdict is Verdict.PASSED
    tensors = load_file(out)
    base, a, b = (source.arrays[f"up/0/kernel{end}"].astype(np.float64) for end in ends)
    assert relative_error(tensors["up.0.weight"], (base + right * a @ b).T) < 1e-6
    tensors["up.0.weight"] = np.ascontiguousarray((base + wrong * a @ b).T.astype("float32"))
    save_file(tensors, out, {"format": "pt"})
    (finding,) = check_weights(plan, open_written(out)).findings
    assert (finding.data["diagnosis"], finding.path) == ("another scale of a pair", "up.0.weight")
    assert check_layers(plan, open_written(out)).verdict is Verdict.FAILED


@pytest.mark.parametrize("axes", ["DF", "FD"])
def test_the_layers_level_does_not_use_the_merge(axes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A merge that takes B for A is what the weights level would compute as well."""
    rng = np.random.default_rng(8)
    leaves = {f"up/0/kernel{end}": rng.standard_normal((8, 8)).astype("float32") for end in ("", "_lora_a", "_lora_b")}
    right = Merge.fill
    monkeypatch.setattr(Merge, "fill", lambda self, out, origin, a, b, *rest: right(self, out, origin, b, a, *rest))
    rules = rule_file(f'- {{einsum: "...D,{axes}->...F", from: "up/{{i}}/kernel", linear: "up.{{i}}"}}')
    plan, out = make_plan(rules, MemorySource(leaves), settings={"lora_alpha": 16}), tmp_path / "m.safetensors"
    assert isinstance(list(execute(plan, out))[-1], Result)
    assert check_weights(plan, open_written(out)).verdict is Verdict.PASSED
    assert check_layers(plan, open_written(out)).verdict is Verdict.FAILED


@pytest.mark.slow
def test_all_levels_of_a_model_with_an_adapter(tmp_path: Path) -> None:
    """The published reference knows no adapter: it runs with the products added."""
    from support.gemma_models import directory, settings

    out = directory("gemma3-lora", tmp_path / "out")
    report = check(out, checkpoint("gemma3-lora"), model="gemma", settings=settings("gemma3-lora"))
    assert [level.verdict for level in report.levels] == [Verdict.PASSED] * 4


ROPE = """
- einsum: "...D,DNH->...NH"
  from: q/kernel
  prescaled_by: 1/sqrt(H)
  rope: {H: interleaved}
  linear: {module: q, rope: half-split}
"""


@pytest.mark.parametrize(
    ("order", "factor", "missing"),
    [
        (False, False, "de-interleaved and x 2.82843"),
        (False, True, "de-interleaved"),
        (True, False, "x 2.82843"),
    ],
)
def test_an_export_that_forgets_what_is_done_to_the_weight(
    order: bool, factor: bool, missing: str, tmp_path: Path
) -> None:
    """MaxText's export of an adapter: the product in the source's layout, on a weight in the target's."""
    rng = np.random.default_rng(12)
    shapes = {"": (16, 2, 8), "_lora_a": (16, 3), "_lora_b": (3, 16)}
    leaves = {f"q/kernel{end}": rng.standard_normal(shape).astype("float32") for end, shape in shapes.items()}
    plan, out = make_plan(rule_file(ROPE), MemorySource(leaves), settings={"lora_alpha": 6}), tmp_path / "m.safetensors"
    assert isinstance(list(execute(plan, out))[-1], Result)
    product = 2 * (leaves["q/kernel_lora_a"].astype(np.float64) @ leaves["q/kernel_lora_b"]).astype(np.float32)
    base = run(make_plan(rule_file(ROPE), MemorySource(leaves), settings={"adapter": "base"}))["q.weight"]
    if order:
        product = product.reshape(16, 2, 4, 2).swapaxes(2, 3).reshape(16, 16)
    product = product * np.float32(8**0.5) if factor else product
    save_file({"q.weight": base + product.T}, out, {"format": "pt"})
    (finding,) = check_weights(plan, open_written(out)).findings
    assert finding.data["diagnosis"] == "LoRA pair without what is done to its weight"
    assert finding.got.startswith("the product without") and finding.got.endswith(missing)


@pytest.mark.parametrize("model", ["gemma", "maxtext-llama3.1", "flax_transformers", "timesfm"])
def test_pairs_without_their_weights(model: str, tmp_path: Path) -> None:
    """What Tunix saves of a model with LoRA."""
    leaves = {f"layers/{i}/attn/q_einsum/w_lora_{x}": np.zeros((4, 4), "float32") for i in range(2) for x in "ab"}
    with pytest.raises(PlanError) as refused:
        convert.plan_conversion(model, MemorySource(leaves), settings={"lora_alpha": 4})
    (finding,) = refused.value.findings
    assert finding.code == "adapter-alone" and finding.got == "leaves such as layers/0/attn/q_einsum/w_lora_a"
