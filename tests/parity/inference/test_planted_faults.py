"""Two programs that differ by one fault are never derived, and the difference is named where it stands."""

from __future__ import annotations

import re

import pytest
import torch

from convert.inference.derivation import Derivation, Grade
from support.inferred import UNPROVEN, derive, grades
from support.planted import Pair, attention, lines_of, others, small, translator, vision
from support.planted.words import WORDS

PAIRS = attention.PAIRS | others.PAIRS | small.PAIRS | translator.PAIRS | vision.PAIRS
QUICK = (("bag", "no places"), ("features", "cos"))
BRIEF = {  # what comes first in the summary: the layer, and what each side computes
    ("bag", "no places"): "in front of m.0: the JAX model adds a table of shape [1, 6, 8], the target does not",
    ("features", "cos"): "behind a: the target applies cos, the JAX model applies sin",
    ("block", "epsilon"): "in n.0: the target adds 1e-05, the JAX model adds 1e-06",
    ("block", "scale"): "behind m.0: the JAX model divides by 2, the target does not",
    (
        "block",
        "window",
    ): "behind m.0: in the target a position sees itself and up to 2 in front of it; in the JAX model, itself and up to 5 in front of it",
    ("block", "norm"): "in front of m.4: the JAX model computes a norm, the target does not",
    ("block", "gelu"): "behind m.4: the target computes gelu_erf, the JAX model gelu_tanh",
    ("block", "factor"): "in m.5: the target multiplies by 2, the JAX model does not",
    ("decoder", "shifted"): "behind m.1: row k of the target's table is row k + 1 of the JAX model's",
    ("encoder", "no type"): "behind e: the JAX model adds y, the target does not",
    (
        "encoder",
        "keys of x",
    ): "the target gives c.1 the sum at attention.py:225; the JAX model gives it the sum at inferred.py:115",
    ("encoder", "positions in pairs"): "behind e: the target uses p.weight, and the JAX model p",
}
UNDECIDED = {  # leaves and layouts are left that the search does not try: what stands at the place is named all the same
    ("encoder", "positions in pairs"),
    ("translator", "positions from one on"),
    ("encoder", "sigmoid"),
    ("net", "circular"),
    ("net", "ones"),
    ("recurrent", "ones"),
    ("recurrent", "hard"),
    ("recurrent", "reversed"),
    ("recurrent", "tanh"),
    ("experts", "all"),
    ("experts", "not normed"),
    ("experts", "gelu"),
    ("translator", "no scale"),
    ("vision", "stride"),
    ("vision", "gate of half more"),  # a bias may hold the number
    ("encoder", "no type"),  # the table of positions may hold the vector
    ("net", "no norm"),  # the layer in front may hold a BatchNorm
    ("vision", "no shift"),  # the bias of the layer behind may hold it
    ("block", "scale"),  # a layer in front makes up for a factor; so below
    ("block", "width"),
    ("features", "octave"),
    ("features", "length"),
    ("features", "other length"),
    ("vision", "width"),
    ("vision", "temperature"),
    ("mixer", "not halved"),
    ("net", "mean"),
    ("experts", "temperature"),
    ("experts", "no factor"),
    ("bag", "no scale"),
    ("bag", "other scale"),
}
CASES = [
    pytest.param(base, fault, marks=() if (base, fault) in QUICK else pytest.mark.slow)
    for base, pair in PAIRS.items()
    for fault in pair.faults
]


def _derived(pair: Pair, fault: str) -> Derivation:
    torch.manual_seed(0)  # the weights of the module, which the search begins with
    return derive(pair.function, pair.module(fault), pair.shapes, pair.inputs)


@pytest.mark.slow
@pytest.mark.parametrize("base", PAIRS)
def test_without_a_fault_everything_is_derived(base: str) -> None:
    found = _derived(PAIRS[base], "")
    assert found.complete
    either = {"c", "p"} if base == "vision" else set()  # a class token and its position, which are added up
    grades = {tensor.name: tensor.grade for tensor in found.tensors}
    assert grades == {name: Grade.INTERCHANGEABLE if name in either else Grade.DERIVED for name in grades}


@pytest.mark.slow
@pytest.mark.parametrize(("base", "fault"), CASES)
def test_a_fault_is_never_derived_and_is_named(base: str, fault: str) -> None:
    found = _derived(PAIRS[base], fault)
    assert not found.complete and found.proof is None
    assert grades(found) <= {*UNPROVEN, Grade.TIED}
    (difference,) = found.differences
    assert re.search(WORDS[base][fault], difference.problem), difference.problem
    assert difference.site.where in lines_of(PAIRS[base].module(fault), fault), difference.problem
    assert difference.brief == BRIEF.get((base, fault), difference.brief)
    assert difference.shown is ((base, fault) not in UNDECIDED)


def test_each_fault_has_words() -> None:
    assert {base: set(words) for base, words in WORDS.items()} == {
        base: set(pair.faults) for base, pair in PAIRS.items()
    }
    assert sum(len(pair.faults) for pair in PAIRS.values()) >= 200
