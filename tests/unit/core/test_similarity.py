"""The closest name has the greatest similarity of all, and many unknown names do not take long."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from convert import survey_rules
from convert.core.similarity import CUTOFF, MAX_TEMPLATES, ClosestNames, closest_match, did_you_mean
from convert.planning.matching.match import cover
from support.effort import calls_at_most
from support.memory_source import MemorySource, rule_file, zeros

KEYS = ["encoder", "layer_0", "layer_12", "attention", "kernel", "bias", "query", "key", "w", "a", "{i}", "norm"]
PATHS = st.one_of(st.lists(st.sampled_from(KEYS), max_size=6).map("/".join), st.text("ab/", max_size=12)).filter(bool)


def similarity(a: str, b: str) -> float:
    """Twice the length of the longest common subsequence, divided by the length of both, by the textbook table."""
    row = [0] * (len(b) + 1)
    for x in a:
        before = list(row)
        for k, y in enumerate(b):
            row[k + 1] = before[k] + 1 if x == y else max(before[k + 1], row[k])
    return 2 * row[-1] / (len(a) + len(b))


@example("aaaaaa", ["aaa/"], CUTOFF)
@given(PATHS, st.lists(PATHS, max_size=9), st.sampled_from([0.3, 0.5, CUTOFF, 1.0]))
def test_the_closest_name_has_the_greatest_similarity(name: str, known: list[str], cutoff: float) -> None:
    ratios = [similarity(name, other) for other in known]
    best = max(ratios, default=0.0)
    assert closest_match(name, known, cutoff) == (known[ratios.index(best)] if known and best >= cutoff else None)


def test_a_suggestion_is_a_question() -> None:
    assert did_you_mean("querry", ["key", "query"]) == "did you mean 'query'?"
    assert did_you_mean("zzz", ["key", "query"]) == ""
    assert did_you_mean("zzz", []) == ""


def test_names_that_differ_only_in_numbers_are_matched_by_their_numbers() -> None:
    names = ClosestNames([f"layers.{i}.attn.q_proj.weight" for i in range(3)])
    assert names.closest_match("layers.2.attn.q_prj.weight") == "layers.2.attn.q_proj.weight"
    assert names.closest_match("layers.7.attn.q_prj.weight") == "layers.0.attn.q_proj.weight"
    assert names.closest_match("zzz") is None
    assert names.did_you_mean("layers.1.attn.q_prj.weight") == "did you mean 'layers.1.attn.q_proj.weight'?"


def test_names_without_a_pattern_get_no_suggestion_but_take_no_time() -> None:
    letters = [f"{a}{b}{c}" for a in "abcdefghijk" for b in "lmnopqrstu" for c in "vwxyzabcdefg"]
    assert len(letters) > MAX_TEMPLATES
    assert ClosestNames(letters).closest_match("alvv") is None
    assert ClosestNames(letters[:10]).closest_match("alvv") == "alv"


@pytest.mark.slow
@pytest.mark.parametrize("layers", [10_000])
def test_fifty_thousand_missing_names_are_compared_once_each_template(layers: int) -> None:
    words = ("q_proj", "k_proj", "v_proj", "o_proj", "norm")
    known = ClosestNames(f"model.layers.{i}.{word}.weight" for i in range(layers) for word in words)
    with calls_at_most(50 * layers * len(words)):
        for i in range(layers):
            for word in words:
                assert known.closest_match(f"layers.{i}.{word}.kernel") == f"model.layers.{i}.{word}.weight"


def test_a_survey_of_many_rules_that_match_nothing_takes_no_time() -> None:
    """600 leaves in 330 groups, 60 rules with two paths each."""
    text = "".join(
        f"- einsum: ask\n  from: encoder/layer_{{i}}/attention_{r}/projection_{r * 7 % 13}/kernel\n"
        f"  bias: encoder/layer_{{i}}/attention_{r}/projection_{r * 7 % 13}/bias\n  linear: ask\n"
        for r in range(60)
    )
    leaves = {}
    for k in range(10):
        for j in range(60):
            block = f"block{k}" if j % 2 else f"{'abcdefghij'[k]}{k}"
            leaves[f"params/encoder_{j}/{block}/sub{j}/attention/kernel_{j}x"] = (4 + j, 6)
    rules, source = rule_file(text), MemorySource(zeros(**leaves))
    with calls_at_most(30 * len(leaves) * len(rules.rules)):
        found = survey_rules(rules, source)
    assert len(found.uncovered) == 330 and all(u.near and u.near.why for u in found.uncovered)
    assert len(cover(rules, source).findings) == 120 + 330
