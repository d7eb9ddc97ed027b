"""Leaves of a view of a checkpoint that are computed from several leaves of the checkpoint."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from convert.core.tensor_spec import TensorSpec
from convert.core.value_ops import Cast
from convert.layers.leaf_sums import PLUS, complex_name

Array = np.ndarray[Any, np.dtype[Any]]


class MergedLeaf(ABC):
    """A leaf that is computed from several. Its pieces are computed from those of one of them, and the others whole.

    Attributes:
        spec: shape and dtype of the result, float32 or wider.
        dtype: dtype in which it is written by default.
        adapter: of a LoRA pair that no rule names: why its factor is that, for people; else empty.
    """

    spec: TensorSpec
    dtype: str
    adapter: str = ""

    @property
    @abstractmethod
    def name(self) -> str:
        """Its name in the view, which lists the leaves."""

    @property
    @abstractmethod
    def arithmetic(self) -> str:
        """What is computed, for people."""

    @property
    @abstractmethod
    def in_pieces(self) -> str | None:
        """The leaf that is read in pieces; None: all are read at once."""

    @property
    @abstractmethod
    def whole(self) -> tuple[str, ...]:
        """The leaves that are read at once, for all pieces."""

    @property
    def leaves(self) -> tuple[str, ...]:
        """All of them, that which is read in pieces first."""
        return (*([] if self.in_pieces is None else [self.in_pieces]), *self.whole)

    @abstractmethod
    def in_float64(self) -> Self:
        """Return the same with the result in float64."""

    @abstractmethod
    def fill_piece(self, out: Array, origin: tuple[int, ...], whole: Sequence[Array], kept: Array | None) -> None:
        """Compute a piece of the result.

        Args:
            out: the piece.
            origin: its first element.
            whole: the leaves that are read at once.
            kept: the same piece of the leaf `in_pieces`.

        Raises:
            OverflowError: the result is too large for its dtype.
        """

    def make(self, read: Callable[[str], Array]) -> Array:
        """Compute the result from the leaves; the bits are the same on every machine.

        Raises:
            OverflowError: the result is too large for its dtype.
        """
        out = np.empty(self.spec.shape, self.spec.dtype)
        kept = None if self.in_pieces is None else read(self.in_pieces)
        self.fill_piece(out, (0,) * out.ndim, [read(leaf) for leaf in self.whole], kept)
        return out


@dataclass(frozen=True)
class Joined(MergedLeaf):
    """Leaves that stand one after the other along an axis.

    Attributes:
        terms: the leaves, in the order of the rule.
        starts: where each begins along the axis.
        axis: of the leaves and of the result.
        spec: of the result, float32 or wider.
        dtype: the widest of theirs, in which the result is written by default.
    """

    terms: tuple[str, ...]
    starts: tuple[int, ...]
    axis: int
    spec: TensorSpec
    dtype: str

    @property
    def name(self) -> str:
        """``[x/kernel, h/kernel]``."""
        return f"[{', '.join(self.terms)}]"

    @property
    def arithmetic(self) -> str:
        return f"{len(self.terms)} leaves, one after the other"

    @property
    def in_pieces(self) -> None:
        return None

    @property
    def whole(self) -> tuple[str, ...]:
        return self.terms

    def in_float64(self) -> Joined:
        return replace(self, spec=replace(self.spec, dtype="float64"))

    def fill_piece(self, out: Array, origin: tuple[int, ...], whole: Sequence[Array], kept: Array | None) -> None:
        here = [slice(start, start + size) for start, size in zip(origin, out.shape, strict=True)]
        begin, end = here[self.axis].start, here[self.axis].stop
        for leaf, start in zip(whole, self.starts, strict=True):
            low, high = max(begin, start), min(end, start + leaf.shape[self.axis])
            if low < high:
                into, of = [slice(None)] * out.ndim, list(here)
                into[self.axis], of[self.axis] = slice(low - begin, high - begin), slice(low - start, high - start)
                out[tuple(into)] = leaf[tuple(of)]


@dataclass(frozen=True)
class Sum(MergedLeaf):
    """Leaves of one shape, added up in their order in float64, and rounded once.

    Attributes:
        terms: the leaves, in the order of the rule.
        spec: of the sum, in float32, or in float64 where a leaf has it.
        dtype: the widest of theirs, in which the sum is written by default.
        places: of leaves whose axes differ: for each axis of each leaf that of the sum, and -1 for one of size 1; empty: all are the same.
    """

    terms: tuple[str, ...]
    spec: TensorSpec
    dtype: str
    places: tuple[tuple[int, ...], ...] = ()

    @property
    def name(self) -> str:
        """``x/bias + h/bias``."""
        return PLUS.join(self.terms)

    @property
    def arithmetic(self) -> str:
        return f"the sum of {len(self.terms)} leaves, added up in float64"

    @property
    def in_pieces(self) -> str | None:
        return None if self.places else self.terms[0]

    @property
    def whole(self) -> tuple[str, ...]:
        return self.terms if self.places else self.terms[1:]

    def in_float64(self) -> Sum:
        return replace(self, spec=replace(self.spec, dtype="float64"))

    def fill_piece(self, out: Array, origin: tuple[int, ...], whole: Sequence[Array], kept: Array | None) -> None:
        here = tuple(slice(start, start + size) for start, size in zip(origin, out.shape, strict=True))
        total = np.zeros(out.shape) if kept is None else kept.astype(np.float64)
        if kept is None:
            whole = [_spread(leaf, places, self.spec.shape) for leaf, places in zip(whole, self.places, strict=True)]
        for leaf in whole:
            total += leaf[here].astype(np.float64)
        out[...] = Cast(out.dtype.name).apply(total)


@dataclass(frozen=True)
class Complex(MergedLeaf):
    """Two leaves of one shape, the real and the imaginary parts of complex numbers.

    Attributes:
        real, imaginary: the leaves.
        spec: of the complex numbers: complex64, or complex128 where a leaf is float64.
        dtype: the same.
    """

    real: str
    imaginary: str
    spec: TensorSpec
    dtype: str

    @property
    def name(self) -> str:
        """``filter/real + 1j * filter/imag``."""
        return complex_name(self.real, self.imaginary)

    @property
    def arithmetic(self) -> str:
        return "complex numbers of two leaves"

    @property
    def in_pieces(self) -> str:
        return self.real

    @property
    def whole(self) -> tuple[str, ...]:
        return (self.imaginary,)

    def in_float64(self) -> Complex:
        return replace(self, spec=replace(self.spec, dtype="complex128"))

    def fill_piece(self, out: Array, origin: tuple[int, ...], whole: Sequence[Array], kept: Array | None) -> None:
        assert kept is not None
        here = tuple(slice(start, start + size) for start, size in zip(origin, out.shape, strict=True))
        out.real[...] = kept.astype(out.real.dtype)
        out.imag[...] = whole[0][here].astype(out.imag.dtype)


def _spread(leaf: Array, places: Sequence[int], shape: tuple[int, ...]) -> Array:
    """Return a leaf repeated along the axes that it lacks.

    Args:
        places: for each of its axes that of the result, and -1 for one of size 1.
    """
    kept = [place for place in places if place >= 0]
    own = leaf.reshape([shape[place] for place in kept]).transpose(np.argsort(kept))
    return np.broadcast_to(own.reshape([size if axis in kept else 1 for axis, size in enumerate(shape)]), shape)
