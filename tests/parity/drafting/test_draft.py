"""Drafted rule files: whole, honest about what they do not know, and right once their questions are answered."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import example as tried
from hypothesis import given, settings
from hypothesis import strategies as st

from convert import (
    CheckpointError,
    ConvertError,
    PlanError,
    Source,
    draft_rules,
    load_rules,
    open_source,
    parse_rules,
    plan_conversion,
    survey_rules,
)
from convert.drafting.path_groups import Names, group
from convert.planning.match import cover
from convert.planning.planner import make_plan
from convert.rules.attention_macro import LIBRARIES
from support.command_line import Run
from support.drafts import alternatives, answered, tree
from support.memory_source import MemorySource, rule_file, run, zeros
from support.paths import EXAMPLES, GOLDEN


@pytest.fixture
def convert(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    return Run(monkeypatch, capsys)


def patterns(source: Source) -> dict[str, int]:
    names = Names()
    return {names.text(g.steps): len(g.leaves) for g in group(source.leaves)}


# ---- grouping


def test_paths_are_grouped_by_indices_that_run_from_0_without_gaps() -> None:
    layers = {f"layer_{k}__{name}": (5, 7) for k in (0, 1, 2) for name in ("a", "b")}
    assert patterns(tree(**layers)) == {"layer_{i}/a": 3, "layer_{i}/b": 3}
    del layers["layer_1__b"]
    assert patterns(tree(**layers)) == {"layer_{0,2}/a": 2, "layer_{0,2}/b": 2, "layer_1/a": 1}
    assert patterns(tree(l_1=(2,), l_2=(2,), l_3=(2,))) == {"l_{1,2,3}": 3}
    assert patterns(tree(l_0=(2,), l_01=(2,))) == {"l_0": 1, "l_01": 1}


def test_the_leaves_of_one_layer_are_grouped_alike() -> None:
    """The biases of Dense_0 and Dense_1 have one shape, their kernels have not: they are two layers."""
    source = tree(Dense_0__kernel=(9, 5), Dense_0__bias=(5,), Dense_1__kernel=(5, 5), Dense_1__bias=(5,))
    assert list(patterns(source)) == ["Dense_0/kernel", "Dense_0/bias", "Dense_1/kernel", "Dense_1/bias"]


def test_siblings_and_stacks_of_their_own() -> None:
    source = tree(
        **{f"encoder_{k}__{x}__w": (4, 6) for k in (0, 1) for x in ("query", "key", "value")},
        **{f"decoder_{k}__{x}__w": (4, 6) for k in (0, 1) for x in ("alpha", "beta")},
    )
    assert patterns(source) == {
        "encoder_{i}/{query,key,value}/w": 6,
        "decoder_{j}/alpha/w": 2,
        "decoder_{j}/beta/w": 2,
    }


def test_names_that_are_patterns_are_escaped() -> None:
    source = MemorySource({"a{i}*/kernel": np.zeros((3, 5), np.float32), "a: #b/kernel": np.zeros((5, 2), np.float32)})
    rules = parse_rules(draft_rules(source))
    assert not cover(rules, source).findings
    assert {str(rule.path) for rule in rules.rules} == {"a\\{i\\}\\*/kernel", "a: #b/kernel"}


# ---- drafts


def module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


NORM = {"multiplies_by": 0, "epsilon": 1, "layer_norm": "norm"}
SQUARE = {"linear": "layers.{i}", "+": ["activation: silu"]}
OWN = {
    "block_{i}/merge/kernel": {"linear": (0, "blocks.{i}.merge")},
    "block_{i}/split/kernel": {"linear": "blocks.{i}.split", "+": ["activation: gelu_tanh"]},
    "block_{i}/norm/scale": {"multiplies_by": "scale", "epsilon": 0, "layer_norm": "blocks.{i}.norm"},
    "embed/embedding": {"embedding": 0},
    "head/kernel": {"linear": 0},
}
FLAX = {
    "dense_{i}/kernel": {"einsum": 0, **SQUARE},
    "norm/scale": NORM,
    "head/kernel": {"linear": 0},
}
EQUINOX = {
    "layers/{i}/weight": {"einsum": 1, **SQUARE},
    "norm/weight": NORM,
    "head/weight": {"linear": 0},
}
KERAS = {
    "layers/dense_{0,1}/vars/0": {"einsum": 0, "linear": "layers.{0,1}"},
    "layers/layer_normalization/vars/0": NORM,
    "layers/dense_2/vars/0": {"linear": "head"},
}
CONV = {
    "*": {"padding": "SAME", "conv": 0, "multiplies_by": 0, "epsilon": 1},
    "params/dense/kernel": {"flattened": 0, "linear": 1},
    "params/depthwise/kernel": {"feature_group_count": 0},
    "params/group/scale": {"layer_norm": 1, "+": ["num_groups: 3"]},
    "params/head/kernel": {"linear": 0},
    "params/mix/kernel": {"+": ["weight_standardization: (w - mean) / (std + 1e-5)"]},
    "params/norm/scale": {"batch_norm": 0},
    "params/stem/kernel": {"+": ["strides: 2", "input_size: [9, 8]"]},
    "params/up/kernel": {"conv": 1, "+": ["strides: 2"]},
}


def example(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, convert: Run) -> tuple[Source, Path]:
    """The checkpoint that an example's own script writes, and the example's rules."""
    if name == "own-model":
        module(EXAMPLES / name / "model_jax.py").main(str(folder / "ckpt"), str(folder / "io.npz"))
        return open_source(folder / "ckpt"), EXAMPLES / name / "rules.yaml"
    if name == "conv-net":
        module(EXAMPLES / name / "model_jax.py").main(str(folder / "ckpt.npz"))
        return open_source(folder / "ckpt.npz"), EXAMPLES / name / "rules.yaml"
    formats = EXAMPLES / "formats"
    if name == "flax":
        module(formats / "flax_model.py").main("msgpack", str(folder / "ckpt.msgpack"), str(folder / "io.npz"))
        return open_source(folder / "ckpt.msgpack"), formats / "flax.yaml"
    if name == "keras":
        module(formats / "keras_model.py").main(str(folder / "ckpt.weights.h5"), str(folder / "io.npz"))
        return open_source(folder / "ckpt.weights.h5"), formats / "keras.yaml"
    monkeypatch.syspath_prepend(str(formats))
    module(formats / "equinox_model.py").main(str(folder / "ckpt.eqx"), str(folder / "io.npz"))
    (folder / "skeleton.json").write_text(convert("skeleton", "equinox_model:make")[0])
    return open_source(folder / "ckpt.eqx", skeleton=folder / "skeleton.json"), formats / "equinox.yaml"


@pytest.mark.parametrize(
    ("name", "answers"),
    [("own-model", OWN), ("flax", FLAX), ("equinox", EQUINOX), ("keras", KERAS), ("conv-net", CONV)],
)
def test_a_draft_of_an_example_with_its_questions_answered_is_the_examples_rules(
    name: str, answers: Mapping[str, Mapping[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, convert: Run
) -> None:
    source, rules = example(name, tmp_path, monkeypatch, convert)
    text = draft_rules(source)
    draft = parse_rules(text, "draft.yaml")
    coverage = cover(draft, source)
    assert not coverage.findings and coverage.claimed == len(source.leaves) and draft.questions
    assert not survey_rules(draft, source).uncovered
    with pytest.raises(PlanError) as open_still:
        make_plan(draft, source)
    assert [*open_still.value.findings] == [question.finding for question in draft.questions]
    whole = answered(text, answers, "  R: {is: rows, equals: 8}\n  S: {is: columns, equals: 4}\n")
    if name != "conv-net":
        whole = whole.replace("  R: {is: rows, equals: 8}\n  S: {is: columns, equals: 4}\n", "")
    ours = run(plan_conversion(parse_rules(whole), source))
    theirs = run(plan_conversion(load_rules(rules), source))
    assert ours.keys() == theirs.keys()
    for tensor, value in theirs.items():
        np.testing.assert_array_equal(ours[tensor], value, err_msg=tensor)


def test_a_wrong_answer_gives_another_conversion(tmp_path: Path) -> None:
    """The question about a square kernel is one: its two answers differ."""
    source = tree(params__dense__kernel=(6, 6))
    text = draft_rules(source)
    one, other = (
        run(plan_conversion(parse_rules(answered(text, {"dense/kernel": {"einsum": k, "linear": 0}})), source))
        for k in (0, 1)
    )  # fmt: skip
    np.testing.assert_array_equal(one["dense.weight"], other["dense.weight"].T)


def test_every_golden_tree_is_covered_and_nothing_contradicts() -> None:
    seen = 0
    for folder in sorted(path for path in GOLDEN.iterdir() if path.is_dir()):
        try:
            source = open_source(folder / "ckpt" if (folder / "ckpt").exists() else folder)
        except ConvertError:
            continue  # several checkpoints
        rules = parse_rules(draft_rules(source), "draft.yaml")
        assert cover(rules, source).claimed == len(source.leaves), folder
        with pytest.raises(PlanError) as error:
            make_plan(rules, source)
        assert [*error.value.findings] == [question.finding for question in rules.questions], folder
        seen += 1
    assert seen > 15


KEYS = ["params", "state", "block_0", "block_1", "block_2", "b0_x", "b1_x", "attn", "query", "key", "value", "out", "lora", "lstm", "cell", "vars", "conv", "norm", "batch_norm", "~", "mean_ema", "query_proj", "{i}", "a*"]  # fmt: skip
LAST = ["kernel", "w", "weight", "bias", "b", "scale", "offset", "mean", "average", "hidden", "counter", "lora_a", "lora_b", "embedding", "gating_einsum", "linear", "0", "1", "2", "u", "step"]  # fmt: skip
SHAPES = st.lists(st.sampled_from([1, 2, 3, 4, 12]), max_size=5).map(tuple)
TREES = st.dictionaries(
    st.tuples(st.lists(st.sampled_from(KEYS), max_size=3), st.sampled_from(LAST)).map(
        lambda x: "/".join([*x[0], x[1]])
    ),
    SHAPES,
    min_size=1,
    max_size=14,
).filter(lambda t: not any(other.startswith(f"{name}/") for name in t for other in t))


@settings(max_examples=150, deadline=None)
@tried({"vars/0": ()})
@tried({"vars/0": (2, 2, 2, 2, 2, 2, 2)})
@given(TREES)
def test_a_draft_of_any_tree_covers_it_and_contradicts_nothing(shapes: dict[str, tuple[int, ...]]) -> None:
    source = MemorySource({name: np.zeros(shape, np.float32) for name, shape in shapes.items()})
    rules = parse_rules(draft_rules(source), "draft.yaml")
    coverage = cover(rules, source)
    assert coverage.claimed == len(source.leaves) and not coverage.findings
    try:
        make_plan(rules, source)
    except PlanError as error:
        open_ones = [question.finding for question in rules.questions]
        assert [*error.findings] == open_ones or error.code == "rules-of-another-model"


def test_what_is_a_guess_and_what_a_question() -> None:
    source = tree(
        params__embed__embedding=(11, 12),
        params__norm__scale=(12,),
        params__attn__query__kernel=(12, 3, 4),
        params__attn__query__bias=(3, 4),
        params__attn__out__kernel=(3, 4, 12),
        params__mixer__kernel=(5, 8, 8),
        params__head__kernel=(12, 7),
        params__bn__scale=(12,),
        params__bn__bias=(12,),
        batch_stats__bn__mean=(12,),
        batch_stats__bn__var=(12,),
        opt_state__0__mu__kernel=(12, 7),
    )
    rules = {str(rule.path): rule for rule in parse_rules(draft_rules(source)).rules}
    query, out = rules["params/attn/query/kernel"], rules["params/attn/out/kernel"]
    assert "einsum" not in {*query.asked, *out.asked} and "activation" not in query.asked
    equation = query.kind.equations[""]  # type: ignore[attr-defined]
    assert (equation.outputs, equation.inputs) == (equation.weight[1:], equation.weight[0])
    assert out.kind.equations[""].inputs == out.kind.equations[""].weight[:2]  # type: ignore[attr-defined]
    assert set(rules["params/mixer/kernel"].asked) == {
        "linear"
    }  # heads, blocks, a stack or a Conv1D: the target says which
    assert set(rules["params/norm/scale"].asked) == {"multiplies_by", "epsilon", "rms_norm"}
    assert (
        rules["params/bn/scale"].kind_name == "batch_norm"
        and "mean" in rules["params/bn/scale"].sources["running_mean"].text
    )
    assert rules["params/embed/embedding"].kind_name == "embedding"
    assert rules["opt_state/**"].kind_name == "drop"
    assert "block diagonal" in draft_rules(source) and "a layer norm without" not in draft_rules(source)


def test_the_states_of_optimizers_are_dropped_at_any_depth() -> None:
    """An agent of several networks, each with its optimizer: one `drop` for each, and no rule for a moment."""
    weights = {"dense_0/kernel": (12, 7), "dense_0/bias": (7,)}
    shapes = {f"agent/{net}/params/{path}": shape for net in ("actor", "critic") for path, shape in weights.items()}
    for net in ("actor", "critic"):
        shapes |= {f"agent/{net}/opt_state/0/{m}/{path}": s for m in ("mu", "nu") for path, s in weights.items()}
        shapes[f"agent/{net}/opt_state/0/count"] = ()
    source = MemorySource({name: np.zeros(shape, np.float32) for name, shape in shapes.items()})
    draft = parse_rules(draft_rules(source))
    drops = [str(rule.path) for rule in draft.rules if rule.kind_name == "drop"]
    assert drops == ["agent/actor/opt_state/**", "agent/critic/opt_state/**"]
    assert not [rule for rule in draft.rules if rule.kind_name != "drop" and "opt_state" in str(rule.path)]
    assert not survey_rules(draft, source).uncovered


def test_stacked_layers_are_told_by_the_scales_of_their_norms() -> None:
    source = tree(
        params__layers__norm__scale=(3, 8),
        params__layers__mlp__kernel=(3, 8, 5),
        params__layers__mlp__bias=(3, 5),
        params__head__kernel=(8, 7),
    )
    text = draft_rules(source)
    answers = {
        "layers/norm/scale": {"multiplies_by": 0, "epsilon": 0, "rms_norm": 0},
        "layers/mlp/kernel": {"linear": 0},
        "head/kernel": {"linear": 0},
    }
    made = run(plan_conversion(parse_rules(answered(text, answers)), source))
    np.testing.assert_array_equal(made["layers.2.mlp.weight"], source.arrays["params/layers/mlp/kernel"][2].T)
    np.testing.assert_array_equal(made["layers.1.norm.weight"], source.arrays["params/layers/norm/scale"][1])
    assert made["head.weight"].shape == (7, 8)


def test_recurrent_cells_are_told_by_their_leaves() -> None:
    """A GRU of flax and an LSTM of Equinox are one rule each; the packed GRU of nnx is told from its LSTM by the shapes."""
    gru = {f"rnn__i{k}__{x}": (3, 5) if x == "kernel" else (5,) for k in "rzn" for x in ("kernel", "bias")}
    gru |= {f"rnn__h{k}__kernel": (5, 5) for k in "rzn"} | {"rnn__hn__bias": (5,)}
    lstm = {"cell__weight_ih": (20, 3), "cell__weight_hh": (20, 5), "cell__bias": (20,)}
    packed = {"packed__dense_i__kernel": (3, 15), "packed__dense_i__bias": (15,), "packed__dense_h__kernel": (5, 15)}
    source = tree(**gru, **lstm, **packed, out__kernel=(5, 2))
    text = draft_rules(source)
    found = {str(rule.path).split("/")[0]: rule for rule in parse_rules(text).rules}
    assert [found[name].kind_name for name in ("rnn", "cell", "packed", "out")] == ["gru", "lstm", "gru", "linear"]
    assert all(f"cell: {name}" in text for name in ("flax.linen.GRUCell", "equinox.nn.LSTMCell", "flax.nnx.GRUCell"))
    answers = {
        "rnn": {"gru": 0},
        "cell": {"lstm": 0},
        "packed": {"gru": 0},
        "out/kernel": {"linear": 0},
    }
    made = run(plan_conversion(parse_rules(answered(text, answers)), source))
    assert made["rnn.weight_ih_l0"].shape == (15, 3) and made["cell.weight_hh_l0"].shape == (20, 5)
    np.testing.assert_array_equal(made["packed.weight_ih_l0"], source.arrays["packed/dense_i/kernel"].T)


@pytest.mark.parametrize("library", LIBRARIES)
def test_attention_of_each_library_is_told_by_its_leaves(library: str) -> None:
    """With and without biases, and with keys and values of their own widths; not where the shapes contradict."""
    facts = LIBRARIES[library]

    def made(own: int, biased: bool, heads: int = 3) -> MemorySource:
        sizes = {"X": 12, "Y": 12, "N": heads, "H": 4, "E": 12}
        specs = {}
        for k, kernel in enumerate(facts.kernels):
            letters = (facts.outward if k == 3 else facts.inward).split(",")[1].split("->")[0]
            wide = {**sizes, "X": own if k in (1, 2) else 12}
            specs[f"block_0/attn/{kernel}"] = tuple(wide[c] for c in letters)
            if biased:
                specs[f"block_0/attn/{facts.biases[k]}"] = (12,) if k == 3 else tuple(wide[c] for c in facts.heads)
        specs["block_0/norm/scale"] = (12,)
        return tree(**{name.replace("/", "__"): shape for name, shape in specs.items()})

    for own, biased in ((12, facts.biased), (12, not facts.biased), (10, True)):
        source = made(own, biased)
        text = draft_rules(source)
        assert f"- layer: {library.replace('nnx.MultiHeadAttention', 'linen.MultiHeadDotProductAttention')} " in text
        assert ("bias: true" in text) == (biased and not facts.biased), text
        assert ("bias: false" in text) == (facts.biased and not biased), text
        answers = {
            "block_0/attn": {"attention": 0},
            "block_0/norm/scale": {"multiplies_by": 0, "epsilon": 0, "rms_norm": 0},
        }
        tensors = run(plan_conversion(parse_rules(answered(text, answers)), source))
        names = {"q_proj_weight", "k_proj_weight", "v_proj_weight"} if own == 10 else {"in_proj_weight"}
        names |= {"out_proj.weight"} | ({"in_proj_bias", "out_proj.bias"} if biased else set())
        assert tensors.keys() == {f"block_0.attn.{name}" for name in names} | {"block_0.norm.weight"}
    if "N" in facts.heads:  # torch's layer has no place for heads that are not as wide together as the model
        assert "# a torch.nn.MultiheadAttention" not in draft_rules(made(12, facts.biased, heads=5))
    source = made(12, True)
    leaf = f"block_0/attn/{facts.kernels[1]}"
    shape = list(source.arrays[leaf].shape)
    shape[facts.inward.split(",")[1].index(facts.heads[-1])] = 9
    source = MemorySource({**source.arrays, leaf: np.zeros(shape, np.float32)})
    assert "attention:" not in draft_rules(source)


def test_what_several_rules_ask_alike_is_asked_once() -> None:
    source = tree(
        **{f"{name}__scale": (6,) for name in ("pre", "mid", "post")},
        **{f"{name}__kernel": (6, 6) for name in ("up", "down")},
    )
    text = draft_rules(source)
    draft = parse_rules(text, "draft.yaml")
    asked = {(q.key, q.path): q.others for q in draft.questions}
    assert len(asked) == 8 and asked["einsum", "up/kernel"] == 1
    assert asked["epsilon", "pre/scale"] == asked["multiplies_by", "pre/scale"] == 2
    assert any("`epsilon` of pre/scale (and of 2 rules more) is open" in str(q) for q in draft.questions)
    answers = {
        "*": {"multiplies_by": "1+scale", "epsilon": "1e-6", "einsum": 1},
        **{f"{name}/scale": {"rms_norm": 0} for name in ("pre", "mid", "post")},
        **{f"{name}/kernel": {"linear": 0} for name in ("up", "down")},
    }
    whole = answered(text, answers)
    made = run(plan_conversion(parse_rules(whole), source))
    for name in ("pre", "mid", "post"):
        np.testing.assert_array_equal(made[f"{name}.weight"], source.arrays[f"{name}/scale"] + 1)
    for name in ("up", "down"):
        np.testing.assert_array_equal(made[f"{name}.weight"], source.arrays[f"{name}/kernel"])
    before, rule, after = whole.partition("from: mid/scale")
    differs = before + rule + after.replace("multiplies_by: *multiplies_by", "multiplies_by: scale", 1)
    made = run(plan_conversion(parse_rules(differs), source))
    np.testing.assert_array_equal(made["mid.weight"], source.arrays["mid/scale"])
    np.testing.assert_array_equal(made["post.weight"], source.arrays["post/scale"] + 1)
    with pytest.raises(ConvertError, match=r"rules.yaml:\d+:\d+: not YAML: undefined alias 'epsilon'"):
        parse_rules(whole.replace("&epsilon ", ""))


def test_questions_that_change_nothing_are_not_asked() -> None:
    """What follows a layer, and how its statistics move, is no weight; a kernel of one element needs no padding."""
    source = tree(
        params__bn__scale=(5,),
        params__bn__bias=(5,),
        batch_stats__bn__mean=(5,),
        batch_stats__bn__var=(5,),
        params__conv__kernel=(1, 1, 4, 5),
        params__dense__kernel=(5, 3),
    )
    text = draft_rules(source)
    assert {q.key for q in parse_rules(text).questions} == {"multiplies_by", "epsilon", "batch_norm", "conv", "linear"}
    assert (
        "# Add `activation: gelu_tanh` to a rule" in text and "# momentum: 0.99" in text and "\n  padding:" not in text
    )
    assert "flattened" not in text  # 5 is a width of the tree


def test_names_of_gemmas_code_and_of_praxis() -> None:
    source = tree(
        norm__scale=(8,),
        a__q_einsum__w=(3, 8, 4),
        a__kv_einsum__w=(2, 3, 8, 4),
        a__attn_vec_einsum__w=(3, 4, 8),
        a__mlp__gating_einsum=(2, 9, 8),
        a__mlp__linear=(9, 8),
        ff__hidden__linear__w=(8, 7),
        ff__hidden__bias__b=(7,),
    )
    text = draft_rules(source)
    assert {q.key for q in parse_rules(text).questions} == {"multiplies_by", "epsilon", "rms_norm", "linear"}
    paths = [f"a/{m}" for m in ("q_einsum/w", "kv_einsum/w", "attn_vec_einsum/w", "mlp/gating_einsum", "mlp/linear")]
    answers: dict[str, dict[str, Any]] = {path: {"linear": 0} for path in (*paths, "ff/hidden/linear/w")}
    answers["norm/scale"] = {"multiplies_by": 0, "epsilon": 0, "rms_norm": 0}
    made = run(plan_conversion(parse_rules(answered(text, answers)), source))
    w = source.arrays
    np.testing.assert_array_equal(made["a.q_einsum.weight"], w["a/q_einsum/w"].transpose(0, 2, 1).reshape(12, 8))
    np.testing.assert_array_equal(made["a.v_proj.weight"], w["a/kv_einsum/w"][1].transpose(0, 2, 1).reshape(12, 8))
    np.testing.assert_array_equal(made["a.attn_vec_einsum.weight"], w["a/attn_vec_einsum/w"].reshape(12, 8).T)
    np.testing.assert_array_equal(made["a.mlp.up_proj.weight"], w["a/mlp/gating_einsum"][1])
    np.testing.assert_array_equal(made["a.mlp.linear.weight"], w["a/mlp/linear"].T)
    np.testing.assert_array_equal(made["ff.hidden.linear.bias"], w["ff/hidden/bias/b"])


def test_a_kernel_without_input_channels_is_a_filter_for_each_channel() -> None:
    source = tree(conv_1d__w=(4, 6), conv_1d__b=(6,), up__w=(4, 6))
    text = draft_rules(source)
    answers = {"conv_1d/w": {"padding": 0, "conv": 0}, "up/w": {"linear": 0}}
    made = run(plan_conversion(parse_rules(answered(text, answers)), source))
    np.testing.assert_array_equal(made["conv_1d.weight"], source.arrays["conv_1d/w"].T[:, None])
    np.testing.assert_array_equal(made["up.weight"], source.arrays["up/w"].T)


def test_an_index_may_stand_within_a_key() -> None:
    source = tree(
        **{f"block{k}_conv__kernel": (3, 3, 4, 4) for k in range(3)}, layer_a2_b__w=(4, 5), layer_a3_b__w=(4, 5)
    )
    assert patterns(source) == {"block{i}_conv/kernel": 3, "layer_a2_b/w": 1, "layer_a3_b/w": 1}
    assert not cover(parse_rules(draft_rules(source)), source).findings


def test_cells_whose_trees_are_those_of_linear_layers_are_told_by_their_names() -> None:
    shapes = {"linear__w": (8, 20), "linear__b": (20,)}
    source = tree(**{f"{m}__{k}": shape for m in ("my_lstm", "head") for k, shape in shapes.items()})
    rules = {str(rule.path): rule.kind_name for rule in parse_rules(draft_rules(source)).rules}
    assert rules == {"my_lstm/linear/w": "lstm", "head/linear/w": "linear"}


def test_keras_cells_and_directions() -> None:
    """`reset_after` and biases are told by the shapes; a bidirectional layer is one torch module."""
    gru = {"vars__0": (3, 15), "vars__1": (5, 15), "vars__2": (2, 15)}
    source = tree(
        **{
            f"layers__bidirectional__{way}_layer__cell__{k}": v
            for way in ("forward", "backward")
            for k, v in gru.items()
        },
        **{f"layers__gru__cell__{k}": (15,) if k == "vars__2" else v for k, v in gru.items()},
        layers__lstm__cell__vars__0=(3, 20),
        layers__lstm__cell__vars__1=(5, 20),
    )
    text = draft_rules(source)
    assert re.findall(r"cell: (\S+)", text) == ["keras.layers.GRU"] * 2 + ["keras.layers.GRU(reset_after=False)", "keras.layers.LSTM(use_bias=False)"]  # fmt: skip
    answers = {f"layers/bidirectional/{way}_layer/cell": {"gru": 0} for way in ("forward", "backward")}
    answers |= {"layers/gru/cell": {"gru": 0}, "layers/lstm/cell": {"lstm": 0}}
    rules = parse_rules(answered(text, answers))
    with pytest.raises(PlanError, match="allow-custom-cells"):
        plan_conversion(rules, source)
    made = run(plan_conversion(rules, source, settings={"custom_cells": True}))
    assert {"layers.bidirectional.weight_ih_l0", "layers.bidirectional.weight_ih_l0_reverse"} <= made.keys()


def test_stacks_of_equinox_are_told_by_a_weight_and_a_bias_of_one_shape() -> None:
    source = tree(
        stack__norm__weight=(4, 6), stack__norm__bias=(4, 6), stack__up__weight=(4, 9, 6), stack__up__bias=(4, 9)
    )
    text = draft_rules(source)
    answers = {
        "stack/norm/weight": {"multiplies_by": 0, "epsilon": 0, "layer_norm": 0},
        "stack/up/weight": {"linear": 0},
    }
    made = run(plan_conversion(parse_rules(answered(text, answers)), source))
    np.testing.assert_array_equal(made["stack.3.up.weight"], source.arrays["stack/up/weight"][3])
    np.testing.assert_array_equal(made["stack.1.norm.bias"], source.arrays["stack/norm/bias"][1])


def readings(text: str, path: str) -> list[str]:
    """What the draft offers as the target of a leaf, each with all its lines."""
    block = next(block for block in text.split("\n\n") if f"from: {path}" in block).splitlines()
    at = next(k for k, line in enumerate(block) if re.match(r"(- |  )(linear|conv|conv_transpose): ask", line))
    return ["; ".join(lines) for lines, _ in alternatives(block[at + 1 :])]


def test_a_kernel_with_three_axes_has_every_reading_that_its_bias_allows() -> None:
    """Of in = out, where a decision would not show in a shape; each reading is a whole answer, and they differ."""
    source = tree(up__kernel=(3, 6, 6), up__bias=(6,), gate__kernel=(2, 5, 7), mid__kernel=(3, 6, 6), mid__bias=(3, 6))
    text = draft_rules(source)
    assert {q.key for q in parse_rules(text).questions} == {"linear"}
    numbers = "dimension_numbers: NWC,WIO->NWC; axes: "
    assert readings(text, "up/kernel") == [
        "linear: up; einsum: ...NH,NHD->...D",
        f"conv: up; {numbers}PCD",
        f"conv_transpose: up; {numbers}PCD",
        f"conv_transpose: up; {numbers}PCD; transpose_kernel: true",
    ]
    gate = readings(text, "gate/kernel")
    assert (
        len(gate) == 10 and sum(one.startswith("linear: gate.{s}; ") and "stacked: {s: 0}" in one for one in gate) == 1
    )
    assert sum("{module: gate, einsum:" in one for one in gate) == 1
    mid = readings(text, "mid/kernel")
    targets = [one.partition(";")[0] for one in mid]
    assert targets[:3] == ["linear: mid", "linear: mid", "linear: mid.{s}"] and "{module: mid" in targets[3]
    found = {}
    for name, count in (("up", 4), ("gate", 10), ("mid", 4)):
        for k in range(count):
            answers = {f"{n}/kernel": {"linear": k if n == name else 0} for n in ("up", "gate", "mid")}
            made = run(plan_conversion(parse_rules(answered(text, answers)), source))
            mine = {key: value for key, value in made.items() if key.startswith(name)}
            found[name, k] = repr(
                [(key, value.shape, value.ravel()[:40].tolist()) for key, value in sorted(mine.items())]
            )
    # A convolution and the transposed one that JAX turns itself have one tensor: torch calls its axes otherwise.
    assert len(set(found.values())) == len(found) - 2


def test_what_a_tree_of_four_axes_says_with_its_bias() -> None:
    source = tree(
        mix__kernel=(2, 4, 3, 5), mix__bias=(3, 5), stem__w=(3, 3, 4, 4), stem__b=(4,), deep__kernel=(2, 4, 3, 5)
    )
    text = draft_rules(source)
    made = parse_rules(answered(text, {"mix/kernel": {"linear": 0}, "stem/w": {"padding": 0, "conv": 1}, "deep/kernel": {"linear": 3}}))  # fmt: skip
    tensors = run(plan_conversion(made, source))
    np.testing.assert_array_equal(
        tensors["mix.weight"], source.arrays["mix/kernel"].transpose(2, 3, 0, 1).reshape(15, 8)
    )
    turned = source.arrays["stem/w"][::-1, ::-1].transpose(3, 2, 0, 1)  # Haiku's: H W O I, not turned round by JAX
    np.testing.assert_array_equal(tensors["stem.weight"], turned)
    assert readings(text, "deep/kernel")[0].startswith("conv: deep; dimension_numbers: NHWC,HWIO->NHWC; axes: ")


def test_cells_whose_trees_do_not_tell_an_argument() -> None:
    source = tree(
        rnn__i__kernel=(3, 5), rnn__i__bias=(5,), rnn__h__kernel=(5, 5), mid__weight_ih=(15, 3), mid__weight_hh=(15, 5)
    )
    text = draft_rules(source)
    assert {(q.key, q.path.partition("/")[0]) for q in parse_rules(text).questions} == {
        ("cell", "rnn"),
        ("rnn", "rnn"),
        ("gru", "mid"),
    }
    plain, residual = (
        run(plan_conversion(parse_rules(answered(text, {"rnn": {"cell": k, "rnn": 0}, "mid": {"gru": 0}})), source))
        for k in (0, 1)
    )
    np.testing.assert_array_equal(residual["rnn.weight_hh_l0"], plain["rnn.weight_hh_l0"] + np.eye(5, dtype=np.float32))
    np.testing.assert_array_equal(plain["mid.weight_hh_l0"], source.arrays["mid/weight_hh"])


@pytest.mark.parametrize("top", ["params/", ""], ids=["variables", "params alone"])
def test_weight_norms_of_some_layers_that_are_called_alike(top: str) -> None:
    """flax's own names: ``Dense_1`` has a weight norm and ``Dense_0`` has none; within a module, too."""
    names = ("", "block__")
    dense = {
        f"{top}{n}Dense_{k}__{x}": (4, 4) if x == "kernel" else (4,)
        for n in names
        for k in (0, 1)
        for x in ("kernel", "bias")
    }
    source = tree(**dense, **{f"{top}{n}WeightNorm_0__Dense_1__kernel__scale": (4,) for n in names})
    text = draft_rules(source)
    answers: dict[str, dict[str, Any]] = {"*": {"einsum": 0}}
    answers |= {f"{n}Dense_{k}/kernel": {"linear": 0, "einsum": 0} for n in ("", "block/") for k in (0, 1, "{i}")}
    made = run(plan_conversion(parse_rules(answered(text, answers)), source))
    for n in ("", "block/"):
        w, scale = (
            source.arrays[f"{top}{n}Dense_1/kernel"],
            source.arrays[f"{top}{n}WeightNorm_0/Dense_1/kernel/scale"],
        )
        wanted = (w / np.sqrt((w**2).sum(0)) * scale).T
        np.testing.assert_allclose(made[f"{n.replace('/', '.')}Dense_1.weight"], wanted, rtol=1e-5)
        np.testing.assert_array_equal(
            made[f"{n.replace('/', '.')}Dense_0.weight"], source.arrays[f"{top}{n}Dense_0/kernel"].T
        )


