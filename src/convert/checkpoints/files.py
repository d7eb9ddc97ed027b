"""Reads arrays whose bytes are stored unchanged in plain files, and the indexes of such files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from convert.checkpoints.access import Boundary, children, read_json
from convert.checkpoints.chunks import Box, Meter, Piece, pieces, read_at_once, timed
from convert.checkpoints.errors import (
    corrupt,
    incomplete,
    out_of_memory,
    truncated,
    unreadable,
)
from convert.checkpoints.source import Absent, Leaf, Source, stamps
from convert.core.findings import Finding
from convert.core.system.regular_file import open_unbuffered
from convert.core.tensor_spec import TensorSpec, numpy_dtype

_READ_BYTES = 16 << 20  # most bytes per read


@dataclass(frozen=True)
class StoredArray:
    """Where an array lies in a file, and how it is stored.

    Attributes:
        file: the file.
        ranges: (offset, bytes), to be read one after the other.
        spec: shape and dtype of the array.
        fortran: whether the first axis varies fastest.
        swapped: whether the elements have the other byte order than this machine.
        value: a plain number, which has no bytes in the file.
    """

    file: Path
    ranges: tuple[tuple[int, int], ...]
    spec: TensorSpec
    fortran: bool = False
    swapped: bool = False
    value: bool | int | float | complex | None = None


class FileSource(Source):
    """A checkpoint whose arrays are stored unchanged in files. Each read opens its file, so threads share nothing."""

    def __init__(
        self,
        path: Path,
        format: str,
        leaves: Mapping[str, Leaf],
        arrays: Mapping[str, StoredArray],
        absent: tuple[Absent, ...] = (),
        notes: tuple[Finding, ...] = (),
    ) -> None:
        self.path, self.format, self.leaves, self.absent, self.notes = path, format, leaves, absent, notes
        self._arrays = arrays
        self.watched = stamps({stored.file for stored in arrays.values()})

    def read(self, name: str) -> np.ndarray:
        return read_stored(self._arrays[name], name)

    def pieces(self, name: str, chunk: Box, meter: Meter | None = None) -> Iterator[Piece]:
        return stored_pieces(self._arrays[name], name, chunk, meter)


def read_stored(stored: StoredArray, leaf: str) -> np.ndarray:
    """Read a copy of the array.

    Raises:
        CheckpointError: the file cannot be read, or has become shorter.
    """
    if stored.value is not None:
        return np.array(stored.value, numpy_dtype(stored.spec.dtype))
    raw = empty_bytes(stored.spec, stored.file, leaf)
    with _filling(stored, leaf) as fill:
        fill(raw.data)
    return as_array(raw, stored)


def stored_pieces(stored: StoredArray, leaf: str, chunk: Box, meter: Meter | None = None) -> Iterator[Piece]:
    """Yield the array in pieces, as `Source.pieces` does for its only chunk.

    Raises:
        CheckpointError: as `read_stored`.
    """
    if stored.value is not None or stored.fortran:
        return read_at_once(chunk.origin, lambda: read_stored(stored, leaf), stored.spec.nbytes, meter)
    return timed(_in_order(stored, leaf, chunk), meter, "read")


def _in_order(stored: StoredArray, leaf: str, chunk: Box) -> Iterator[Piece]:
    with _filling(stored, leaf) as fill:
        yield from pieces(fill, stored.spec.shape, chunk, numpy_dtype(stored.spec.dtype), swapped=stored.swapped)


@contextmanager
def _filling(stored: StoredArray, leaf: str) -> Iterator[Callable[[memoryview], None]]:
    """Give a function that fills a buffer with the next bytes of the array, as they are stored.

    Raises:
        CheckpointError: the file cannot be read, or has become shorter.
    """
    try:
        file = open_unbuffered(stored.file, max((offset + size for offset, size in stored.ranges), default=0))
    except OSError as error:
        raise unreadable(stored.file, error, leaf) from None
    ranges = iter(stored.ranges)
    offset = left = 0

    def fill(buffer: memoryview) -> None:
        nonlocal offset, left
        at = 0
        while at < len(buffer):
            while not left:
                offset, left = next(ranges)
            try:
                file.seek(offset)
                count = file.readinto(buffer[at : at + min(left, _READ_BYTES)]) or 0
            except OSError as error:
                raise unreadable(stored.file, error, leaf) from None
            if not count:
                problem = "the file ends inside this array"
                raise truncated(problem, stored.file, leaf, got=f"{left} bytes fewer than expected")
            at, offset, left = at + count, offset + count, left - count

    with file:
        yield fill


def empty_bytes(spec: TensorSpec, file: Path, leaf: str) -> np.ndarray:
    """Allocate memory for an array.

    Raises:
        CheckpointError: there is not enough.
    """
    try:
        return np.empty(spec.nbytes, np.uint8)
    except MemoryError:
        raise out_of_memory(file, leaf, f"not enough memory for {spec} ({spec.nbytes} bytes)") from None


def as_array(raw: np.ndarray, stored: StoredArray) -> np.ndarray:
    """Return the array with these stored bytes, in C order and native byte order. The result may share memory with `raw`."""
    dtype, shape = numpy_dtype(stored.spec.dtype), stored.spec.shape
    flat = raw.view(dtype)
    if stored.swapped:
        flat.byteswap(inplace=True)
    return np.ascontiguousarray(flat.reshape(shape[::-1]).T) if stored.fortran else flat.reshape(shape)


def files_in(path: Path, suffixes: tuple[str, ...], matches: Callable[[Path], bool]) -> list[Path]:
    """Return `path` if it is a file that `matches`; for a directory, the files with these suffixes that match."""
    if path.is_dir():
        return [child for child in children(path) if child.name.endswith(suffixes) and matches(child)]
    return [path] if matches(path) else []


def read_index(path: Path, boundary: Boundary) -> dict[Path, set[str]]:
    """Read the shards in an index (``*.index.json`` of Hugging Face), each with the names of its leaves.

    Raises:
        CheckpointError: the index is damaged, or names a file that is missing or outside of the checkpoint.
    """
    document = read_json(boundary.open(path), path)
    weight_map = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise corrupt("the index has no weight_map, which names the shards", path)
    shards: dict[Path, set[str]] = {}
    for leaf, name in weight_map.items():
        file = boundary.named(path.parent, name)
        if file not in shards and not file.is_file():
            raise incomplete(f"the shard {name} with the leaf {leaf} is missing", path)
        shards.setdefault(file, set()).add(leaf)
    return dict(sorted(shards.items()))


def check_index(path: Path, shards: Mapping[Path, set[str]], names: Mapping[Path, set[str]]) -> None:
    """Compare the leaves that an index lists for each shard with the names in that shard.

    Raises:
        CheckpointError: they differ.
    """
    for file, listed in shards.items():
        for name in sorted(listed ^ names[file])[:1]:
            side = "index" if name in listed else "shard"
            raise corrupt(f"the leaf is only in the {side}", file, name, expected=f"the leaves in {path.name}")
