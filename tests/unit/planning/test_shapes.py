"""Shapes that contradict an equation, a stacked axis or a product of sizes."""

from __future__ import annotations

import numpy as np
import pytest

from support.memory_source import HEAD, zeros
from support.small_plans import IO, MLP, PRODUCTS, findings, mlp, names, places, plan


def test_a_rank_that_contradicts_the_equation() -> None:
    assert findings(MLP, {**mlp(), "layers_1/up/w": np.zeros((7, 11, 2))}) == [
        "r.yaml:5: layers_1/up/w: float64[7,11,2] does not fit: ...D,DF->...F has a weight with 2 axes (D F)"
    ]
    assert findings(MLP, {**mlp(), "layers_1/up/b": np.zeros((11, 1))}) == [
        "r.yaml:5: layers_1/up/b: float64[11,1] does not fit: a bias with 2 axes cannot be added to the result of "
        "...D,DF->...F"
    ]
    assert findings(MLP, {**mlp(), "layers_1/norm/scale": np.zeros((7, 1))}) == [
        "r.yaml:12: layers_1/norm/scale: float64[7,1] does not fit: the rule gives it the axes D"
    ]
    assert findings("- from: w\n  embedding: e", zeros(w=(3, 2, 2))) == [
        "r.yaml:5: w: float32[3,2,2] does not fit: an embedding table has two axes, entries and width"
    ]


def test_two_leaves_that_contradict_each_other() -> None:
    tree = {**mlp(), "layers_1/down/w": np.zeros((13, 7), np.float32)}
    assert places(MLP, tree) == [("size-conflict", "r.yaml:9", "layers_1/down/w")]
    (text,) = findings(MLP, tree)
    assert "float32[13,7] as F D makes F = 13, but layers_0/up/w (r.yaml:5, float32[7,11] as D F) makes it 11" in text


@pytest.mark.parametrize("wrong", [0, 7, 19])
def test_a_wrong_stacked_axis_blames_its_own_rule_once(wrong: int) -> None:
    """Also where it is the first of many rules."""
    rule = "- einsum: ...D,DF->...F\n  from: m{k}/w\n  stacked: {{i: {axis}}}\n  linear: m{k}.{{i}}\n"
    rules = "".join(rule.format(k=k, axis=1 if k == wrong else 0) for k in range(20))
    tree = {f"m{k}/w": np.zeros((3, 7, 11), np.float32) for k in range(20)}
    assert places(rules, tree) == [("size-conflict", f"r.yaml:{5 + 4 * wrong}", f"m{wrong}/w")]
    (text,) = findings(rules, tree)
    assert (
        "stacked: {i: 1} reads float32[3,7,11] as D i F, which makes i = 7, D = 3; the other rules make i = 3 " in text
    )
    assert text.endswith("with `stacked: {i: 0}` the rule agrees with the others")


def test_a_wrong_stacked_axis_of_layers_that_are_counted_together_is_named() -> None:
    """It was an internal error: such layers have no letter of their own."""
    rule = "- from: {path}\n  axes: E\n  stacked: {{s: {axis}}}\n  index_from: {{i: [s]}}\n  parameter: {path}.{{i}}\n"
    rules = "".join(rule.format(path=path, axis=axis) for path, axis in (("a", 1), ("b", 1), ("c", 0)))
    (text,) = (one for one in findings(rules, {path: np.zeros((4, 2), np.float32) for path in "abc"}) if "reads" in one)
    assert "stacked: {s: 0} reads float32[4,2] as s E, which makes E = 2; the other rules make E = 4 " in text
    assert text.endswith("with `stacked: {s: 1}` the rule agrees with the others")


HEADS = HEAD + "axes: {N: {is: heads}, K: {is: key heads, divides: N}, D: {is: width}, H: {is: width of a head}}\n"
GROUPED = """
- einsum: ...D,DNH->...NH
  from: q/w
  linear: q
- einsum: ...D,DKH->...KH
  from: k/w
  linear: k
"""


def test_a_size_that_divides_another_one() -> None:
    (found,) = findings(GROUPED, zeros(**{"q/w": (5, 6, 2), "k/w": (5, 4, 2)}), HEADS)
    assert found == (
        "r.yaml:4: q/w: N (heads) is no multiple of K (key heads): expected N to be a multiple of 4, by r.yaml:9: k/w: float32[5,4,2] as D K H, "
        "got 6, by r.yaml:6: q/w: float32[5,6,2] as D N H; convert a tree whose leaves fit one another, or correct the equation in rules of your own"
    )
    for keys in (1, 2, 3, 6):
        assert plan(GROUPED, zeros(**{"q/w": (5, 6, 2), "k/w": (5, keys, 2)}), HEADS).sizes["K"] == keys


