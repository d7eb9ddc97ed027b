"""Other ways to make some tensors are tried together where they change different tensors; one that does not hold takes none with it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from convert.inference.derivation import Arithmetic, Evidence, Grade, Part, Role, Site, Tensor
from convert.inference.grading.other_ways import with_ways_that_hold

EVIDENCE = Evidence(Role.PRODUCT, None, Site("target", 0, "mm", "", "", {}, None), "", "", 0, ())


def part(leaf: str) -> Part:
    return Part(np.arange(2), leaf, np.arange(2), Arithmetic.SAME, EVIDENCE)


def tensor(name: str, leaf: str, **ways: str) -> Tensor:
    alternatives = {int(way[1:]): (part(of),) for way, of in ways.items()}
    grade = Grade.INTERCHANGEABLE if ways else Grade.DERIVED
    return Tensor(name, (2,), grade, (part(leaf),), alternatives)


PAIRS = [
    tensor(f"{side}{k}", f"{side}{k}", **{f"w{k}": f"{other}{k}"}) for k in range(6) for side, other in ("ab", "ba")
]


@pytest.mark.parametrize("wrong", [(), (0,), (2, 3), (5,), range(6)])
def test_ways_that_do_not_hold_are_left_out(wrong: Sequence[int]) -> None:
    runs = 0

    def holds(made: Sequence[Tensor]) -> bool:
        nonlocal runs
        runs += 1
        return not any(t.name.startswith("a") and t.parts[-1].leaf in [f"b{k}" for k in wrong] for t in made)

    found = with_ways_that_hold(PAIRS, holds)
    assert {t.name for t in found if t.grade is Grade.DERIVED} == {f"{side}{k}" for side in "ab" for k in wrong}
    assert all(bool(t.alternatives) is (t.grade is Grade.INTERCHANGEABLE) for t in found)
    assert runs == 1 or wrong


def test_two_ways_of_one_tensor_are_tried_apart() -> None:
    seen = []

    def holds(made: Sequence[Tensor]) -> bool:
        seen.append([t.parts[-1].leaf for t in made])
        return True

    tensors = [tensor("a", "a", w0="b", w1="c"), tensor("b", "b", w0="a"), tensor("c", "c", w1="a")]
    assert {t.grade for t in with_ways_that_hold(tensors, holds)} == {Grade.INTERCHANGEABLE}
    assert sorted(seen) == [["b", "a", "c"], ["c", "b", "a"]]
