"""Coverage: leaves without a rule, rules without a leaf, gaps in an index; every finding by its full text, and coverage as a property."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convert import PlanError, TensorSpec
from convert.planning.planner import make_plan
from support.effort import calls_at_most
from support.memory_source import HEAD, MemorySource, rule_file, zeros
from support.small_plans import MLP, findings, mlp, names, places, plan, refusal, without


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


def test_a_dropped_leaf_of_the_layer_is_named_where_one_is_missing() -> None:
    rules = MLP + '- drop: "**quantised/**"\n  because: quantised\n'
    kept = {**mlp(), "aside/layers_1/up/quantised/q": np.zeros(3, np.int8)}
    assert plan(rules, kept).dropped[-1].reason == "quantised"
    named = "aside/layers_1/up/quantised/q lies there, and is dropped: quantised"
    assert named in findings(rules, without(kept, "layers_1/up/w"))[0]
    assert named in findings(rules, without(kept, *(f"layers_{i}/up/b" for i in range(3))))[0]
    assert named not in findings(rules, without(kept, "layers_0/down/w"))[0]


def test_a_leaf_missing_below_words_of_several_keys() -> None:
    rules = "- from: part_{i}/{a/k,b/k}\n  axes: D\n  parameter: p.{i}.{a,b}\n- drop: /part_1/old\n  because: old"
    tree = {f"part_{i}/{name}/k": np.zeros(3) for i in range(2) for name in "ab"}
    (text,) = findings(rules, {**without(tree, "part_1/b/k"), "part_1/old": np.zeros(3)})
    assert "part_1/b/k: this leaf is not in the checkpoint" in text and "part_1/old lies there, and is dropped" in text


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


@pytest.mark.slow
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


def test_planning_many_experts_of_few_leaves_is_quick() -> None:
    """Each expert is a name, two numbers and two objects; what its layer has is worked out once."""
    rules = "- from: blocks/w\n  stacked: {s: 1, p: 2}\n  index_from: {i: [s, p]}\n  einsum: E...D,EDF->E...F\n  linear: m.{i}.{E}"
    tree = zeros(**{"blocks/w": (1000, 2, 3, 5, 7)})
    with calls_at_most(6000 * 16):
        assert len(plan(rules, tree).steps) == 6000


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


def test_numbers_that_scale_float8_weights_are_not_to_be_dropped() -> None:
    """MaxText's float8: the advice for a leaf without a rule was to drop it, and the weights would have been others."""
    tree = zeros(**{"a/kernel": (3, 5), "b/kernel": (3, 5), "b/kernel_scale": (1,), "c": (2,)})
    tree["a/kernel"] = tree["a/kernel"].astype(ml_dtypes.float8_e4m3fn)
    tree |= {"a/kernel_scale": np.ones((3, 1), np.float32), "e/w/value": tree["a/kernel"], "e/w_scale/value": np.ones(1, np.float32)}  # fmt: skip
    rules = "- {from: '{a,b}/kernel', parameter: '{a,b}'}\n- {from: c, parameter: c}\n- {from: e/w, parameter: e}\n"
    with pytest.raises(PlanError) as refused:
        make_plan(rule_file(rules), MemorySource(tree))
    scales, plain = refused.value.findings
    assert (scales.code, scales.path) == (
        "leaf-without-rule",
        "a/kernel_scale",
    ) and "and 1 more like it" in scales.problem
    assert "drop" not in scales.fix and "weights of another dtype" in scales.fix
    assert (plain.code, plain.path) == ("leaf-without-rule", "b/kernel_scale") and "`drop:`" in plain.fix
