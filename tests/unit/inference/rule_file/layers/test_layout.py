"""A layout is read off the numbers of the elements, whatever the order of the axes."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from convert.inference.rule_file.layers.layout import Axis, read_layout


@given(st.permutations(range(4)))
def test_every_order_of_axes_is_read(order: list[int]) -> None:
    leaf = np.arange(2 * 3 * 5 * 7).reshape(2, 3, 5, 7)
    moved = leaf.transpose(order)
    layout = read_layout(leaf.shape, moved.ravel(), moved.shape)
    assert layout is not None and layout.fixed == ()
    assert [(axis.of, axis.size) for axis in layout.axes] == [(k, leaf.shape[k]) for k in order]
    assert layout.groups == tuple((axis,) for axis in layout.axes)


def test_axes_of_one_size_are_told_apart_by_their_steps() -> None:
    leaf = np.arange(4**3).reshape(4, 4, 4)
    layout = read_layout(leaf.shape, leaf.transpose(1, 2, 0).ravel(), (16, 4))
    assert layout is not None
    assert [[axis.of for axis in group] for group in layout.groups or ()] == [[1, 2], [0]]


def test_one_index_of_an_axis_is_fixed_and_an_axis_of_size_one_is_no_axis() -> None:
    leaf = np.arange(3 * 1 * 4 * 5).reshape(3, 1, 4, 5)
    layout = read_layout(leaf.shape, leaf[2, 0].T.ravel(), (5, 4))
    assert layout is not None
    assert layout.fixed == ((0, 2),)
    assert [axis.of for axis in layout.axes] == [3, 2]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_an_axis_that_is_made_of_others_is_taken_apart(order: tuple[int, ...]) -> None:
    """(N C H) of a fused kernel, written in another order."""
    leaf = np.arange(6 * 30).reshape(6, 30)
    rows = leaf.reshape(6, 2, 3, 5).transpose(*(1 + k for k in order), 0)
    layout = read_layout(leaf.shape, rows.ravel(), (30, 6))
    assert layout is not None
    if order == (0, 1, 2):
        assert layout.axes == (Axis(1, 0, 30), Axis(0, 0, 6))
    else:
        moved = np.arange(30).reshape([axis.size for axis in layout.made_of(1)])
        rank = {(axis.of, axis.place): k for k, axis in enumerate(layout.made_of(1))}
        assert np.array_equal(
            moved.transpose([rank[a.of, a.place] for a in layout.axes if a.of == 1]).ravel(), rows[..., 0].ravel() % 30
        )


def test_rows_from_an_offset_are_a_part_of_the_axis() -> None:
    leaf = np.arange(8 * 20).reshape(8, 20)
    layout = read_layout(leaf.shape, leaf[:, 12:16].T.ravel(), (4, 8))
    assert layout is not None
    assert layout.axes == (Axis(1, 0, 4, start=12), Axis(0, 0, 8))


@pytest.mark.parametrize("flat", [False, True])
def test_pairs_of_rope_are_named(flat: bool) -> None:
    leaf = np.arange(6 * 3 * 8).reshape(6, 3, 8)
    halves = leaf.reshape(6, 3, 4, 2).swapaxes(2, 3).reshape(6, 24)  # stored interleaved, wanted half-split
    shape = (6, 24) if flat else leaf.shape
    layout = read_layout(shape, halves.T.ravel(), (24, 6), rotary=True)
    assert layout is not None
    assert [(axis.of, axis.size, axis.order) for axis in layout.axes] == [
        (1, 3, ""),
        (1 if flat else 2, 8, "interleaved"),
        (0, 6, ""),
    ]


def test_an_order_without_a_name_is_no_layout() -> None:
    rng = np.random.default_rng(0)
    leaf = np.arange(6 * 12).reshape(6, 12)
    assert read_layout(leaf.shape, leaf[:, rng.permutation(12)].T.ravel(), (12, 6)) is None
    assert read_layout(leaf.shape, rng.permutation(72), (12, 6)) is None
    broken = leaf.T.ravel().copy()
    broken[-1] = 0
    assert read_layout(leaf.shape, broken, (12, 6)) is None


@pytest.mark.parametrize("parts", [((8, 4), (0, 8)), ((8, 4), (3, 5), (0, 3))])
def test_parts_in_another_order_are_named(parts: tuple[tuple[int, int], ...]) -> None:
    leaf = np.arange(12 * 5).reshape(12, 5)
    rows = np.concatenate([leaf[start : start + length] for start, length in parts])
    layout = read_layout(leaf.shape, rows.T.ravel(), (5, 12))
    assert layout is not None and [axis.parts for axis in layout.axes] == [(), parts]


def test_halves_are_parts_and_not_a_product_that_is_reversed() -> None:
    leaf = np.arange(6 * 5).reshape(6, 5)
    layout = read_layout(leaf.shape, np.roll(leaf, 3, 0).T.ravel(), (5, 6))
    assert layout is not None and [axis.parts for axis in layout.axes] == [(), ((3, 3), (0, 3))]


def test_a_few_reversed_elements_are_parts_of_their_own() -> None:
    few, many = Axis(0, 0, 3, order="reversed"), Axis(0, 0, 9, order="reversed")
    assert few.in_parts == Axis(0, 0, 3, parts=((2, 1), (1, 1), (0, 1))) and many.in_parts is many
