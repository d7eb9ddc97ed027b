"""Lists of two sides that a finding writes."""

from __future__ import annotations

import pytest

from convert.core.text import where_they_differ


@pytest.mark.parametrize(
    ("ours", "theirs", "shown"),
    [
        ([0, 2, 4], [0, 1, 2], ("0, 2, 4", "0, 1, 2")),
        ([0, 1, 2, 3, 9], [0, 1, 2, 4, 5], ("0, 1, 2, 3, ...", "0, 1, 2, 4, ...")),
        ([0, 1, 2, 3, 9, 10], [0, 1, 2, 3, 4, 5], ("..., 9, 10", "..., 4, 5")),
        ([*range(20)], [*range(8), *range(20, 32)], ("..., 8, 9, 10, 11, ...", "..., 20, 21, 22, 23, ...")),
        ([1, 2], [1, 2], ("1, 2", "1, 2")),
        ([1, 2], [], ("1, 2", "")),
    ],
)
def test_a_list_of_two_sides_shows_where_they_differ(
    ours: list[int], theirs: list[int], shown: tuple[str, str]
) -> None:
    assert where_they_differ(ours, theirs, most=4) == shown
