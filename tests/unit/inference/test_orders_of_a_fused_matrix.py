"""The orders of leaves in a fused matrix are few: where no widths add up none is tried, and what is looked at is bounded."""

from __future__ import annotations

import numpy as np
import pytest

from convert.inference.meetings.sites import Meeting, Product
from convert.inference.proposals import fillings


def _leaves(count: int, width: int) -> list[fillings.Atom]:
    numbers = np.arange(2 * width).reshape(2, width)
    meeting = Meeting.__new__(Meeting)  # no order depends on it
    found = []
    for _ in range(count):
        product = Product((), numbers.astype(float), (numbers,), numbers)
        found.append(fillings.Atom(product, meeting, np.arange(2), ("index", 0, 0), np.arange(width), ()))
    return found


def test_no_order_is_tried_where_no_widths_add_up() -> None:
    leaves = _leaves(40, 4)
    assert list(fillings.fillings(leaves, 4 * fillings.MAX_PARTS + 4, 2)) == []  # one part too many
    assert list(fillings.fillings(leaves, 30, 2)) == []


def test_every_order_is_tried_where_there_are_few() -> None:
    found = list(fillings.fillings(_leaves(2, 3), 6, 1)) + list(fillings.fillings(_leaves(2, 3), 6, 2))
    assert [[part for _, part in way] for way in found] == [[slice(0, 3), slice(3, 6)]] * 2


def test_leaves_that_do_not_go_together_end_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []

    def goes_with(atom: object, chosen: list[object], again: bool = False) -> bool:
        looks.append(atom)
        return len(chosen) < fillings.MAX_PARTS - 1

    monkeypatch.setattr(fillings, "_goes_with", goes_with)
    assert list(fillings.fillings(_leaves(40, 4), 4 * fillings.MAX_PARTS, 2)) == []
    assert len(looks) <= fillings.MAX_STEPS
