"""What differs in the rows of a table of relative positions, which a row and a column of scores take by their distance."""

from __future__ import annotations

from typing import Any

import numpy as np

from convert.core.text import where_they_differ
from convert.programs.divergence.naming.both import steps
from convert.programs.divergence.repair import Repair

Array = np.ndarray[Any, np.dtype[Any]]
TURNED, FARTHEST = "relative positions turned round", "another largest distance of relative positions"
LISTED = 4  # distances that a sentence lists


def by_distance(ours: Array, theirs: Array, behind: Repair | None) -> tuple[str, str]:
    """Name what differs, and say at which distances; empty where distances do not decide the rows.

    Args:
        behind: the operations behind the two that differ; None where they are not known.
    """
    one, two = _rows_of_distances(ours), _rows_of_distances(theirs)
    if one is None or two is None:
        return "", ""
    if all(row == two.get(-distance) for distance, row in one.items()):
        return TURNED, "the target takes for each distance the row that the JAX model takes for the opposite one"
    differing = sorted((distance for distance in one if one[distance] != two[distance]), key=abs)
    nearest, side = abs(differing[0]), 1 if differing[0] > 0 else -1
    distances = [side * n for n in range(nearest, nearest + LISTED) if side * n in one]
    shown = where_they_differ([one[n] for n in distances], [two[n] for n in distances], LISTED)
    said = f"for the distances {', '.join(map(str, distances))} these are {shown[0]} in the target, and {shown[1]} in the JAX model"
    if nearest > 1:
        said = f"up to a distance of {nearest - 1}, both take the same rows; {said}"
    return FARTHEST if nearest > 1 and behind is not None and _one_number(behind) else "", said


def _rows_of_distances(rows: Array) -> dict[int, int] | None:
    """Return the row of each distance from the position of a query to that of a key; None where others decide."""
    if rows.ndim < 2 or min(rows.shape[-2:]) < 2:
        return None
    flat = rows.reshape(-1, *rows.shape[-2:])
    if (flat != flat[0]).any():
        return None
    found: dict[int, int] = {}
    for query, of_query in enumerate(flat[0].tolist()):
        for key, row in enumerate(of_query):
            if found.setdefault(key - query, row) != row:
                return None
    return found


def _one_number(behind: Repair) -> bool:
    """Whether the operations behind the rows are the same, with one other number; limits to the rows of the table aside."""
    one, two = ([step for step in steps(x) if step[0] != "limit"] for x in (behind.target, behind.source))
    if [kind for kind, _ in one] != [kind for kind, _ in two]:
        return False
    return sum(a != b for (_, a), (_, b) in zip(one, two, strict=True)) == 1
