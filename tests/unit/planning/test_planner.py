"""Rules against a tree: every finding by its full text, arithmetic against exact numbers, and coverage as a property."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convert import Plan, PlanError, RuleFile, TensorSpec
from convert.core.errors import MAX_LINES, OptionError
from convert.core.findings import Finding
from convert.planning.planner import make_plan
from convert.planning.select_rules import Ambiguous, NoMatch, RuleMatch, explain, pick, score
from support.effort import calls_at_most
from support.memory_source import HEAD, MemorySource, rule_file, run, zeros

BF16 = ml_dtypes.bfloat16

MLP = """
- einsum: ...D,DF->...F
  from: layers_{i}/up/w
  bias: layers_{i}/up/b
  linear: layers.{i}.up
- einsum: ...F,FD->...D
  from: layers_{i}/down/w
  linear: layers.{i}.down
- from: layers_{i}/norm/scale
  multiplies_by: 1+scale
  epsilon: 1e-6
  axes: D
  layer_norm: layers.{i}.norm
- drop: opt/**
  because: optimizer state
"""  # the rules stand in lines 5, 9, 12 and 17 of r.yaml


def mlp(layers: int = 3) -> dict[str, np.ndarray]:
    tree = {}
    for i in range(layers):
        tree[f"layers_{i}/up/w"] = np.zeros((7, 11), np.float32)
        tree[f"layers_{i}/up/b"] = np.zeros(11, np.float32)
        tree[f"layers_{i}/down/w"] = np.zeros((11, 7), np.float32)
        tree[f"layers_{i}/norm/scale"] = np.zeros(7, np.float32)
    return {**tree, "opt/mu/0": np.zeros(3, np.float32)}


def without(tree: Mapping[str, np.ndarray], *names: str) -> dict[str, np.ndarray]:
    assert set(names) <= set(tree)
    return {name: x for name, x in tree.items() if name not in names}


def plan(rules: str | RuleFile, tree: Mapping[str, np.ndarray], head: str = HEAD, **options: Any) -> Plan:
    return make_plan(rule_file(rules, head) if isinstance(rules, str) else rules, MemorySource(tree), **options)


def findings(rules: str, tree: Mapping[str, np.ndarray], head: str = HEAD, **options: Any) -> list[str]:
    """The findings, each of which must stand in the message as well."""
    with pytest.raises(PlanError) as refused:
        plan(rules, tree, head, **options)
    found = [str(finding) for finding in refused.value.findings]
    said = "1 problem" if len(found) == 1 else f"{len(found)} problems"
    head_line, *lines = str(refused.value).splitlines()
    assert head_line == f"r.yaml does not fit /memory: {said}"
    ends = [re.search(r"(?: \((\d+) more like it\)|\.\.\. and (\d+) more)$", line) for line in lines]
    folded = [int(end[1] or end[2]) if end else 0 for end in ends]
    last = bool(lines) and lines[-1].startswith("  ... and ")
    shown = [line[: end.start()] if end else line for line, end in zip(lines, ends, strict=True)][
        : -1 if last else None
    ]
    assert len(shown) <= MAX_LINES and len(shown) + sum(folded) == len(found)
    without_codes = [re.sub(r" ?\[[a-z]+(-[a-z]+)+\]:", ":", line.removeprefix("  - "), count=1) for line in shown]
    assert all(line in found for line in without_codes)
    return found


def places(rules: str, tree: Mapping[str, np.ndarray], head: str = HEAD, **options: Any) -> list[tuple[str, str, str]]:
    """Code, rule and path of each finding."""
    with pytest.raises(PlanError) as refused:
        plan(rules, tree, head, **options)
    return [(finding.code, finding.rule, finding.path) for finding in refused.value.findings]


def refusal(rules: str, tree: Mapping[str, np.ndarray], head: str = HEAD, **options: Any) -> Finding:
    """The finding of an error with one finding and no headline."""
    with pytest.raises(PlanError) as refused:
        plan(rules, tree, head, **options)
    assert len(refused.value.findings) == 1 and not refused.value.headline
    finding: Finding = refused.value.findings[0]
    return finding


def names(made: Plan) -> list[str]:
    return [step.name for step in made.steps]


# --- coverage -------------------------------------------------------------------------------------------------------


def test_a_plan() -> None:
    made = plan(MLP, mlp())
    roles = ("up.weight", "up.bias", "down.weight", "norm.weight")
    assert names(made) == [f"layers.{i}.{role}" for role in roles for i in range(3)]
    assert made.sizes == {"i": 3, "D": 7, "F": 11}
    assert [(d.leaf, d.reason, d.rule.line_only) for d in made.dropped] == [
        ("opt/mu/0", "optimizer state", "r.yaml:17")
    ]
    assert made.nbytes == 3 * 4 * (77 + 11 + 77 + 7)
    assert made.steps[0].layouts == ("D F -> F D",)
    assert made.layers[-1] == {
        "layer": "layers.{i}.norm",
        "kind": "layer_norm",
        "epsilon": 1e-6,
        "source_multiplies_by": "1+scale",
        "target_multiplies_by": "weight",
    }
    told = json.loads(json.dumps(made.to_dict()))
    assert told["tensors"][0] == {
        "name": "layers.0.up.weight",
        "shape": [11, 7],
        "dtype": "float32",
        "kind": "linear",
        "rule": "r.yaml:5",
        "from": [{"leaf": "layers_0/up/w", "layout": "D F -> F D", "at": "", "ops": ["permute (1, 0)"], "rows": None}],
        "arithmetic": "",
        "loses": "",
    }
    assert told["dropped"] == [
        {"leaf": "opt/mu/0", "shape": [3], "dtype": "float32", "because": "optimizer state", "rule": "r.yaml:17"}
    ]


def test_a_leaf_claimed_by_two_rules() -> None:
    for more, leaf, rules in (
        (
            "- from: layers_{i}/norm/scale\n  parameter: x.{i}\n",
            "layers_0/norm/scale",
            "r.yaml:12 (layer_norm) and r.yaml:19 (parameter)",
        ),
        ("- drop: '*/norm/**'\n  because: x\n", "layers_0/norm/scale", "r.yaml:12 (layer_norm) and r.yaml:19 (drop)"),
        ("- drop: opt/mu/*\n  because: x\n", "opt/mu/0", "r.yaml:17 (drop) and r.yaml:19 (drop)"),
    ):
        assert places(MLP + more, mlp(1)) == [("leaf-claimed-twice", "", leaf)]
        assert rules in findings(MLP + more, mlp(1))[0]


def test_a_drop_that_takes_everything_is_no_other_model() -> None:
    found = places(MLP + "- drop: layers_0/**\n  because: x\n", mlp(1))
    assert len(found) == 4 and {code for code, _, _ in found} == {"leaf-claimed-twice"}


def test_a_leaf_without_a_rule() -> None:
    extra = {"layers_0/up/c": np.zeros(3), "layers_1/up/c": np.zeros(3), "zzz": np.zeros((), np.int32)}
    assert places(MLP, {**mlp(), **extra}) == [
        ("leaf-without-rule", "r.yaml", "layers_0/up/c"),
        ("leaf-without-rule", "r.yaml", "zzz"),
    ]
    first, second = findings(MLP, {**mlp(), **extra})
    assert "(float64[3]) and 1 more" in first and "closest is layers_{i}/up/w (r.yaml:5)" in first
    assert "int32[]" in second and "closest" not in second


def test_a_rule_without_a_leaf() -> None:
    tree = {**mlp(), "embedder/table": np.zeros((3, 7))}
    rules = MLP + "- from: embed/table\n  embedding: e\n"
    assert findings(rules, tree) == [
        "r.yaml:19: embed/table (embedding, weight): expected a leaf with this path, got none; did you mean "
        "'embedder/table'? Write `optional: true` only if the leaf may be absent"
    ]
    tree["embed/other"] = tree.pop("embedder/table")  # is not a misspelling
    assert places(rules, tree) == [("leaf-missing", "r.yaml:19", ""), ("leaf-without-rule", "r.yaml", "embed/other")]
    assert "the closest is embed/table (r.yaml:19)" in findings(rules, tree)[1]


def test_a_missing_layer_in_the_middle() -> None:
    assert findings(MLP, {n: x for n, x in mlp(4).items() if "layers_1" not in n}) == [
        "r.yaml:5: layers_{i}/up/w: {i} runs from 0 to 3 in the tree, without 1; the checkpoint is incomplete, or the "
        "pattern matches something else"
    ]


def test_an_index_far_away_costs_nothing() -> None:
    with calls_at_most(100_000):
        found = findings("- from: w_{i}\n  parameter: p.{i}", zeros(w_0=(1,), w_999999999999=(1,)))
    assert found == [
        "r.yaml:5: w_{i}: {i} runs from 0 to 999999999999 in the tree, without 1, 2, 3, 4, 5, 6, 7, 8 ...; the checkpoint "
        "is incomplete, or the pattern matches something else"
    ]


@pytest.mark.parametrize(
    ("leaf", "rule"), [("layers_1/up/w", 5), ("layers_1/up/b", 5), ("layers_0/down/w", 9), ("layers_2/norm/scale", 12)]
)
def test_a_leaf_missing_in_one_layer(leaf: str, rule: int) -> None:
    assert places(MLP, without(mlp(), leaf)) == [("leaf-missing", f"r.yaml:{rule}", leaf)]


def test_a_bias_missing_everywhere() -> None:
    tree = without(mlp(), "layers_0/up/b", "layers_1/up/b", "layers_2/up/b")
    assert places(MLP, tree) == [("leaf-missing", "r.yaml:5", "")]
    (text,) = findings(MLP, tree)
    assert text == (
        "r.yaml:5: layers_{i}/up/b (linear, bias): expected a leaf with this path, got none; remove `bias:` only if the "
        "layer has none"
    )


def test_a_tree_of_another_model() -> None:
    finding = refusal(MLP, zeros(x=(3,), y=(3,)))
    assert (finding.code, finding.expected, finding.got) == ("rules-of-another-model", "layers_{i}/up/w", "x")
    assert refusal(MLP, {}).got == "no leaves"


def test_findings_beyond_the_first_dozen_are_counted() -> None:
    found = findings(MLP + "- drop: '**/norm/*'\n  because: x", mlp(20))  # checks the message as well
    assert len(found) == 20


def test_findings_that_differ_in_numbers_alone_are_one_line() -> None:
    with pytest.raises(PlanError) as refused:
        plan(MLP + "- drop: '**/norm/*'\n  because: x", mlp(20))
    said = str(refused.value).splitlines()
    assert len(said) == 2 and said[0].endswith(": 20 problems") and said[1].endswith("(19 more like it)")
    with pytest.raises(PlanError) as refused:
        plan(MLP + "- drop: '**/norm/*'\n  because: x", mlp(2))
    assert len(str(refused.value).splitlines()) == 3


# --- shapes ---------------------------------------------------------------------------------------------------------


def test_a_rank_that_contradicts_the_equation() -> None:
    assert findings(MLP, {**mlp(), "layers_1/up/w": np.zeros((7, 11, 2))}) == [
        "r.yaml:5: layers_1/up/w: float64[7,11,2] does not fit: ...D,DF->...F has a weight with 2 axes (D F)"
    ]
    assert findings(MLP, {**mlp(), "layers_1/up/b": np.zeros((11, 1))}) == [
        "r.yaml:5: layers_1/up/b: float64[11,1] does not fit: a bias with 2 axes cannot be added to the result of "
        "...D,DF->...F"
    ]
    assert findings(MLP, {**mlp(), "layers_1/norm/scale": np.zeros((7, 1))}) == [
        "r.yaml:12: layers_1/norm/scale: float64[7,1] does not fit: the rule gives it the axes D"
    ]
    assert findings("- from: w\n  embedding: e", zeros(w=(3, 2, 2))) == [
        "r.yaml:5: w: float32[3,2,2] does not fit: an embedding table has two axes, entries and width"
    ]


def test_two_leaves_that_contradict_each_other() -> None:
    tree = {**mlp(), "layers_1/down/w": np.zeros((13, 7), np.float32)}
    assert places(MLP, tree) == [("size-conflict", "r.yaml:9", "layers_1/down/w")]
    (text,) = findings(MLP, tree)
    assert "float32[13,7] as F D makes F = 13, but layers_0/up/w (r.yaml:5, float32[7,11] as D F) makes it 11" in text


@pytest.mark.parametrize("wrong", [0, 7, 19])
def test_a_wrong_stacked_axis_blames_its_own_rule_once(wrong: int) -> None:
    """Also where it is the first of many rules."""
    rule = "- einsum: ...D,DF->...F\n  from: m{k}/w\n  stacked: {{i: {axis}}}\n  linear: m{k}.{{i}}\n"
    rules = "".join(rule.format(k=k, axis=1 if k == wrong else 0) for k in range(20))
    tree = {f"m{k}/w": np.zeros((3, 7, 11), np.float32) for k in range(20)}
    assert places(rules, tree) == [("size-conflict", f"r.yaml:{5 + 4 * wrong}", f"m{wrong}/w")]
    (text,) = findings(rules, tree)
    assert (
        "stacked: {i: 1} reads float32[3,7,11] as D i F, which makes i = 7, D = 3; the other rules make i = 3 " in text
    )
    assert text.endswith("with `stacked: {i: 0}` the rule agrees with the others")


@pytest.mark.parametrize("wrong", [0, 4])
def test_the_size_that_most_rules_state_holds(wrong: int) -> None:
    rule = "- einsum: {equation}\n  from: m{k}/w\n  linear: m{k}\n"
    equations = ["...F,FD->...D" if k == wrong else "...D,DF->...F" for k in range(5)]
    rules = "".join(rule.format(k=k, equation=equation) for k, equation in enumerate(equations))
    tree = {f"m{k}/w": np.zeros((7, 11), np.float32) for k in range(5)}
    assert places(rules, tree) == [("size-conflict", f"r.yaml:{5 + 3 * wrong}", f"m{wrong}/w")] * 2


def test_a_transposed_leaf_contradicts_twice() -> None:
    head = HEAD + "axes: {D: {is: model width}}\n"
    tree = {**mlp(), "layers_1/down/w": np.zeros((7, 11), np.float32)}
    assert places(MLP, tree, head) == [("size-conflict", "r.yaml:10", "layers_1/down/w")] * 2
    for text, sizes in zip(findings(MLP, tree, head), ("F = 7, ", "D = 11 (model width), "), strict=True):
        assert f"float32[7,11] as F D makes {sizes}but layers_0/up/w (r.yaml:6, float32[7,11] as D F) makes it" in text


PRODUCTS = (
    HEAD + "axes:\n  I: {is: input, equals: 2*P}\n  P: {is: patch}\n  O: {is: output, equals: T*Q}\n"
    "  T: {is: steps}\n  Q: {is: quantiles, equals: 10}\n"
)
IO = "- einsum: ...I,IO->...O\n  from: w\n  linear: m"  # in line 11


def test_products_are_solved() -> None:
    assert plan(IO, zeros(w=(8, 30)), PRODUCTS).sizes == {"I": 8, "O": 30, "P": 4, "Q": 10, "T": 3}


@pytest.mark.parametrize(
    ("shape", "rule", "problem"),
    [
        (
            (7, 30),
            "r.yaml:5",
            "I = 2*P (input): 7 is not divisible by 2 (r.yaml:11: w: float32[7,30] as I O makes it 7)",
        ),
        (
            (8, 25),
            "r.yaml:7",
            "O = T*Q (output): 25 is not divisible by 10 (r.yaml:11: w: float32[8,25] as I O makes it 25)",
        ),
    ],
)
def test_an_axis_that_does_not_divide(shape: tuple[int, ...], rule: str, problem: str) -> None:
    assert places(IO, zeros(w=shape), PRODUCTS) == [("size-conflict", rule, "")]
    assert problem in findings(IO, zeros(w=shape), PRODUCTS)[0]


def test_a_product_that_contradicts() -> None:
    tree = zeros(w=(8, 20))
    for rules, leaves, sizes in (
        (IO + "\n- from: p\n  axes: P\n  parameter: p", {**tree, **zeros(p=(5,))}, {}),
        (IO, tree, {"P": 5}),
    ):
        assert places(rules, leaves, PRODUCTS, settings=sizes) == [("size-conflict", "r.yaml:5", "")]
        (text,) = findings(rules, leaves, PRODUCTS, settings=sizes)
        assert "is 10, but r.yaml:11: w: float32[8,20] as I O makes it 8" in text
    assert places(IO, tree, PRODUCTS, settings={"T": 3}) == [("size-conflict", "r.yaml:7", "")]
    assert places(IO, tree, PRODUCTS, settings={"I": 6}) == [("size-conflict", "r.yaml:11", "w")]
    assert findings(IO, tree, PRODUCTS, settings={"I": 6})[0].endswith("leave out --set I=6")


# --- targets --------------------------------------------------------------------------------------------------------


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
        "r.yaml:5: w: float32[3,5,7] as C D H: C has 3 elements, but the rule lists 2 targets; if they are elements of another "
        "axis, name it in the target, such as {H:k,v}"
    ]
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


TWO_TARGETS = HEAD.replace("{torch: {loads: T}}", "{torch: {loads: T}, hf: {loads: H}}")


def test_a_rule_without_this_target() -> None:
    rules = "- from: w\n  parameter: {torch: p}\n- from: v\n  parameter: q"
    assert names(plan(rules, zeros(w=(1,), v=(1,)), TWO_TARGETS)) == ["p", "q"]
    assert findings(rules, zeros(w=(1,), v=(1,)), TWO_TARGETS, to="hf") == [
        "r.yaml:5: the rule has no target for 'hf', so w would be lost; add one, or give its leaves a `drop:` rule"
    ]
    optional = rules.replace("{torch: p}", "{torch: p}\n  optional: true")
    assert names(plan(optional, zeros(v=(1,)), TWO_TARGETS, to="hf")) == ["q"]  # nothing is lost


# --- arguments ------------------------------------------------------------------------------------------------------


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


# --- facts and config -----------------------------------------------------------------------------------------------

CONFIG = """\
model: m
title: M
axes: {D: {is: width}, F: {is: hidden}, Z: {is: nothing has it}}
facts: {epsilon: 1e-6, theta: ask, mask: ask, rope: half}
versions:
  small: {sizes: {D: 7, F: 11}, facts: {theta: 10, mask: causal}}
targets:
  hf:
    loads: H
    config: {width: $D, rope: {theta: $theta, kind: $rope}, list: [$mask, 1], eps: $epsilon, name: x}
  bare: {loads: B}
"""
ONE = "- einsum: ...D,DF->...F\n  from: w\n  linear: m"


def test_config_of_a_published_size() -> None:
    made = plan(ONE, zeros(w=(7, 11)), CONFIG)
    assert (made.version, made.found) == ("small", "M, small")
    assert made.config == {
        "width": 7,
        "rope": {"theta": 10, "kind": "half"},
        "list": ["causal", 1],
        "eps": 1e-6,
        "name": "x",
        "dtype": "float32",
    }
    assert plan(ONE, zeros(w=(7, 11)), CONFIG, to="bare").config is None
    assert plan(ONE, zeros(w=(7, 11)), CONFIG, settings={"theta": 5}).facts["theta"] == 5


def test_facts_that_config_needs_are_asked_for_by_name() -> None:
    made = plan(ONE, zeros(w=(7, 13)), CONFIG)
    assert (made.version, made.found) == (None, "M, no published size (D=7, F=13)")
    with pytest.raises(PlanError) as refused:
        _ = made.config
    (finding,) = refused.value.findings
    assert (finding.code, finding.rule, finding.data) == ("fact-missing", "r.yaml", {"facts": ["theta", "mask"]})
    assert "small has D=7, F=11" in finding.problem and "--set theta=... --set mask=..." in finding.fix
    with pytest.raises(PlanError) as refused:
        _ = plan(ONE, zeros(w=(7, 13)), CONFIG, settings={"mask": "full"}).config
    assert refused.value.findings[0].data == {"facts": ["theta"]}
    config = plan(ONE, zeros(w=(7, 13)), CONFIG, settings={"mask": "full", "theta": 3}).config
    assert config is not None and config["list"] == ["full", 1]


# --- optional leaves, roots, values, drops --------------------------------------------------------------------------

OPTIONAL = """
- from: a_{i}
  parameter: a.{i}
- einsum: ...D,DF->...F
  from: '{q,k}_{i}/w'
  bias: '{q,k}_{i}/b'
  linear: '{q,k}.{i}'
  optional: true
"""
ALWAYS = zeros(a_0=(2,), a_1=(2,))
MAYBE = {f"{x}_{i}/{r}": np.zeros((3, 4) if r == "w" else 4) for x in "qk" for i in (0, 1) for r in "wb"}


def test_optional_leaves_all_there_or_none() -> None:
    assert len(plan(OPTIONAL, {**ALWAYS, **MAYBE}).steps) == 2 + 8
    assert len(plan(OPTIONAL, ALWAYS).steps) == 2
    assert len(plan(OPTIONAL, {**ALWAYS, **{n: x for n, x in MAYBE.items() if "_0" in n}}).steps) == 2 + 4


@pytest.mark.parametrize("leaf", MAYBE)
def test_optional_leaves_half_there(leaf: str) -> None:
    assert places(OPTIONAL, {**ALWAYS, **without(MAYBE, leaf)}) == [("leaf-missing", "r.yaml:7", leaf)]


def test_root_alternatives() -> None:
    head = HEAD + "root: [state/params, params, '']\n"
    rules = "- from: w\n  parameter: p\n- drop: junk/*\n  because: x\n- drop: /step\n  because: y"
    for root in ("state/params", "params", ""):
        prefix = f"{root}/" if root else ""
        tree = {f"{prefix}w": np.zeros(2), f"{prefix}junk/x": np.zeros(1), "step": np.zeros(())}
        made = plan(rules, tree, head)
        assert (made.root, names(made)) == (root, ["p"])
        assert {d.leaf: d.reason for d in made.dropped} == {f"{prefix}junk/x": "x", "step": "y"}
    both = {"params/w": np.zeros(2), "w": np.zeros(2)}
    assert places(rules, both, head) == [("leaf-without-rule", "r.yaml", "w")]
    made = plan(rules, {"params/w/value": np.zeros(2), "step/value": np.zeros(())}, head)
    assert (made.root, names(made), [d.leaf for d in made.dropped]) == ("params", ["p"], ["step/value"])


def test_value_suffix_of_nnx_present_or_absent() -> None:
    suffixed = {f"{name}/value": x for name, x in mlp().items()}
    assert names(plan(MLP, suffixed)) == names(plan(MLP, mlp()))
    mixed = {name + ("/value" if k % 2 else ""): x for k, (name, x) in enumerate(mlp().items())}
    assert names(plan(MLP, mixed)) == names(plan(MLP, mlp()))
    named = plan("- from: a/value\n  parameter: p", zeros(**{"a/value": (1,)}))  # a leaf that is called so
    assert names(named) == ["p"]


def test_two_leaves_that_differ_only_by_the_suffix() -> None:
    twins = zeros(**{"w": (3,), "w/value": (3,)})
    assert places("- from: w\n  parameter: p", twins) == [("pattern-matches-two-leaves", "r.yaml:5", "")]
    numbered = zeros(w_0=(3,), w_00=(3,))
    assert places("- from: w_{i}\n  parameter: p.{i}", numbered) == [("pattern-matches-two-leaves", "r.yaml:5", "")]
    (text,) = findings("- from: w_{i}\n  parameter: p.{i}", numbered)
    assert "w_0 and w_00 both match w_{i}" in text


def test_drops_with_wildcards() -> None:
    rules = "- from: w\n  parameter: p\n- drop: opt/*/m\n  because: flat\n- drop: '**/count'\n  because: deep"
    made = plan(rules, zeros(**{"w": (1,), "opt/0/m": (1,), "opt/a/b/count": (), "x/count": ()}))
    assert {d.leaf: d.reason for d in made.dropped} == {
        "opt/0/m": "flat",
        "opt/a/b/count": "deep",
        "x/count": "deep",
    }
    assert places(rules, zeros(**{"w": (1,), "opt/0/0/m": (1,)})) == [("leaf-without-rule", "r.yaml", "opt/0/0/m")]


