"""What folds are compared with: a weight as a matrix with a row for each feature, all of it at once."""

from typing import Any

import numpy as np

from convert.core.weight_norm_ops import Features

Array = np.ndarray[Any, np.dtype[Any]]


def matrix(of: Features, x: Array) -> Array:
    """The weight with a row for each feature."""
    return np.moveaxis(x.reshape(of.inner), of.axes, range(len(of.axes))).reshape(of.count, -1)


def back(of: Features, rows: Array, shape: tuple[int, ...]) -> Array:
    """The weight that this is the matrix of."""
    others = [size for axis, size in enumerate(of.inner) if axis not in of.axes]
    moved = rows.reshape([of.inner[axis] for axis in of.axes] + others)
    return np.moveaxis(moved, range(len(of.axes)), of.axes).reshape(shape)
