"""Bytes of arrays in plain files: where they lie, and how they are read, checked against what the file can hold."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from convert.checkpoints.chunks import Box, Meter, Piece, in_one, pieces, timed
from convert.checkpoints.source import Absent, Source, stamps
from convert.core.errors import CheckpointError
from convert.core.tensor_spec import TensorSpec, numpy_dtype

COPY_AGAIN = "copy the checkpoint again from where it was written"
_MOST_INDEX = 64 << 20  # bytes of an index of shards; 100 per leaf are usual
_PIECE = 16 << 20  # bytes read at once


@dataclass(frozen=True)
class Place:
    """Where an array lies in a file, as it is stored.

    Attributes:
        file: the file.
        pieces: (offset, bytes), to be read one after the other.
        spec: shape and dtype of the array.
        fortran: whether the first axis varies fastest.
        swapped: whether the bytes of each element are in the order that is not this machine's.
        value: a plain number, which has no bytes of its own.
    """

    file: Path
    pieces: tuple[tuple[int, int], ...]
    spec: TensorSpec
    fortran: bool = False
    swapped: bool = False
    value: bool | int | float | complex | None = None


class FileSource(Source):
    """Leaves whose bytes lie in files as they are. Each read opens its file, so threads share nothing."""

    def __init__(
        self,
        path: Path,
        format: str,
        leaves: Mapping[str, Any],
        places: Mapping[str, Place],
        absent: tuple[Absent, ...] = (),
        notes: tuple[str, ...] = (),
    ) -> None:
        self.path, self.format, self.leaves, self.absent, self.notes = path, format, leaves, absent, notes
        self._places = places
        self.watched = stamps({place.file for place in places.values()})

    def read(self, name: str) -> np.ndarray:
        return read_place(self._places[name], name)

    def pieces(self, name: str, chunk: Box, meter: Meter | None = None) -> Iterator[Piece]:
        return place_pieces(self._places[name], name, chunk, meter)


def read_place(place: Place, leaf: str) -> np.ndarray:
    """The array at `place`, in memory of its own.

    Raises:
        CheckpointError: the file cannot be read, or has become shorter.
    """
    if place.value is not None:
        return np.array(place.value, numpy_dtype(place.spec.dtype))
    raw = empty_bytes(place.spec, place.file, leaf)
    with _filling(place, leaf) as fill:
        fill(raw.data)
    return as_array(raw, place)


def place_pieces(place: Place, leaf: str, chunk: Box, meter: Meter | None = None) -> Iterator[Piece]:
    """The array at `place`, undivided, as `Source.pieces` gives it.

    Raises:
        CheckpointError: as `read_place`.
    """
    if place.value is not None or place.fortran:
        return in_one(chunk.origin, lambda: read_place(place, leaf), place.spec.nbytes, meter)
    return timed(_in_order(place, leaf, chunk), meter, "read")


def _in_order(place: Place, leaf: str, chunk: Box) -> Iterator[Piece]:
    with _filling(place, leaf) as fill:
        yield from pieces(fill, place.spec.shape, chunk, numpy_dtype(place.spec.dtype), swapped=place.swapped)


@contextmanager
def _filling(place: Place, leaf: str) -> Iterator[Callable[[memoryview], None]]:
    """A function that fills a buffer with the next of the array's bytes, as they are stored.

    Raises:
        CheckpointError: the file cannot be read, or has become shorter.
    """
    try:
        file = place.file.open("rb", buffering=0)
    except OSError as error:
        raise _unreadable(place, leaf, error) from None
    ranges = iter(place.pieces)
    offset = left = 0

    def fill(buffer: memoryview) -> None:
        nonlocal offset, left
        at = 0
        while at < len(buffer):
            while not left:
                offset, left = next(ranges)
            try:
                file.seek(offset)
                got = file.readinto(buffer[at : at + min(left, _PIECE)])
            except OSError as error:
                raise _unreadable(place, leaf, error) from None
            if not got:
                raise CheckpointError(f"{place.file}: leaf {leaf}: truncated: {left} bytes are missing; {COPY_AGAIN}")
            at, offset, left = at + got, offset + got, left - got

    with file:
        yield fill


def _unreadable(place: Place, leaf: str, error: OSError) -> CheckpointError:
    return CheckpointError(f"{place.file}: leaf {leaf}: cannot be read: {error.strerror or error}")


def empty_bytes(spec: TensorSpec, file: Path, leaf: str) -> np.ndarray:
    """Memory for an array.

    Raises:
        CheckpointError: there is not enough.
    """
    try:
        return np.empty(spec.nbytes, np.uint8)
    except MemoryError:
        raise CheckpointError(f"{file}: leaf {leaf}: not enough memory for {spec} ({spec.nbytes} bytes)") from None


def as_array(raw: np.ndarray, place: Place) -> np.ndarray:
    """The array whose bytes, as stored, are `raw`; in C order and the machine's byte order. `raw` becomes part of it."""
    dtype, shape = numpy_dtype(place.spec.dtype), place.spec.shape
    flat = raw.view(dtype)
    if place.swapped:
        flat.byteswap(inplace=True)
    return np.ascontiguousarray(flat.reshape(shape[::-1]).T) if place.fortran else flat.reshape(shape)


