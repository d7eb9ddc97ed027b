"""The names of leaves and tensors agree, and a leaf in another tensor is found by them."""

from __future__ import annotations

import dataclasses

import numpy as np

from convert.api import plan_conversion
from convert.core.findings import Finding
from convert.layers.base import Part, Step
from convert.planning.merged_leaf import Sum
from convert.planning.plan import Plan
from convert.planning.planner import make_plan
from convert.rules.parse import parse_rules
from convert.verify.layers.placement import misplaced
from support.goldens import checkpoint
from support.memory_source import MemorySource


def test_names_agree_in_all_goldens() -> None:
    for case in ("timesfm-1.0", "timesfm-2.0", "timesfm-2.5"):
        for to in ("timesfm", "transformers"):
            plan = plan_conversion("timesfm", checkpoint(case), to=to)
            assert not any(place(plan, step, part) for step in plan.steps for part in step.parts)


def place(plan: Plan, step: Step, part: Part) -> Finding | None:
    rule = next(rule for rule in plan.rules.rules if rule.at == step.rule)
    return misplaced(plan, rule, step, part)


def test_lexical_order_is_misplaced() -> None:
    """`x_layers_10` lies before `x_layers_2`: whoever numbers the sorted leaves gets 2.0 wrong."""
    plan = plan_conversion("timesfm", checkpoint("timesfm-2.0"))
    step = next(step for step in plan.steps if step.name == "stacked_transformer.layers.2.self_attn.o_proj.weight")
    part = dataclasses.replace(step.parts[0], leaf=step.parts[0].leaf.replace("x_layers_2", "x_layers_10"))
    finding = place(plan, step, part)
    assert finding is not None and finding.code == "layer-misplaced" and finding.expected == step.name
    assert finding.got.endswith("belongs to stacked_transformer.layers.10.self_attn.o_proj.weight")
    part = dataclasses.replace(step.parts[0], leaf="mdl_vars/params/freq_emb/emb_var")
    finding = place(plan, step, part)
    assert finding is not None and finding.got == part.leaf and finding.path == step.name


def test_a_stacked_parameter_without_letters_takes_an_element_of_each_layer() -> None:
    """The scales of layers that a scan stacks."""
    text = "model: m\ntitle: M\ntargets: {torch: {loads: T}}\nrules:\n- from: scale\n  stacked: {i: 0}\n  parameter: blocks.{i}.gamma\n"
    plan = make_plan(parse_rules(text), MemorySource({"scale": np.ones((2, 3), np.float32)}))
    assert [(step.name, place(plan, step, step.parts[0])) for step in plan.steps] == [
        ("blocks.0.gamma", None),
        ("blocks.1.gamma", None),
    ]
    first, second = plan.steps
    assert place(plan, first, second.parts[0]) is not None, "another layer's element"


SHARED = """\
model: m
title: M
targets: {torch: {loads: T, shared: {g.embed: [d.embed], g.head: [d.head]}}}
rules:
- {from: table, axes: VD, embedding: {module: g.embed.word, tied: g.head}}
- {from: 'h_{i}', axes: AD, embedding: 'h.{i}'}
"""


def test_a_tied_table_of_a_module_that_several_places_use_has_all_its_names() -> None:
    """An ELECTRA's table, which the generator's head and the discriminator use, was said to be of another tensor."""
    tree = {name: np.ones((3, 2), np.float32) for name in ("table", "h_0")}
    plan = make_plan(parse_rules(SHARED), MemorySource(tree))
    names = {step.name: step for step in plan.steps}
    shared = [f"{side}.{name}.weight" for side in "gd" for name in ("embed.word", "head")]
    assert {*shared, "h.0.weight"} == names.keys()
    assert not any(place(plan, names[name], part) for name in shared for part in names[name].parts)
    stranger = dataclasses.replace(names["g.head.weight"], name="d.other.weight")
    assert place(plan, stranger, stranger.parts[0]) is not None, "a name that no rule gives it"


OF_TWO_PATHS = """\
model: m
title: M
targets: {torch: {loads: T}}
path_variants:
  b_{i}: [[{path: "first_{f}", order: [f]}, {path: rest, stacked: {s: 1}, order: [s]}]]
rules:
- {einsum: '...D,DF->...F', from: 'b_{i}/w', bias: 'b_{i}/b + b_{i}/c', linear: 'l.{i}'}
"""


def test_leaves_that_are_added_are_of_one_layer_on_each_path_of_a_rule() -> None:
    """DeepSeek 4's scanned layers were said to take leaves of another layer: the rule stands there once for each path."""
    tree = {f"first_0/{name}": np.ones(shape, np.float32) for name, shape in (("w", (3, 4)), ("b", 4), ("c", 4))}
    tree |= {f"rest/{name}": np.ones(shape, np.float32) for name, shape in (("w", (3, 2, 4)), ("b", (4, 2)), ("c", (4, 2)))}  # fmt: skip
    plan = make_plan(parse_rules(OF_TWO_PATHS), MemorySource(tree))
    parts = [(step, part) for step in plan.steps for part in step.parts if step.role == "bias"]
    assert len(parts) == 3
    for step, part in parts:
        assert part.rule is not None and misplaced(plan, part.rule, step, part) is None
    (step, part), merge = parts[1], plan.merges["rest/b + rest/c"]
    assert part.rule is not None and isinstance(merge, Sum)
    planted = Sum(("rest/b", "first_0/c"), merge.spec, merge.dtype)
    finding = misplaced(dataclasses.replace(plan, merges={**plan.merges, merge.name: planted}), part.rule, step, part)
    assert finding is not None and finding.got == "first_0/c"
