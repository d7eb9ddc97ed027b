"""The elements of A, or of B, that belong to a tensor, as one operation with an inverse."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np

from convert.core.ops import Op
from convert.core.tensor_spec import TensorSpec, numpy_dtype

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, eq=False)
class Gathered(Op):
    """One row for each place along an axis of the tensor, one column for each element of the rank; zeros off the blocks.

    Attributes:
        letters: of the axes of the leaf.
        rank: letters of the rank.
        alone: letters that only this leaf has, over which the source sums; the sum is in float32.
        index: letter -> the element that each place along the tensor's axis takes.
        blocks: letters of batch axes that both leaves have and that become part of the rank, with their sizes.
        own: those of `blocks` whose element depends on the place: others are zero there.
        size: number of rows.
        rows: those with a place.
    """

    letters: str
    rank: str
    alone: str
    index: Mapping[str, Array]
    blocks: Mapping[str, int]
    own: frozenset[str]
    size: int
    rows: slice

    partial = True

    @property
    def rounds(self) -> bool:
        return bool(self.alone)

    def out_spec(self, spec: TensorSpec) -> TensorSpec:
        sizes = dict(zip(self.letters, spec.shape, strict=True))
        columns = math.prod(self.blocks.values()) * math.prod(sizes[x] for x in self.rank)
        return TensorSpec((self.size, columns), "float32" if self.alone and spec.dtype != "bool" else spec.dtype)

    def apply(self, x: Array) -> Array:
        moved = x.transpose([self.letters.index(axis) for axis in (*self.alone, *self._kept)])
        if self.alone:
            flat = moved.reshape(-1, *moved.shape[len(self.alone) :]).astype(np.float64)
            moved = np.asarray(reduce(np.add, flat)).astype(np.float32)
        numbers = self._numbers(moved.shape)
        return np.where(numbers < 0, np.zeros((), moved.dtype), moved.reshape(-1)[numbers])

    def inverse(self, spec: TensorSpec) -> Op:
        return Scattered(self, spec)

    def __str__(self) -> str:
        return f"the {self.rank} of {self.size} places"

    @property
    def _kept(self) -> list[str]:
        """The axes that are not summed, those of the rank last."""
        return [axis for axis in self.letters if axis not in (*self.rank, *self.alone)] + list(self.rank)

    def scattered(self, y: Array, spec: TensorSpec) -> Array:
        """Return the leaf that gives `y`: of a sum, the first element gets all. Flags are those of every element of a sum."""
        sizes = dict(zip(self.letters, spec.shape, strict=True))
        shape = [sizes[axis] for axis in self._kept]
        numbers = self._numbers(shape)
        one = np.zeros(math.prod(shape), y.dtype)
        one[numbers[numbers >= 0]] = y[numbers >= 0]
        whole = np.zeros([*(sizes[axis] for axis in self.alone), *shape], numpy_dtype(spec.dtype))
        whole[... if spec.dtype == "bool" else (0,) * len(self.alone)] = one.reshape(shape).astype(whole.dtype)
        order = [*self.alone, *self._kept]
        return whole.transpose([order.index(axis) for axis in self.letters])

    def _numbers(self, shape: Any) -> Array:
        """Return which element of the leaf each element of the result is, its axes in the order of `_kept`; -1: none."""
        chosen = self._kept[: len(self._kept) - len(self.rank)]
        every = np.arange(math.prod(shape)).reshape(*shape[: len(chosen)], -1)
        count = every.shape[-1]
        numbers = np.full((self.size, math.prod(self.blocks.values()) * count), -1)
        for k, element in enumerate(itertools.product(*map(range, self.blocks.values()))):
            at = dict(zip(self.blocks, element, strict=True))
            places = len(range(*self.rows.indices(self.size)))
            where = tuple(np.full(places, at[axis]) if axis in at else self.index[axis] for axis in chosen)
            values = every[where] if where else np.broadcast_to(every, (places, count))
            for letter in self.own:
                values = np.where((self.index[letter] == at[letter])[:, None], values, -1)
            numbers[self.rows, k * count : (k + 1) * count] = values
        return numbers


@dataclass(frozen=True, eq=False)
class Scattered(Op):
    """The inverse of `Gathered`: elements that it does not take are zeros."""

    of: Gathered
    spec: TensorSpec

    def out_spec(self, spec: TensorSpec) -> TensorSpec:
        return self.spec

    def apply(self, x: Array) -> Array:
        return self.of.scattered(x, self.spec)

    def inverse(self, spec: TensorSpec) -> Op:
        return self.of

    def __str__(self) -> str:
        return f"the leaf of {self.of}"