def test_every_convolution_is_offered_strides() -> None:
    """Nothing in a tree tells them: a rule that refers to another's padding has a stride of its own, as a kernel of 1 x 1 has."""
    shapes = {"stem": (7, 7, 3, 8), "mid": (3, 3, 8, 8), "proj": (1, 1, 8, 16), "up_deconv": (4, 4, 16, 8)}
    source = tree(**{f"{name}__conv__kernel": shape for name, shape in shapes.items()})
    text = draft_rules(source)
    offered = {rule.split("from: ")[1].split("/")[0]: re.findall("# strides: 2    # (.*)", rule) for rule in text.split("\n\n") if "from: " in rule}  # fmt: skip
    larger = ["if they are not 1; with SAME say `input_size:`, too"]
    assert offered == {name: ["if they are not 1; with `padding: VALID`"] if name == "proj" else larger for name in shapes}  # fmt: skip
    assert text.count("padding: *padding") == 2
    answers = {f"{name}/conv/kernel": {"padding": "VALID", "conv": 0, "conv_transpose": 0} for name in shapes}
    for more in ([], ["padding: VALID", "strides: 2"]):
        answers["proj/conv/kernel"]["+"] = more
        assert plan_conversion(parse_rules(answered(text, answers)), source)


@pytest.mark.parametrize("name", ["ConvLocal_0", "my_conv"])
def test_filters_for_each_place_are_no_convolution(name: str) -> None:
    """flax's ConvLocal has a bias for each place, too; without one its name tells."""
    shapes = {f"{name}__kernel": (5, 6, 36, 4), f"{name}__bias": (5, 6, 4)}
    kept = [shapes] if name == "my_conv" else [shapes, {f"{name}__kernel": (5, 6, 36, 4)}]
    for shape in kept:
        draft = parse_rules(draft_rules(tree(**shape)))
        assert [rule.kind_name for rule in draft.rules] == ["parameter"] * len(shape)
    plain = parse_rules(draft_rules(tree(my_conv__kernel=(5, 6, 36, 4), my_conv__bias=(4,))))
    assert [rule.kind_name for rule in plain.rules] == ["conv"]


