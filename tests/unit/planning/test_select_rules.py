"""The choice among the rule files of a family."""

from __future__ import annotations

import pytest

from convert import RuleFile
from convert.planning.options import ConversionOptions
from convert.planning.select_rules import Ambiguous, NoMatch, RuleMatch, explain, pick, score, suggest_other
from support.memory_source import HEAD, MemorySource, rule_file, zeros


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


@pytest.mark.parametrize("leaves", [("t/new",), ("t/a/lora_A", "t/a/lora_B"), ("t/a/lora_B",)])
def test_a_leaf_that_the_tower_does_not_know_is_no_reason_to_leave_it_out(leaves: tuple[str, ...]) -> None:
    text = family("- from: w\n  parameter: p\n- drop: t/**\n  because: text only", "text")
    part = family("- from: w\n  parameter: p\n- from: t/a\n  parameter: a\n- drop: t/b\n  because: one part", "part")
    full = family("- from: w\n  parameter: p\n- from: t/a\n  parameter: a\n- from: t/b\n  parameter: b", "full")
    tree = zeros(w=(2,), **{"t/a": (3,), "t/b": (3,)}, **dict.fromkeys(leaves, (4,)))
    for candidates in ((text, part, full), (full, part, text)):
        outcome = pick(score(candidates, MemorySource(tree)))
        assert isinstance(outcome, NoMatch) and outcome.nearest.rules is full
        error = explain(outcome)
        assert error.code == "leaf-without-rule" and error.findings[0].path == leaves[0]
        assert error.hint == "Name text in place of fam to convert without the leaves that it drops"
    named = pick(score((text,), MemorySource(tree)))
    assert isinstance(named, RuleMatch) and {drop.leaf for drop in named.coverage.dropped} == set(tree) - {"w"}


def test_a_tower_of_which_no_leaf_is_known_is_not_left_out() -> None:
    text = family(
        "- from: w\n  parameter: p\n- drop: /opt/**\n  because: state\n- drop: t/**\n  because: text only", "text"
    )
    full = family("- from: w\n  parameter: p\n- drop: /opt/**\n  because: state\n- from: t/a\n  parameter: a", "full")
    renamed = MemorySource(zeros(w=(2,), **{"t/new/a": (3,), "t/new/b": (3,)}))
    for candidates in ((text, full), (full, text)):
        outcome = pick(score(candidates, renamed))
        assert isinstance(outcome, NoMatch) and outcome.nearest.rules is full
        error = explain(outcome)
        assert {finding.path for finding in error.findings} >= {"t/new/a", "t/new/b"}
        assert error.hint == "Name text in place of fam to convert without the leaves that it drops"
        assert picked(candidates, MemorySource(zeros(w=(2,), **{"opt/a": (3,)}))) == "text"
    assert picked((text,), renamed) == "text"


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
    assert error.hint == "a is the closest of fam: a matches 50 % of the leaves"  # and b none of them


def test_the_nearest_of_those_that_match_as_many_leaves_is_named() -> None:
    """By what the tree lacks, what the rules leave out, and what the shapes contradict: not by the order of the files."""
    both = "- {from: w, axes: DE, parameter: p}\n- {from: v, axes: F, parameter: q}\n"
    text = dict.fromkeys(("right", "tall", "more", "tower"), both + "- from: u\n  parameter: u")
    text["more"] += "\n- from: x\n  parameter: x\n- from: y\n  parameter: y"
    text["tall"] = text["tall"].replace("axes: DE", "axes: DEF")
    text["tower"] = "- {from: w, axes: DE, parameter: p}\n- drop: v\n  because: no tower\n- from: u\n  parameter: u"
    rules = {name: family(rules, name) for name, rules in text.items()}
    source = MemorySource(zeros(w=(6, 2), v=(3,)))
    for order in (["more", "tall", "tower", "right"], ["right", "tower", "more", "tall"]):
        outcome = pick(score([rules[name] for name in order], source))
        assert isinstance(outcome, NoMatch) and outcome.nearest.rules.model == "right"
        error = explain(outcome)
        assert [finding.problem for finding in error.findings] == ["u (parameter, weight)"]
        assert (
            error.hint
            == "right is the closest of fam: right matches 100 % of the leaves, more matches 100 % and lacks u"
        )


def test_a_model_of_another_family_is_suggested_where_it_is_nearer() -> None:
    mine, other = family("- from: a/w\n  parameter: p", "mine"), family("- from: a/w\n  parameter: p\n- from: b/v\n  parameter: q", "other")  # fmt: skip
    far = family("- from: c/w\n  parameter: p", "far")

    def said(**leaves: tuple[int, ...]) -> str:
        (match,) = score((mine,), MemorySource(zeros(**leaves)))
        return suggest_other(match, (far, other), "my")

    assert said(**{"a/w": (2,), "b/v": (3,)}) == "The tree is that of other (M): name other in place of my"
    assert said(**{"a/w": (2,), "b/v": (3,), "b/u": (3,)}) == "other (M) is nearer: it matches 67 % of the leaves: name other in place of my"  # fmt: skip
    assert said(**{"a/w": (2,)}) == said(**{"a/w": (2,), "d/e": (2,)}) == ""


def test_the_rules_with_the_target_and_the_fewest_contradictions_are_named() -> None:
    head = HEAD.replace(
        "targets: {", "axes: {D: {is: width}, E: {is: height}}\nfacts: {n: ask, k: ask}\nFORMULAS\ntargets: {"
    )
    text = "- {from: w, axes: DE, parameter: p}"
    formulas = {"two": "{n*2: D, k*2: D}", "one": "{n*3: D}", "other": "{n*2: D}"}
    rules = {name: family_of(head.replace("FORMULAS", f"formulas: {x}"), name, text) for name, x in formulas.items()}
    other = family_of(head.replace("FORMULAS", "").replace("torch:", "other:"), "other", text)
    tree, said = MemorySource(zeros(w=(6, 2))), {"n": 9, "k": 9}
    for candidates in ((rules["two"], rules["one"]), (rules["one"], rules["two"])):
        outcome = pick(score(candidates, tree, ConversionOptions(settings=said)))
        assert isinstance(outcome, NoMatch) and outcome.nearest.rules.model == "one"
        assert explain(outcome).code == "size-conflict"
    for candidates in ((rules["two"], other), (other, rules["two"])):
        outcome = pick(score(candidates, tree, ConversionOptions(settings=said, to="torch")))
        assert isinstance(outcome, NoMatch) and outcome.nearest.rules.model == "two"


def family_of(head: str, model: str, rules: str) -> RuleFile:
    return rule_file(rules, head.replace("model: m", f"model: {model}\nfamily: fam"))


def test_rules_that_fit_the_tree_and_lack_the_target_say_so() -> None:
    """The others, which have the target, are of another tree: what they miss helps nobody."""
    two = HEAD.replace("targets: {", "targets: {other: {loads: U}, ")
    pooled = rule_file(
        "- from: w\n  parameter: {torch: p}\n- from: v\n  parameter: {torch: q}",
        two.replace("model: m", "model: pooled\nfamily: fam"),
    )
    mean = rule_file("- from: w\n  parameter: p", two.replace("model: m", "model: mean\nfamily: fam"))
    outcome = pick(score((mean, pooled), MemorySource(zeros(w=(2,), v=(3,))), ConversionOptions(to="other")))
    assert isinstance(outcome, NoMatch) and outcome.nearest.rules.model == "pooled"
    assert explain(outcome).code == "rule-without-target"
