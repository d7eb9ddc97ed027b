"""Which value a tensor holds now: tensors share storages, and an operation in place changes all that look at one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakTensorKeyDictionary

from convert.programs.program import Array, Value

Layout = Callable[[str, Sequence[Value], Callable[..., torch.Tensor], dict[str, Any]], Value]


def array_of(tensor: torch.Tensor) -> Array:
    """Return a copy of the elements; floating ones as float64."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.is_floating_point():
        tensor = tensor.double()
    elif tensor.is_complex():
        tensor = tensor.to(torch.complex128)
    return np.array(tensor.cpu().numpy())


def _elements(x: torch.Tensor, dtype: torch.dtype) -> int:
    """Return how many elements of a dtype the storage of a tensor holds."""
    return x.untyped_storage().nbytes() // dtype.itemsize


class Geometry(NamedTuple):
    """Which elements of a storage a tensor looks at."""

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    conjugate: bool = False
    negative: bool = False

    @classmethod
    def of(cls, x: torch.Tensor) -> Geometry:
        size = tuple(x.shape)
        stride = tuple(0 if n == 1 else step for n, step in zip(size, x.stride(), strict=True))
        return cls(x.dtype, size, stride, int(x.storage_offset()), x.is_conj(), x.is_neg())

    @property
    def elements(self) -> int:
        return math.prod(self.size)

    @property
    def settings(self) -> dict[str, Any]:
        return {"size": self.size, "stride": self.stride, "storage_offset": self.offset}

    def covers(self, elements: int) -> bool:
        """Whether each of the storage's first elements, as many as given, is looked at once."""
        step = 1
        for stride, n in sorted((stride, n) for stride, n in zip(self.stride, self.size, strict=True) if n != 1):
            if stride != step:
                return False
            step *= n
        return self.offset == 0 and self.elements == elements

    def overlaps(self, other: Geometry) -> bool:
        """Whether both look at an element of the storage that is the same."""
        if self.dtype != other.dtype:
            return True
        size = 1 + max(
            g.offset + sum((n - 1) * s for n, s in zip(g.size, g.stride, strict=True)) for g in (self, other)
        )
        mine = torch.zeros(size, dtype=torch.bool)
        mine.as_strided(self.size, self.stride, self.offset).fill_(True)
        return bool(mine.as_strided(other.size, other.stride, other.offset).any())

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """Look at these elements of a storage that is given as a tensor of one axis."""
        x = flat.as_strided(self.size, self.stride, self.offset)
        x = x.conj() if self.conjugate else x
        return torch._neg_view(x) if self.negative else x


@dataclass
class _Storage:
    """What is known of a storage.

    Attributes:
        alive: the reference that keeps another storage from the same address.
        dtype: of its elements when it was made.
        roots: the values that fill it, with what they fill; later ones lie on top.
        seen: the values of tensors that look at it, since it last changed.
        constant: whether it was not made by the run, and the run has not written to it.
    """

    alive: StorageWeakRef
    dtype: torch.dtype
    roots: list[tuple[Geometry, Value]] = field(default_factory=list)
    seen: dict[Geometry, Value] = field(default_factory=dict)
    constant: bool = False