@pytest.mark.parametrize(("queries", "keys"), [(6, 0), (0, 0), (3, 6)])
def test_no_axis_is_shared_by_none(queries: int, keys: int) -> None:
    tree = zeros(**{"q/w": (5, queries, 2), "k/w": (5, keys, 2)})
    assert places(GROUPED, tree, HEADS) == [("size-conflict", "r.yaml:4", "q/w")]


def test_heads_of_which_rope_turns_no_pairs() -> None:
    rules = GROUPED.replace("  linear", "  rope: {H: half-split}\n  linear")
    (found,) = findings(rules, zeros(**{"q/w": (5, 6, 3), "k/w": (5, 2, 3)}), HEADS)
    assert "q/w: RoPE turns pairs of features of a head: expected an even H (width of a head), got H = 3;" in found
    assert plan(rules, zeros(**{"q/w": (5, 6, 4), "k/w": (5, 2, 4)}), HEADS).sizes["H"] == 4


def test_a_rule_under_which_two_letters_have_one_size() -> None:
    rules = GROUPED.replace("  linear: k", "  same_size: {K: N}\n  linear: k")
    (found,) = findings(rules, zeros(**{"q/w": (5, 6, 2), "k/w": (5, 3, 2)}), HEADS)
    assert "k/w: float32[5,3,2] as D K H makes N = 3 (heads), but q/w" in found
    assert names(plan(rules, zeros(**{"q/w": (5, 6, 2), "k/w": (5, 6, 2)}), HEADS)) == ["q.weight", "k.weight"]


@pytest.mark.parametrize("wrong", [0, 4])
def test_the_size_that_most_rules_state_holds(wrong: int) -> None:
    rule = "- einsum: {equation}\n  from: m{k}/w\n  linear: m{k}\n"
    equations = ["...F,FD->...D" if k == wrong else "...D,DF->...F" for k in range(5)]
    rules = "".join(rule.format(k=k, equation=equation) for k, equation in enumerate(equations))
    tree = {f"m{k}/w": np.zeros((7, 11), np.float32) for k in range(5)}
    assert places(rules, tree) == [("size-conflict", f"r.yaml:{5 + 3 * wrong}", f"m{wrong}/w")] * 2


def test_a_transposed_leaf_contradicts_twice() -> None:
    head = HEAD + "axes: {D: {is: model width}}\n"
    tree = {**mlp(), "layers_1/down/w": np.zeros((7, 11), np.float32)}
    assert places(MLP, tree, head) == [("size-conflict", "r.yaml:10", "layers_1/down/w")] * 2
    for text, sizes in zip(findings(MLP, tree, head), ("F = 7, ", "D = 11 (model width), "), strict=True):
        assert f"float32[7,11] as F D makes {sizes}but layers_0/up/w (r.yaml:6, float32[7,11] as D F) makes it" in text


def test_products_are_solved() -> None:
    assert plan(IO, zeros(w=(8, 30)), PRODUCTS).sizes == {"I": 8, "O": 30, "P": 4, "Q": 10, "T": 3}


@pytest.mark.parametrize(
    ("shape", "rule", "problem"),
    [
        (
            (7, 30),
            "r.yaml:5",
            "I = 2*P (input): 7 is not divisible by 2 (r.yaml:11: w: float32[7,30] as I O makes it 7)",
        ),
        (
            (8, 25),
            "r.yaml:7",
            "O = T*Q (output): 25 is not divisible by 10 (r.yaml:11: w: float32[8,25] as I O makes it 25)",
        ),
    ],
)
def test_an_axis_that_does_not_divide(shape: tuple[int, ...], rule: str, problem: str) -> None:
    assert places(IO, zeros(w=shape), PRODUCTS) == [("size-conflict", rule, "")]
    assert problem in findings(IO, zeros(w=shape), PRODUCTS)[0]


def test_a_product_that_contradicts() -> None:
    tree = zeros(w=(8, 20))
    for rules, leaves, sizes, leaf, stated, fix in (
        (IO + "\n- from: p\n  axes: P\n  parameter: p", {**tree, **zeros(p=(5,))}, {}, "p", "r.yaml:14", "convert a tree whose"),
        (IO, tree, {"P": 5}, "w", "--set P=5", "leave out --set P=5"),
    ):  # fmt: skip
        assert places(rules, leaves, PRODUCTS, settings=sizes) == [("size-conflict", "r.yaml:5", leaf)]
        (text,) = findings(rules, leaves, PRODUCTS, settings=sizes)
        assert f"expected 10, as P = 5 by {stated}, got 8, by r.yaml:11: w: float32[8,20] as I O; {fix}" in text
    assert places(IO, tree, PRODUCTS, settings={"T": 3}) == [("size-conflict", "r.yaml:7", "")]
    assert places(IO, tree, PRODUCTS, settings={"I": 6}) == [("size-conflict", "r.yaml:11", "w")]
    assert findings(IO, tree, PRODUCTS, settings={"I": 6})[0].endswith("leave out --set I=6")
