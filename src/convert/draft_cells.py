"""Recurrent cells that a tree holds, told by what their leaves are called and by how their shapes go together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from convert.grouping import Group, Step
from convert.kinds.cells import CELLS, named_cell
from convert.kinds.recurrent import Cell

PLAIN = ("haiku.LSTM", "haiku.VanillaRNN")  # their trees are those of linear layers


def find_cells(groups: Sequence[Group]) -> dict[tuple[Step, ...], list[tuple[str, str]]]:
    """Path of a cell -> kind and name of each library's cell that has such a tree; the first is the guess.

    Trees that could be of several kinds are left out.
    """
    below: dict[tuple[Step, ...], dict[str, Group]] = {}
    for g in groups:
        for k in range(1, len(g.steps)):
            if all(len(step.words) == 1 for step in g.steps[k:]):
                below.setdefault(g.steps[:k], {})["/".join(step.words[0] for step in g.steps[k:])] = g
    known = {name: _cell(name) for name in CELLS if name not in PLAIN}
    found = {}
    for prefix, leaves in below.items():
        fitting = [(word, name) for name, (word, cell) in known.items() if _fits(cell, leaves)]
        whole = sum(g.steps[: len(prefix)] == prefix for g in groups) == len(leaves)
        if whole and len({word for word, _ in fitting}) == 1:
            found[prefix] = fitting
    return found


def _cell(name: str) -> tuple[str, Cell]:
    word = CELLS[name]()[0]
    return word, named_cell(name, word)


def _fits(cell: Cell, leaves: Mapping[str, Group]) -> bool:
    """Whether the leaves are called as the cell's, and their shapes agree on the widths of the input and of the state."""
    if not (cell.leaves.keys() - cell.may_lack <= leaves.keys() <= cell.leaves.keys()):
        return False
    sizes: dict[str, int] = {}
    for path, g in leaves.items():
        held = cell.leaves[path]
        if len(g.shape) != len(held.axes) or g.shape[held.gate_axis] % len(held.gates):
            return False
        own = {"H": g.shape[held.gate_axis] // len(held.gates)}
        if any(sizes.setdefault(axis, size) != size for axis, size in own.items()):
            return False
        for axis, size in zip(held.axes, g.shape, strict=True):
            if axis in ("I", "H") and sizes.setdefault(axis, size) != size:
                return False
            if axis == "2" and size != 2:
                return False
    return True
