"""What a checkpoint is to the rest of the package: named leaves with specs, and a way to read one of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from convert.checkpoints.chunks import Box, Grid, Meter, Piece, in_one, undivided
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
    """A node of the pytree that holds no array. `why` is ``None``, ``empty dict``, ``empty list``, ``string``, ..."""

    keys: tuple[str, ...]
    why: str


def name_leaves(leaves: Iterable[Leaf]) -> dict[str, Leaf]:
    """Names leaves by their keys joined with ``/``, in the order given.

    The flat keys of official Gemma releases (``transformer/layer_0/attn``) and the nested ones get the same names
    this way. Where two leaves of one tree would share a name, the slashes inside their keys are written ``\\/``.
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
    """A key to sort paths by: dict keys by text, the indices of sequences by number."""
    return tuple((0, int(key), key) if key.isascii() and key.isdecimal() else (1, 0, key) for key in keys)


Stamp = tuple[int, int, int, int]  # device, inode, bytes, nanoseconds of the last change


def stamps(files: Iterable[Path]) -> dict[Path, Stamp | None]:
    """What tells each file from another that takes its place; None where there is none."""
    found: dict[Path, Stamp | None] = {}
    for file in files:
        try:
            said = file.stat()
            found[file] = said.st_dev, said.st_ino, said.st_size, said.st_mtime_ns
        except OSError:
            found[file] = None
    return found


class Source(ABC):
    """A checkpoint, opened: its leaves are known, none has been read.

    Attributes:
        path: the directory or file that holds the arrays (a step's item directory, not what the user typed).
        format: how it lies on disk, for people, such as ``Orbax, OCDBT, zarr``.
        leaves: name -> leaf, in the order of the tree.
        absent: nodes without an array.
        notes: what was decided on the way to `path` (which step, which item), for people.
        named: what the user called the checkpoint; None when it was opened by other means than `open_source`.
        watched: files that are written anew whenever the checkpoint is, as they were when it was opened (`stamps`).
    """

    path: Path
    format: str
    leaves: Mapping[str, Leaf]
    absent: tuple[Absent, ...] = ()
    notes: tuple[Finding, ...] = ()
    named: Path | None = None
    watched: Mapping[Path, Stamp | None] = {}

    def changed(self) -> Path | None:
        """A file that is no longer the one that was opened; leaves that were read since may be of neither checkpoint."""
        now = stamps(self.watched)
        return next((file for file, stamp in self.watched.items() if now[file] != stamp), None)

    @property
    def called(self) -> Path:
        """The checkpoint as the user called it, for messages."""
        return self.named or self.path

    @abstractmethod
    def read(self, name: str) -> np.ndarray:
        """The whole array called `name`, in C order, of the spec's shape and dtype. Safe to call from several threads.

        Raises:
            CheckpointError: a file is missing, truncated or corrupt; the message names the leaf and the file.
            KeyError: there is no such leaf.
        """

    def chunks(self, name: str) -> Grid:
        """The parts in which an array is stored, each of which `pieces` can read on its own. Here: all in one."""
        return undivided(self.leaves[name].spec.shape)

    def pieces(self, name: str, chunk: Box, meter: Meter | None = None) -> Iterator[Piece]:
        """One of the `chunks`, piece by piece in C order. An array that is yielded is valid until the next one is asked for.

        Here the whole array is read; sources that can read less do.

        Args:
            meter: gets the seconds that are spent on ``read`` and ``decode``.

        Raises:
            CheckpointError: as `read`.
        """

        def read() -> np.ndarray:
            array, spec = self.read(name), self.leaves[name].spec
            # A reader's promise, on which the plan relies.
            if array.shape != spec.shape or array.dtype.name != spec.dtype:
                raise CheckpointError(
                    Finding(
                        "reader-invalid",
                        "the reader returned another array than it announced",
                        path=name,
                        expected=str(spec),
                        got=f"{array.dtype.name}{list(array.shape)}",
                        fix="report it to the authors of the reader",
                    )
                )
            part: np.ndarray = array[chunk.within((0,) * array.ndim)]
            return part

        yield from in_one(chunk.origin, read, self.leaves[name].spec.nbytes, meter)

    def read_box(self, name: str, box: Box) -> np.ndarray:
        """A part of an array, in C order; no more is decoded than what lies before it in its chunks.

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
        """Bytes of all leaves in memory."""
        return sum(leaf.spec.nbytes for leaf in self.leaves.values())


@dataclass(frozen=True)
class Options:
    """What the user said beside the path.

    Attributes:
        step: which step, where there are several; None is the latest.
        item: which item of a composite checkpoint.
        skeleton: a file that `convert skeleton` wrote, with the names that the checkpoint does not hold.
        leaf_names: names in the order of the file, as rule files list them; each is one candidate.
    """

    step: int | None = None
    item: str | None = None
    skeleton: Path | None = None
    leaf_names: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True)
class Format:
    """A kind of checkpoint. A package adds one with an entry point of the group ``convert.checkpoints`` that is a `Format`.

    Attributes:
        name: for people, such as ``Equinox``.
        understands: which files and directories it reads, for people; it is listed where nothing is recognised.
        find: what `open` may be given for a path: the path, or files in that directory; nothing when it is of another
            format. Looks at content, reads little, and raises nothing.
        open: opens what `find` found, without reading arrays; raises CheckpointError.
        options: the names of the `Options` that it knows; the others are refused when they are given.
    """

    name: str
    understands: str
    find: Callable[[Path], Sequence[Path]]
    open: Callable[[Path, Options], Source]
    options: frozenset[str] = frozenset()
