"""Equal groups are one axis in an equation, and an axis each in the axes of one leaf."""

from __future__ import annotations

from convert.core.axis_groups import parse_leaf_axes, take_groups


def test_equal_groups_of_a_leaf_are_axes_of_their_own() -> None:
    names = parse_leaf_axes("(1 + 1)(1 + 1)")
    assert len(names.letters) == len(set(names.letters)) == len(names.groups) == 2
    assert names.text == "(1 + 1) (1 + 1)"


def test_equal_groups_of_an_equation_are_one_axis() -> None:
    flat, groups = take_groups("...D,D(C F)->...(C F)")
    assert flat.count(next(iter(groups))) == 2 and len(groups) == 1
