"""Layers of several types, references with an offset in `config`, and targets that have an einsum of their own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from convert import PlanError, RuleError
from convert.planning.planner import make_plan
from convert.rules.file import parse_reference
from support.memory_source import MemorySource, rule_file, run

HEAD = """\
model: m
title: M
axes: {i: {is: layers}}
facts: {window: 7}
layer_types:
  kinds: {of: i, leaves: {loop: 'b.{i}/loop/**', look: 'b.{i}/look/**'}}
targets: {torch: {loads: T, config: {layer_types: $kinds, window: $window, reach: $window+1, fewer: $i-1}}}
"""
RULES = """\
- from: b.{i}/norm
  parameter: n.{i}
- from: b.{i}/loop/w
  bias: b.{i}/loop/b
  einsum: "...D,DE->...E"
  layer_type: loop
  linear: loop.{i}
- from: b.{i}/look/w
  layer_type: look
  parameter: look.{i}
"""


def tree(*types: str) -> dict[str, np.ndarray]:
    out = {}
    for i, word in enumerate(types):
        out[f"b.{i}/norm"] = np.ones(3, np.float32)
        out[f"b.{i}/{word}/w"] = np.ones((3, 5), np.float32)
        if word == "loop":
            out[f"b.{i}/loop/b"] = np.ones(5, np.float32)
    return out


def test_types_are_read_off_the_tree() -> None:
    plan = make_plan(rule_file(RULES, HEAD), MemorySource(tree("loop", "look", "loop")))
    assert plan.facts["kinds"] == ["loop", "look", "loop"]
    assert plan.config is not None
    assert plan.config == {
        "layer_types": ["loop", "look", "loop"],
        "window": 7,
        "reach": 8,
        "fewer": 2,
        "dtype": "float32",
    }
    assert [s.name for s in plan.steps if s.name.startswith(("loop", "look"))] == [
        "loop.0.weight",
        "loop.2.weight",
        "loop.0.bias",
        "loop.2.bias",
        "look.1",
    ]


def test_a_target_may_support_one_order_of_types() -> None:
    needed = "requires: {kinds: {is: {repeat: [loop, look], length: $i}, because: it has no other}}, config: {"
    head = HEAD.replace("config: {", needed)
    assert make_plan(rule_file(RULES, head), MemorySource(tree("loop", "look", "loop"))).facts["kinds"][2] == "loop"
    with pytest.raises(PlanError) as refused:
        make_plan(rule_file(RULES, head), MemorySource(tree("look", "loop")))
    (finding,) = refused.value.findings
    assert finding.code == "target-requirement"
    assert (finding.expected, finding.got) == ("kinds = ['loop', 'look']", "kinds = ['look', 'loop']")
    with pytest.raises(RuleError) as unknown:
        rule_file(RULES, head.replace("requires: {kinds", "requires: {kindz"))
    assert unknown.value.code == "rule-unknown-name"


def test_a_type_that_no_layer_has_is_no_gap() -> None:
    plan = make_plan(rule_file(RULES, HEAD), MemorySource(tree("loop", "loop")))
    assert plan.facts["kinds"] == ["loop", "loop"]


OUTSIDE = HEAD.replace("axes:", "root: [net, '']\naxes:", 1)
OUTSIDE = OUTSIDE.replace("b.{i}/loop/**", "/state/b.{i}/ids").replace("b.{i}/look/**", "/state/b.{i}/bias")
OF_STATE = """\
- from: /state/b.{i}/ids
  layer_type: loop
  parameter: ids.{i}
- from: /state/b.{i}/bias
  layer_type: look
  parameter: bias.{i}
- from: b.{i}/w
  parameter: w.{i}
"""


@pytest.mark.parametrize("root", ["net/", ""])
def test_leaves_outside_the_root_tell_the_type(root: str) -> None:
    """DeepSeek 4's experts of each token lie beside the parameters of its train state, and not below their root."""
    leaves = {f"state/b.{i}/{leaf}": np.ones(3, np.float32) for i, leaf in enumerate(("ids", "bias", "bias"))}
    leaves |= {f"{root}b.{i}/w": np.ones(3, np.float32) for i in range(3)}
    rules = rule_file(OF_STATE, OUTSIDE)
    plan = make_plan(rules, MemorySource(leaves))
    assert plan.facts["kinds"] == ["loop", "look", "look"]
    assert {step.name for step in plan.steps} == {"ids.0", "bias.1", "bias.2", "w.0", "w.1", "w.2"}
    below = make_plan(rules, MemorySource({f"saved/{name}": x for name, x in leaves.items()}))
    assert (below.facts["kinds"], len(below.steps)) == (["loop", "look", "look"], 6)
    with pytest.raises(PlanError) as refused:
        make_plan(rules, MemorySource({name: x for name, x in leaves.items() if name != "state/b.1/bias"}))
    assert refused.value.code == "layer-type-unknown" and "{i} = 1" in refused.value.findings[0].problem