def test_keras_slopes_of_several_axes_are_a_parameter() -> None:
    draft = parse_rules(draft_rules(tree(layers__p_re_lu__vars__0=(4, 4, 4), layers__p_re_lu_1__vars__0=(3, 5))))
    assert [rule.kind_name for rule in draft.rules] == ["parameter", "parameter"]


@pytest.mark.parametrize("has", [("scale", "bias"), ("scale",), ("bias",)], ids="+".join)
@pytest.mark.parametrize("name", ["GroupNorm_0", "group_norm", "group_normalization"])
def test_the_name_that_libraries_give_a_norm_decides_its_kind(name: str, has: tuple[str, ...]) -> None:
    """And the number of groups is asked for."""
    source = tree(**{f"params__{name}__{key}": (64,) for key in has}, params__gn__scale=(64,), params__gn__bias=(64,))
    text = draft_rules(source)
    rule = next(block for block in text.split("\n\n") if f"{name}/" in block)
    assert "group_norm: ask    # question: what is" in rule and f"# group_norm: {name}    # guess: by its name" in rule
    assert "  num_groups: ask    # question: " in rule
    assert "layer_norm: gn    # guess: a bias" in text and text.count("layer_norm: ask") == 1


def test_an_empty_tree_is_refused() -> None:
    with pytest.raises(CheckpointError) as error:
        draft_rules(tree())
    assert error.value.code == "tree-empty"


