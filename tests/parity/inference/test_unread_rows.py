"""Rows of a table that no draw reads: as the leaf goes on, with a note where they could lie in another order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from convert.inference.derivation import Derivation, Grade
from support.inferred import derive, grades, rules, tokens

ROWS, READ, WIDTH = 18, 9, 5


class Table(torch.nn.Module):
    def __init__(self, rows: int = ROWS) -> None:
        super().__init__()
        self.e = torch.nn.Embedding(rows, WIDTH)

    def forward(self, x: Any) -> Any:
        return self.e(x)


def _derived(look_up: Callable[[Any, Any], Any], *shape: int, rows: int = ROWS) -> Derivation:
    found = derive(lambda w, x: look_up(w["t"], x), Table(rows), {"t": shape}, tokens(READ, 3, 40))
    assert found.complete and grades(found) == {Grade.DERIVED}
    return found


@pytest.mark.parametrize(
    ("look_up", "shape", "row"),
    [
        (lambda t, x: t[2 * x], (ROWS, WIDTH), "t[1, :]"),
        (lambda t, x: t[x % READ, x // READ], (READ, 2, WIDTH), "t[0, 1, :]"),
        (lambda t, x: t[:, 0][x], (READ, 2, WIDTH), "t[0, 1, :]"),
    ],
    ids=["every second row", "two indices", "the first of each pair"],
)
def test_unread_rows_that_may_lie_in_another_order_are_said(look_up: Any, shape: tuple[int, ...], row: str) -> None:
    found = _derived(look_up, *shape)
    assert found.notes[-1] == (
        f"no draw has read {ROWS - READ} of {ROWS} rows of e.weight, and their order is a guess: row {READ} is written as {row}; give inputs that read them"
    )
    assert '(D C)E"' in rules(found, Table())[0]


@pytest.mark.parametrize(
    ("look_up", "shape"),
    [
        (lambda t, x: t[x], (ROWS, WIDTH)),
        (lambda t, x: t[:, x].transpose(1, 2, 0), (WIDTH, ROWS)),
        (lambda t, x: t[0][x], (2, READ, WIDTH)),
        (lambda t, x: t.reshape(READ, -1, WIDTH)[x // 2, x % 2], (ROWS, WIDTH)),
    ],
    ids=["rows", "columns", "the first half", "split rows"],
)
def test_unread_rows_go_on_where_each_row_is_one_behind_the_last(look_up: Any, shape: tuple[int, ...]) -> None:
    assert not _derived(look_up, *shape).notes


def test_rows_that_the_source_has_not_got_are_zeros_without_a_note() -> None:
    found = _derived(lambda t, x: t[x], READ, WIDTH, rows=ROWS)
    assert not found.notes and [part.leaf for part in found.tensor("e.weight").parts] == ["t", ""]