# --- dtypes and arithmetic ------------------------------------------------------------------------------------------


def test_dtype_override_leaves_integers_alone() -> None:
    tree = {
        "f": np.ones(2, np.float32),
        "b": np.ones(2, BF16),
        "i": np.ones(2, np.int32),
        "u": np.ones(2, np.uint8),
        "t": np.ones(2, bool),
        "x": np.ones(2, ml_dtypes.int4),
        "k": np.ones(2, np.float32),
    }
    rules = "".join(f"- from: {n}\n  parameter: {n}\n" for n in tree) + "  dtype: float16\n"
    dtypes = {step.name: step.spec.dtype for step in plan(rules, tree, dtype="bfloat16").steps}
    assert dtypes == {
        "f": "bfloat16",
        "b": "bfloat16",
        "i": "int32",
        "u": "uint8",
        "t": "bool",
        "x": "int8",  # safetensors has no int4
        "k": "float16",  # the rule's word counts more
    }
    made = plan(rules, tree)
    assert {step.name: step.spec.dtype for step in made.steps} == {**dtypes, "f": "float32"}
    assert {s.name: s.loses for s in made.steps if s.loses} == {"k": "rounded from float32 to float16"}
    for name, array in run(made).items():
        assert array.dtype.name == {**dtypes, "f": "float32"}[name]
        assert array.astype(np.float32).tolist() == [1, 1]


