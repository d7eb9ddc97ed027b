"""The interface of an opened checkpoint: named leaves with shapes and dtypes, and methods that read one of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from convert.checkpoints.access import Boundary
from convert.checkpoints.chunks import Box, Grid, Meter, Piece, read_at_once, single_chunk
from convert.checkpoints.errors import name_clash, out_of_memory
from convert.core.errors import CheckpointError
from convert.core.findings import Finding
from convert.core.tensor_spec import TensorSpec, numpy_dtype


@dataclass(frozen=True, slots=True)
class Leaf:
    """An array of the checkpoint's pytree.

    Attributes:
        keys: the path through the pytree, one string per level; keys may hold dots and slashes, sequence
            indices are decimal strings.
        spec: global shape and dtype.
    """

    keys: tuple[str, ...]
    spec: TensorSpec


@dataclass(frozen=True)
class Absent:
    """A node of the pytree without an array. `why` says what it is instead: ``None``, ``empty dict``, ``string``, ..."""

    keys: tuple[str, ...]
    why: str


def name_leaves(leaves: Iterable[Leaf]) -> dict[str, Leaf]:
    """Name leaves by their keys joined with ``/``, in the order given.

    Flat keys (``transformer/layer_0/attn`` in official Gemma releases) and nested ones get the same names. Where two leaves
    would have one name, the slashes inside their keys become ``\\/``.
    """
    leaves = list(leaves)
    names = ["/".join(leaf.keys) for leaf in leaves]
    named = dict(zip(names, leaves, strict=True))
    if len(named) == len(leaves):
        return named
    counts = Counter(names)
    escaped = ("/".join(key.replace("/", "\\/") for key in leaf.keys) for leaf in leaves)
    return {
        longer if counts[name] > 1 else name: leaf for name, longer, leaf in zip(names, escaped, leaves, strict=True)
    }


def distinct_names(path: Path, leaves: Iterable[Leaf]) -> dict[str, Leaf]:
    """Sort leaves as JAX flattens dicts and lists, and name them with `name_leaves`.

    Raises:
        CheckpointError: two leaves have the same name.
    """
    leaves = sorted(leaves, key=lambda leaf: tree_order(leaf.keys))
    named = name_leaves(leaves)
    if len(named) != len(leaves):
        counts = Counter("/".join(leaf.keys) for leaf in leaves)
        twice = next(name for name, n in counts.items() if n > 1)
        raise name_clash(path, twice)
    return named


def tree_order(keys: Sequence[str]) -> tuple[tuple[int, int, str], ...]:
    """Return a key that sorts paths: dict keys by text, indices of sequences by number."""
    return tuple(
        (0, int(key), key) if key.isascii() and key.isdecimal() and len(key) < 19 else (1, 0, key) for key in keys
    )


# Device, inode, bytes, and the times in nanoseconds when the content and the inode changed. A program can set the former.
Stamp = tuple[int, int, int, int, int]


def stamps(files: Iterable[Path]) -> dict[Path, Stamp | None]:
    """Return the identity of each file, which changes when it is replaced or rewritten; None where it does not exist."""
    result: dict[Path, Stamp | None] = {}
    for file in files:
        try:
            stat = file.stat()
            result[file] = stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns
        except OSError:
            result[file] = None
    return result


class Source(ABC):
    """An opened checkpoint: its leaves are known, no array has been read.

    Attributes:
        path: the directory or file that holds the arrays, such as the directory of an item.
        format: the layout on disk, for people, such as ``Orbax, OCDBT, zarr``.
        leaves: name -> leaf, in the order of the tree.
        absent: nodes without an array.
        notes: findings on how it was read: the chosen step and item (``step-chosen``, ``item-chosen``), others.
        given_path: the path that the user gave; None where the checkpoint was not opened by `open_source`.
        boundary: where its files may lie; None where the checkpoint was not opened by `open_source`.
        watched: files that change whenever the checkpoint is written, with their `stamps` at opening.
        names_from: what names the leaves in their order, where the checkpoint itself has no names.
        adapter: the checkpoint whose LoRA pairs are among the leaves, where these are another one's.
    """

    path: Path
    format: str
    leaves: Mapping[str, Leaf]
    absent: tuple[Absent, ...] = ()
    notes: tuple[Finding, ...] = ()
    given_path: Path | None = None
    boundary: Boundary | None = None
    watched: Mapping[Path, Stamp | None] = {}
    names_from: str = ""
    adapter: Source | None = None

    @property
    def parts(self) -> tuple[Source, ...]:
        """The checkpoints that were opened: this one, and that of the adapter."""
        return (self,) if self.adapter is None else (self, self.adapter)

    def changed(self) -> Path | None:
        """Return a file that changed since opening; leaves read since then may be a mixture of two checkpoints."""
        now = stamps(self.watched)
        return next((file for file, stamp in self.watched.items() if now[file] != stamp), None)

    @property
    def names_in_order(self) -> tuple[str, ...]:
        """The names of the leaves, where the checkpoint itself has none."""
        return tuple(self.leaves) if self.names_from else ()

    @property
    def display_path(self) -> Path:
        """The path that the user gave, for messages."""
        return self.given_path or self.path

    @abstractmethod
    def read(self, name: str) -> np.ndarray:
        """Read the array `name` in C order, with the shape and dtype of its spec. Safe to call from several threads.

        Raises:
            CheckpointError: a file is missing, truncated or corrupt; the finding names the leaf and the file.
            KeyError: there is no such leaf.
        """

    def chunks(self, name: str) -> Grid:
        """Return the chunks of an array, each of which `pieces` can read separately. The default is one chunk."""
        return single_chunk(self.leaves[name].spec.shape)

    def pieces(self, name: str, chunk: Box, meter: Meter | None = None) -> Iterator[Piece]:
        """Yield one of the `chunks`, piece by piece in C order. A yielded array is valid until the next one is requested.

        The default reads the whole array.

        Args:
            meter: adds the seconds of ``read`` and ``decode``.

        Raises:
            CheckpointError: as `read`.
        """

        def read() -> np.ndarray:
            array, spec = self.read(name), self.leaves[name].spec
            # The plan relies on the spec.
            if array.shape != spec.shape or array.dtype.name != spec.dtype:
                raise CheckpointError(
                    Finding(
                        "reader-invalid",
                        "the reader returned another array than it announced",
                        path=name,
                        expected=str(spec),
                        got=str(TensorSpec(array.shape, array.dtype.name)),
                        fix="report it to the authors of the reader",
                    )
                )
            part: np.ndarray = array[chunk.within((0,) * array.ndim)]
            return part

        yield from read_at_once(chunk.origin, read, self.leaves[name].spec.nbytes, meter)

    def read_box(self, name: str, box: Box) -> np.ndarray:
        """Read a part of an array, in C order. Decodes only the chunks that it overlaps, up to its last element.

        Raises:
            CheckpointError: as `read`.
        """
        spec = self.leaves[name].spec
        try:
            out = np.empty(box.shape, numpy_dtype(spec.dtype))
        except MemoryError as error:
            raise out_of_memory(
                self.path, name, f"not enough memory for {TensorSpec(box.shape, spec.dtype)}: {error}"
            ) from None
        left = box.size
        for chunk in self.chunks(name):
            if not left:
                break
            if box.overlap(chunk.origin, chunk.shape) is None:
                continue
            for origin, values in self.pieces(name, chunk):
                if (common := box.overlap(origin, values.shape)) is not None:
                    out[common.within(box.origin)] = values[common.within(origin)]
                    left -= common.size
                if not left:
                    break
        return out

    @property
    def nbytes(self) -> int:
        """The bytes of all leaves in memory."""
        return sum(leaf.spec.nbytes for leaf in self.leaves.values())


@dataclass(frozen=True)
class Options:
    """The options of `open_source`.

    Attributes:
        step: which step of several; None is the latest.
        item: which item of a composite checkpoint.
        skeleton: a file of `convert skeleton` with the names that the checkpoint does not contain.
        leaf_names: names in the order of the file, from rule files; each sequence is one candidate.
        boundary: where the files of the checkpoint may lie; a reader opens files with `Boundary.open`, or checks them.
    """

    step: int | None = None
    item: str | None = None
    skeleton: Path | None = None
    leaf_names: tuple[tuple[str, ...], ...] = ()
    boundary: Boundary = field(kw_only=True)


@dataclass(frozen=True)
class Format:
    """A checkpoint format. A package adds one with an entry point of the group ``convert.checkpoints`` that is a `Format`.

    Attributes:
        name: for people, such as ``Equinox``.
        understands: which files and directories it reads, for people; listed in the error for an unknown path.
        find: returns the paths that `open` can read: the path itself or files in this directory; nothing for other formats.
            Reads little content, and raises nothing.
        open: opens a path from `find` without reading arrays; raises CheckpointError.
        options: the names of the `Options` that it accepts; others are rejected.
    """

    name: str
    understands: str
    find: Callable[[Path], Sequence[Path]]
    open: Callable[[Path, Options], Source]
    options: frozenset[str] = frozenset()