SCANNED = HEAD.replace("loop/**", "loop/w").replace("look/**", "look/w").replace("layer_types:", """\
path_variants:
  b.{i}:
  - [{path: "b.{f}", order: [f]}, {path: units/zero, stacked: {s: 1}, order: [s, p], period: 2, positions: [0]}, {path: units/one, stacked: {s: 1}, order: [s, p], period: 2, positions: [1]}]
layer_types:""", 1)  # fmt: skip


def scanned(*types: str, first: int) -> dict[str, np.ndarray]:
    """Return the tree whose layers are stacked two by two behind the first ones, those of a unit being of the same two types."""
    out = {name: x for name, x in tree(*types).items() if int(name[2]) < first}
    for place, word in enumerate(("zero", "one")):
        units = [tree(*types[: first + k + place + 1]) for k in range(0, len(types) - first, 2)]
        for name in [name for name in units[0] if name.startswith(f"b.{first + place}/")]:
            numbered = [
                unit[name.replace(f".{first + place}/", f".{first + 2 * k + place}/")] for k, unit in enumerate(units)
            ]
            out[name.replace(f"b.{first + place}", f"units/{word}")] = np.stack(numbered, 1)
    return out


@pytest.mark.parametrize("types", [("loop", "look", "look", "look", "look"), ("look", "loop", "look", "loop", "look")])
def test_types_are_read_off_stacked_layers(types: tuple[str, ...]) -> None:
    """The type of a whole stack, and types that only the layers before it have, as DeepSeek 4's experts that the token chooses."""
    rules = rule_file(RULES, SCANNED)
    plan, apart = (make_plan(rules, MemorySource(one)) for one in (scanned(*types, first=1), tree(*types)))
    assert plan.facts["kinds"] == apart.facts["kinds"] == list(types)
    assert {step.name for step in plan.steps} == {step.name for step in apart.steps}


@pytest.mark.parametrize(
    ("lost", "code", "said"),
    [
        ("b.0/loop/w", "layer-type-unknown", "layer {i} = 0"),
        ("units/zero/look/w", "layer-type-unknown", "layer {i} = 1"),
        ("b.0/loop/b", "leaf-missing", "b.{f}/loop/b (linear, bias)"),
        ("units/one/norm", "layers-missing", "{i} = 2, 4"),
    ],
)
def test_a_stack_is_of_one_type_and_complete(lost: str, code: str, said: str) -> None:
    leaves = scanned("loop", "look", "look", "look", "look", first=1)
    del leaves[lost]
    with pytest.raises(PlanError) as refused:
        make_plan(rule_file(RULES, SCANNED), MemorySource(leaves))
    assert any(one.code == code and said in str(one) for one in refused.value.findings), refused.value.findings


def test_a_type_is_told_by_the_path_of_a_rule_where_trees_write_it_in_several_ways() -> None:
    with pytest.raises(RuleError) as refused:
        rule_file(RULES, SCANNED.replace("b.{i}/look/w", "b.{i}/look/*"))
    (finding,) = refused.value.findings
    assert (finding.code, finding.got) == ("rule-layer-types", "b.{i}/look/*")
    assert finding.expected == "the path of a rule with `layer_type: look`, as a tree may have another than b.{i}"


@pytest.mark.parametrize(
    ("change", "code", "place", "got"),
    [
        (lambda t: t.pop("b.1/look/w"), "layer-type-unknown", "r.yaml:6", "neither"),
        (
            lambda t: t.update({"b.1/loop/w": t["b.0/loop/w"], "b.1/loop/b": t["b.0/loop/b"]}),
            "layer-type-unknown",
            "r.yaml:6",
            "leaves of look and of loop",
        ),
        (lambda t: t.pop("b.2/loop/b"), "leaf-missing", "b.2/loop/b", ""),
    ],
)
def test_a_layer_is_of_one_type_and_complete(change: Any, code: str, place: str, got: str) -> None:
    leaves = tree("loop", "look", "loop")
    change(leaves)
    with pytest.raises(PlanError) as refused:
        make_plan(rule_file(RULES, HEAD), MemorySource(leaves))
    (finding,) = refused.value.findings
    assert (finding.code, finding.got) == (code, got) and place in (finding.rule, finding.path)
    if code == "layer-type-unknown":
        assert finding.expected == "b.{i}/loop/** (loop) or b.{i}/look/** (look)" and "{i} = 1" in finding.problem


