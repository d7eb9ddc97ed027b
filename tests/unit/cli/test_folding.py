"""Folding: repeated layers become one entry, and nothing else does."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from convert.cli.folding import fold


def folded(*names: str) -> list[tuple[str, int]]:
    return [(f.lines[0], f.count) for f in fold((None, (name,)) for name in names)]


def test_layers_become_a_range() -> None:
    assert folded("a.0.w", "a.1.w", "a.2.w", "norm.w") == [("a.{0..2}.w", 3), ("norm.w", 1)]


def test_gaps_are_shown() -> None:
    assert folded("a.0.w", "a.1.w", "a.3.w") == [("a.{0..1,3}.w", 3)]


def test_numbers_that_count_the_same_are_folded_together() -> None:
    entries = [(None, (f"layers.{i}.w", f"from x_{i} at {i}")) for i in range(3)]
    assert [f.lines for f in fold(entries)] == [("layers.{0..2}.w", "from x_{0..2} at {0..2}")]


def test_a_grid_is_folded_only_when_it_is_complete() -> None:
    grid = [f"l.{i}.e.{j}" for i in range(2) for j in range(3)]
    assert folded(*grid) == [("l.{0..1}.e.{0..2}", 6)]
    assert folded(*grid[1:]) == [(name, 1) for name in grid[1:]]


def test_entries_with_another_key_stay_apart() -> None:
    assert [f.count for f in fold([("float32", ("a.0",)), ("bfloat16", ("a.1",))])] == [1, 1]


PATHS = st.tuples(st.sampled_from("ab"), st.integers(0, 12), st.sampled_from("cd"), st.integers(0, 2))


@given(st.lists(PATHS, unique=True, max_size=20))
def test_no_entry_is_lost(paths: list[tuple[str, int, str, int]]) -> None:
    names = [f"{a}.{i}.{b}{k}" for a, i, b, k in paths]
    assert sum(f.count for f in fold((None, (name,)) for name in names)) == len(names)
