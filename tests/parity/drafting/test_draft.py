"""What a draft guesses and what it asks: copies of questions, attention, recurrent cells, names of libraries."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from convert import (
    ConvertError,
    draft_rules,
    parse_rules,
    plan_conversion,
    survey_rules,
)
from convert.rules.attention_macro import LIBRARIES
from support.drafts import answered, tree
from support.memory_source import MemorySource, run


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