@pytest.mark.parametrize(
    ("old", "new", "code", "got"),
    [
        ("layer_type: look", "layer_type: lok", "rule-unknown-name", "did you mean 'look'?"),
        ("{of: i, leaves: {loop: 'b.{i}/loop/**', ", "{of: i, leaves: {", "rule-layer-types", "got 1"),
        ("{of: i,", "{of: j,", "rule-layer-types", "got b.{i}/loop/**"),
        ("facts: {window: 7}", "facts: {window: 7, kinds: 3}", "rule-name-clash", "'kinds'"),
        ("$window+1", "$windw+1", "rule-unknown-name", "did you mean 'window'?"),
        ("- from: b.{i}/norm\n", "- from: norm\n  layer_type: look\n", "rule-index-mismatch", "{i}"),
    ],
)
def test_errors(old: str, new: str, code: str, got: str) -> None:
    head, rules = HEAD.replace(old, new), RULES.replace(old, new)
    assert (head, rules) != (HEAD, RULES)
    with pytest.raises(RuleError) as error:
        rule_file(rules, head)
    assert error.value.code == code and got in str(error.value.findings[0])


def test_a_type_needs_the_index_of_its_layers() -> None:
    rules = RULES.replace("- from: b.{i}/norm\n", "- from: norm\n  layer_type: look\n").replace("n.{i}", "n")
    with pytest.raises(RuleError) as error:
        rule_file(rules, HEAD)
    finding = error.value.findings[0]
    assert finding.code == "rule-layer-types" and "{i}" in finding.expected and finding.got == "norm"


def test_a_word_has_no_one_more() -> None:
    head = HEAD.replace("window: 7", "window: wide")
    with pytest.raises(PlanError) as refused:
        _ = make_plan(rule_file(RULES, head), MemorySource(tree("loop", "look"))).config
    assert (refused.value.code, refused.value.findings[0].got) == ("fact-not-a-number", "'wide'")


def test_references() -> None:
    assert parse_reference("$a") == ("a", 0)
    assert parse_reference("$a_b-2") == ("a_b", -2)
    assert parse_reference("a") is None
    assert parse_reference("$a*2") is None
    assert parse_reference(3) is None


# ---- an einsum on both sides


@pytest.mark.parametrize(
    ("source", "target", "shape", "bias"),
    [
        ("...hi,hij->...hj", "...hi,hij->...hj", (3, 5, 7), (3, 7)),
        ("...hi,hij->...hj", "...hi,jhi->...hj", (3, 5, 7), (3, 7)),
        ("...td,cdf->c...tf", "...td,cdf->c...tf", (2, 5, 7), (2, 1, 1, 7)),
        ("...td,cdf->c...tf", "...td,fcd->c...tf", (2, 5, 7), (2, 1, 1, 7)),
    ],
)
def test_the_targets_own_einsum(source: str, target: str, shape: tuple[int, ...], bias: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    leaves = {"w": rng.standard_normal(shape), "b": rng.standard_normal(bias)}
    rules = rule_file(
        f'- einsum: "{source}"\n  from: w\n  bias: b\n  linear: {{module: m, weight: w, bias: b, einsum: "{target}"}}'
    )
    out = run(make_plan(rules, MemorySource(leaves)))
    sizes = dict(zip(source.split(",")[1].split("->")[0], shape, strict=True))
    x = rng.standard_normal(
        [2, 4, *(sizes.get(a, 4) for a in source.split(",")[0].replace("...", "").replace("t", ""))]
    )
    want = np.einsum(source, x, leaves["w"]) + leaves["b"]
    assert np.abs(np.einsum(target, x, out["m.w"]) + out["m.b"] - want).max() < 1e-12


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("{module: m, einsum: '...D,DF->...F'}", "the target's ...D,DF->...F is not the source's ...D,DE->...E with the weight's axes in another order"),
        ("{module: m, einsum: '...E,DE->...D'}", "the target's ...E,DE->...D is not the source's ...D,DE->...E with the weight's axes in another order"),
        ("{module: 'm.{a,b}', einsum: '...D,DE->...E'}", "a target with an `einsum:` holds one leaf in one tensor; it can be neither fused nor split"),
    ],
)  # fmt: skip
def test_a_target_that_computes_something_else(target: str, message: str) -> None:
    with pytest.raises(RuleError) as refused:
        rule_file(f'- einsum: "...D,DE->...E"\n  from: w\n  linear: {target}')
    assert str(refused.value) == f"r.yaml:5:3: {message}"