def test_int4_becomes_int8_value_by_value() -> None:
    values = np.arange(-8, 8, dtype=np.int8)
    made = plan("- from: w\n  parameter: p", {"w": values.astype(ml_dtypes.int4)})
    assert run(made)["p"].tolist() == values.tolist()
    assert made.steps[0].loses == ""


def test_dtypes_that_safetensors_cannot_hold() -> None:
    assert findings("- from: w\n  parameter: p", {"w": np.zeros(2, np.complex128)}) == [
        "r.yaml:5: w: complex128[2] -> p: safetensors cannot hold complex128"
    ]
    assert findings("- from: w\n  dtype: int4\n  parameter: p", {"w": np.zeros(2, np.float32)}) == [
        "r.yaml:5: w: float32[2] -> p: safetensors cannot hold int4; choose another `dtype:`"
    ]
    assert findings("- from: w\n  dtype: float32\n  parameter: p", {"w": np.zeros(2, np.complex64)}) == [
        "r.yaml:5: w: complex64[2] -> p: complex64 as float32 would lose the imaginary part"
    ]


NORM = "- from: w\n  multiplies_by: %s\n  epsilon: 1e-6\n  rms_norm: {module: n, multiplies_by: %s}"


def rounded(value: Fraction, bits: int) -> Fraction:
    """The nearest number with a significand of so many bits, ties to even; no matter of range."""
    if value == 0:
        return value
    exponent = math.floor(math.log2(abs(value))) - bits + 1
    while abs(value) >= Fraction(2) ** (exponent + bits):
        exponent += 1
    unit = Fraction(2) ** exponent
    return round(value / unit) * unit  # Python rounds ties to even