def test_the_letters_run_out_without_an_error() -> None:
    source = tree(**{f"layer{chr(97 + k % 26)}{chr(97 + k // 26)}__kernel": (100 + k, 200 + k) for k in range(40)})
    rules = parse_rules(draft_rules(source))
    assert cover(rules, source).claimed == 40 and {rule.kind_name for rule in rules.rules} == {"linear", "parameter"}


# ---- open questions


OPEN = """
- einsum: ask
  from: dense/kernel
  linear: ask
- from: norm/scale
  multiplies_by: ask
  epsilon: 1e-6
  layer_norm: norm
"""


def test_a_file_with_questions_is_valid_and_converts_nothing() -> None:
    rules = rule_file(OPEN)
    assert [(str(q.at), q.key, q.path) for q in rules.questions] == [
        ("r.yaml:5:11", "einsum", "dense/kernel"),
        ("r.yaml:7:11", "linear", "dense/kernel"),
        ("r.yaml:9:18", "multiplies_by", "norm/scale"),
    ]
    with pytest.raises(PlanError) as error:
        make_plan(rules, MemorySource(zeros(**{"dense/kernel": (3, 3), "norm/scale": (3,)})))
    assert "r.yaml:9:18: `multiplies_by` of norm/scale is open; write what the source does in place of `ask`" in str(error.value)  # fmt: skip


