"""Rows of a table that no draw has read, where the table is not its leaf row by row.

A table that is its leaf row by row has no note: its other rows follow. Where the rows that were read lie in another order, the order of the
other rows is a guess. So are zeros in place of elements that the leaf has left.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from convert.inference.derivation import Part, Role, Tensor
from convert.inference.forms.hidden.always_zero import met_by_parameters
from convert.programs.program import Program

Array = np.ndarray[Any, np.dtype[Any]]
Shapes = Mapping[str, Sequence[int]]


def notes(tensors: Sequence[Tensor], source: Program, runs: Iterable[Program]) -> tuple[str, ...]:
    """Return how the rows are written that no run reads, in words.

    Args:
        source: has the leaves.
        runs: of the target.
    """
    leaves = {name: value.array.shape for name, value in source.parameters.items()}
    left = {leaf: prod(shape) for leaf, shape in leaves.items()}
    for part in (part for tensor in tensors for part in tensor.parts if part.leaf):
        left[part.leaf] -= len(np.unique(part.positions))
    tables = [one for one in tensors if _is_table(one) and not _is_copied(one, left)]
    if not tables:
        return ()
    read = [(run.first_element, met_by_parameters(run, {}).at_all) for run in runs]
    return tuple(note for table in tables for note in _note(table, leaves, read))


def _note(table: Tensor, leaves: Shapes, read: Sequence[tuple[Mapping[str, int], Array]]) -> Iterator[str]:
    size = prod(table.shape)
    rows = np.zeros(table.shape[0], bool)
    for first, elements in read:
        rows |= elements[first[table.name] : first[table.name] + size].reshape(len(rows), -1).any(1)
    unread = np.flatnonzero(~rows)
    if len(unread):
        yield (
            f"no draw has read {len(unread):,} of {len(rows):,} rows of {table.name}, and their order is a guess: "
            f"row {unread[0]} is written as {_row(table, int(unread[0]), leaves)}; give inputs that read them"
        )


def _row(table: Tensor, row: int, leaves: Shapes) -> str:
    """Say what a row is made of: `t[1, :]`, or a number."""
    at, size = row * prod(table.shape[1:]), prod(table.shape[1:])
    made = ((part, (at <= part.elements) & (part.elements < at + size)) for part in table.parts)
    part, here = next((part, here) for part, here in made if here.any())
    if not part.leaf:
        return f"{part.factor:g}"
    index = np.unravel_index(part.positions[here], tuple(leaves[part.leaf]))
    along = ", ".join(":" if (places != places[0]).any() else str(places[0]) for places in index)
    return f"{part.leaf}[{along}]"


def _is_table(tensor: Tensor) -> bool:
    return (
        bool(tensor.shape)
        and any(part.leaf for part in tensor.parts)
        and all(part.evidence.role is Role.LOOKUP for part in tensor.parts)
    )


def _is_copied(table: Tensor, left: Mapping[str, int]) -> bool:
    """Whether each row is as far behind the one before it as any other, in each leaf that it is made of, and zeros stand only where the leaves end."""
    filled = any(not part.leaf for part in table.parts)
    return all(
        _is_regular(part, prod(table.shape[1:])) and not (filled and left[part.leaf])
        for part in table.parts
        if part.leaf
    )


def _is_regular(part: Part, size: int) -> bool:
    rows, counts = np.unique(part.elements // size, return_counts=True)
    if len(rows) < 2 or (counts != counts[0]).any():
        return len(rows) < 2
    steps = np.diff(part.positions[np.argsort(part.elements)].reshape(len(rows), -1), axis=0)
    return bool((steps == steps[0, 0]).all())
