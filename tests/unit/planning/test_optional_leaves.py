"""Leaves that may be absent: optional rules, alternatives of `root`, the suffix of nnx, and drops with wildcards."""

from __future__ import annotations

import numpy as np
import pytest

from convert import PlanError, RuleError
from convert.core.errors import OptionError
from support.memory_source import HEAD, rule_file, zeros
from support.small_plans import MLP, findings, mlp, names, places, plan, without

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


MODULES = """
- from: a_{i}/w
  parameter: a.{i}
- from: a_{i}/more/x
  parameter: x.{i}
  optional: true
- from: a_{i}/more/{y,z}/w
  parameter: '{y,z}.{i}'
  optional: true
- from: a_{i}/bias
  parameter: b.{i}
  optional: true
"""
WHOLE = zeros(**{f"a_{i}/{leaf}": (2,) for i in (0, 1) for leaf in ("w", "bias", "more/x", "more/y/w", "more/z/w")})


@pytest.mark.parametrize("layers", [(), (0,), (1,), (0, 1)])
def test_an_optional_module_is_complete_or_absent(layers: tuple[int, ...]) -> None:
    """`more` has leaves of two rules, all optional; a bias beside required leaves stands for itself."""
    there = {n: x for n, x in WHOLE.items() if "more" not in n or int(n[2]) in layers}
    assert len(plan(MODULES, there).steps) == 4 + 3 * len(layers)
    assert len(plan(MODULES, without(there, "a_0/bias")).steps) == 3 + 3 * len(layers)
    for k in layers:
        (found,) = findings(MODULES, without(there, f"a_{k}/more/x"))
        assert f": a_{k}/more/x: this leaf is not in the checkpoint, but others below a_{{i}}/more are; " in found
        (found,) = findings(MODULES, without(there, f"a_{k}/more/y/w", f"a_{k}/more/z/w"))
        assert f": a_{k}/more/y/w: this leaf" in found and "an optional module is complete or absent" in found


SHARED = HEAD + "facts: {shared: ask}\n"
LAST = "- from: a_{i}\n  parameter: a.{i}\n- from: k_{i}\n  parameter: k.{i}\n  optional_last: shared"


@pytest.mark.parametrize(
    ("layers", "shared", "missing"),
    [("0123", 2, ""), ("01", 2, ""), ("01", None, ""), ("", 4, ""), ("1", 2, "k_0"), ("13", None, "k_0"),
     ("0", 2, "k_1"), ("013", 2, ""), ("03", 2, "k_1"), ("013", None, "k_2"), ("", 2, "k_0")],
)  # fmt: skip
def test_only_the_last_layers_may_lack_a_leaf(layers: str, shared: int | None, missing: str) -> None:
    tree = zeros(**{f"a_{i}": (2,) for i in range(4)}, **{f"k_{i}": (2,) for i in layers})
    settings = {} if shared is None else {"shared": shared}
    if not missing:
        assert len(plan(LAST, tree, SHARED, settings=settings).steps) == 4 + len(layers)
        return
    with pytest.raises(PlanError) as refused:
        plan(LAST, tree, SHARED, settings=settings)
    (finding,) = refused.value.findings
    assert (finding.code, finding.path) == ("leaf-missing", missing) and "shared is another number" in finding.fix


def test_the_layers_that_lack_a_leaf_are_those_that_are_counted() -> None:
    tree = zeros(**{f"a_{i}": (2,) for i in range(4)}, **{f"k_{i}": (2,) for i in range(3)})
    with pytest.raises(PlanError, match="the last 1 of 4 layers have no k_{i}, and those before have it: expected shared to be 1, got 2"):  # fmt: skip
        plan(LAST, tree, SHARED, settings={"shared": 2})
    for beyond in (5, -1):
        with pytest.raises((PlanError, OptionError), match="an integer of at least 0 and at most i"):
            plan(LAST, tree, SHARED, settings={"shared": beyond})


def test_a_fact_has_the_values_of_the_leaves_that_the_tree_has() -> None:
    head = HEAD + "facts: {act: ask}\n"
    rules = """
- {from: "wi_{i}", absent_if: "gate_{i}", parameter: "wi.{i}", fact_values: {act: [relu, silu]}}
- {from: "gate_{i}", absent_if: "wi_{i}", parameter: "gate.{i}", fact_values: {act: [gated]}}
"""
    plain, gated = zeros(wi_0=(2,), wi_1=(2,)), zeros(gate_0=(2,), gate_1=(2,))
    for tree, right in ((plain, "relu"), (plain, "silu"), (gated, "gated"), (gated, None)):
        assert plan(rules, tree, head, settings={"act": right} if right else {}).steps
    for tree, wrong, values in ((plain, "gated", "relu, silu"), (gated, "relu", "gated"), (gated, "x", "gated")):
        with pytest.raises(PlanError) as refused:
            plan(rules, tree, head, settings={"act": wrong})
        (finding,) = refused.value.findings
        assert (finding.code, finding.path, finding.got) == ("setting-invalid", f"--set act={wrong}", repr(wrong))
        assert finding.expected == f"act to be one of {values}" and next(iter(tree)) in finding.problem
    with pytest.raises(RuleError, match="act"):
        rule_file(rules, HEAD)


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