def test_one_plus_scale_is_added_in_float32_and_then_cast() -> None:
    scale = np.random.default_rng(0).standard_normal(3000) * 0.05
    scale = np.concatenate([scale, [2.0**-9, 3 * 2.0**-9, 2.0**-8, -(2.0**-9), 2.0**-30, 0.0]]).astype(BF16)
    made = plan(NORM % ("1+scale", "weight"), {"w": scale})
    (step,) = made.steps
    assert (step.arithmetic, step.spec.dtype, step.loses) == ("+ 1", "bfloat16", "rounded from float32 to bfloat16")
    assert [str(op) for op in step.parts[0].ops] == ["to float32", "+ 1", "to bfloat16"]
    exact = [rounded(rounded(Fraction(float(v)) + 1, 24), 8) for v in scale]
    assert [Fraction(float(v)) for v in run(made)["n.weight"]] == exact
    # Kept in float32, the scale survives, and the plan says that nothing is lost.
    wide = plan(NORM % ("1+scale", "weight") + "\n  dtype: float32", {"w": scale})
    assert (wide.steps[0].spec.dtype, wide.steps[0].loses) == ("float32", "")
    assert [Fraction(float(v)) for v in run(wide)["n.weight"]] == [rounded(Fraction(float(v)) + 1, 24) for v in scale]


