"""A dropped tree of the same paths and shapes: the check says whether its values are the same."""

from __future__ import annotations

import numpy as np
import pytest

from convert.planning.planner import make_plan
from convert.verify.weights import twins
from support.memory_source import HEAD, MemorySource, rule_file

RULES = """
- {einsum: "...D,DF->...F", from: "layers_{i}/w", linear: "m.{i}"}
- {drop: "/ema/**", because: an average}
"""


def notes_of(change: dict[str, np.ndarray]) -> list[str]:
    weights = {f"layers_{i}/w": np.full((3, 4), i + 1.0, np.float32) for i in range(3)}
    tree = {f"{root}/{name}": value for root in ("model", "ema") for name, value in weights.items()} | change
    plan = make_plan(rule_file(RULES, HEAD + "root: model\n"), MemorySource(tree))
    return list(twins.twin_notes(plan))


def test_the_same_values() -> None:
    assert notes_of({}) == ["ema is dropped and has the paths and shapes of model; its values are the same"]


@pytest.mark.parametrize("leaf", ["ema/layers_0/w", "ema/layers_2/w"])
def test_other_values(leaf: str) -> None:
    (note,) = notes_of({leaf: np.zeros((3, 4), np.float32)})
    assert note.endswith(f"its values differ (first in {leaf})")


def test_another_dtype() -> None:
    (note,) = notes_of({"ema/layers_0/w": np.ones((3, 4), np.float64)})
    assert note.endswith("its dtype differs (ema/layers_0/w: float64, not float32)")


def test_large_trees_are_compared_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(twins, "MAX_BYTES", 100)
    (note,) = notes_of({})
    assert note.endswith("the 2 smallest of its 3 leaves have the same values")


def test_no_twin() -> None:
    assert notes_of({"ema/layers_1/w": np.zeros((4, 3), np.float32)}) == []
