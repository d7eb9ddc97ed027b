"""The summary of `convert infer`: what is not sure of each tensor, in lines that say it of those that share it alone."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from convert.cli.infer_text import hint, summary, written
from convert.drafting.like.target import TargetModel, TargetModule
from convert.inference.derivation import (
    MORE_ROWS,
    Arithmetic,
    Derivation,
    Difference,
    Evidence,
    Grade,
    Part,
    Role,
    Site,
    Tensor,
    Tie,
)
from convert.inference.open_tensors import NOT_PROVEN

LEAVES = {"a": (3, 4), "b": (4, 3), "c": (12,), "stack": (2, 3, 4), "wide": (5, 7)}

SITE = Site("target", 0, "mm")


def lines(*tensors: Tensor) -> list[str]:
    return list(summary(Derivation(tensors, LEAVES), {}))


def tensor(name: str, grade: Grade, **values: Any) -> Tensor:
    return Tensor(name, (4, 3), grade, **values)


def test_tensors_share_a_line_only_where_the_number_of_other_ways_is_the_same() -> None:
    ways = {"g.0": 3, "g.1": 7, "g.2": 3}
    same = [
        tensor(f"{name}.weight", Grade.INTERCHANGEABLE, alternatives=dict.fromkeys(range(n), ()))
        for name, n in ways.items()
    ]
    end = "orders of its elements give the same outputs; one of them is written"
    assert lines(*same) == [
        f"interchangeable: g.0.weight and 1 more like it: 3 other {end}",
        f"interchangeable: g.1.weight: 7 other {end}",
    ]


def test_another_leaf_that_fits_is_named() -> None:
    """Of two biases that are added up, either may be either."""
    evidence = Evidence(Role.SHIFT, None, SITE, "", "")
    one, two = (Part(np.arange(12), leaf, np.arange(12), Arithmetic.SAME, evidence) for leaf in ("a", "c"))
    bias = tensor("b", Grade.INTERCHANGEABLE, parts=(one,), alternatives={1: (two,)})
    assert lines(bias) == ["interchangeable: b: c would give the same outputs; a is written"]


def test_tensors_share_a_line_only_where_as_many_elements_are_unseen() -> None:
    unseen = [tensor(f"t.{k}", Grade.DERIVED, unseen=n) for k, n in enumerate((2, 2, 5))]
    end = "of its 12 elements; they are made as the others of this kind"
    assert lines(*unseen, tensor("t.3", Grade.DERIVED)) == [
        f"derived: t.0 and 1 more like it: with inputs of these sizes no output shows 2 {end}",
        f"derived: t.2: with inputs of these sizes no output shows 5 {end}",
    ]


def test_of_a_table_the_rows_are_counted_that_no_output_shows() -> None:
    evidence = Evidence(Role.LOOKUP, None, SITE, "", "")
    part = Part(np.arange(12), "table", np.arange(12), Arithmetic.SAME, evidence)
    end = "of its 4 rows; they are made as the others of this kind"
    table = tensor("t", Grade.DERIVED, unseen=6, parts=(part,))
    assert lines(table) == [f"derived: t: with inputs of these sizes no output shows 2 {end}"]


@pytest.mark.parametrize(
    ("told_by", "said"),
    [
        (
            MORE_ROWS,
            "2 columns are 0 in all rows that were drawn, as units behind a ReLU can be; more rows may tell them apart",
        ),
        ("random ones", "the inputs make 2 columns equal; random ones would tell them apart"),
    ],
)
def test_a_tie_says_which_inputs_would_tell_its_columns_apart(told_by: str, said: str) -> None:
    assert lines(tensor("w", Grade.TIED, ties=(Tie((1, 3), SITE, told_by),))) == [f"tied: w: {said}"]


@pytest.mark.parametrize(
    ("candidates", "said"),
    [
        (("a",), "may be made of a"),
        (("a", "b", "c"), "may be made of any of 3 leaves of its size, which nothing tells apart so far: a, b, c"),
        (
            ("a", "stack"),
            "may be made of any of 2 leaves or parts of leaves of its size, which nothing tells apart so far: a; one part of axis 0 of stack",
        ),
        (("stack",), "may be made of one part of axis 0 of stack"),
        (("a", "wide"), "may be made of a, wide"),  # the second is no alternative, or not by itself
        (("wide",) * 10, f"may be made of {', '.join(['wide'] * 8)} and 2 more"),
        ((), "nothing was found that fits"),
    ],
)
def test_candidates_of_one_size_are_alternatives(candidates: tuple[str, ...], said: str) -> None:
    assert lines(tensor("w", Grade.OPEN, candidates=candidates)) == [f"open: w: {said}"]


def test_candidates_that_make_a_tensor_together_are_no_alternatives() -> None:
    """The stack of two layers is as large as the tensor that is made of a half of each."""
    assert lines(dataclasses.replace(guessed("a", "b"), candidates=("a", "b"))) == ["open: w: may be made of a, b"]


def ended(*tensors: Tensor, leaves: dict[str, tuple[int, ...]] = LEAVES) -> Derivation:
    """A search that ended at a place that it does not decide."""
    return Derivation(tensors, leaves, differences=(Difference(SITE, "it differs", shown=False),))


def guessed(*sources: str) -> Tensor:
    evidence = Evidence(Role.PRODUCT, None, SITE, "input x", "columns")
    each = 12 // len(sources)
    parts = [
        Part(np.arange(each) + each * k, leaf, np.arange(each), Arithmetic.SAME, evidence)
        for k, leaf in enumerate(sources)
    ]
    return tensor("w", Grade.OPEN, parts=tuple(parts), guessed=True)


def test_what_an_open_tensor_is_nearest_to_is_no_word_of_nothing() -> None:
    """The file offers the guess, so that the summary does not say that nothing was found."""
    assert lines(guessed("a")) == ["open: w: may be made of a"]
    assert lines(dataclasses.replace(guessed("a"), unread=True)) == ["open: w: no operation of the target reads it"]


@pytest.mark.parametrize(("leaf", "said"), [("a", "a"), ("stack", "one part of axis 0 of stack")])
def test_a_guess_of_a_search_that_ended_is_said_to_be_unproven_and_not_said_twice(leaf: str, said: str) -> None:
    """A line of a tensor without a rule would say as a fact what the guess is made of."""
    found = list(summary(ended(guessed(leaf)), {"w": NOT_PROVEN}))
    assert f"open: w: may be made of {said}; the search ended before it was proven" in found
    assert not any(line.startswith("no rule") for line in found)


BRIEF = "in attn: the target uses a, and the JAX model b"


@pytest.mark.parametrize(
    ("problem", "said"),
    [
        ("the target uses a (net.py:7, in attn), and the JAX model b", []),
        (
            "the target uses a (net.py:7), and the JAX model b; what follows is not compared, as w is open",
            ["  also: what follows is not compared, as w is open"],
        ),
        (
            "of x, the target sums (net.py:7); the JAX model sums (jax.py:3); the target uses a, and the JAX model b",
            ["  in full: of x, the target sums (net.py:7); the JAX model sums (jax.py:3)"],
        ),
        (
            "the target uses a (net.py:7), and the JAX model b (jax.py:3)",
            ["  in full: the target uses a (net.py:7), and the JAX model b (jax.py:3)"],
        ),
    ],
)
def test_the_whole_sentence_does_not_repeat_the_short_one(problem: str, said: list[str]) -> None:
    place = Site("target", 0, "mm", where="net.py:7")
    found = Derivation((), LEAVES, differences=(Difference(place, problem, brief=BRIEF),))
    first, *more = summary(found, {})
    assert first == f"differs: net.py:7: {BRIEF}" and more == said


@pytest.mark.parametrize(
    ("leaves", "said"),
    [
        (
            {"a": (4, 4), "s": (2, 3, 3), "b": (3, 4)},
            "the layers different widths (2 open leaves have two axes of one size), or other",
        ),
        (
            {"a": (4, 4), "b": (3, 4)},
            "the layers different widths (1 open leaf has two axes of one size), or other",
        ),
        ({"b": (3, 4), "v": (4,)}, "where you cannot, give other weights (another `--seed`) or inputs"),
    ],
)
def test_the_hint_says_widths_only_where_an_open_leaf_has_equal_ones(
    leaves: dict[str, tuple[int, ...]], said: str
) -> None:
    text = hint(ended(leaves=leaves))
    assert said in text and ("widths" in text) is ("widths" in said)
    assert list(summary(ended(leaves=leaves), {}))[-1] == text


def test_widths_of_leaves_that_are_found_are_not_in_the_way() -> None:
    made = dataclasses.replace(guessed("square"), grade=Grade.IN_FRONT)
    whole = dataclasses.replace(made.parts[0], elements=np.arange(16), positions=np.arange(16))
    square = dataclasses.replace(made, shape=(4, 4), parts=(whole,))
    assert "widths" not in hint(ended(square, leaves={"square": (4, 4)}))
    assert "widths" in hint(ended(square, leaves={"square": (2, 4, 4)})), "the other layer is open"


def test_the_hint_begins_with_what_helps_most() -> None:
    text = hint(ended(leaves={"a": (4, 4)}))
    first, second = text.index("write that place, or what follows it, in one way in both"), text.index("widths")
    assert text.startswith("hint: if you see no difference there, write") and first < second


def test_open_tensors_of_one_kind_share_a_line_with_the_leaves_of_the_first() -> None:
    opened = [tensor(f"layers.{k}.w", Grade.OPEN, candidates=(f"layers/{k}/w",)) for k in range(3)]
    assert lines(*opened) == ["open: layers.0.w and 2 more like it: may be made of layers/0/w"]


def test_what_convert_writes_beside_the_derived_tensors_is_said() -> None:
    """The rules of BatchNorm write its counter, and a module that has two names is written under both."""
    norm = dict.fromkeys(("weight", "bias", "running_mean", "running_var"), (4,)) | {"num_batches_tracked": ()}
    modules = (TargetModule("bn", "batch_norm", norm), TargetModule("index", "", {"rows": (2, 2)}))
    target = TargetModel("Net", modules, shared={"bn": ("features.1",)})
    found = Derivation(
        tuple(Tensor(f"bn.{name}", (4,), Grade.DERIVED) for name in norm if name != "num_batches_tracked"),
        LEAVES,
        buffers={"index.rows": np.zeros((2, 2), np.int64)},
    )
    start = "wrote r.yaml: 4 tensors (4 derived) of 5 leaves; 0 candidates tried"
    more = "; `convert` also writes 1 BatchNorm counter and 1 whole-number buffer and 5 second names"
    rules = "model: m\ntitle: M\ntargets: {torch: {loads: Net}}\nrules:\n- "
    of_norm = (
        f"{rules}{{from: a, bias: b, mean: c, var: d, epsilon: 1e-5, multiplies_by: scale, axes: C, batch_norm: bn}}\n"
    )
    assert written(Path("r.yaml"), found, target, of_norm, {}) == start + more
    without = more.replace("1 BatchNorm counter and ", "")
    assert (
        written(Path("r.yaml"), found, target, f"{rules}{{from: a, axes: C, parameter: bn.weight}}\n", {})
        == start + without
    )
    counter = '- {value: 0, axes: "", dtype: int64, because: no count, constant: bn.num_batches_tracked}\n'
    of_its_own = f"{rules}{{from: a, axes: C, parameter: bn.weight}}\n{counter}"
    assert written(Path("r.yaml"), found, target, of_its_own, {}) == start + more
    alone = TargetModel("Net", (TargetModule("bn", "batch_norm", dict.fromkeys(list(norm)[:4], (4,))),))
    assert written(Path("r.yaml"), Derivation(found.tensors, LEAVES), alone, of_norm, {}) == start
    behind = dataclasses.replace(found, differences=ended().differences)
    assert written(Path("r.yaml"), behind, target, of_norm, {}) == start, "the norms behind a mismatch are not known"


def test_tensors_without_a_rule_are_counted() -> None:
    target, rules = (
        TargetModel("Net", ()),
        "model: m\ntitle: M\ntargets: {torch: {loads: Net}}\nrules:\n- {from: a, axes: C, parameter: a}\n",
    )
    found = Derivation((Tensor("a", (4,), Grade.DERIVED), Tensor("b", (4,), Grade.OPEN)), LEAVES)
    assert "2 tensors (1 derived, 1 open), 1 without a rule of" in written(
        Path("r.yaml"), found, target, rules, {"a": "no words", "b": "open"}
    )


def test_tensors_that_no_leaf_gives_are_named() -> None:
    evidence = Evidence(Role.SHIFT, None, SITE, "", "")
    zeros = Part(np.arange(12), "", np.zeros(0, int), Arithmetic.CONSTANT, evidence, 0.0)
    biases = [tensor(f"layers.{k}.bias", Grade.DERIVED, parts=(zeros,)) for k in range(3)]
    scale = tensor("norm.weight", Grade.DERIVED, parts=(dataclasses.replace(zeros, factor=1.0),))
    assert lines(*biases, scale) == [
        "note: no leaf gives layers.0.bias and 2 more like it: 0 in all elements gives the JAX model's outputs",
        "note: no leaf gives norm.weight: 1 in all elements gives the JAX model's outputs",
    ]
