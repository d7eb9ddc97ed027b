"""Proposals for the kernel of a convolution: the source's convolutions of the same data, with the channels paired by columns.

Of a convolution with a filter for each channel, each element of the kernel meets the data shifted by some places. The source may
multiply shifted data by parameters itself, and add the products up. A convolution of one tap, or of patches, is a product. An axis of
space that a kernel spans whole may be one of channels in the other program: the series of an LSTNet.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from convert.inference.candidates.candidate import Candidate
from convert.inference.candidates.context import Context
from convert.inference.derivation import Role
from convert.inference.meetings.columns import columns_along, in_other_orders, pair
from convert.inference.meetings.sites import Meeting, Product
from convert.inference.proposals import column_orders, others, products, taps
from convert.inference.proposals.elementwise import anywhere
from convert.programs.program import Operation, Value

Array = np.ndarray[Any, np.dtype[Any]]


def propose(context: Context, operation: Operation, side: int) -> Iterator[Candidate]:
    """Yield proposals for the kernel, operand `side`; PyTorch has data as N C spatial, kernels as O I spatial."""
    if side == 0:  # the kernel is data, as one that a style modulates
        yield from others.any_leaf(context, operation, side)
        return
    weight = operation.operands[side]
    elements = context.lacking(weight)
    x = context.replay.value(operation.operands[1 - side])
    transposed, groups = bool(operation.settings.get("transposed")), int(operation.settings.get("groups", 1))
    channels = columns_along(x, 1)
    kernels: list[tuple[Product, Meeting, tuple[int, ...]]] = []
    for meeting in context.near_first(context.source.same_data(Role.CONVOLUTION, x, context.tolerance)):
        if meeting.operation.name != "conv_general_dilated" or len(meeting.operations) > 1:
            continue
        layout = meeting.operation.settings["dimension_numbers"]
        data, source = meeting.data[0].transpose(layout.lhs_spec), meeting.weight
        stack = [source.array, np.arange(source.array.size).reshape(source.array.shape), *source.elements]
        stack = [a.transpose(layout.rhs_spec) for a in stack]  # O I spatial
        whole: tuple[int, ...] = ()
        pairing = (
            pair(channels, columns_along(data, 1), context.tolerance) if stack[0].ndim == weight.array.ndim else None
        )
        if pairing is None:
            whole, axes = _spanned(operation, x, weight.array), _spanned(meeting.operation, data, stack[0])
            if not (whole or axes) or x.ndim - len(whole) != data.ndim - len(axes):
                continue
            stack, data = [_as_channels(a, axes) for a in stack], _as_channels(data, axes)
            pairing = pair(columns_along(_as_channels(x, whole), 1), columns_along(data, 1), context.tolerance)
            if pairing is None or len(pairing.tied):  # of the tied ones, some are along another axis of the kernel
                continue
        shape = _as_channels(weight.array, whole).shape
        tied = tuple(pairing.tied.tolist())
        more = () if context.strict or whole else in_other_orders(pairing, channels)
        cuts = (_kernels(stack, one.numbers, groups, transposed) for one in (pairing, *more))
        for how, cut in itertools.chain.from_iterable(cuts):
            value, places, *numbers = cut
            if groups == 1 and numbers and not whole and value.shape[2:] == shape[2:]:
                places_, value_, *numbers_ = (taps.matrix(a, transposed) for a in (places, value, *numbers))
                kernels.append((Product((), value_, tuple(numbers_), places_), meeting, tied))
            if value.shape != shape or not numbers or not context.free(numbers[0]):
                continue
            for order_, of in ((), cut), *_rows_in_parts(context, operation, meeting, cut, groups, transposed):
                value, places, *numbers = of
                found = context.fitted(
                    [_as_channels(a, whole) for a in elements],
                    numbers,
                    value,
                    partial(_replayed, context, weight, whole),
                    meeting,
                    places,
                )
                if found is not None:
                    yield Candidate(found, f"channels of the data{how}", ("convolution", how, *order_), tied)
    if kernels and elements:
        yield from products.of_parts(
            context,
            [
                kernel
                for kernel in kernels
                if len(kernel[0].value) == weight.array.size // _out(weight.array, transposed)
            ],
            [taps.matrix(numbers, transposed) for numbers in elements],
            lambda part: taps.matrix(context.replay.value(weight), transposed)[:, part],
            taken=context.taken.of(operation),
        )
    yield from products.propose(context, operation, side)
    if transposed or groups not in (1, x.shape[1]):
        return
    moved = shifted(x, weight.array.shape[2:], operation)
    kept = tuple(slice(size) for size in x.shape[2:])  # the code that follows may cut the result, as of causal ones
    for data in (moved, moved[:, :, *kept]):
        if groups == 1:
            yield from taps.propose(context, weight, data)
        elif groups == len(weight.array):
            rows = np.moveaxis(data, 1, x.ndim - 1).reshape(-1, *weight.array.shape)
            yield from anywhere(context, elements, rows, Role.SCALE)


def _spanned(operation: Operation, data: Array, kernel: Array) -> tuple[int, ...]:
    """Return the axes of space that a kernel, O I spatial, spans whole: their places are channels, too."""
    said, rank = operation.settings, data.ndim - 2
    grouped = (said.get(name, 1) for name in ("groups", "feature_group_count", "batch_group_count"))
    if any(count != 1 for count in (*grouped, *said.get("lhs_dilation", ()))) or said.get("transposed"):
        return ()
    padding = np.broadcast_to(np.abs(np.reshape(said["padding"], (-1, np.size(said["padding"][0])))).max(1), rank)
    axes = range(2, data.ndim)
    return tuple(k for k in axes if not padding[k - 2] and kernel.shape[k] == data.shape[k])


def _as_channels(array: Array, axes: Sequence[int]) -> Array:
    """Return an array, N C spatial, with some axes of space among the channels."""
    kept = [k for k in range(2, array.ndim) if k not in axes]
    moved: Array = array.transpose(0, 1, *axes, *kept)
    return moved.reshape(len(array), -1, *(array.shape[k] for k in kept)) if axes else array


def _replayed(context: Context, weight: Value, axes: Sequence[int]) -> Array:
    return _as_channels(context.replay.value(weight), axes)


def _rows_in_parts(
    context: Context, operation: Operation, meeting: Meeting, stack: list[Array], groups: int, transposed: bool
) -> Iterator[tuple[tuple[Any, ...], list[Array]]]:
    """Yield the kernels with the channels of the result in the order in which the target takes parts of it, or turns two axes of it."""
    if context.level > 0 and groups == 1:
        axis, result = (1 if transposed else 0), operation.results[0]
        size = stack[0].shape[axis]
        cuts = context.cuts(result, 1)
        of_target = context.taken.sets(operation)
        sets = column_orders.in_other_sets(context.source.taken.sets(meeting.operation), of_target, size)
        turned = column_orders.turned(size, context.sizes_behind(result, 1))
        for order, rows, _ in itertools.chain(column_orders.as_cut(size, cuts), sets, turned):
            yield order, [np.take(a, rows, axis) for a in stack]


def _out(kernel: Array, transposed: bool) -> int:
    return int(kernel.shape[1 if transposed else 0])


def shifted(x: Array, kernel: Sequence[int], operation: Operation) -> Array:
    """Return the data that each element of a kernel with these spatial sizes meets: [N, C, spatial of the result, kernel]."""
    rank = x.ndim - 2
    strides, padding, dilation = (
        said * rank if len(said) == 1 else said  # PyTorch takes one number for all axes
        for said in (list(operation.settings[name]) for name in ("stride", "padding", "dilation"))
    )
    spatial = tuple(range(2, x.ndim))
    x = np.pad(x, [(0, 0), (0, 0), *((pad, pad) for pad in padding)])
    reach = [(size - 1) * d + 1 for size, d in zip(kernel, dilation, strict=True)]
    windows = sliding_window_view(x, reach, spatial)  # type: ignore[call-overload]  # its stub takes one axis
    found: Array = windows[:, :, *(slice(None, None, step) for step in (*strides, *dilation))]
    return found


def _kernels(stack: list[Array], order: Array, groups: int, transposed: bool) -> Iterator[tuple[str, list[Array]]]:
    """Yield the kernels with the input channels in the target's order, as PyTorch lays them out."""
    if groups == 1 and stack[0].shape[1] == len(order):
        stack = [a[:, order] for a in stack]
    elif groups == len(order) and stack[0].shape[1] == 1 and stack[0].shape[0] % groups == 0:
        stack = [a.reshape(groups, -1, *a.shape[1:])[order].reshape(a.shape) for a in stack]
    elif (order != np.arange(len(order))).any():
        return  # channels would change their group
    if not transposed:
        yield "", stack
        return
    turned = [_grouped_transpose(a, groups) for a in stack]
    yield ", turned round", [np.flip(a, tuple(range(2, a.ndim))) for a in turned]
    yield "", turned


def _grouped_transpose(kernel: Array, groups: int) -> Array:
    """From O I/groups spatial to I O/groups spatial."""
    parts = kernel.reshape(groups, -1, *kernel.shape[1:]).swapaxes(1, 2)
    return parts.reshape(-1, *parts.shape[2:])
