"""Leave repairs out that no output depends on: what stands in rows that are masked or padded may differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from convert.programs.divergence.rerun import Change, Rerun
from convert.programs.program import Program, Value

Array = np.ndarray[Any, np.dtype[Any]]
MOST = 8  # places of repairs
UNCHANGED = 1e-9  # relative change of an error


def needed(
    target: Program,
    goal: Value,
    places: Sequence[Any],
    changes: Sequence[Change],
    error: Callable[[Array], float],
    enough: float,
) -> list[int]:
    """Return the numbers of the repairs without those of places that do nothing.

    With the repairs of such a place alone the output is as wrong as without any, and with all others it is equal.

    Args:
        places: of each repair.
        changes: those that each repair puts in, in order.
        error: of an array as the output; `enough`: the error up to which it is equal.
    """

    def with_those(kept: Callable[[Any], bool]) -> float:
        rerun = Rerun(target)
        try:
            for place, change in zip(places, changes, strict=True):
                if kept(place):
                    list(rerun.put(change))
        except ValueError:
            return float("nan")
        return error(rerun.array(goal))

    kept = list(dict.fromkeys(places))
    if not 1 < len(kept) <= MOST:
        return list(range(len(places)))
    before = error(goal.array)
    for place in tuple(kept):
        others = [other for other in kept if other != place]
        alone = with_those(lambda one, place=place: bool(one == place))  # type: ignore[misc]
        if others and abs(alone - before) <= UNCHANGED * before and with_those(others.__contains__) <= enough:
            kept = others
    return [k for k, place in enumerate(places) if place in kept]
