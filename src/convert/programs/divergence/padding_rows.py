"""Give the rows of a target that hold zeros, such as those that a packed recurrence leaves out, what the source has there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from convert.programs.divergence.knowledge import Knowledge
from convert.programs.divergence.layouts import layouts
from convert.programs.divergence.rerun import Change, Rerun
from convert.programs.divergence.shared_values import tells
from convert.programs.program import Value

Array = np.ndarray[Any, np.dtype[Any]]
MOST = 8  # values that are filled
CLOSE = 1e-9


def with_rows_filled(known: Knowledge) -> Knowledge:
    """Return what is known where each value that has rows of zeros, and is otherwise one of the source's, is that value.

    Rows that are padding do not matter to a right model, and each library has other numbers there.
    """
    by_size: dict[int, list[Value]] = {}
    for one in known.source.operations:
        for value in one.results:
            if value.data and tells(value.array):
                by_size.setdefault(value.array.size, []).append(value)
    for _ in range(MOST):
        found = next(_fills(known, by_size), None)
        if found is None:
            return known
        rerun = Rerun(known.target, known.rerun)
        try:
            list(rerun.put(Change(dict([found]))))
        except ValueError:
            return known
        known = known.with_rerun(rerun, dict([found]))
    return known


def _fills(known: Knowledge, by_size: Mapping[int, Sequence[Value]]) -> Iterator[tuple[Value, Array]]:
    """Yield values of the faulty region with rows of zeros, and what the source has for them."""
    for index in known.region():
        for value in known.target.operations[index].results:
            array = known.array(value)
            if known.is_known(value) or array.ndim < 3 or array.dtype.kind != "f":
                continue
            seen = (array != 0).any(-1)
            if seen.all() or not seen.any():
                continue
            for other in by_size.get(array.size, ()):
                for laid in layouts(other.array, array):
                    scale = float(np.abs(array).max())
                    if np.allclose(laid[seen], array[seen], rtol=0, atol=CLOSE * scale):
                        yield value, laid
