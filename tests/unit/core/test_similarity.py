"""The name that is most like another is the one that difflib measures to be, and is found without measuring every name."""

from __future__ import annotations

import difflib
import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from convert import survey_rules
from convert.core import similarity
from convert.core.fields import nearest
from convert.core.similarity import most_alike
from convert.planning.match import cover
from support.memory_source import MemorySource, rule_file, zeros

KEYS = ["encoder", "layer_0", "layer_12", "attention", "kernel", "bias", "query", "key", "w", "a", "{i}", "norm"]
PATHS = st.one_of(st.lists(st.sampled_from(KEYS), max_size=6).map("/".join), st.text("ab/", max_size=12))


def measured(name: str, others: list[str], cutoff: float, *, before: bool) -> tuple[int, float] | None:
    """What it must find, by measuring all."""
    pairs = [(name, other) if before else (other, name) for other in others]
    ratios = [difflib.SequenceMatcher(None, *pair, autojunk=False).ratio() for pair in pairs if "".join(pair)]
    best = max(ratios, default=0.0)
    return (ratios.index(best), best) if ratios and best >= cutoff else None


@given(PATHS, st.lists(PATHS.filter(bool), max_size=9), st.sampled_from([0.01, 0.3, 0.5, 0.6, 1.0]), st.booleans())
@example("encoder/layer_0/attention/w", ["a/norm", "encoder/layer_12/attention/w", "encoder/layer_0/norm"], 0.5, True)
@example("ab", ["ba", "ab/", "ab"], 0.5, False)
def test_it_finds_what_difflib_would(name: str, others: list[str], cutoff: float, before: bool) -> None:
    assert most_alike(name, others, cutoff, before=before) == measured(name, others, cutoff, before=before)
    if not before:
        near = difflib.get_close_matches(name, others, n=1, cutoff=cutoff)
        greatest_first = sorted(others, reverse=True)  # of several that are alike difflib gives the greatest
        found = most_alike(name, greatest_first, cutoff)
        assert ([greatest_first[found[0]]] if found else []) == near


def test_a_bound_that_is_too_low_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    name, others = "encoder/layer_1/kernel", ["decoder/kernel", "encoder/layer_2/kernel"]
    assert most_alike(name, others, 0.5) == measured(name, others, 0.5, before=False)
    monkeypatch.setattr(similarity._CommonSubsequence, "length", lambda self, other: 16 - len(other) // 2)
    assert most_alike(name, others, 0.5) != measured(name, others, 0.5, before=False)


def test_a_survey_of_many_rules_that_match_nothing_takes_no_time() -> None:
    """600 leaves in 330 groups, 60 rules with two paths each: it took seconds when every pair was measured."""
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
    start = time.process_time()
    found = survey_rules(rules, source)
    spent = time.process_time() - start
    assert len(found.uncovered) == 330 and all(u.near and u.near.why for u in found.uncovered)
    findings = cover(rules, source).findings
    assert len([said for said in findings if "no leaf matches" in said]) == 120
    assert len([said for said in findings if "has no rule" in said]) == 330

    paths = [pattern.text for rule in rules.rules for pattern in rule.sources.values()]
    start = time.process_time()
    for group in found.uncovered[:33]:
        measured(group.leaves[0], paths, 0.3, before=True)
    assert spent < 10 * (time.process_time() - start) / 3  # a tenth where it was written, 0.7 s


@given(PATHS, st.lists(PATHS, max_size=12))
def test_suggestions_are_those_of_difflib(name: str, known: list[str]) -> None:
    wanted = difflib.get_close_matches(name, [word for word in known if word], n=1, cutoff=0.6)
    assert nearest(name, [word for word in known if word], "") == (f"{wanted[0]!r}?" if wanted else "")