def test_folding_in_bfloat16_shows_why() -> None:
    """Multiplied by 3, two scales that differ by 10 % become one: the note on the plan is not idle."""
    scale = np.array([0.0101, 0.0111], BF16)
    folded = run(plan(NORM % ("1+scale", "weight"), {"w": scale}))["n.weight"]
    assert scale[0] != scale[1]
    assert folded[0] == folded[1]


@pytest.mark.parametrize(
    ("source", "target", "arithmetic", "offset"),
    [
        ("scale", "weight", "", 0),
        ("1+scale", "weight", "+ 1", 1),
        ("scale", "1+weight", "- 1", -1),
        ("1+scale", "1+weight", "", 0),
    ],
)
def test_both_sides_state_what_they_multiply_by(source: str, target: str, arithmetic: str, offset: int) -> None:
    scale = np.array([0.25, -0.5, 1.0], np.float32)
    made = plan(NORM % (source, target), {"w": scale})
    assert made.steps[0].arithmetic == arithmetic
    assert run(made)["n.weight"].tolist() == (scale + offset).tolist()
    assert made.layers[0]["source_multiplies_by"] == source
    assert made.layers[0]["target_multiplies_by"] == target


def test_a_bias_of_a_norm_is_not_added_to() -> None:
    rule = "- from: s\n  bias: b\n  multiplies_by: 1+scale\n  epsilon: 1e-6\n  layer_norm: n"
    out = run(plan(rule, {"s": np.zeros(2, np.float32), "b": np.zeros(2, np.float32)}))
    assert (out["n.weight"].tolist(), out["n.bias"].tolist()) == ([1, 1], [0, 0])


