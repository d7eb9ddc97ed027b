"""Orders of rows: each is named, and a random order is not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from convert.verify.weights.corruption.find import find_corruption
from convert.verify.weights.corruption.permutations import describe_order, first_few

Array = np.ndarray[Any, np.dtype[Any]]
ROWS = np.arange(48)
HEADS = ROWS.reshape(4, 12)
QKV = np.arange(96).reshape(3, 4, 8)  # parts, heads, features
GROUPS = np.concatenate(
    [np.r_[16 * g : 16 * g + 16, 64 + 8 * g : 72 + 8 * g, 96 + 8 * g : 104 + 8 * g] for g in range(4)]
)

ORDERS: dict[str, tuple[str, str, Array]] = {
    "reversed": ("rows reversed", "the 48 rows are in the reverse order", ROWS[::-1]),
    "as strings": ("rows in the order of strings", "0, 1, 10, 11", np.array(sorted(range(48), key=str))),
    "parts in each head": ("parts within heads", "8, 8 and 8 of each, 4 times", QKV.swapaxes(0, 1).reshape(-1)),
    "unequal parts in each group": ("parts within heads", "16, 8 and 8 of each, 4 times", GROUPS),
    "as many parts as heads": ("parts and heads exchanged", "or the other way round", ROWS[:36].reshape(3, 3, 4).swapaxes(0, 1).reshape(-1)),
    "heads apart": ("heads within parts", "in the source they are in turns", np.argsort(GROUPS)),
    "two heads": ("blocks in another order", "of the blocks of 12 rows, 0 and 2 are exchanged", HEADS[[2, 1, 0, 3]].reshape(-1)),
    "three heads": ("blocks in another order", "in the order 1, 3, 0, 2", HEADS.reshape(8, 6)[[1, 3, 0, 2, 5, 7, 6, 4]].reshape(-1)),
    "heads reversed": ("blocks reversed", "the 4 blocks of 12 rows", HEADS[::-1].reshape(-1)),
    "each head reversed": ("reversed within blocks", "within each block of 12 rows", HEADS[:, ::-1].reshape(-1)),
    "each head rolled": ("another order within blocks", "moved forward by 1", np.roll(HEADS, 1, 1).reshape(-1)),
    "query and key": ("thirds in another order", "in the order 1, 0 and 2", np.r_[16:32, :16, 32:48]),
    "a grid": ("factors of an axis in another order", "a grid of 4 x 12", HEADS.T.reshape(-1)),
    "three factors": ("factors of an axis in another order", "axes are in the order 2, 1 and 0", QKV.T.reshape(-1)),
    "the keys' heads reversed": ("blocks reversed", "in the indices 16 to 31", np.r_[:16, ROWS[16:32].reshape(4, 4)[::-1].reshape(-1), 32:48]),
}  # fmt: skip


@pytest.mark.parametrize("order", [order for order in ORDERS if order != "three heads"])
def test_an_order_is_named(order: str) -> None:
    name, text, rows = ORDERS[order]
    found = describe_order(rows)
    assert found is not None and found.name == name and text in found.text
    want = np.random.default_rng(0).standard_normal((len(rows), 5)).astype(np.float32)
    corruption = find_corruption(want[rows], want)
    assert corruption is not None and corruption.name == name


def test_an_order_of_blocks_without_a_name_is_listed() -> None:
    found = describe_order(ORDERS["three heads"][2])
    assert found is not None and found.name == "blocks in another order"
    assert found.text.endswith("are in the order 1, 3, 0, 2, 5, 7, 6, 4")


def test_an_order_of_some_rows() -> None:
    found = describe_order(ORDERS["the keys' heads reversed"][2])
    assert found is not None and found.name == "blocks reversed"
    assert found.text == "in the indices 16 to 31: the 4 blocks of 4 rows are in the reverse order"


@pytest.mark.parametrize("size", [5, 24, 97])
def test_a_random_order_has_no_name(size: int) -> None:
    order = np.random.default_rng(size).permutation(size)
    assert describe_order(order) is None


def test_numbers_in_a_row_are_a_range() -> None:
    assert first_few([0, 2, 3, 4, 9, 10]) == "0, 2 to 4, 9, 10"
