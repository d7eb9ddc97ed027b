"""Proposals for a kernel of which the source multiplies each tap by shifted data, and adds up: one product of all shifts side by side."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from convert.inference.candidates.candidate import Candidate, numbers_are_plain
from convert.inference.candidates.context import Context
from convert.inference.meetings.columns import columns_of_rows, pair
from convert.inference.meetings.sites import Meeting, Product
from convert.inference.proposals import products
from convert.programs.program import Value

Array = np.ndarray[Any, np.dtype[Any]]
Kernel = tuple[Product, Meeting, tuple[int, ...]]


def propose(context: Context, weight: Value, shifted: Array) -> Iterator[Candidate]:
    """Yield proposals for a kernel, O I taps: a matrix of the source, some columns of one, or several below each other.

    Args:
        shifted: the data that each of its elements meets: [N, I, spatial of the result, taps].
    """
    taps = weight.array.shape[2:]
    elements = [matrix(numbers) for numbers in context.lacking(weight)]
    if not elements or math.prod(taps) == 1:
        return
    rows = np.moveaxis(shifted, 1, shifted.ndim - len(taps) - 1).reshape(-1, len(elements[0]))
    kernels = list(_kernels(context, rows))
    for product, meeting, tied in kernels:
        if product.value.shape == elements[0].shape:
            pieces = context.fitted(
                elements,
                product.numbers,
                product.value,
                lambda: matrix(context.replay.value(weight)),
                meeting,
                product.places,
            )
            if pieces is not None:
                yield Candidate(pieces, "shifted channels of the data", ("taps",), tied)
    yield from products.of_parts(context, kernels, elements, lambda part: matrix(context.replay.value(weight))[:, part])


def _kernels(context: Context, rows: Array) -> Iterator[Kernel]:
    """Yield the source's matrices of plain leaves that these rows meet, with rows in the order of the columns."""
    for product, meeting in context.source.same_rows([rows], context.tolerance):
        pairing = pair(columns_of_rows([rows]), product.columns, context.tolerance)
        if pairing is None or len(product.numbers) != 1 or not context.free(product.numbers[0]):
            continue
        stack = product.value, product.numbers[0], product.places
        value, numbers, places = (array.reshape(len(array), -1)[pairing.numbers] for array in stack)
        if numbers_are_plain([numbers], value, context.source.theta):
            yield Product((), value, (numbers,), places), meeting, tuple(pairing.tied.tolist())


def matrix(kernel: Array, transposed: bool = False) -> Array:
    """Return a kernel, O I taps or, of a transposed convolution, I O taps, as [I taps, O]."""
    found: Array = np.moveaxis(kernel, 1 if transposed else 0, -1)
    return found.reshape(-1, found.shape[-1])
