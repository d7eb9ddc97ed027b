"""Matrices whose rows and columns come from several leaves: a gate below another, and the weights of the state beside those of the input."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from convert.inference.derivation import Tensor
from convert.inference.rule_file.layers.fused import cut, origin
from convert.inference.rule_file.layers.rule import NoWordsError, Source
from convert.inference.rule_file.layers.sources import Shapes, sources_of

MAX_COLUMNS = 4  # values that code joins in front of a matrix


def grid_of(tensor: Tensor, leaves: Shapes) -> tuple[tuple[Source, ...], ...]:
    """Return the sources of each run of columns of a matrix, in the order of its rows; none where it is no such grid.

    A rule says them as leaves that stand one after the other along the inputs, of each block of rows in the same way.
    """
    if len(tensor.shape) != 2 or len(tensor.parts) < 4:
        return ()
    owners = np.full(tensor.shape, -1)
    for number, one in enumerate(dict.fromkeys(map(origin, tensor.parts))):
        for part in tensor.parts:
            if origin(part) == one:
                owners.ravel()[part.elements] = number
    starts = [0, *(np.flatnonzero((np.diff(owners, axis=1) != 0).any(0)) + 1).tolist()]
    if (owners < 0).any() or not 1 < len(starts) <= MAX_COLUMNS:
        return ()
    ends = [*starts[1:], tensor.shape[1]]
    try:
        found = tuple(sources_of(cut(tensor, 1, at, end - at), leaves) for at, end in zip(starts, ends, strict=True))
    except NoWordsError:
        return ()
    same = len({_form(of) for of in found}) == 1 and len({source.layout.shape[0] for source in found[0]}) == 1
    return found if same and len(found[0]) > 1 else ()


def _form(sources: tuple[Source, ...]) -> tuple[object, ...]:
    """Return what the runs of columns have in common: whole leaves with one axis of inputs, in the same order of axes, and as many rows of each."""
    return tuple(
        (
            source.contracted,
            tuple(replace(axis, size=0) for axis in source.layout.axes),
            source.layout.shape[0],
            source.layout.fixed,
            [axis.size for axis in source.layout.axes]
            == [source.layout.leaf_shape[axis.of] for axis in source.layout.axes],
            len(source.contracted) == 1,
        )
        for source in sources
    )
