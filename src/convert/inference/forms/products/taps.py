"""Write a sum of shifted data times the taps of a kernel as the convolution that it is, along one axis: a WaveNet, a TCN.

The two programs may then differ in what a convolution has and a sum has not: the dilation and the padding.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from convert.inference.derivation import Role
from convert.inference.forms.elements import step
from convert.inference.forms.products.joined import product_of, summands
from convert.inference.forms.sums.reordered import SUMS
from convert.inference.meetings.sites import role_of
from convert.programs.program import Array, Operation, Program, Value, times_used

SHIFTS = ("slice", "pad", "dynamic_slice", "concatenate", "convert_element_type", "copy")
MOST_TAPS = 32
SAME = 1e-9
RANK = 3  # of the data: rows, places, features


@dataclass(frozen=True, eq=False)
class _Tap:
    """A product of shifted data.

    Attributes:
        data: the data before it is shifted.
        axis: along which it is shifted.
        offset: place of the data that the first place of the product reads; negative: zeros stand there.
        weight: the matrix.
    """

    data: Value
    axis: int
    offset: int
    weight: Value


def convolutions(program: Program) -> int:
    """Return how many convolutions a program has."""
    return sum(role_of(operation) is Role.CONVOLUTION for operation in program.operations)


def taps_as_convolutions(program: Program) -> Program:
    """Return the program with a convolution behind each sum of shifted data times the taps of a kernel; it gives the same value."""
    made_by, uses = program.made_by, times_used(program)
    found: dict[Operation, list[Operation]] = {}
    for operation in program.operations:
        if operation.name in SUMS and operation.results[0].data:
            values = list(itertools.islice(summands(operation.results[0], made_by, uses), MOST_TAPS + 1))
            terms = [value for value in values if not value.constant or value.array.any()]  # `sum` starts with 0
            taps = [_tap(value, made_by) for value in terms]
            if made := _convolution(operation, [tap for tap in taps if tap is not None], len(taps)):
                found[operation] = made
                for part in (made_by[x] for x in operation.operands if x in made_by and uses[x] == 1):
                    found.pop(part, None)
    return replace(program, operations=tuple(x for one in program.operations for x in (one, *found.get(one, ()))))


def _tap(value: Value, made_by: Mapping[Value, Operation]) -> _Tap | None:
    found = product_of(value, made_by) if value in made_by else None
    if found is None or found[1].array.ndim != RANK:
        return None
    _, shifted, weight = found
    data = shifted
    while (made := made_by.get(data)) is not None and made.name in SHIFTS and len(made.data) == 1:
        (data,) = made.data
    if weight.array.ndim != 2 or data.array.ndim != RANK:
        return None
    for axis in range(RANK - 1):
        for offset in sorted(range(-data.array.shape[axis] + 1, data.array.shape[axis]), key=abs):
            made_here = _shifted(data.array, axis, offset, shifted.array.shape[axis])
            if made_here.shape == shifted.array.shape and np.array_equal(made_here, shifted.array):
                return _Tap(data, axis, offset, weight)
    return None


def _shifted(array: Array, axis: int, offset: int, length: int) -> Array:
    """Return `length` places along an axis from an offset on, with zeros outside."""
    size = array.shape[axis]
    places = np.arange(offset, offset + length)
    found = np.take(array, np.clip(places, 0, size - 1), axis)
    inside = ((places >= 0) & (places < size)).reshape(-1, *(1,) * (array.ndim - 1 - axis))
    return np.where(inside, found, 0.0)


def _convolution(total: Operation, taps: Sequence[_Tap], count: int) -> list[Operation]:
    """Return the convolution that gives a sum, and its kernel; none where a term is no tap, or the taps have no common distance."""
    taps = sorted(taps, key=lambda tap: tap.offset)
    steps = {two.offset - one.offset for one, two in itertools.pairwise(taps)}
    places = {(tap.data, tap.axis if tap.offset else None) for tap in taps}
    axes = {tap.axis for tap in taps if tap.offset}
    if len(taps) != count or len(steps) != 1 or len({data for data, _ in places}) != 1 or len(axes) != 1:
        return []
    (dilation,), (axis,), data, (result,) = steps, axes, taps[0].data, total.results
    length, first, last = result.array.shape[axis], taps[0].offset, taps[-1].offset
    padding = -first, last + length - data.array.shape[axis]
    if dilation < 1 or min(padding) < 0 or len({tap.weight.array.shape for tap in taps}) != 1:
        return []
    weights = tuple(tap.weight for tap in taps)
    kernel = Value(
        np.stack([x.array for x in weights]),
        leaves=frozenset().union(*(x.leaves for x in weights)),
        elements=(np.stack([x.elements[0] for x in weights]),),
    )

    def run(x: Array, kernel: Array) -> Array:
        moved = (_shifted(x, axis, first + k * dilation, length) @ tap for k, tap in enumerate(kernel))
        return np.asarray(sum(moved))

    if not np.allclose(run(data.array, kernel.array), result.array, rtol=SAME, atol=SAME):  # one is subtracted
        return []

    from jax.lax import ConvDimensionNumbers

    order = (RANK - 2 - axis, RANK - 1, axis)
    settings = {
        "window_strides": (1,),
        "padding": (padding,),
        "lhs_dilation": (1,),
        "rhs_dilation": (dilation,),
        "dimension_numbers": ConvDimensionNumbers(order, (2, 1, 0), order),
        "feature_group_count": 1,
        "batch_group_count": 1,
    }
    made = step(total, "conv_general_dilated", (data, kernel), result, run)
    return [
        step(total, "concatenate", weights, kernel, lambda *arrays: np.stack(arrays)),
        replace(made, settings=settings),
    ]
