"""Tensors that two rules make, splits, fused parts, stacked axes, rules without a target, and wrong arguments of `make_plan`."""

from __future__ import annotations

import numpy as np
import pytest

from convert import TensorSpec
from convert.core.errors import OptionError
from support.memory_source import zeros
from support.small_plans import (
    BF16,
    IO,
    MLP,
    PRODUCTS,
    TWO_TARGETS,
    findings,
    mlp,
    names,
    places,
    plan,
    refusal,
)


def test_two_rules_that_make_one_tensor() -> None:
    rules, tree = "- from: a\n  parameter: x\n- from: b\n  parameter: x", zeros(a=(3,), b=(4,))
    assert places(rules, tree) == [("tensor-made-twice", "r.yaml:7", "x")]
    assert "float32[4]" in findings(rules, tree)[0] and "r.yaml:5 (float32[3])" in findings(rules, tree)[0]


def test_one_rule_that_makes_a_tensor_twice() -> None:
    """Two captures side by side do not show where one ends: ``p112`` is made from 1/12 and from 11/2."""
    tree = zeros(**{f"{i}/{j}": (2,) for i in range(12) for j in range(13)})
    assert ("tensor-made-twice", "r.yaml:5", "p112") in places("- from: '{i}/{j}'\n  parameter: 'p{i}{j}'", tree)


def test_a_split_whose_count_differs() -> None:
    rule = "- einsum: ...D,CDH->C...H\n  from: w\n  linear: 'm.{k,v}'"
    assert findings(rule, zeros(w=(3, 5, 7))) == [
        "r.yaml:5: w: float32[3,5,7] as C D H: C has 3 elements, but the rule lists 2 targets; list one for each element"
    ]
    (other,) = findings("- einsum: ...D,DNCH->...NCH\n  from: w\n  linear: 'm.{k,v}'", zeros(w=(5, 3, 2, 7)))
    assert other.endswith("if they are elements of another axis, name it in the target, such as {C:k,v}")
    assert names(plan(rule, zeros(w=(2, 5, 7)))) == ["m.k.weight", "m.v.weight"]


def test_what_cannot_be_split() -> None:
    (one,) = findings("- einsum: ...D,DH->...H\n  from: w\n  linear: 'm.{k,v}'", zeros(w=(5, 2)))
    assert "r.yaml:5: w: float32[5,2] as D H: ...D,DH->...H has one output axis" in one
    (raw,) = findings("- from: w\n  parameter: 'm.{k,v}'", zeros(w=(5, 2)))
    assert raw.startswith("r.yaml:5: w: ") and "a `parameter` cannot be split" in raw
    (named,) = findings("- from: w\n  axes: AB\n  parameter: 'm.{k,v}'", zeros(w=(2, 2)))
    assert "r.yaml:5: w: float32[2,2] as A B: " in named and "cannot be split" in named


def test_fused_parts_of_different_dtypes() -> None:
    rule = "- einsum: ...D,DH->...H\n  from: '{q,k}'\n  linear: qk"
    tree = {"q": np.zeros((3, 4), np.float32), "k": np.zeros((3, 4), BF16)}
    (finding,) = findings(rule, tree)
    assert finding.startswith("r.yaml:5: qk.weight: q and k ")
    assert "expected float32[4,3]" in finding and "got bfloat16[4,3]; " in finding and "`dtype:`" in finding
    for made in (plan(rule + "\n  dtype: float32", tree), plan(rule, tree, dtype="float32")):
        assert [str(step.spec) for step in made.steps] == ["float32[8,3]"]
        assert made.steps[0].loses == ""


def test_a_stacked_axis_that_is_not_there() -> None:
    rule = "- einsum: ...D,DH->...H\n  from: w\n  stacked: {i: %d}\n  linear: m.{i}"
    for axis in (2, -1):
        (finding,) = findings(rule % axis, zeros(w=(5, 2)))
        assert f"r.yaml:5: w: expected an axis {axis} " in finding and "got float32[5,2]; correct `stacked`" in finding
    assert findings(rule % 0, zeros(w=(5, 2))) == [
        "r.yaml:5: w: float32[5,2] (2 without stacked axes) does not fit: ...D,DH->...H has a weight with 2 axes (D H)"
    ]