def head(path: Path, nbytes: int = 64) -> bytes:
    """The first bytes of a file; none where there is no file that can be read."""
    try:
        if not path.is_file():
            return b""
        with path.open("rb") as file:
            return file.read(nbytes)
    except OSError:
        return b""


def children(directory: Path) -> list[Path]:
    """What lies in a directory, sorted by name; nothing where it is none, or cannot be listed."""
    try:
        return sorted(directory.iterdir()) if directory.is_dir() else []
    except OSError:
        return []


def files_in(path: Path, suffixes: tuple[str, ...], matches: Callable[[Path], bool]) -> list[Path]:
    """`path`, when it is a file that `matches`; of a directory, the files with these suffixes that do."""
    if path.is_dir():
        return [child for child in children(path) if child.name.endswith(suffixes) and matches(child)]
    return [path] if matches(path) else []


def opened(path: Path) -> IO[bytes]:
    """The file, opened for reading.

    Raises:
        CheckpointError: it cannot be.
    """
    try:
        return path.open("rb")
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from None


def size_of(file: IO[bytes]) -> int:
    """Bytes of an open file."""
    return os.fstat(file.fileno()).st_size


def inside(folder: Path, name: object) -> Path:
    """The file or directory `name` in `folder`, where the name comes from a checkpoint and is not to be trusted.

    Links are followed within the folder, and to the ``blobs`` that Hugging Face's cache keeps beside its snapshots.

    Raises:
        CheckpointError: it is no plain name, or leads out of the folder.
    """
    if not isinstance(name, str) or not name or name in (".", "..") or any(c in name for c in "/\\\0"):
        raise CheckpointError(f"{folder}: {name!r:.200} is no plain name of a file in it; such a path is not followed")
    path = folder / name
    try:
        real, home = path.resolve(), folder.resolve()
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{path}: cannot be followed: {error}") from None
    blobs = home.parent.parent / "blobs" if home.parent.name == "snapshots" else None
    if not real.is_relative_to(home) and not (blobs is not None and real.is_relative_to(blobs)):
        raise CheckpointError(
            f"{path}: a link that leads out of the checkpoint's folder; it is not followed. Copy the file there"
        )
    return path


def read_json(path: Path) -> Any:
    """The content of a JSON file of moderate size.

    Raises:
        CheckpointError: unreadable, too long, or not JSON.
    """
    with opened(path) as file:
        if size_of(file) > _MOST_INDEX:
            raise CheckpointError(f"{path}: longer than {_MOST_INDEX} bytes, which no such file is")
        try:
            return json.loads(file.read())
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{path}: not JSON: {error}; {COPY_AGAIN}") from None


def read_index(path: Path) -> dict[Path, set[str]]:
    """The shards that an index (``*.index.json`` of Hugging Face) names, each with the names of its leaves.

    Raises:
        CheckpointError: it is damaged, names a file outside its folder, or one that is not there.
    """
    document = read_json(path)
    weight_map = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: it has no weight_map that names the shards; {COPY_AGAIN}")
    shards: dict[Path, set[str]] = {}
    for leaf, name in weight_map.items():
        file = inside(path.parent, name)
        if file not in shards and not file.is_file():
            raise CheckpointError(f"{path}: the shard {name} is not there, which holds {leaf}; {COPY_AGAIN}")
        shards.setdefault(file, set()).add(leaf)
    return dict(sorted(shards.items()))


def check_index(path: Path, shards: Mapping[Path, set[str]], found: Mapping[Path, set[str]]) -> None:
    """Compares what an index promises with what its shards hold.

    Raises:
        CheckpointError: they differ.
    """
    for file, promised in shards.items():
        for name in sorted(promised ^ found[file])[:1]:
            where = "is not in it" if name in promised else "is in it, but the index does not say so"
            raise CheckpointError(f"{file}: leaf {name} {where} ({path.name}); {COPY_AGAIN}")
