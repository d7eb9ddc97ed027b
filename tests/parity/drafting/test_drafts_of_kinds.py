"""Which kinds a draft offers for a kernel, a norm or a cell, by its axes and its names."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from convert import (
    CheckpointError,
    PlanError,
    draft_rules,
    parse_rules,
    plan_conversion,
)
from convert.planning.matching.match import cover
from support.drafts import alternatives, answered, tree
from support.memory_source import run


def test_a_kernel_without_input_channels_is_a_filter_for_each_channel() -> None:
    source = tree(conv_1d__w=(4, 6), conv_1d__b=(6,), up__w=(4, 6))
    text = draft_rules(source)
    answers = {"conv_1d/w": {"padding": 0, "conv": 0}, "up/w": {"linear": 0}}
    made = run(plan_conversion(parse_rules(answered(text, answers)), source))
    np.testing.assert_array_equal(made["conv_1d.weight"], source.arrays["conv_1d/w"].T[:, None])
    np.testing.assert_array_equal(made["up.weight"], source.arrays["up/w"].T)


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