def test_depths_that_differ() -> None:
    stacked = "- from: w\n  stacked: {i: 1}\n  parameter: w.{i}\n"
    two = "- from: v\n  stacked: {i: 0}\n  parameter: v.{i}\n" + stacked
    assert places(two, zeros(v=(5, 3), w=(5, 2))) == [("size-conflict", "r.yaml:8", "w")]
    (text,) = findings(two, zeros(v=(5, 3), w=(5, 2)))
    assert (
        "stacked: {i: 1} reads float32[5,2] as stored, which makes i = 2; the other rules make i = 5 (r.yaml:5)" in text
    )
    assert "but v (r.yaml:5, float32[5,3] as stored) makes it 5" in findings(two, zeros(v=(5, 3), w=(4, 2)))[0]
    counted, tree = "- from: v_{i}\n  parameter: v.{i}\n" + stacked, zeros(v_0=(3,), v_1=(3,), v_2=(3,), w=(5, 2))
    assert places(counted, tree) == [("size-conflict", "r.yaml:7", "w")]
    assert "but the number of {i} in the tree (r.yaml:5) makes it 3" in findings(counted, tree)[0]


def test_a_rule_without_this_target() -> None:
    rules = "- from: w\n  parameter: {torch: p}\n- from: v\n  parameter: q"
    assert names(plan(rules, zeros(w=(1,), v=(1,)), TWO_TARGETS)) == ["p", "q"]
    assert findings(rules, zeros(w=(1,), v=(1,)), TWO_TARGETS, to="hf") == [
        "r.yaml:5: the rule has no target for 'hf', so w would be lost; add one, or give its leaves a `drop:` rule"
    ]
    optional = rules.replace("{torch: p}", "{torch: p}\n  optional: true")
    assert names(plan(optional, zeros(v=(1,)), TWO_TARGETS, to="hf")) == ["q"]  # nothing is lost


def test_wrong_arguments() -> None:
    tree = zeros(w=(8, 20))
    finding = refusal(IO, tree, PRODUCTS, settings={"PP": 3})
    assert (finding.code, finding.path, finding.fix) == ("setting-unknown", "--set PP", "did you mean 'P'?")
    assert finding.expected == "one of I, P, O, T, Q"
    for wrong in ("x", 0, -1, 1.5, True):
        finding = refusal(IO, tree, PRODUCTS, settings={"P": wrong})
        assert (finding.code, finding.path, finding.got) == ("setting-invalid", f"--set P={wrong}", repr(wrong))
    finding = refusal(IO, tree, PRODUCTS, to="trch")
    assert (finding.code, finding.expected, finding.fix) == (
        "target-unknown",
        "one of torch, burn",
        "did you mean 'torch'?",
    )
    for dtype in ("bf16", "int8", "float8_e4m3fnuz"):
        finding = refusal(IO, tree, PRODUCTS, dtype=dtype)
        assert (finding.code, finding.got) == ("dtype-unknown", dtype)
    with pytest.raises(OptionError):
        plan(IO, tree, PRODUCTS, dtype="int8")


def test_like() -> None:
    def f32(*shape: int) -> TensorSpec:
        return TensorSpec(shape, "float32")

    like = {"layers.0.up.weight": f32(11, 7), "layers.0.up.bias": f32(11), "layers.0.norm.weight": f32(7)}
    assert len(plan(MLP, mlp(1), like={**like, "layers.0.down.weight": f32(7, 11)}).steps) == 4
    wanted = {**like, "layers.0.up.bias": f32(12), "layers.0.down.wieght": f32(7, 11), "zz": f32()}
    assert places(MLP, mlp(1), like=wanted) == [
        ("state-dict-mismatch", "r.yaml:5", "layers.0.up.bias"),
        ("state-dict-mismatch", "", "layers.0.down.wieght"),
        ("state-dict-mismatch", "", "zz"),
        ("state-dict-mismatch", "r.yaml:9", "layers.0.down.weight"),
    ]
    shape, missing, _, extra = findings(MLP, mlp(1), like=wanted)
    assert "float32[12]" in shape and "float32[11]" in shape
    assert missing.endswith("did you mean 'layers.0.down.weight'?")
    assert extra.endswith("did you mean 'layers.0.down.wieght'?")