def test_arithmetic_on_integers_is_refused() -> None:
    assert findings(NORM % ("1+scale", "weight"), {"w": np.zeros(3, np.int32)}) == [
        "r.yaml:5: w: int32[3] -> n.weight: + 1 needs floating-point values"
    ]


def test_float64_is_computed_in_float64() -> None:
    out = run(plan(NORM % ("1+scale", "weight"), {"w": np.array([2.0**-40])}))
    assert out["n.weight"].tolist() == [1 + 2.0**-40]


def test_activation_of_a_layer_is_a_fact() -> None:
    rule = "- einsum: ...D,DF->...F\n  from: w\n  activation: gelu_tanh\n  linear: m"
    made = plan(rule, zeros(w=(7, 11)))
    assert made.layers == ({"layer": "m", "kind": "linear", "activation": "gelu_tanh"},)
    assert plan(rule.replace("  activation: gelu_tanh\n", ""), zeros(w=(7, 11))).layers == ()


def test_epsilon_of_a_layer_is_the_fact() -> None:
    rule = NORM.replace("1e-6", "$eps") % ("scale", "weight")
    head = HEAD + "facts: {eps: 1e-5}\n"
    assert plan(rule, zeros(w=(2,)), head).layers[0]["epsilon"] == 1e-5
    assert plan(rule, zeros(w=(2,)), head, settings={"eps": 1e-3}).layers[0]["epsilon"] == 1e-3


# --- a buffer that no leaf holds ------------------------------------------------------------------------------------

TIMES = HEAD + "facts: {use: ask, min_timescale: 1, max_timescale: 10000}\n"
BUFFER = (
    "- from: w\n  axes: D\n  parameter: p\n- timescales: D\n  when: use\n  buffer: t.inv"  # the buffer is in line 9
)


def test_timescales_with_the_fact_true_false_unknown() -> None:
    made = plan(BUFFER, zeros(w=(8,)), TIMES, settings={"use": True})
    (step,) = [s for s in made.steps if s.name == "t.inv"]
    assert (str(step.spec), step.parts, step.arithmetic) == ("float32[4]", (), "computed from sizes")
    assert step.value is not None
    low, increment = step.value
    np.testing.assert_allclose(
        [low * math.exp(-k * increment) for k in range(4)], [10000 ** (-k / 3) for k in range(4)], rtol=1e-15
    )
    made = plan(BUFFER, zeros(w=(8,)), TIMES, settings={"use": False})
    assert (names(made), made.notes) == (["p"], ())
    made = plan(BUFFER, zeros(w=(8,)), TIMES)
    assert (names(made), made.notes) == (
        ["p"],
        (
            "t.inv is left out: the target has it only when use is true, and nothing says whether it is "
            "(--set use=true|false)",
        ),
    )


def test_timescales_that_cannot_be_computed() -> None:
    on = {"use": True}
    (finding,) = findings(BUFFER, zeros(w=(8,)), TIMES, settings={"use": "yes"})
    assert "expected true or false, got 'yes'; set it with --set use=true" in finding
    (finding,) = findings(BUFFER.replace("axes: D", "axes: E"), zeros(w=(8,)), TIMES, settings=on)
    assert finding.startswith("r.yaml:9: t.inv: ") and "its width D" in finding and "`axes`" in finding
    (finding,) = findings(BUFFER, zeros(w=(8,)), TIMES.replace("10000", "ask"), settings=on)
    assert "expected two positive numbers, got 1 and None; " in finding and "--set max_timescale=..." in finding
    with pytest.raises(PlanError, match="--set max_timescale=0: expected an integer above 0, such as 10000"):
        plan(BUFFER, zeros(w=(8,)), TIMES, settings={**on, "max_timescale": 0})


