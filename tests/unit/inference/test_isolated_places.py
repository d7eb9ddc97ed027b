"""Where a part of a leaf may lie: each place has room for it, each order has each element once, and no order is missing."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from convert.inference.isolated.places import HIDDEN, Fills, blocks, cuts, layouts, places

SIZES = st.sampled_from([1, 2, 3, 4, 5, 6])
SHAPES = st.lists(SIZES, min_size=1, max_size=3).map(tuple)


@given(SHAPES)
def test_layouts_are_all_orders_of_the_axes_and_no_element_is_lost(shape: tuple[int, ...]) -> None:
    leaf = np.arange(np.prod(shape)).reshape(shape)
    found = [order.tolist() for order in layouts(leaf)]
    assert all(sorted(order) == list(range(leaf.size)) for order in found)
    assert len({tuple(order) for order in found}) == len(found)
    for axes in itertools.permutations(range(leaf.ndim)):
        assert leaf.transpose(axes).ravel().tolist() in found


def test_heads_and_their_features_are_exchanged_in_either_order() -> None:
    heads_last = np.arange(12).reshape(6, 2)  # [features of 3 heads, 2]
    found = [order.tolist() for order in layouts(heads_last)]
    assert heads_last.reshape(3, 2, 2).swapaxes(0, 1).ravel().tolist() in found


def test_only_the_axes_of_space_of_a_kernel_run_backwards() -> None:
    leaf = np.arange(24).reshape(2, 3, 4)  # [features, heads, of each], or a kernel [taps, in, out]
    turned = leaf[:, ::-1].ravel().tolist()
    assert turned in [order.tolist() for order in layouts(leaf, kernel=True)]
    assert turned not in [order.tolist() for order in layouts(leaf)]


@given(SHAPES, st.integers(1, 40), st.booleans())
def test_blocks_have_as_many_elements_as_was_asked_for(shape: tuple[int, ...], size: int, in_heads: bool) -> None:
    array = np.arange(np.prod(shape)).reshape(shape)
    for axis, rows in blocks(shape, size, in_heads=in_heads):
        block = np.take(array, rows, axis)
        assert block.size == size < array.size
        assert len(set(rows)) == len(rows)


@given(SHAPES, st.lists(st.integers(1, 12), min_size=1, max_size=3))
def test_the_parts_of_a_cut_are_the_leaf(shape: tuple[int, ...], sizes: list[int]) -> None:
    leaf = np.arange(np.prod(shape)).reshape(shape)
    for parts in cuts(leaf, sizes):
        assert len({part.size for part in parts}) == 1 and parts[0].size in sizes
        assert sorted(np.concatenate([part.ravel() for part in parts]).tolist()) == list(range(leaf.size))


def test_a_place_that_is_taken_is_no_place() -> None:
    known = {"w": np.array([[0, 1], [HIDDEN, HIDDEN]]), "b": np.full(2, HIDDEN)}
    assert [name for name, _ in places(2, known, Fills.ALL)] == ["b"]
    (found,) = places(2, known, Fills.ROWS)
    assert found[0] == "w" and known["w"][found[1]].tolist() == [[HIDDEN, HIDDEN]]
