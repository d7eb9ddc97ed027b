"""`allowed`: what facts may be, by numbers, letters and other facts, and where a rule file states it wrongly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import convert
from convert import PlanError, RuleError
from convert.core.errors import OptionError
from convert.planning.options import ConversionOptions
from convert.planning.planner import make_plan
from convert.rules.parse import parse_models
from support.memory_source import HEAD, MemorySource, rule_file, zeros

AXES = "axes: {i: {is: layers}, D: {is: width}, F: {is: wide, varies: true}}\n"
RULES = "- from: a_{i}\n  axes: DF\n  parameter: a.{i}\n- {from: 'b_{i}', optional: true, parameter: 'b.{i}'}"
TREE = zeros(a_0=(6, 2), a_1=(6, 2), a_2=(6, 4), b_1=(1,))


def head(allowed: str, given: str = "ask") -> str:
    used = HEAD.replace("{torch: {loads: T}}", "{torch: {loads: T, config: {x: $x, n: $n}}}")
    return f"{used}{AXES}facts: {{x: {given}, n: ask}}\nallowed: {{x: {allowed}}}\n"


def refusal(allowed: str, value: Any, **more: Any) -> str:
    """Return what planning says it expected; empty if it takes the value."""
    options = ConversionOptions(settings={"x": value, **more})
    try:
        make_plan(rule_file(RULES, head(allowed)), MemorySource(TREE), options)
    except (PlanError, OptionError) as refused:
        (finding,) = refused.findings
        assert finding.path == f"--set x={value}" and finding.code == "setting-invalid" and finding.fix and finding.got
        return finding.expected
    return ""


@pytest.mark.parametrize(
    ("allowed", "right", "wrong", "expected"),
    [
        ("{at_least: 1}", [1, 2.5], [0, True, "1", None, [1], float("nan")], "a number of at least 1"),
        ("{is: integer, above: 0}", [1, 10**400], [0, 1.0, "1"], "an integer above 0"),
        ("{is: integer, at_least: 1, at_most: D}", [1, 6], [7], "x to be an integer of at least 1 and at most D = 6 (width)"),
        ("{below: i}", [2], [3], "x to be a number below i = 3 (layers)"),
        ("{divides: D}", [1, 2, 3], [4, 5], "x to be a number that divides D = 6 (width)"),
        ("{multiple_of: D//2}", [3, 9], [4], "x to be a number that is a multiple of D//2 = 3"),
        ("{is: square}", [1, 4, 49], [2, -4, 4.0], "the square of an integer"),
        ("{is: token, below: D}", [0, 5], [6, 7], "x to be the id of a token below D = 6 (width)"),
        ("{is: token, below: D}", [0], [-1, 1.0, "a"], "the id of a token below D"),
        ("{is: word}", ["a"], [1, None], "a word"),
        ("{is: flag}", [True, False], [1, 0, "yes"], "true or false"),
        ("{one_of: [a, b]}", ["a"], ["c", 1], "a or b"),
        ("{above: 0, or: null}", [1.5, None], [0], "a number above 0 or null"),
        ("{is: integer, at_least: 0, or_list: true}", [0, [0, 7]], [[], [-1], "a"], "an integer of at least 0 or a list of such"),
        ("{length: i, each: {one_of: [s, f]}}", [["s", "f", "s"]], [["s"]], "x to be a list of i = 3 (layers) values, each s or f"),
        ("{length: i, each: {one_of: [s, f]}, ends_with: f}", [["s", "s", "f"]], [["s", "f", "s"]], "a list of i values, each s or f, with f at the end"),
        ("{each: {one_of: [s, f]}, starts_with: s}", [["s", "f"]], [["f", "s"], []], "a list of values, each s or f, with s at the start"),
        ("{each: {is: integer}, sum: D//2}", [[1, 2], [3]], [[2, 2]], "x to be a list of integers, together D//2 = 3"),
        ("{each: {is: integer, below: i}, rising: true}", [[0, 2]], [[2, 0]], "a list of integers, each below i, in rising order"),
        ("{one_size_of: F}", [[1, 1, 2]], [[1, 2, 2]], "x to be a list of numbers, one for each F of the layers (2, 2, 4)"),
        ("{each: {is: word}, leaves: {k: 'b_{i}'}}", [["s", "k", "s"]], [["k", "s", "s"]], "x to be a list of words, k in layers 1, which have b_{i}"),
        ("{is: integer, counts_last_of: F}", [1], [2], "x to be an integer, 1: the last layers with F = 4"),
        ("{equals: 'F[-1]//F[0]'}", [2], [1], "x to be a number equal to F[-1]//F[0] = 2"),
        ("{is: flag, equals: 'F[-1]//F[0] - 1'}", [True], [False], "x to be true or false equal to F[-1]//F[0] - 1 = 1"),
    ],
)  # fmt: skip
def test_a_value_is_taken_or_refused(allowed: str, right: list[Any], wrong: list[Any], expected: str) -> None:
    assert [refusal(allowed, value) for value in right] == [""] * len(right)
    assert {refusal(allowed, value) for value in wrong} == {expected}


def test_layers_before_the_last_ones_have_one_size() -> None:
    """The class has one number for all of them."""
    tree = zeros(a_0=(6, 2), a_1=(6, 3), a_2=(6, 4))
    with pytest.raises(PlanError, match=r"1: the last layers with F = 4, behind layers of one size, not of 2 and 3"):
        make_plan(
            rule_file(RULES, head("{counts_last_of: F}")), MemorySource(tree), ConversionOptions(settings={"x": 1})
        )


def test_layers_of_the_tree_contradict_a_value_of_the_rules() -> None:
    """Nobody stated it, and the output would be wrong."""
    with pytest.raises(PlanError, match="expected x to be an integer equal to F"):
        make_plan(rule_file(RULES, head("{equals: 'F[-1]/F[0]'}", "3")), MemorySource(TREE))


def test_a_bound_is_another_fact() -> None:
    assert refusal("{at_most: n}", 4, n=4) == "" and refusal("{at_most: n}", 4) == ""
    assert refusal("{at_most: n}", 5, n=4) == "x to be a number at most n = 4".replace("number at", "number of at")
    every = "{complete_before_last: n}"
    assert refusal(every, [1, 2, 1], n=1) == ""
    assert "the last n = 2 have no value that those before lack" in refusal(every, [1, 2, 1], n=2)


def test_a_value_of_the_rules_is_refused_beside_a_stated_one_alone() -> None:
    rules = rule_file(RULES, head("{is: integer, at_most: n}", "5"))
    for settings in ({}, {"n": 5}):
        assert make_plan(rules, MemorySource(TREE), ConversionOptions(settings=settings)).steps
    with pytest.raises(
        PlanError, match="--set n=4: expected x to be an integer of at most n = 4, got 5; give the x and n of"
    ):
        make_plan(rules, MemorySource(TREE), ConversionOptions(settings={"n": 4}))
    rules = rule_file(RULES, head("{is: integer, at_most: D}", "50"))
    assert make_plan(rules, MemorySource(TREE)).steps  # of a larger model: nobody stated it


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (head("{at_most: Q}"), "`allowed` refers to 'Q'"),
        (head("{at_most: 'D +'}"), "expected a formula"),
        (head("{at_mots: 2}"), "unknown key 'at_mots' in the allowed values of a fact"),
        (head("{one_size_of: D}"), "`allowed` refers to 'D'"),
        (head("{leaves: {k: nowhere}}"), "is the path of no rule"),
        (head("{is: whole}"), "expected one of integer"),
        (head("{above: 0}").replace("{x: {above", "{y: {above"), "`allowed` refers to 'y'"),
        (head("{at_most: 2}", "3"), "the fact 'x': expected a number of at most 2|the fact 'x': expected an integer of at most 2"),
        (head("{at_most: D}") + "versions: {v: {sizes: {D: 6}, facts: {x: 7}}}\n", "the fact 'x': expected an integer of at most D = 6, got 7"),
    ],
)  # fmt: skip
def test_a_declaration_that_is_not_valid_is_refused_with_its_place(text: str, problem: str) -> None:
    with pytest.raises(RuleError, match=problem) as refused:
        rule_file(RULES, text)
    assert refused.value.findings[0].rule.startswith("r.yaml:")


def test_an_entry_of_several_models_holds_for_those_that_have_the_fact() -> None:
    text = (
        "title: M\ntargets: {torch: {loads: T, config: {w: 1}}}\nallowed: {x: {above: 0}}\n"
        "models: {one: {facts: {x: ask}}, two: {}}\nrules:\n- {from: w, parameter: w}\n"
    )
    one, two = parse_models(text, "r.yaml")
    assert "x" in one.allowed and not two.allowed
    with pytest.raises(RuleError, match="'z', which is a fact of no model"):
        parse_models(text.replace("{x: {above", "{z: {above"), "r.yaml")


def test_what_rules_require_of_a_fact_needs_no_entry() -> None:
    rules = rule_file(
        "- {from: s, multiplies_by: scale, epsilon: $eps, axes: D, rms_norm: n}\n"
        "- {from: w, einsum: '...D,DF->...F', activation: $act, linear: l}",
        HEAD + "facts: {eps: ask, act: ask}\n",
    )
    source = MemorySource(zeros(s=(3,), w=(3, 4)))
    for name, wrong in (("eps", 5), ("eps", 0), ("eps", -1e-6), ("eps", "x"), ("act", "nonsense"), ("act", 3)):
        with pytest.raises(OptionError, match="above 0 and at most 0.1" if name == "eps" else "gelu"):
            make_plan(rules, source, ConversionOptions(settings={"eps": 1e-6, "act": "gelu", name: wrong}))


@pytest.mark.parametrize("like", [False, True])
def test_config_json_next_to_tensors_is_held_to_it(like: bool, tmp_path: Path) -> None:
    """The way back to JAX: what the file states, and where."""
    rules = rule_file("- {from: w, axes: DF, parameter: w}", HEAD.replace("loads: T", "loads: T, config: {top: $x}") + "facts: {x: ask}\naxes: {D: {is: experts}, F: {is: wide}}\nallowed: {x: {is: integer, at_least: 1, at_most: D}}\n")  # fmt: skip
    save_file({"w": np.ones((4, 2), np.float32)}, tmp_path / "model.safetensors", {"format": "pt"})
    given = MemorySource(zeros(w=(4, 2))) if like else None
    for stated in (4, None):
        (tmp_path / "config.json").write_text(json.dumps({"top": stated}))
        assert convert.plan_reverse(rules, tmp_path, given).leaves
    for wrong in (5, 0, "many"):
        (tmp_path / "config.json").write_text(json.dumps({"top": wrong}))
        with pytest.raises(PlanError, match=r"an integer of at least 1 and at most D = 4 \(experts\)") as refused:
            convert.plan_reverse(rules, tmp_path, given)
        (finding,) = refused.value.findings
        assert (finding.code, finding.path, finding.got) == ("config-conflict", "top", json.dumps(wrong))
    summed = rule_file("- {from: w, axes: DF, parameter: w}", HEAD.replace("loads: T", "loads: T, config: {top: $x, more: $n}") + "facts: {x: ask, n: ask}\naxes: {D: {is: experts}}\nformulas: {x + n: D}\n")  # fmt: skip
    for stated in (3, 2):
        (tmp_path / "config.json").write_text(json.dumps({"top": 1, "more": stated}))
        if stated == 3:
            assert convert.plan_reverse(summed, tmp_path, given).leaves
            continue
        with pytest.raises(
            PlanError,
            match=r"more in the config.json of the tensors: the tree has D = 4 \(experts\): expected x \+ n to be 4, got 3 with",
        ):
            convert.plan_reverse(summed, tmp_path, given)