class Aliases:
    """The values that tensors hold.

    Args:
        layout: records an operation that only moves elements: name, operands, function of tensors, settings.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._storages: dict[int, _Storage] = {}
        self._empty: Any = WeakTensorKeyDictionary()  # tensors of no elements all look at the same ones

    def _storage(self, x: torch.Tensor) -> _Storage | None:
        storage = self._storages.get(x.untyped_storage()._cdata)
        return storage if storage is not None and not storage.alive.expired() else None

    def _new(self, x: torch.Tensor) -> _Storage:
        storage = _Storage(StorageWeakRef(x.untyped_storage()), x.dtype)
        self._storages[x.untyped_storage()._cdata] = storage
        return storage

    def known(self, x: torch.Tensor) -> bool:
        """Whether a tensor with this storage has been read or bound."""
        return self._storage(x) is not None

    def seen(self, x: torch.Tensor) -> Value | None:
        """Return the value of a tensor if one that looks at the same elements has been read or bound."""
        if not x.numel():
            return cast("Value | None", self._empty.get(x))
        storage = self._storage(x)
        return None if storage is None else storage.seen.get(Geometry.of(x))

    def read(self, x: torch.Tensor) -> Value:
        """Return the value that a tensor holds now."""
        if x in self._empty:
            return cast(Value, self._empty[x])
        storage, geometry = self._storage(x), Geometry.of(x)
        if storage is None:  # a constant of the code
            storage = self._new(x)
            storage.constant = True
            whole = torch.empty(0, dtype=x.dtype, device=x.device).set_(x.untyped_storage())
            storage.roots = [(Geometry.of(whole), Value(array_of(whole)))]
        if geometry not in storage.seen:
            storage.seen[geometry] = Value(array_of(x)) if storage.constant else self._gather(storage, geometry, x)
        return storage.seen[geometry]

    def give(self, x: torch.Tensor, value: Value) -> None:
        """Let a tensor that the run is given hold a value; the rest of its storage is constant, or given too."""
        if not self.known(x):
            self.read(x)
        self.bind(x, value, new=True)

    def bind(self, x: torch.Tensor, value: Value, *, new: bool) -> None:
        """Let a tensor that an operation gave hold a value.

        Args:
            new: whether the operation made the storage; otherwise the tensor is a view.
        """
        if not x.numel():
            self._empty[x] = value
        storage = self._storage(x) or self._new(x)
        if new:
            self._lay(storage, x, value)
        storage.seen[Geometry.of(x)] = value

    def write(self, x: torch.Tensor, value: Value) -> None:
        """Let a tensor hold a new value; other tensors that look at its storage see it too."""
        if not x.numel():
            self._empty[x] = value
            return
        if not self.known(x):
            self.read(x)
        storage, geometry = self._storages[x.untyped_storage()._cdata], Geometry.of(x)
        self._lay(storage, x, value)
        storage.seen = {other: seen for other, seen in storage.seen.items() if not geometry.overlaps(other)}
        storage.seen[geometry] = value

    @staticmethod
    def _lay(storage: _Storage, x: torch.Tensor, value: Value) -> None:
        """Lay a value on top of what fills a storage."""
        geometry = Geometry.of(x)
        whole = geometry.dtype == storage.dtype and geometry.covers(_elements(x, storage.dtype))
        storage.roots = [*([] if whole else storage.roots), (geometry, value)]
        storage.constant = False

    def _flat(self, storage: _Storage, x: torch.Tensor) -> Value:
        """Return all elements of a storage, that of `x`, as one axis."""
        size = _elements(x, storage.dtype)
        whole = Geometry(storage.dtype, (size,), (1 if size != 1 else 0,), 0)
        (first, flat), *roots = storage.roots
        if first.covers(size) and first.dtype == storage.dtype:
            if first != whole:
                order = sorted(range(len(first.size)), key=lambda axis: -first.stride[axis])
                flat = self._layout("flatten", [flat], lambda y: y.permute(order).reshape(-1), {})
        else:
            flat, roots = Value(array_of(torch.zeros(size, dtype=storage.dtype))), storage.roots
        for geometry, value in roots:
            flat = self._scatter(storage, flat, value, geometry)
        storage.roots = [(whole, flat)]
        return flat

    def _gather(self, storage: _Storage, geometry: Geometry, x: torch.Tensor) -> Value:
        """Record that elements of a storage are read."""
        dtype = storage.dtype

        def gather(flat: torch.Tensor) -> torch.Tensor:
            return geometry.view(flat if geometry.dtype == dtype else flat.to(dtype).view(geometry.dtype))

        return self._layout("as_strided", [self._flat(storage, x)], gather, geometry.settings)

    def _scatter(self, storage: _Storage, flat: Value, value: Value, geometry: Geometry) -> Value:
        """Record that elements of a storage are written."""
        dtype = storage.dtype

        def scatter(flat: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            if geometry.dtype == dtype:
                flat = flat.clone()
                geometry.view(flat).copy_(x)
                return flat
            bits = flat.to(dtype, copy=True).view(geometry.dtype)
            geometry.view(bits).copy_(x)
            return bits.view(dtype)

        return self._layout("as_strided_scatter", [flat, value], scatter, geometry.settings)
