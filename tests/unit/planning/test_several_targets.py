"""One leaf that becomes several tensors, for every kind of layer; and leaves that no other rule matches."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import numpy as np
import pytest

from convert import PlanError, RuleError
from convert.core.yaml_nodes import load_yaml
from convert.planning.planner import make_plan
from convert.planning.rule_match import match_rules
from convert.rules.schema import schema
from convert.verify.config.declared import declared_facts
from convert.writing.execute import execute
from convert.writing.written import open_written
from support.memory_source import HEAD, MemorySource, rule_file, run
from support.weights_level import check_weights

KINDS = {
    "linear": ('- einsum: "...D,DF->...F"\n  from: w\n  bias: b\n  linear: TARGETS', {"w": (3, 5), "b": (5,)}, "{module: two, axes: FD..}"),
    "embedding": ("- from: w\n  axes: VD\n  embedding: TARGETS", {"w": (5, 3)}, "{module: two, tied: head}"),
    "parameter": ("- from: w\n  axes: AB\n  parameter: TARGETS", {"w": (5, 3)}, "{name: two, axes: BA}"),
    "layer_norm": ("- from: w\n  bias: b\n  multiplies_by: scale\n  epsilon: 1e-5\n  layer_norm: TARGETS", {"w": (5,), "b": (5,)}, "{module: two, multiplies_by: 1+weight}"),
    "conv": ("- dimension_numbers: NWC,WIO->NWC\n  axes: PIO\n  from: w\n  conv: TARGETS", {"w": (3, 5, 7)}, "two"),
    "gru": ("- cell: flax.linen.GRUCell\n  from: rnn\n  gru: TARGETS", {f"rnn/{part}{gate}/{leaf}": ((4, 4) if part == "h" else (3, 4)) if leaf == "kernel" else (4,) for part in "hi" for gate in "rzn" for leaf in ("kernel", "bias") if leaf == "kernel" or part == "i" or gate == "n"}, "two"),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_list_of_targets_gets_the_leaf(kind: str, tmp_path: Path) -> None:
    rules, shapes, second = KINDS[kind]
    rng = np.random.default_rng(0)
    tree = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    alone = [run(make_plan(rule_file(rules.replace("TARGETS", to)), MemorySource(tree))) for to in ("one", second)]
    plan = make_plan(rule_file(rules.replace("TARGETS", f"[one, {second}]")), MemorySource(tree))
    both = run(plan)
    assert both.keys() == alone[0].keys() | alone[1].keys()
    for name, values in {**alone[0], **alone[1]}.items():
        np.testing.assert_array_equal(both[name], values)
    list(execute(plan, tmp_path / "out.safetensors"))
    assert check_weights(plan, open_written(tmp_path / "out.safetensors")).findings == ()


def test_each_target_has_its_own_list_and_its_own_facts() -> None:
    head = "model: m\ntitle: M\ntargets: {a: {loads: A}, b: {loads: B, rename_prefixes: {model: m}}}\n"
    rules = rule_file(
        "- from: n\n  multiplies_by: scale\n  epsilon: 1e-6\n  rms_norm: {a: [model.x, model.y], b: model.z}\n"
        "- from: t\n  axes: VD\n  embedding: [model.one, model.two]",
        head,
    )
    tree = MemorySource({"n": np.ones(3, np.float32), "t": np.ones((2, 3), np.float32)})
    first, second = (make_plan(rules, tree, to=target) for target in "ab")
    assert list(run(first)) == ["model.x.weight", "model.y.weight", "model.one.weight", "model.two.weight"]
    assert list(run(second)) == ["m.z.weight", "m.one.weight", "m.two.weight"]
    epsilons = [fact.layer.text for fact in declared_facts(first) if fact.name == "epsilon" and fact.layer is not None]
    assert epsilons == ["model.x", "model.y"]


@pytest.mark.parametrize(
    ("targets", "code", "said"),
    [
        ("[]", "rule-wrong-value", "list of targets"),
        ("[one, {module: two, nonsense: 1}]", "rule-unknown-key", "nonsense"),
        ("[one, 'two.{i}']", "rule-index-mismatch", "{i}"),
        ("[one, one]", "tensor-made-twice", "one.weight"),
    ],
)
def test_lists_that_are_refused(targets: str, code: str, said: str) -> None:
    with pytest.raises((PlanError, RuleError)) as error:
        make_plan(rule_file(f"- from: w\n  axes: VD\n  embedding: {targets}"), MemorySource({"w": np.ones((2, 3), np.float32)}))  # fmt: skip
    assert (error.value.findings[0].code, said in str(error.value)) == (code, True), error.value


def test_the_schema_takes_lists_of_targets_and_the_rest() -> None:
    text = (
        HEAD
        + 'rules:\n- from: w\n  axes: VD\n  embedding: [one, {module: two}]\n- drop: "**"\n  rest: true\n  because: tests\n'
    )
    jsonschema.validate(load_yaml(text, "r.yaml").plain(), json.loads(json.dumps(schema())))


# ---- the rest


TREE = {"w": (2, 3), "decoder/a": (3,), "decoder/b": (3,), "step": ()}
REST = '- from: w\n  axes: VD\n  embedding: e\n- drop: "**"\n  rest: true\n  because: only the table is used'


def tree(**more: tuple[int, ...]) -> MemorySource:
    return MemorySource({name: np.zeros(shape, np.float32) for name, shape in {**TREE, **more}.items()})


def test_the_rest_is_dropped_and_counted() -> None:
    plan = make_plan(rule_file(REST), tree())
    assert [step.name for step in plan.steps] == ["e.weight"]
    assert [(d.leaf, d.reason, d.rule.line_only) for d in plan.dropped] == [
        (leaf, "only the table is used", "r.yaml:8") for leaf in ("decoder/a", "decoder/b", "step")
    ]
    assert plan.notes == ("3 leaves that no other rule matches are dropped by r.yaml:8: decoder (2), step (1)",)


def test_the_rest_may_stand_first_and_be_a_part_of_the_tree() -> None:
    first = '- drop: "decoder/**"\n  rest: true\n  because: x\n- from: decoder/b\n  parameter: b\n- from: w\n  parameter: w\n- drop: step\n  because: y'
    plan = make_plan(rule_file(first), tree())
    assert {d.leaf: d.reason for d in plan.dropped} == {"decoder/a": "x", "step": "y"}
    assert plan.notes == ("1 leaf that no other rule matches is dropped by r.yaml:5: decoder (1)",)


def test_without_the_rest_a_leaf_has_one_rule() -> None:
    with pytest.raises(PlanError) as error:
        make_plan(rule_file(REST.replace("  rest: true\n", "")), tree())
    assert error.value.findings[0].code == "leaf-claimed-twice"


def test_a_rule_that_finds_nothing_is_an_error_although_the_rest_is_dropped() -> None:
    with pytest.raises(PlanError) as error:
        make_plan(rule_file(REST + "\n- from: encoder/missing\n  parameter: m"), tree())
    assert error.value.findings[0].code == "leaf-missing"


def test_rules_that_drop_the_rest_convert_no_more_than_others() -> None:
    coverage = match_rules(rule_file(REST), tree()).coverage
    assert (coverage.fraction, coverage.left_out) == (0.25, 3)


@pytest.mark.parametrize("count", [7])
def test_many_trees_are_counted_together(count: int) -> None:
    plan = make_plan(rule_file(REST), tree(**{f"t{k}/x": (1,) for k in range(count)}))
    assert plan.notes[0].endswith("and 3 more")


def test_a_layer_that_stands_in_several_places_is_written_under_each_name() -> None:
    tree = MemorySource({"k": np.ones((2, 3), np.float32), "c": np.ones(3, np.float32), "u": np.ones(4, np.float32)})
    text = "- einsum: ...D,DE->...E\n  from: k\n  bias: c\n  linear: layers.0.up\n- from: u\n  parameter: u"
    head = "model: m\ntitle: M\naxes: {D: {is: a width}, E: {is: a width}}\ntargets: {torch: {loads: A, shared: {layers.0: [layers.1, layers.2], u: [layers.0.u]}}}\n"
    plan = make_plan(rule_file(text, head), tree)
    made = run(plan)
    assert set(made) == {"u", "layers.0.u", *(f"layers.{i}.up.{role}" for i in range(3) for role in ("weight", "bias"))}
    np.testing.assert_array_equal(made["layers.2.up.weight"], made["layers.0.up.weight"])
    assert {step.name: step.tied for step in plan.steps}["layers.2.up.bias"] == "layers.0.up.bias"
    with pytest.raises(PlanError, match="names layers.3, which no rule makes"):
        make_plan(rule_file(text, head.replace("layers.0:", "layers.3:")), tree)