def test_a_buffer_may_be_asked_for() -> None:
    head = "model: m\ntitle: M\nfacts: {min_timescale: 1, max_timescale: 9}\ntargets:\n  torch: {loads: T}\n"
    rules = rule_file("- timescales: D\n  buffer: ask\n- from: a\n  axes: D\n  parameter: b", head)
    assert [str(q) for q in rules.questions] == [
        "r.yaml:8:11: `buffer` of buffer is open; write what the source does in place of `ask`"
    ]
    with pytest.raises(PlanError, match="1 problem"):
        make_plan(rules, MemorySource(zeros(a=(4,))))


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        (
            "- from: a\n  multiplies_by: asked\n  epsilon: 1\n  rms_norm: n",
            "r.yaml:6:18: expected one of scale, 1+scale",
        ),
        ("- from: a\n  optional: ask\n  parameter: n", "r.yaml:6:13: expected true or false"),
        ("- from: a\n  epsilom: ask\n  rms_norm: ask", "r.yaml:6:3 [rule-unknown-key]: unknown key 'epsilom'"),
    ],
)
def test_errors_around_questions_say_where(rule: str, said: str) -> None:
    with pytest.raises(ConvertError, match=re.escape(said)):
        rule_file(rule)


# ---- the survey


def test_the_nearest_rule_and_why_it_does_not_match() -> None:
    rules = rule_file("""
- einsum: ...D,DE->...E
  from: block_0/mlp/kernel
  linear: blocks.0.mlp
- from: block_{i}/norm/scale
  multiplies_by: scale
  epsilon: 1e-6
  layer_norm: blocks.{i}.norm
- einsum: ...D,DF->...F
  from: head/kernel
  linear: head
""")
    leaves = {f"block_{k}/mlp/kernel": (4, 6) for k in range(48)} | {f"block_{k}/norm/scale": (4,) for k in range(48)}
    leaves |= {f"block_{k}/norm/bias": (4,) for k in range(48)} | {"head/kernel": (4, 9), "heads/kernel": (4, 2, 3)}
    found = survey_rules(rules, MemorySource(zeros(**leaves)))
    assert [(c.path, c.leaves) for c in found.covered] == [
        ("block_0/mlp/kernel", 1),
        ("block_{i}/norm/scale", 48),
        ("head/kernel", 1),
    ]
    said = {u.path: (len(u.leaves), u.near.path, u.near.why) for u in found.uncovered if u.near}
    assert said == {
        "block_{1,2,3,4,5,6,7,...,47}/mlp/kernel": (
            47,
            "block_0/mlp/kernel",
            ("the index is missing: it has block_0; block_{i} would also match block_1",),
        ),
        "block_{i}/norm/bias": (48, "block_{i}/norm/scale", ("other name: the rule has scale, the leaf has bias",)),
        "heads/kernel": (
            1,
            "head/kernel",
            (
                "other name: the rule has head, the leaf has heads",
                "other shape, float32[4,2,3]: ...D,DF->...F has a weight with 2 axes (D F)",
            ),
        ),
    }