# --- choosing among rule files --------------------------------------------------------------------------------------


def family(rules: str, model: str) -> RuleFile:
    return rule_file(rules, HEAD.replace("model: m", f"model: {model}\nfamily: fam"))


def picked(candidates: tuple[RuleFile, ...], source: MemorySource) -> str:
    choice = pick(score(candidates, source))
    assert isinstance(choice, RuleMatch), choice
    return choice.rules.model


def test_the_match_that_drops_fewest_leaves_is_picked() -> None:
    tree = MemorySource(zeros(w=(2,), v=(3,)))
    both = family("- from: w\n  parameter: p\n- from: v\n  parameter: q", "both")
    first = family("- from: w\n  parameter: p", "first")
    drops = family("- from: w\n  parameter: p\n- drop: v\n  because: not here", "drops")
    tower = family("- from: w\n  parameter: p\n- from: v\n  parameter: q\n- from: u\n  parameter: r", "tower")
    for candidates in ((first, drops, both, tower), (both, drops, first), (both, tower)):
        assert picked(candidates, tree) == "both"
    assert picked((first, drops), tree) == "drops"
    outcome = pick(score((first, tower), tree))
    assert isinstance(outcome, NoMatch) and outcome.nearest.rules is not first
    assert "leaf-missing" in {finding.code for finding in explain(outcome).findings}


def test_a_damaged_tower_is_not_left_out() -> None:
    text = "- from: w\n  parameter: p\n- drop: t/*\n  because: text only"
    full = family("- from: w\n  parameter: p\n- from: t/a\n  parameter: a\n- from: t/b\n  parameter: b", "full")
    outcome = pick(score((full, family(text, "text")), MemorySource(zeros(w=(2,), **{"t/a": (3,)}))))
    assert isinstance(outcome, NoMatch) and outcome.nearest.rules.model == "full"
    error = explain(outcome)
    assert error.code == "leaf-missing" and error.hint.startswith("Name text in place of fam")


def test_the_tree_picks_the_rule_file() -> None:
    a, b = family("- from: w\n  parameter: p", "a"), family("- from: v\n  parameter: q", "b")
    w = MemorySource(zeros(w=(2,)))
    assert picked((a, b), w) == picked((b, a), w) == "a"
    assert [(match.rules.model, match.coverage.fraction) for match in score((b, a), w)] == [("a", 1.0), ("b", 0.0)]
    nothing = pick(score((a, b), MemorySource(zeros(x=(2,)))))
    assert isinstance(nothing, NoMatch)
    assert explain(nothing).code == "rules-of-another-model" and "a, b" in str(explain(nothing))
    several = pick(score((a, rule_file("- from: w\n  parameter: r", HEAD)), w))
    assert isinstance(several, Ambiguous) and explain(several).code == "rules-ambiguous"
    half = pick(score((a, b), MemorySource(zeros(w=(2,), y=(1,)))))
    assert isinstance(half, NoMatch)
    error = explain(half)
    assert [finding.code for finding in error.findings] == ["leaf-without-rule"] and error.findings[0].path == "y"
    assert error.hint == "a is the closest of fam: a matches 50 %, b matches 0 % of the leaves"


# --- coverage as a property -----------------------------------------------------------------------------------------

LETTERS = "ABCDEFGH"


@st.composite
def models(draw: st.DrawFn) -> tuple[list[str], dict[str, tuple[int, ...]]]:
    """Rules, and the tree that they describe: per layer, stacked, single, with biases, fused, dropped.

    Each index has at least two leaves in each layer: a tree of which the last layer is missing as a whole is the tree of
    a shallower model, and nothing in it can tell.
    """
    depth = draw(st.integers(1, 3))
    rules = [
        "- einsum: ...A,AB->...B\n  from: l_{i}/r0/w\n  bias: l_{i}/r0/b\n  linear: m.{i}.r0",
        "- drop: opt/**\n  because: x",
    ]
    tree: dict[str, tuple[int, ...]] = {}
    for i in range(depth):
        tree |= {f"l_{i}/r0/w": (2, 3), f"l_{i}/r0/b": (3,)}
    for k in range(1, draw(st.integers(1, 5)) + 1):
        form = draw(st.sampled_from(["linear", "norm", "fused", "stacked", "plain", "embedding"]))
        per_layer = form != "stacked" and draw(st.booleans())
        at, to = ("l_{i}/", "m.{i}.") if per_layer else ("", "m.")
        where = [at.replace("{i}", str(i)) for i in range(depth)] if per_layer else [""]
        if form == "linear":
            rules.append(f"- einsum: ...A,AB->...B\n  from: '{at}r{k}/w'\n  linear: '{to}r{k}'")
            tree |= {f"{p}r{k}/w": (2, 3) for p in where}
        elif form == "norm":
            rules.append(
                f"- from: '{at}r{k}/s'\n  bias: '{at}r{k}/b'\n  multiplies_by: 1+scale\n  epsilon: 1e-6\n"
                f"  layer_norm: '{to}r{k}'"
            )
            tree |= {f"{p}r{k}/{x}": (2,) for p in where for x in "sb"}
        elif form == "fused":
            rules.append(f"- einsum: ...A,ABC->...BC\n  from: '{at}r{k}/{{q,v}}/w'\n  linear: '{to}r{k}'")
            tree |= {f"{p}r{k}/{x}/w": (2, 3, 5) for p in where for x in "qv"}
        elif form == "stacked":
            rules.append(f"- einsum: ...BC,ABC->...A\n  from: r{k}/w\n  stacked: {{i: 0}}\n  linear: 'm.{{i}}.r{k}'")
            tree[f"r{k}/w"] = (depth, 2, 3, 5)
        elif form == "plain":
            rules.append(f"- from: '{at}r{k}/{{x,y}}'\n  parameter: '{to}r{k}.{{x,y}}'")
            tree |= {f"{p}r{k}/{x}": (7,) for p in where for x in "xy"}
        else:
            rules.append(f"- from: '{at}r{k}/t'\n  embedding: '{to}r{k}'")
            tree |= {f"{p}r{k}/t": (4, 2) for p in where}
    for name in draw(st.lists(st.sampled_from(["opt/mu", "opt/nu/0", "opt/count"]), unique=True)):
        tree[name] = (1,)
    return draw(st.permutations(rules)), tree


