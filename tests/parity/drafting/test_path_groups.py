"""Leaves whose paths differ in an index or a sibling are grouped into patterns."""

from __future__ import annotations

import numpy as np

from convert import (
    Source,
    draft_rules,
    parse_rules,
)
from convert.drafting.path_groups import Names, group
from convert.planning.matching.match import cover
from support.drafts import tree
from support.memory_source import MemorySource


def patterns(source: Source) -> dict[str, int]:
    names = Names()
    return {names.text(g.steps): len(g.leaves) for g in group(source.leaves)}


def test_paths_are_grouped_by_indices_that_run_from_0_without_gaps() -> None:
    layers = {f"layer_{k}__{name}": (5, 7) for k in (0, 1, 2) for name in ("a", "b")}
    assert patterns(tree(**layers)) == {"layer_{i}/a": 3, "layer_{i}/b": 3}
    del layers["layer_1__b"]
    assert patterns(tree(**layers)) == {"layer_{0,2}/a": 2, "layer_{0,2}/b": 2, "layer_1/a": 1}
    assert patterns(tree(l_1=(2,), l_2=(2,), l_3=(2,))) == {"l_{1,2,3}": 3}
    assert patterns(tree(l_0=(2,), l_01=(2,))) == {"l_0": 1, "l_01": 1}


def test_the_leaves_of_one_layer_are_grouped_alike() -> None:
    """The biases of Dense_0 and Dense_1 have one shape, their kernels have not: they are two layers."""
    source = tree(Dense_0__kernel=(9, 5), Dense_0__bias=(5,), Dense_1__kernel=(5, 5), Dense_1__bias=(5,))
    assert list(patterns(source)) == ["Dense_0/kernel", "Dense_0/bias", "Dense_1/kernel", "Dense_1/bias"]


def test_siblings_and_stacks_of_their_own() -> None:
    source = tree(
        **{f"encoder_{k}__{x}__w": (4, 6) for k in (0, 1) for x in ("query", "key", "value")},
        **{f"decoder_{k}__{x}__w": (4, 6) for k in (0, 1) for x in ("alpha", "beta")},
    )
    assert patterns(source) == {
        "encoder_{i}/{query,key,value}/w": 6,
        "decoder_{j}/alpha/w": 2,
        "decoder_{j}/beta/w": 2,
    }


def test_names_that_are_patterns_are_escaped() -> None:
    source = MemorySource({"a{i}*/kernel": np.zeros((3, 5), np.float32), "a: #b/kernel": np.zeros((5, 2), np.float32)})
    rules = parse_rules(draft_rules(source))
    assert not cover(rules, source).findings
    assert {str(rule.path) for rule in rules.rules} == {"a\\{i\\}\\*/kernel", "a: #b/kernel"}


def test_an_index_may_stand_within_a_key() -> None:
    source = tree(
        **{f"block{k}_conv__kernel": (3, 3, 4, 4) for k in range(3)}, layer_a2_b__w=(4, 5), layer_a3_b__w=(4, 5)
    )
    assert patterns(source) == {"block{i}_conv/kernel": 3, "layer_a2_b/w": 1, "layer_a3_b/w": 1}
    assert not cover(parse_rules(draft_rules(source)), source).findings
