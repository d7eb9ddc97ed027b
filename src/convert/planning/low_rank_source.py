"""A view of a checkpoint with merged leaves: the product of a low-rank pair, a weight with such a product added, or a sum of leaves.

The steps of a plan read merged leaves like others. Their names list the leaves that they are computed from.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any

import numpy as np

from convert.checkpoints.chunks import (
    AT_ONCE_BUDGET,
    PIECE,
    Box,
    Grid,
    Meter,
    Piece,
    full_box,
    read_at_once,
    single_chunk,
    tiles,
)
from convert.checkpoints.source import Leaf, Source
from convert.core.errors import PlanError
from convert.core.findings import Finding
from convert.core.tensor_spec import TensorSpec, numpy_dtype
from convert.core.value_ops import Cast
from convert.layers.low_rank import Product
from convert.planning.merged_leaf import MergedLeaf

Array = np.ndarray[Any, np.dtype[Any]]
BLOCK = 1 << 18  # elements of the result that are summed at a time, so that they stay in a cache


@dataclass(frozen=True)
class Form:
    """The axes of A or B.

    Attributes:
        letters: of the axes that are not stacked, in order.
        stacked: axes that enumerate layers, in the order of the result's.
        shape: the sizes of all axes, where the leaf has several of them flattened into one; None: as stored.
        places: of the stacked axes in the leaf, where it has axes flattened.
    """

    letters: str
    stacked: tuple[int, ...]
    shape: tuple[int, ...] | None = None
    places: tuple[int, ...] = ()

    def opened(self, leaf: Array) -> Array:
        """Return the leaf with the axes of this form."""
        return leaf if self.shape is None else leaf.reshape(self.shape)

    def layer(self, leaf: Array, elements: Sequence[int]) -> Array:
        """Return one element of each stacked axis."""
        opened = self.opened(leaf)
        where = dict(zip(self.stacked, elements, strict=True))
        return opened[tuple(where.get(axis, slice(None)) for axis in range(opened.ndim))]

    @property
    def axes(self) -> list[str | int]:
        """Name the axes by letter, and stacked axes by their place among them."""
        rest = iter(self.letters)
        count = len(self.letters) + len(self.stacked)
        return [self.stacked.index(k) if k in self.stacked else next(rest) for k in range(count)]


@dataclass(frozen=True)
class Merge(MergedLeaf):
    """``base + scale * A B``, or the product alone.

    Attributes:
        first, second: leaves A and B.
        base: the leaf that the product is added to; None for the product alone.
        product: the einsum of the pair.
        letters: axes of the result, in order; those of `base` if there is one.
        stacked: axes of the leaves and of the result that enumerate layers.
        scale: the factor.
        spec: of the result, float32 or wider.
        dtype: dtype in which the result is written by default.
        forms: the axes of A and B; None: the letters of the product, stacked as the result is.
        adapter: of a pair that no rule names: why `scale` is that, for people.
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
    forms: tuple[Form, Form] | None = None
    adapter: str = ""

    @property
    def name(self) -> str:
        """``q/kernel + 2 x q/lora_a q/lora_b``."""
        factor = "" if self.scale == 1 else f"{self.scale:g} x "
        return (
            f"{self.base} + {factor}{self.first} {self.second}" if self.base else f"{factor}{self.first} {self.second}"
        )

    @property
    def arithmetic(self) -> str:
        """What is computed, for people."""
        factor = "" if self.scale == 1 else f"{self.scale:g} x "
        rank = " ".join(self.product.shared)
        of = "a LoRA product" if self.adapter else f"a product over {rank}" if rank else "a kernel times a scale"
        return f"{'+ ' if self.base else ''}{factor}{of}"

    @property
    def in_pieces(self) -> str | None:
        return self.base

    @property
    def whole(self) -> tuple[str, str]:
        return self.first, self.second

    def in_float64(self) -> Merge:
        return replace(self, spec=replace(self.spec, dtype="float64"))

    @property
    def pair_forms(self) -> tuple[Form, Form]:
        """The axes of A and B."""
        return self.forms or (Form(self.product.first, self.stacked), Form(self.product.second, self.stacked))

    def make(self, read: Callable[[str], Array], base: float = 1.0, scale: float | None = None) -> Array:
        """Compute the result from the leaves; the bits are the same on every machine.

        Sums run over the rank in order, in float64, and are rounded once. A library's matrix product is not used, because its
        order of summation depends on the processor.

        Args:
            base, scale: other factors, to reproduce a mistake.

        Raises:
            OverflowError: the result is too large for its dtype.
        """
        a, b, kept = read(self.first), read(self.second), read(self.base) if self.base else None
        out = np.empty(self.spec.shape, self.spec.dtype)
        self.fill(out, (0,) * out.ndim, a, b, kept, base, scale)
        return out

    def fill_piece(self, out: Array, origin: tuple[int, ...], whole: Sequence[Array], kept: Array | None) -> None:
        a, b = whole
        self.fill(out, origin, a, b, kept)

    def fill(
        self,
        out: Array,
        origin: tuple[int, ...],
        a: Array,
        b: Array,
        kept: Array | None,
        base: float = 1.0,
        scale: float | None = None,
    ) -> None:
        """Compute a part of the result.

        Args:
            out: the part.
            origin: its first element.
            a, b: the leaves `first` and `second`, whole.
            kept: the same part of the leaf `base`.
            base, scale: as for `make`.
        """
        first, second = self.pair_forms
        for tile in tiles(out.shape, max(1, PIECE // BLOCK)):
            at = tuple(slice(x + y, x + y + n) for x, y, n in zip(origin, tile.origin, tile.shape, strict=True))
            here = tile.within((0,) * out.ndim)
            total = np.zeros(tile.shape)
            for left, right in zip(self._ranks(a, first, at), self._ranks(b, second, at), strict=True):
                total += left * right
            total *= self.scale if scale is None else scale
            if kept is not None:
                total += base * kept[here].astype(np.float64)
            out[here] = Cast(out.dtype.name).apply(total)

    def _ranks(self, leaf: Array, form: Form, at: tuple[slice, ...]) -> Array:
        """Return the slice of A or B for a part of the result, in float64: the rank flattened in front, then the axes of the result."""
        axes, result, rank = form.axes, Form(self.letters, self.stacked).axes, self.product.shared
        where = dict(zip(result, at, strict=True))
        cut = form.opened(leaf)[tuple(where.get(axis, slice(None)) for axis in axes)].astype(np.float64)
        own = [axis for axis in result if axis in axes]
        alone = [axis for axis in axes if axis not in (*own, *rank)]
        moved = cut.transpose([axes.index(axis) for axis in (*alone, *rank, *own)])
        for _ in alone:  # an axis that neither the other leaf nor the result has: the source sums over it
            moved = reduce(np.add, moved)
        shape = [moved.shape[len(rank) + own.index(axis)] if axis in own else 1 for axis in result]
        return np.asarray(moved.reshape(math.prod(moved.shape[: len(rank)]), *shape))


class HoldsMerged(ABC):
    """A source that can read the result of a merge, but not the leaves that it is computed from."""

    @abstractmethod
    def read_merged(self, merge: MergedLeaf) -> Array:
        """Read the result of a merge."""


def with_merges(checkpoint: Source, merges: Mapping[str, MergedLeaf]) -> Source:
    """Return a view of the checkpoint with merged leaves; the checkpoint itself if nothing is merged."""
    return LowRankSource(checkpoint, merges) if merges else checkpoint


def in_float64(merges: Mapping[str, MergedLeaf]) -> dict[str, MergedLeaf]:
    """Return the merges with results in float64."""
    return {name: merge.in_float64() for name, merge in merges.items()}


class LowRankSource(Source):
    """A view of a checkpoint in which one leaf replaces several: a low-rank pair and the weight that it is added to, the leaves of a sum, or the parts of complex numbers.

    A merged leaf stands where the first of its leaves stood.
    """

    def __init__(self, stored: Source, merges: Mapping[str, MergedLeaf]) -> None:
        self._inner, self._merges = stored, merges
        self.path, self.format, self.absent = stored.path, stored.format, stored.absent
        self.notes, self.given_path, self.adapter = stored.notes, stored.given_path, stored.adapter
        gone = {name for merge in merges.values() for name in merge.leaves}
        at = {merge.leaves[0]: merge for merge in merges.values()}
        self.leaves = {
            name if name not in at else at[name].name: leaf if name not in at else Leaf((at[name].name,), at[name].spec)
            for name, leaf in stored.leaves.items()
            if name in at or name not in gone
        }

    def read(self, name: str) -> np.ndarray:
        merge = self._merges.get(name)
        if merge is None:
            return self._inner.read(name)
        if isinstance(self._inner, HoldsMerged):
            return self._inner.read_merged(merge)
        try:
            return merge.make(self._inner.read)
        except OverflowError as error:
            raise _overflowed(merge, error) from None

    def chunks(self, name: str) -> Grid:
        return single_chunk(self.leaves[name].spec.shape) if name in self._merges else self._inner.chunks(name)

    def pieces(self, name: str, chunk: Box, meter: Meter | None = None) -> Iterator[Piece]:
        if name in self._merges:
            return self._made(self._merges[name], meter)
        return self._inner.pieces(name, chunk, meter)

    def _made(self, merge: MergedLeaf, meter: Meter | None) -> Iterator[Piece]:
        """Yield the pieces of a merged leaf, computed from the pieces of one of its leaves, where one is read in pieces."""
        with AT_ONCE_BUDGET.reserve(sum(self._inner.leaves[leaf].spec.nbytes for leaf in merge.whole)):
            whole = [self._inner.read(leaf) for leaf in merge.whole]
            yield from self._filled(merge, whole, meter or Meter())

    def _filled(self, merge: MergedLeaf, whole: Sequence[Array], meter: Meter) -> Iterator[Piece]:
        if merge.in_pieces is None:
            for tile in tiles(merge.spec.shape, numpy_dtype(merge.spec.dtype).itemsize):
                yield tile.origin, _filled_piece(merge, tile.origin, tile.shape, whole, None, meter)
            return
        grid = self._inner.chunks(merge.in_pieces)
        for chunk in grid if grid.in_order else (full_box(grid.shape),):
            if grid.in_order:
                pieces = self._inner.pieces(merge.in_pieces, chunk, meter)
            else:
                nbytes = self._inner.leaves[merge.in_pieces].spec.nbytes
                pieces = read_at_once(chunk.origin, partial(self._inner.read, merge.in_pieces), nbytes, meter)
            for origin, kept in pieces:
                yield origin, _filled_piece(merge, origin, kept.shape, whole, kept, meter)


def _filled_piece(
    merge: MergedLeaf,
    origin: tuple[int, ...],
    shape: tuple[int, ...],
    whole: Sequence[Array],
    kept: Array | None,
    meter: Meter,
) -> Array:
    out = np.empty(shape, merge.spec.dtype)
    started = time.perf_counter()
    try:
        merge.fill_piece(out, origin, whole, kept)
    except OverflowError as error:
        raise _overflowed(merge, error) from None
    meter.add("transform", time.perf_counter() - started)
    return out


def _overflowed(merge: MergedLeaf, error: OverflowError) -> PlanError:
    return PlanError(
        Finding(
            "value-overflow",
            f"{merge.arithmetic}: {error}",
            path=merge.name,
            fix="check the values of these leaves, and the factor, such as --set lora_alpha=",
        )
    )
