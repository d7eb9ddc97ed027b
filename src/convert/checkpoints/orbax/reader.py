"""Opens Orbax checkpoints: joins the tree, the stores and the metadata of the arrays to a `Source`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from convert.checkpoints.access import Boundary, children
from convert.checkpoints.chunks import Box, Grid, Meter, Piece, full_box
from convert.checkpoints.encodings.flax_arrays import PackedArray, read_packed
from convert.checkpoints.encodings.ocdbt import TENSORSTORE_ERRORS
from convert.checkpoints.errors import corrupt, incomplete, located, name_clash, out_of_memory, unreadable
from convert.checkpoints.orbax.arrays import pieces, read_array
from convert.checkpoints.orbax.locate import locate, looks_like_orbax
from convert.checkpoints.orbax.stores import AGAIN, Store, open_store, reason
from convert.checkpoints.orbax.tree import ARRAYS, METADATA, Tree, TreeNode, read_tree
from convert.checkpoints.orbax.zarr_metadata import Array, read_metadata
from convert.checkpoints.source import Absent, Leaf, Source, name_leaves, stamps
from convert.core.errors import CheckpointError
from convert.core.findings import Finding

__all__ = ["OrbaxSource", "looks_like_orbax", "open_orbax"]

_SHOWN = 5  # leaves in one error


def open_orbax(
    path: Path, *, step: int | None = None, item: str | None = None, boundary: Boundary | None = None
) -> Source:
    """Open an Orbax checkpoint without reading its arrays.

    Args:
        path: a tree, a step with several items, or a directory of steps.
        step: which step; the latest finished one if None.
        item: which item of the step; the only one that is a tree if None.
        boundary: where files may lie; in `path` if None.

    Raises:
        CheckpointError: missing, not finished, truncated, corrupt, with links out of it, or several could be meant. The finding names the path,
            and the leaf if it is about one.
    """
    located = locate(path, step, item)
    return OrbaxSource(located.path, boundary or Boundary(path), located.notes)


class OrbaxSource(Source):
    """An open tree. Reading takes no lock: TensorStore's handles may be used from several threads."""

    def __init__(self, path: Path, boundary: Boundary, notes: tuple[Finding, ...] = ()) -> None:
        boundary.check(path)
        self.watched = stamps(child for child in children(path) if child.is_file())
        tree = read_tree(path, boundary)
        stored = [node for node in tree.nodes if node.name is not None]
        self._store: Store | None = None
        arrays: dict[str, Array | CheckpointError | None] = {}
        if stored:
            try:
                self._store = open_store(path, tree.use_ocdbt, boundary)
                arrays = read_metadata(self._store, [str(node.name) for node in stored], tree.use_zarr3)
            except TENSORSTORE_ERRORS as error:
                raise unreadable(path, ValueError(reason(error, path)), fix=AGAIN) from error
        self._data, self._all_stored = tree.data, tree.all_stored
        self.path = path
        self.format = _format(tree, self._store, arrays)
        self.notes = notes
        advice = AGAIN if self._store is None else self._store.advice
        stored_leaves, self.absent = _leaves(path, tree, arrays, advice)
        self.leaves: Mapping[str, Leaf] = name_leaves(Leaf(node.keys, array.spec) for node, array in stored_leaves)
        if len(self.leaves) != len(stored_leaves):
            names = Counter("/".join(node.keys) for node, _ in stored_leaves)
            raise name_clash(path, next(name for name, n in names.items() if n > 1))
        self._arrays = dict(zip(self.leaves, (array for _, array in stored_leaves), strict=True))

    def read(self, name: str) -> np.ndarray:
        array = self._arrays[name]
        if isinstance(array, PackedArray):
            return read_packed(self._data, array)
        if array.encoding is not None:
            return self.read_box(name, full_box(array.spec.shape))
        assert self._store is not None
        with self._errors(name, array):
            return read_array(self._store, array, self._all_stored)

    def chunks(self, name: str) -> Grid:
        array = self._arrays[name]
        return super().chunks(name) if isinstance(array, PackedArray) else array.grid

    def pieces(self, name: str, chunk: Box, meter: Meter | None = None) -> Iterator[Piece]:
        array = self._arrays[name]
        if isinstance(array, PackedArray):
            yield from super().pieces(name, chunk, meter)
            return
        assert self._store is not None
        with self._errors(name, array):
            yield from pieces(self._store, array, self._all_stored, chunk, meter)

    @contextmanager
    def _errors(self, name: str, array: Array) -> Iterator[None]:
        """Add the leaf, its spec and the next step to the errors of TensorStore and of the system."""
        assert self._store is not None
        try:
            yield
        except MemoryError as error:
            raise out_of_memory(self.path, name, f"not enough memory for {array.spec}: {error}") from None
        except TENSORSTORE_ERRORS as error:
            problem = ValueError(f"{array.spec}: {reason(error, self.path)}")
            raise unreadable(self.path, problem, name, self._store.advice) from error


def _format(tree: Tree, store: Store | None, arrays: Mapping[str, Array | CheckpointError | None]) -> str:
    if store is None:
        return "Orbax, aggregate file (msgpack)" if tree.data else "Orbax, no arrays"
    drivers = sorted({array.driver for array in arrays.values() if isinstance(array, Array)})
    return ", ".join(["Orbax", store.format, *drivers])


def _leaves(
    path: Path, tree: Tree, arrays: Mapping[str, Array | CheckpointError | None], fix: str
) -> tuple[list[tuple[TreeNode, Array | PackedArray]], tuple[Absent, ...]]:
    """Return the array of each leaf, and the nodes without an array.

    Raises:
        CheckpointError: `_METADATA` and the zarr metadata contradict each other.
    """
    leaves: list[tuple[TreeNode, Array | PackedArray]] = []
    absent: list[Absent] = []
    wrong: list[Finding] = []
    for node in tree.nodes:
        array = arrays.get(node.name) if node.name is not None else None
        leaf = "/".join(node.keys)
        if node.why is not None:
            absent.append(Absent(node.keys, node.why))
        elif node.packed is not None:
            leaves.append((node, node.packed))
        elif isinstance(array, Array):
            leaves.append((node, array))
            if not _fits(node.write_shape, array.spec.shape):
                written = f"{METADATA} with a written part of {list(node.write_shape or ())}"
                wrong += corrupt("", path, leaf, expected=str(array.spec), got=written).findings
        elif isinstance(array, CheckpointError):
            wrong += located(array, path, leaf).findings
        elif node.kind in ARRAYS:
            wrong += incomplete("its zarr metadata is missing", path, leaf).findings
        else:
            # A type with another handler, which may have written any files.
            absent.append(Absent(node.keys, f"{node.kind}, not stored as an array"))
    if wrong:
        count = f" ({len(wrong)} leaves, {_SHOWN} of them here)" if len(wrong) > _SHOWN else ""
        shown = [replace(finding, fix="") for finding in wrong[:_SHOWN]]
        shown[-1] = replace(shown[-1], fix=fix)
        headline = f"{METADATA} and the arrays contradict each other{count}:"
        raise CheckpointError(*shown, headline=headline)
    return leaves, tuple(absent)


def _fits(part: tuple[int, ...] | None, shape: tuple[int, ...]) -> bool:
    """Whether the shape of the part that one process wrote, if known, fits into the array.

    `.zarray` has no checksum; this detects a shape that was damaged.
    """
    return part is None or (len(part) == len(shape) and all(p <= n for p, n in zip(part, shape, strict=True)))
