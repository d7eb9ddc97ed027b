"""A derivation is data: it goes to JSON and keeps every position."""

import json

import numpy as np
import pytest

from convert.inference.derivation import (
    Arithmetic,
    Derivation,
    Evidence,
    Grade,
    Part,
    Proof,
    Role,
    Site,
    Tensor,
    progressions,
)


def _expanded(found: list[list[int]]) -> list[int]:
    return [first + step * k for first, step, count in found for k in range(count)]


@pytest.mark.parametrize(
    "numbers",
    [[], [7], [3, 1], [0, 1, 2, 10, 20, 30, 31], np.arange(12).reshape(3, 4).T.ravel(), np.random.default_rng(0).permutation(40)],
    ids=["none", "one", "two", "three runs", "transposed", "no order"],
)  # fmt: skip
def test_progressions_keep_every_number(numbers):
    assert _expanded(progressions(numbers)) == list(numbers)


def test_a_transposed_matrix_is_one_progression_per_row():
    assert progressions(np.arange(6).reshape(2, 3).T.ravel()) == [[0, 3, 2], [1, 3, 2], [2, 3, 2]]


def _derivation(grade: Grade, proof: Proof | None) -> Derivation:
    site = Site("target", 3, "mm", "model.py:7", "a")
    evidence = Evidence(Role.PRODUCT, Site("source", 1, "dot_general"), site, "input x", "columns", 2, (("mm", 1),))
    part = Part(np.arange(6), "w", np.arange(6).reshape(2, 3).T.ravel(), Arithmetic.SAME, evidence, contracted=(0,))
    return Derivation((Tensor("a.weight", (3, 2), grade, (part,), also=("b.weight",)),), {"w": (2, 3)}, proof=proof)


def test_to_dict_is_json_with_every_part():
    found = json.loads(json.dumps(_derivation(Grade.DERIVED, Proof(3, 1e-16, 1e-10)).to_dict()))
    (part,) = found["tensors"][0]["parts"]
    assert part["leaf"] == "w" and _expanded(part["positions"]) == [0, 3, 1, 4, 2, 5]
    assert part["evidence"]["source"]["operation"] == "dot_general"


@pytest.mark.parametrize("grade", list(Grade))
@pytest.mark.parametrize("proof", [None, Proof(3, 1e-16, 1e-10)])
def test_complete_needs_a_proof_and_no_tied_or_open_tensor(grade, proof):
    expected = proof is not None and grade in (Grade.DERIVED, Grade.INTERCHANGEABLE)
    assert _derivation(grade, proof).complete == expected


def test_a_tied_tensor_is_found_under_each_name():
    found = _derivation(Grade.DERIVED, None)
    assert found.tensor("b.weight") is found.tensor("a.weight")
    with pytest.raises(KeyError):
        found.tensor("c.weight")
