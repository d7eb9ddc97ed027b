"""A convolution that uses each place of the data at most once is a product: of one tap, or with strides as long as its kernel.

One program convolves, as a Vision Transformer's patches or a layer for each pixel; the other multiplies the rows by a matrix.
A transposed convolution is one, too, behind which the taps of neighbouring places are added up: the decoder of a Conv-TasNet.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from convert.programs.program import Operation

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Patches:
    """How a convolution meets its data.

    Attributes:
        data: the axes of the data: rows, channels, then those of space.
        weight: the axes of the kernel: channels that it gives, channels that it takes, then those of space.
        strides: along each axis of space.
        transposed: whether each place is multiplied by all taps.
        turned: whether the first tap gives the last place, as in JAX.
    """

    data: tuple[int, ...]
    weight: tuple[int, ...]
    strides: tuple[int, ...]
    transposed: bool = False
    turned: bool = False

    def rows(self, x: Array, kernel: Sequence[int]) -> Array:
        """Return the rows that a kernel of this shape multiplies: [N places, channels taps]; of a transposed one, [N places, channels]."""
        if self.transposed:
            return np.moveaxis(x.transpose(self.data), 1, -1).reshape(-1, x.shape[self.data[1]])
        taps = [kernel[axis] for axis in self.weight[2:]]
        x = x.transpose(self.data)
        split = list(x.shape[:2])
        for axis, (tap, step) in enumerate(zip(taps, self.strides, strict=True), 2):
            count = (x.shape[axis] - tap) // step + 1
            x = x.take(range(0, count * step, step) if tap == 1 else range(count * step), axis)
            split += [count, tap]
        rank = len(taps)
        places, inner = range(2, 2 + 2 * rank, 2), range(3, 3 + 2 * rank, 2)
        return x.reshape(split).transpose(0, *places, 1, *inner).reshape(-1, split[1] * math.prod(taps))

    def matrix(self, weight: Array) -> Array:
        """Return an array like the kernel as [channels taps, channels that it gives]; of a transposed one, [channels, channels that it gives, taps]."""
        weight = weight.transpose(self.weight)
        if self.transposed:
            return np.flip(weight.swapaxes(0, 1), tuple(range(2, weight.ndim)) if self.turned else ())
        return weight.reshape(len(weight), -1).T


def patches_of(operation: Operation, side: int) -> Patches | None:
    """Return how a convolution meets its data; None if it uses a place again and is not transposed, pads, or has groups."""
    said, shape = operation.settings, operation.operands[side].array.shape
    every = tuple(range(len(shape)))
    if operation.name == "convolution":
        strides, padding, groups = said["stride"], said["padding"], said["groups"]
        transposed = said["transposed"]
        found = Patches(every, (1, 0, *every[2:]) if transposed else every, tuple(strides), transposed)
    elif operation.name == "conv_general_dilated":
        strides, padding = said["window_strides"], np.ravel(said["padding"])
        groups = said["feature_group_count"] * said["batch_group_count"]
        dilated = any(step != 1 for step in said["lhs_dilation"])
        numbers = said["dimension_numbers"]
        found = Patches(tuple(numbers.lhs_spec), tuple(numbers.rhs_spec), tuple(strides), dilated, True)
    else:
        return None
    once = all(shape[axis] in (1, step) for axis, step in zip(found.weight[2:], found.strides, strict=True))
    dilation = said.get("dilation", said.get("rhs_dilation"))
    plain = all(step == 1 for step in dilation) or math.prod(shape[axis] for axis in found.weight[2:]) == 1
    if found.transposed:
        return found if groups == 1 and side == 1 else None
    return found if once and plain and groups == 1 and side == 1 and not any(padding) else None
