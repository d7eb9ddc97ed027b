"""The parts of the slow tests are disjoint, and together they are all tests."""

from __future__ import annotations

import pytest

from support.parts import parse_part, part_of


def test_parts_have_about_as_many_tests_each() -> None:
    tests = [f"tests/models/test_one.py::test_it[case {k}]" for k in range(900)]
    parts = [[test for test in tests if part_of(test, 3) == k] for k in (1, 2, 3)]
    assert sorted(test for part in parts for test in part) == sorted(tests)
    assert all(200 < len(part) < 400 for part in parts)


def test_one_part_is_everything() -> None:
    assert parse_part("1/1") == (1, 1)
    assert part_of("any", 1) == 1


@pytest.mark.parametrize("text", ["", "2", "0/3", "4/3", "1/0", "a/b", "-1/3", "1/3/4"])
def test_what_is_no_part_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="expected K/N with 1 <= K <= N, got"):
        parse_part(text)
