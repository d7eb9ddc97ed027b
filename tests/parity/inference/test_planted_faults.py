"""Two programs that differ by one fault are never derived, and the difference is named where it stands."""

from __future__ import annotations

import re

import pytest
import torch

from convert.inference.derivation import Derivation, Grade
from support.inferred import UNPROVEN, derive, grades
from support.planted import Pair, attention, lines_of, others, small, translator
from support.planted.words import WORDS

PAIRS = attention.PAIRS | others.PAIRS | small.PAIRS | translator.PAIRS
QUICK = (("bag", "no places"), ("features", "cos"))
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
    assert {tensor.grade for tensor in found.tensors} == {Grade.DERIVED}


@pytest.mark.parametrize(("base", "fault"), CASES)
def test_a_fault_is_never_derived_and_is_named(base: str, fault: str) -> None:
    found = _derived(PAIRS[base], fault)
    assert not found.complete and found.proof is None
    assert grades(found) <= {*UNPROVEN, Grade.TIED}
    (difference,) = found.differences
    words = WORDS.get(base, {}).get(fault)
    if words is not None:
        assert re.search(words, difference.problem), difference.problem
        assert difference.site.where in lines_of(PAIRS[base].module(fault), fault), difference.problem


def test_words_are_of_faults() -> None:
    assert all(set(words) <= set(PAIRS[base].faults) for base, words in WORDS.items())
    assert sum(len(pair.faults) for pair in PAIRS.values()) >= 200
