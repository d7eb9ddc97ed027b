"""Which leaves an open tensor may be made of by their sizes: whole ones, and one part of a stack."""

from __future__ import annotations

import pytest

from convert.inference.open_tensors import by_likeness, is_candidate, part_of, stacked_along


@pytest.mark.parametrize(
    ("tensor", "leaf", "axes", "said"),
    [
        ((5, 7), (3, 5, 7), (0,), "one part of axis 0"),
        ((5, 7), (7, 3, 5), (1,), "one part of axis 1"),
        ((1, 1, 5), (3, 4, 5), (0, 1), "one part of axes 0 and 1"),
        ((5, 5), (5, 5, 5), (0,), "one part of axis 0"),  # of axes of one size the first
        ((6,), (3, 2, 3), (0,), "one part of axis 0"),  # flattened
        ((6, 2), (2, 2, 6), (0,), "one part of axis 0"),  # the part keeps the tensor's shape
        ((6,), (2, 3, 6), (0, 1), "one part of axes 0 and 1"),  # and not axis 2, although its part has 6 elements, too
        ((5, 7), (5, 7), (), ""),
        ((35,), (5, 7), (), ""),
        ((5,), (3, 4), (), ""),
        ((1,), (3, 4), (), ""),  # any leaf has a single number
        ((5,), (), (), ""),
    ],
)
def test_the_axes_that_a_leaf_is_stacked_along(
    tensor: tuple[int, ...], leaf: tuple[int, ...], axes: tuple[int, ...], said: str
) -> None:
    assert stacked_along(tensor, leaf) == axes and part_of(tensor, leaf) == said


def test_a_matrix_is_no_stack_of_vectors_where_the_target_has_fewer_of_them() -> None:
    """Each row of a table has the size of a bias."""
    assert not is_candidate((5,), (64, 5), 6) and is_candidate((5,), (3, 2, 5), 6)
    assert is_candidate((5,), (5,), 1) and is_candidate((5, 1), (5,), 1) and not is_candidate((5,), (7,), 9)


def test_leaves_of_the_shape_come_first_and_of_these_such_of_which_a_part_was_found() -> None:
    leaves = {"heads": (3, 2, 3), "whole": (6,), "stack": (3, 6), "other": (3, 6)}
    assert list(by_likeness((6,), leaves, {"stack", "heads"})) == ["stack", "whole", "other", "heads"]