@given(models(), st.data())
@settings(max_examples=120, deadline=None)
def test_one_leaf_more_or_less_or_one_rule_twice_is_refused(
    model: tuple[list[str], dict[str, tuple[int, ...]]], data: st.DataObject
) -> None:
    rules, shapes = model
    tree = zeros(**shapes)
    made = plan("\n".join(rules), tree)
    used = {part.leaf for step in made.steps for part in step.parts}
    assert used | {d.leaf for d in made.dropped} == set(tree)
    assert len(set(names(made))) == len(made.steps)

    needed = sorted(used)
    with pytest.raises(PlanError):
        plan("\n".join(rules), without(tree, data.draw(st.sampled_from(needed), "removed")))
    added = data.draw(
        st.sampled_from(["extra", "l_0/extra", "l_9/r0/w", "l_0/r0", "l_0/r0/w/x", *(f"{n}/value" for n in needed)])
        | st.text("abr0/_", min_size=1, max_size=6).filter(lambda name: name not in tree),
        "added",
    )
    with pytest.raises(PlanError):
        plan("\n".join(rules), {**tree, added: np.zeros((2, 3), np.float32)})
    twice = data.draw(st.sampled_from([rule for rule in rules if "drop" not in rule]), "repeated")
    with pytest.raises(PlanError):
        plan("\n".join([*rules, twice]), tree)
    with pytest.raises(PlanError):
        plan("\n".join(rule for rule in rules if rule is not twice), tree)


def test_what_a_tree_alone_cannot_tell() -> None:
    """The last layer missing as a whole is a shallower model. Its depth, or the state_dict wanted, can tell."""
    shallow = {n: x for n, x in mlp(3).items() if "layers_2" not in n}
    like = {step.name: step.spec for step in plan(MLP, mlp(3)).steps}
    assert plan(MLP, shallow).sizes["i"] == 2
    assert findings(MLP, shallow, HEAD + "axes: {i: {is: layers}}\n", settings={"i": 3}) == [
        "r.yaml:6: the number of {i} in the tree makes i = 2 (layers), but the setting (--set i=3) makes it 3; leave out "
        "--set i=3"
    ]
    assert len(findings(MLP, shallow, like=like)) == 4


@given(models(), st.data())
@settings(max_examples=60, deadline=None)
def test_one_axis_longer_is_refused(model: tuple[list[str], dict[str, tuple[int, ...]]], data: st.DataObject) -> None:
    """Where letters meet: any leaf of a linear rule has an axis in common with another one."""
    rules, shapes = model
    letters = [n for n in shapes if n.endswith("/w")]
    leaf = data.draw(st.sampled_from(letters))
    shape = list(shapes[leaf])
    axis = shape.index(2)  # A, which r0 has in each layer, and every stacked or fused weight has as well
    shape[axis] += 1
    others = [n for n in letters if n != leaf]
    if not others:
        return
    with pytest.raises(PlanError) as refused:
        plan("\n".join(rules), zeros(**{**shapes, leaf: tuple(shape)}))
    conflicts = [finding for finding in refused.value.findings if finding.code == "size-conflict"]
    assert any(leaf in str(finding) for finding in conflicts)


def test_planning_a_large_tree_is_quick() -> None:
    tree = mlp(300)
    with calls_at_most(1000 * 1200):
        assert len(plan(MLP, tree).steps) == 1200


def test_a_state_dict_of_another_model_is_refused_quickly() -> None:
    """The nearest name is looked up for the findings that are shown; for thousands it would take minutes."""
    like = {f"model.layers.{i}.mlp.up.weight": TensorSpec((3, 2), "float32") for i in range(1000)}
    with calls_at_most(1000 * 2200):
        assert len(findings(MLP, mlp(300), like=like)) == 1000 + 1200


def test_a_norm_whose_bias_has_another_shape() -> None:
    rules = "- from: s\n  bias: b\n  multiplies_by: scale\n  epsilon: 1e-6\n  layer_norm: n\n"
    (finding,) = findings(rules, zeros(s=(7,), b=(3, 4)))
    assert finding.startswith("r.yaml:5: b: ")
    assert "expected the shape of s: float32[7], got float32[3,4]; correct one of the two paths" in finding


def test_a_stack_of_no_layers() -> None:
    rules = "- from: w\n  stacked: {i: 0}\n  parameter: w.{i}\n- from: v\n  parameter: v\n"
    (said,) = findings(rules, zeros(w=(0, 4), v=(2,)))
    assert "r.yaml:5: w: expected at least one layer on the stacked axis 0, got float32[0,4]; " in said


def test_rules_that_only_drop() -> None:
    assert refusal("- drop: '**'\n  because: all of it\n", zeros(w=(2,))).code == "rules-empty"
