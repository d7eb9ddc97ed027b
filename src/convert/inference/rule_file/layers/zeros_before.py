"""Tensors with zeros in front of what a leaf has along an axis, such as the position of a class token or the row of the padding word."""

from __future__ import annotations

import math

import numpy as np

from convert.inference.derivation import Arithmetic, Tensor
from convert.inference.rule_file.layers.fused import cut


def zeros_before(tensor: Tensor) -> tuple[int, int] | None:
    """Return along which axis a tensor begins with zeros, and how many; None where it does not."""
    flat = np.zeros(math.prod(tensor.shape), bool)
    for part in tensor.parts:
        flat[part.elements] = part.arithmetic is Arithmetic.CONSTANT and part.factor == 0
    zero = flat.reshape(tensor.shape)
    for axis, size in enumerate(tensor.shape):
        along = np.all(np.moveaxis(zero, axis, 0).reshape(size, -1), axis=1)
        count = int(along.sum())
        if 0 < count < size and along[:count].all() and zero.sum() * size == count * zero.size:
            return axis, count
    return None


def without_zeros(tensor: Tensor, axis: int, count: int) -> Tensor:
    """Return a tensor without the zeros that it begins with along an axis."""
    return cut(tensor, axis, count, tensor.shape[axis] - count)
