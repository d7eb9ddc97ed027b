"""Proposals for a kernel whose taps the source multiplies by themselves: shifted data times a matrix for each tap, added up.

Or it puts the shifted data side by side, and has one matrix for all taps.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from convert.inference.candidates.candidate import Candidate, Piece
from convert.inference.candidates.context import Context
from convert.inference.meetings.columns import Pairing, columns_of_rows, pair
from convert.inference.meetings.sites import Meeting, Product
from convert.programs.program import Value

Array = np.ndarray[Any, np.dtype[Any]]
MOST = 16  # so many choices of the matrices are tried, where several meet the data of a tap


def propose(context: Context, weight: Value, shifted: Array) -> Iterator[Candidate]:
    """Yield proposals for a kernel, O I taps.

    Args:
        shifted: the data that each of its elements meets: [N, I, spatial of the result, taps].
    """
    out, taps = len(weight.array), math.prod(weight.array.shape[2:])
    elements = [_matrix(numbers) for numbers in context.lacking(weight)]
    if not elements or taps == 1:
        return
    last = shifted.ndim - len(weight.array.shape[2:])
    rows = np.moveaxis(shifted, 1, last - 1).reshape(-1, shifted.shape[1], taps)

    def read(part: slice) -> Array:
        return _matrix(context.replay.value(weight))[part]

    side_by_side = [slice(None)]
    tap_by_tap = [slice(tap, None, taps) for tap in range(taps)]
    for parts, by in ((side_by_side, "taps side by side"), (tap_by_tap, "tap by tap")):
        met = [list(_matrices(context, rows.reshape(len(rows), -1)[:, part], out)) for part in parts]
        for chosen in itertools.islice(itertools.product(*met), MOST):
            pieces: list[Piece] = []
            for (product, meeting, pairing), part in zip(chosen, parts, strict=True):
                order = pairing.numbers
                fitted = context.fitted(
                    [numbers[part] for numbers in elements],
                    [_flat(numbers)[order] for numbers in product.numbers],
                    _flat(product.value)[order],
                    partial(read, part),
                    meeting,
                    _flat(product.places)[order],
                )
                pieces += fitted or ()
            if len({piece.elements.tobytes() for piece in pieces}) >= len(parts):
                tied = tuple(sorted({k for _, _, pairing in chosen for k in pairing.tied.tolist()}))
                yield Candidate(tuple(pieces), f"channels of the data, {by}", ("taps", by), tied)


def _matrices(context: Context, rows: Array, out: int) -> Iterator[tuple[Product, Meeting, Pairing]]:
    """Yield the source's matrices that give so many columns of these rows."""
    for product, meeting in context.source.same_rows([rows], context.tolerance):
        pairing = pair(columns_of_rows([rows]), product.columns, context.tolerance)
        fits = product.value.size == rows.shape[1] * out and bool(product.numbers)
        if pairing is not None and fits and context.free(product.numbers[0]):
            yield product, meeting, pairing


def _flat(array: Array) -> Array:
    return array.reshape(len(array), -1)


def _matrix(kernel: Array) -> Array:
    """Return a kernel, O I taps, as [I taps, O]."""
    return _flat(kernel).T
