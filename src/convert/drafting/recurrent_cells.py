"""Recognize the recurrent cells of known libraries by the names and shapes of their leaves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from convert.layers.draft import Group, PathKey
from convert.layers.recurrent.equations import Cell
from convert.layers.recurrent.library_cells import CELLS, named_cell

# Cells whose trees are those of linear layers: the name of the module must say what they are.
PLAIN = ("haiku.LSTM", "haiku.VanillaRNN")
VARIANTS = (
    *CELLS,
    "flax.linen.MGUCell(reset_gate=False)",
    "equinox.nn.GRUCell(use_bias=False)",
    "equinox.nn.LSTMCell(use_bias=False)",
    "haiku.VanillaRNN(double_bias=False)",
    "keras.layers.GRU(reset_after=False)",
    "keras.layers.GRU(use_bias=False)",
    "keras.layers.LSTM(use_bias=False)",
    "keras.layers.SimpleRNN(use_bias=False)",
)
NAMES = {"gru": ("gru", "mgu"), "lstm": ("lstm",), "rnn": ("rnn", "simple")}


def find_cells(groups: Sequence[Group]) -> dict[tuple[PathKey, ...], tuple[str, str]]:
    """Return path -> kind and name of the cell; the first of several cells with the same tree and computation.

    Trees that could be of several kinds are left out, unless their names say which.
    """
    below: dict[tuple[PathKey, ...], dict[str, Group]] = {}
    for g in groups:
        for k in range(1, len(g.steps)):
            if all(len(step.words) == 1 for step in g.steps[k:]):
                below.setdefault(g.steps[:k], {})["/".join(step.words[0] for step in g.steps[k:])] = g
    known = list(_known())
    found: dict[tuple[PathKey, ...], tuple[str, str]] = {}
    for prefix, leaves in below.items():
        fitting = [(word, name) for word, name, cell in known if _fits(cell, leaves) and _may_be(name, word, prefix)]
        kinds = {word for word, _ in fitting}
        named = [(word, name) for word, name in fitting if len(kinds) == 1 or _called(word, prefix)]
        if len({word for word, _ in named}) == 1:
            whole = sum(g.steps[: len(prefix)] == prefix for g in groups) == len(leaves)
            found |= {prefix: named[0]} if whole else {}
    return found


def _known() -> Iterator[tuple[str, str, Cell]]:
    for name in VARIANTS:
        word = CELLS[name.partition("(")[0]]()[0]
        yield word, name, named_cell(name, word)


def _called(word: str, prefix: Sequence[PathKey]) -> bool:
    """Whether the module, or the module that has it as ``cell``, is named like cells of this kind."""
    named = [step for step in prefix if step.words[0] != "cell"]
    last = (named[-1].stem or named[-1].words[0]).lower() if named else ""
    return any(name in last for name in NAMES[word]) and not (word == "rnn" and "rnn" in last and "lstm" in last)


def _may_be(name: str, word: str, prefix: Sequence[PathKey]) -> bool:
    plain = name.partition("(")[0] in PLAIN
    unnamed = name.startswith("keras.") and "use_bias=False" in name and prefix[-1].words != ("cell",)
    return not (plain or unnamed) or _called(word, prefix)


def _fits(cell: Cell, leaves: Mapping[str, Group]) -> bool:
    """Whether the leaves have the names of the cell, and their shapes agree on the widths of input and state."""
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
            if (axis == "2" and size != 2) or (axis == "I+H" and size <= sizes["H"]):
                return False
    return True
