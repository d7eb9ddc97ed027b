"""Reads Orbax checkpoints with TensorStore: the layouts of Orbax 0.5 to 0.12, without JAX and without devices.

Where the tree lies is found in `orbax_locate`, what is in it in `orbax_tree`; arrays are read in `orbax_store`, which
learns from `orbax_ocdbt` what a database holds.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from convert.checkpoints.chunks import Box, Grid, Meter, Piece, whole
from convert.checkpoints.encodings import msgpack_tokens
from convert.checkpoints.encodings.ocdbt import TENSORSTORE_ERRORS
from convert.checkpoints.orbax.arrays import (
    AGAIN,
    Array,
    Store,
    open_store,
    pieces,
    read_array,
    read_metadata,
    reason,
)
from convert.checkpoints.orbax.locate import locate, looks_like_orbax
from convert.checkpoints.orbax.tree import ARRAYS, METADATA, Node, Tree, read_tree
from convert.checkpoints.source import Absent, Leaf, Source, name_leaves, stamps
from convert.core.errors import CheckpointError

__all__ = ["OrbaxSource", "looks_like_orbax", "open_orbax"]

_SHOWN = 5  # leaves in one message


def open_orbax(path: Path, *, step: int | None = None, item: str | None = None) -> Source:
    """Opens an Orbax checkpoint without reading its arrays.

    Args:
        path: a tree, a step with several items, or a directory of steps.
        step: which step; the latest finished one if None.
        item: which item of the step; the only one that is a tree if None.

    Raises:
        CheckpointError: nothing there, not finished, truncated, corrupt, or a choice is left open. The message names
            the path, the leaf if it is about one, and the next step.
    """
    located = locate(path, step, item)
    return OrbaxSource(located.path, located.notes)


class OrbaxSource(Source):
    """An open tree. Reading takes no lock: TensorStore's handles may be used from several threads."""

    def __init__(self, path: Path, notes: tuple[str, ...] = ()) -> None:
        self.watched = stamps(Path(entry) for entry in os.scandir(path) if entry.is_file())
        tree = read_tree(path)
        stored = [node for node in tree.nodes if node.name is not None]
        self._store: Store | None = None
        arrays: dict[str, Array | CheckpointError | None] = {}
        if stored:
            try:
                self._store = open_store(path, tree.use_ocdbt)
                arrays = read_metadata(self._store, [str(node.name) for node in stored], tree.use_zarr3)
            except TENSORSTORE_ERRORS as error:
                raise CheckpointError(
                    f'"{path}": the arrays cannot be found: {reason(error, path)}; {AGAIN}'
                ) from error
        self._data, self._all_stored = tree.data, tree.all_stored
        self.path = path
        self.format = _format(tree, self._store, arrays)
        self.notes = notes
        advice = AGAIN if self._store is None else self._store.advice
        places, self.absent = _places(path, tree, arrays, advice)
        self.leaves: Mapping[str, Leaf] = name_leaves(Leaf(node.keys, place.spec) for node, place in places)
        if len(self.leaves) != len(places):
            raise CheckpointError(
                f'"{path}": {len(places) - len(self.leaves)} leaves have the name of another one; rename a key'
            )
        self._by_name = dict(zip(self.leaves, (place for _, place in places), strict=True))

    def read(self, name: str) -> np.ndarray:
        place = self._by_name[name]
        if isinstance(place, msgpack_tokens.Packed):
            return msgpack_tokens.array(self._data, place)
        if place.encoding is not None:
            return self.read_box(name, whole(place.spec.shape))
        assert self._store is not None
        with self._errors(name, place):
            return read_array(self._store, place, self._all_stored)

    def chunks(self, name: str) -> Grid:
        place = self._by_name[name]
        return super().chunks(name) if isinstance(place, msgpack_tokens.Packed) else place.grid

    def pieces(self, name: str, chunk: Box, meter: Meter | None = None) -> Iterator[Piece]:
        place = self._by_name[name]
        if isinstance(place, msgpack_tokens.Packed):
            yield from super().pieces(name, chunk, meter)
            return
        assert self._store is not None
        with self._errors(name, place):
            yield from pieces(self._store, place, self._all_stored, chunk, meter)

    @contextmanager
    def _errors(self, name: str, place: Array) -> Iterator[None]:
        """Puts the leaf, its spec and the next step around what TensorStore and the system raise."""
        assert self._store is not None
        try:
            yield
        except MemoryError as error:
            raise CheckpointError(f'"{self.path}": leaf {name} ({place.spec}): {error}') from None
        except TENSORSTORE_ERRORS as error:
            why = f"{reason(error, self.path)}; {self._store.advice}"
            raise CheckpointError(f'"{self.path}": leaf {name} ({place.spec}) cannot be read: {why}') from error


def _format(tree: Tree, store: Store | None, arrays: Mapping[str, Array | CheckpointError | None]) -> str:
    if store is None:
        return "Orbax, aggregate file (msgpack)" if tree.data else "Orbax, no arrays"
    drivers = sorted({array.driver for array in arrays.values() if isinstance(array, Array)})
    return ", ".join(["Orbax", store.format, *drivers])


def _places(
    path: Path, tree: Tree, arrays: Mapping[str, Array | CheckpointError | None], advice: str
) -> tuple[list[tuple[Node, Array | msgpack_tokens.Packed]], tuple[Absent, ...]]:
    """Where each leaf lies, and what has no array."""
    places: list[tuple[Node, Array | msgpack_tokens.Packed]] = []
    absent: list[Absent] = []
    wrong: list[str] = []
    for node in tree.nodes:
        array = arrays.get(node.name) if node.name is not None else None
        if node.why is not None:
            absent.append(Absent(node.keys, node.why))
        elif node.packed is not None:
            places.append((node, node.packed))
        elif isinstance(array, Array):
            places.append((node, array))
            wrong.extend(_disagreement(node, array))
        elif isinstance(array, CheckpointError):
            wrong.append(f"leaf {'/'.join(node.keys)}: {array}")
        elif node.kind in ARRAYS:
            wrong.append(f"leaf {'/'.join(node.keys)}: its zarr metadata is missing")
        else:
            # A type with a handler of its own, which may have written anything.
            absent.append(Absent(node.keys, f"{node.kind}, not stored as an array"))
    if wrong:
        shown = "\n  ".join(wrong[:_SHOWN]) + (f"\n  and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else "")
        raise CheckpointError(f'"{path}": {METADATA} and the arrays do not agree:\n  {shown}\n{advice}')
    return places, tuple(absent)


def _disagreement(node: Node, array: Array) -> list[str]:
    """`.zarray` has no checksum, but `_METADATA` has the shape of what one process wrote, a part of the array."""
    part, whole = node.write_shape, array.spec.shape
    if part is None or (len(part) == len(whole) and all(p <= n for p, n in zip(part, whole, strict=True))):
        return []
    return [f"leaf {'/'.join(node.keys)}: it is {array.spec}, but {METADATA} says that {list(part)} of it was written"]