def test_a_rule_that_lacks_its_main_leaf_is_not_covered(convert: Run, tmp_path: Path) -> None:
    ckpt, file = tmp_path / "net.npz", tmp_path / "mine.yaml"
    np.savez(ckpt, **{"a/kernel": np.ones((3, 4), np.float32), "a/bias": np.ones(4, np.float32)})
    file.write_text(
        "model: m\ntitle: M\ntargets: {torch: {loads: T}}\nrules:\n"
        "- einsum: ...D,DE->...E\n  from: a/kernal\n  bias: a/bias\n  linear: a\n"
    )
    out, err = convert("plan", file, ckpt, code=2)
    assert out.splitlines()[0] == "Covered: 0 of 2 leaves"
    assert "Main leaf missing: 1 rule" in out and "a/kernal  linear  matches 1 leaf" in out
    assert err.splitlines() == [
        f"error[leaf-missing]: {file} does not fit {ckpt}: 1 problem",
        f"  - {file}:5: a/kernal (linear, weight): expected a leaf with this path, got none; did you mean 'a/kernel'? "
        "Write `optional: true` only if the leaf may be absent",
    ]


def test_commands(convert: Run, tmp_path: Path) -> None:
    """`rules new`, `rules validate` and `plan` on a draft: what they print, and their exit codes."""
    ckpt, file = tmp_path / "net.npz", tmp_path / "draft.yaml"
    np.savez(ckpt, **{f"params/dense_{k}/kernel": np.ones((6, 6), np.float32) for k in range(48)}, step=np.int32(3))
    shown, _ = convert("rules", "new", ckpt)
    out, err = convert("rules", "new", ckpt, file)
    assert out == "" and file.read_text() == shown
    assert err == (
        f"wrote {file}: 2 rules for 49 leaves, 2 questions open; answer them, then `convert plan {file} {ckpt}`\n"
    )
    assert "# question: the sizes 6 x 6 do not tell which axes are inputs" in shown
    _, err = convert("rules", "new", ckpt, file, code=2)
    assert err.startswith("error[output-exists]: ") and str(file) in err
    out, _ = convert("rules", "validate", file, code=2)
    assert out.splitlines()[0] == f"{file}: valid so far, 2 rules for torch, 2 questions open"
    assert f"{file}:16:11: `einsum` of dense_{{i}}/kernel is open" in out
    out, err = convert("plan", file, ckpt, code=2)
    rows = [line.split() for line in out.splitlines()]
    assert rows[0] == ["Covered:", "48", "of", "49", "leaves"]
    assert rows[1][:4] == ["params/dense_{i}/kernel", "linear", "48", "leaves"]
    assert ["No", "rule:"] not in [row[:2] for row in rows] and "does not fit" in err and "2 problems" in err
    said = json.loads(convert("plan", file, ckpt, "--json", code=2)[0])
    assert not said["complete"] and said["leaves"] == 49 and len(said["questions"]) == 2 == len(said["findings"])
    assert said["covered"][0]["open"] == ["einsum", "linear"] and said["dropped"][0]["path"] == "step"
    out, err = convert("plan", file, ckpt, "--dtype", "float3", code=2)
    assert "--dtype float3" in err and out == ""
    file.write_text(shown.replace("dense_{i}", "dens_{i}"))
    out, _ = convert("plan", file, ckpt, code=2)
    assert (
        "No rule: 48 leaves\n  params/dense_{i}/kernel  float32[6,6]  48 leaves\n      nearest: params/dens_{i}/kernel"
        in out
    )
    assert "other name: the rule has dens_{i}, the leaf has dense_0" in out


def test_a_key_of_many_numbers_takes_little_memory() -> None:
    """A key of n numbers was copied n times."""
    import tracemalloc

    source = tree(**{"1_" * 2000 + f"w{k}": (3,) for k in range(10)})
    tracemalloc.start()
    try:
        draft_rules(source)
        assert tracemalloc.get_traced_memory()[1] < 20_000_000
    finally:
        tracemalloc.stop()
