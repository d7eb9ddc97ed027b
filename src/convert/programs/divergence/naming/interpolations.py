"""By which method a value was interpolated to another size: each method is a matrix for each axis, so the result tells."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from convert.programs.divergence.layouts import same

Array = np.ndarray[Any, np.dtype[Any]]
MOST = 10**6  # elements of a result
Filter = Callable[[Array], Array]  # the weight of an element, by its distance


def method_of(got: Array, given: Array) -> str:
    """Return the method by which one array was interpolated to the other; empty where none of the known ones gives it."""
    axes = [k for k, (n, m) in enumerate(zip(given.shape, got.shape, strict=False)) if n != m]
    if given.ndim != got.ndim or not axes or max(got.size, given.size) > MOST or not given.size or not got.size:
        return ""
    for name, matrix in METHODS.items():
        made = given
        for axis in axes:
            made = np.moveaxis(np.moveaxis(made, axis, -1) @ matrix(given.shape[axis], got.shape[axis]), -1, axis)
        if same(made, got):
            return name
    return ""


def _centres(n: int, m: int) -> Array:
    return np.asarray((np.arange(m) + 0.5) * n / m - 0.5)


def _corners(n: int, m: int) -> Array:
    return np.asarray(np.arange(m) * ((n - 1) / (m - 1) if m > 1 else 0.0))


def _nearest(places: Array, n: int) -> Array:
    return np.asarray(np.eye(n)[:, np.clip(np.floor(places), 0, n - 1).astype(int)])


def _filtered(places: Array, n: int, weight: Filter, wider: float = 1.0) -> Array:
    """Weights of the elements that there are; they add up to one."""
    made = weight(np.abs(places - np.arange(n)[:, None]) / max(wider, 1.0))
    return np.asarray(made / made.sum(0))


def _bordered(places: Array, n: int, weight: Filter) -> Array:
    """Weights with which an element at the border stands for those beyond it."""
    found = np.zeros((n, len(places)))
    first = np.floor(places).astype(int)
    for step in range(-1, 3):
        at = np.clip(first + step, 0, n - 1)
        np.add.at(found, (at, np.arange(len(places))), weight(np.abs(places - first - step)))
    return found


def _triangle(x: Array) -> Array:
    return np.asarray(np.maximum(0, 1 - x))


def _cubic(a: float) -> Filter:
    def weight(x: Array) -> Array:
        near, far = (a + 2) * x**3 - (a + 3) * x**2 + 1, a * (x**3 - 5 * x**2 + 8 * x - 4)
        return np.asarray(np.where(x <= 1, near, np.where(x < 2, far, 0)))

    return weight


METHODS: Mapping[str, Callable[[int, int], Array]] = {
    "linear interpolation": lambda n, m: _bordered(_centres(n, m), n, _triangle),
    "linear interpolation with aligned corners": lambda n, m: _bordered(_corners(n, m), n, _triangle),
    "the nearest element": lambda n, m: _nearest(np.arange(m) * n / m, n),
    "the element nearest to the centre": lambda n, m: _nearest(_centres(n, m) + 0.5, n),
    "cubic interpolation (-0.75)": lambda n, m: _bordered(_centres(n, m), n, _cubic(-0.75)),
    "cubic interpolation (-0.75) with aligned corners": lambda n, m: _bordered(_corners(n, m), n, _cubic(-0.75)),
    "cubic interpolation (-0.5)": lambda n, m: _filtered(_centres(n, m), n, _cubic(-0.5)),
    "linear interpolation with antialiasing": lambda n, m: _filtered(_centres(n, m), n, _triangle, n / m),
    "cubic interpolation (-0.5) with antialiasing": lambda n, m: _filtered(_centres(n, m), n, _cubic(-0.5), n / m),
}
