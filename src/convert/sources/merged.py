"""Leaves that are computed from several: the product of a pair, or a weight with such a product added.

To everything behind the plan they are leaves like others, with a name that says what they are made of.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from convert.kinds.product import Product
from convert.sources.base import Leaf, Source
from convert.sources.chunks import Box, Grid, Meter, Piece
from convert.spec import TensorSpec

Array = np.ndarray[Any, np.dtype[Any]]
BLOCK = 1 << 18  # elements of the result that are added up at a time: they stay in a cache


@dataclass(frozen=True)
class Merge:
    """``base + scale * A B``, or the product alone.

    Attributes:
        first, second: leaves A and B.
        base: the leaf that the product is added to; None: nothing.
        product: which axes are which.
        letters: axes of the result, in order; those of `base`, when there is one.
        stacked: axes, of the leaves as of the result, that enumerate layers.
        scale: the factor.
        spec: of the result, float32 or wider.
        dtype: in which the result is written when nothing else is asked for.
    """

    first: str
    second: str
    base: str | None
    product: Product
    letters: str
    stacked: tuple[int, ...]
    scale: float
    spec: TensorSpec
    dtype: str

    @property
    def name(self) -> str:
        """``q/kernel + 2 x q/lora_a q/lora_b``."""
        factor = "" if self.scale == 1 else f"{self.scale:g} x "
        return (
            f"{self.base} + {factor}{self.first} {self.second}" if self.base else f"{factor}{self.first} {self.second}"
        )

    @property
    def said(self) -> str:
        """The arithmetic, in words."""
        factor = "" if self.scale == 1 else f"{self.scale:g} x "
        return f"{'+ ' if self.base else ''}{factor}a product over {' '.join(self.product.shared)}"

    def make(self, read: Callable[[str], Array], base: float = 1.0, scale: float | None = None) -> Array:
        """The result, from the leaves; the same bits on every machine.

        Sums run over the rank in its order, in float64, and are rounded once: no library's matrix product is called, whose
        order of summation depends on the processor.

        Args:
            base, scale: other factors, for what a mistake would have made.
        """
        factor = self.scale if scale is None else scale
        a, b = (self._split(read(name), letters) for name, letters in ((self.first, self.product.first), (self.second, self.product.second)))  # fmt: skip
        rank = self.product.shared
        rows = "".join(x for x in self.product.first if x not in rank)
        columns = "".join(x for x in self.product.second if x not in rank)
        out = np.empty(self._layers(self.spec.shape), self.spec.dtype)
        kept = self._split(read(self.base), self.letters) if self.base else None
        for k in range(out.shape[0]):
            left = _matrix(a[k], self.product.first, rows, rank)
            right = _matrix(b[k], self.product.second, rank, columns)
            sizes = dict(zip(self.product.first + self.product.second, (*a[k].shape, *b[k].shape), strict=True))
            whole = np.empty((left.shape[0], right.shape[1]), self.spec.dtype)
            under = None if kept is None else _matrix(kept[k], self.letters, rows, columns)
            height = max(1, BLOCK // max(1, right.shape[1]))
            for start in range(0, left.shape[0], height):
                some = left[start : start + height].astype(np.float64)
                total = np.zeros((some.shape[0], right.shape[1]))
                for r in range(right.shape[0]):
                    total += some[:, r, None] * right[r].astype(np.float64)
                total *= factor
                if under is not None:
                    total += base * under[start : start + height].astype(np.float64)
                whole[start : start + height] = total
            shaped = whole.reshape([sizes[x] for x in rows + columns])
            out[k] = shaped.transpose([(rows + columns).index(x) for x in self.letters])
        return self._join(out)

    def _layers(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        own = [size for axis, size in enumerate(shape) if axis not in self.stacked]
        return (math.prod(shape[axis] for axis in self.stacked), *own)

    def _split(self, array: Array, letters: str) -> Array:
        """The stacked axes in front, flattened into one."""
        front = np.moveaxis(array, self.stacked, range(len(self.stacked)))
        return front.reshape(-1, *front.shape[len(self.stacked) :])

    def _join(self, array: Array) -> Array:
        """`_split` undone, for the result."""
        front = array.reshape(*(self.spec.shape[axis] for axis in self.stacked), *array.shape[1:])
        return np.ascontiguousarray(np.moveaxis(front, range(len(self.stacked)), self.stacked))


def _matrix(array: Array, letters: str, rows: str, columns: str) -> Array:
    moved = array.transpose([letters.index(x) for x in rows + columns])
    return moved.reshape(math.prod(moved.shape[: len(rows)]), -1)


class Merged(Source):
    """A checkpoint in which some leaves are computed from several of `stored`, in the place of the first of them."""

    def __init__(self, stored: Source, merges: Mapping[str, Merge]) -> None:
        self._inner, self.merges = stored, merges
        self.path, self.format, self.absent = stored.path, stored.format, stored.absent
        self.notes, self.named = stored.notes, stored.named
        gone = {name for merge in merges.values() for name in (merge.first, merge.second, merge.base)}
        at = {merge.base or merge.first: merge for merge in merges.values()}
        self.leaves = {
            name if name not in at else at[name].name: leaf if name not in at else Leaf((at[name].name,), at[name].spec)
            for name, leaf in stored.leaves.items()
            if name in at or name not in gone
        }

    @property
    def on_disk(self) -> Source:
        return self._inner

    def unrounded(self) -> Source:
        wide = {name: replace(m, spec=replace(m.spec, dtype="float64")) for name, m in self.merges.items()}
        return Merged(self._inner, wide)

    def merge(self, name: str) -> Merge | None:
        return self.merges.get(name)

    def read(self, name: str) -> np.ndarray:
        merge = self.merges.get(name)
        return self._inner.read(name) if merge is None else self._inner.make(merge)

    def chunks(self, name: str) -> Grid:
        return super().chunks(name) if name in self.merges else self._inner.chunks(name)

    def pieces(self, name: str, chunk: Box, meter: Meter | None = None) -> Iterator[Piece]:
        if name in self.merges:
            return super().pieces(name, chunk, meter)
        return self._inner.pieces(name, chunk, meter)
