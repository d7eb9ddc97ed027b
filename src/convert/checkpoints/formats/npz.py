"""Reads ``.npz``: what ``numpy.savez`` and ``jax.numpy.savez`` write, big_vision's checkpoints among them.

A zip archive with one ``.npy`` per array. Its directory is read by the standard library; each array is read by itself from
the file, so that neither the archive is held nor a lock shared. Nothing is unpickled.
"""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from convert.checkpoints.chunks import Box, Meter, Piece, pieces, timed
from convert.checkpoints.encodings.npy_header import Header, read_header
from convert.checkpoints.files import COPY_AGAIN, Place, as_array, empty_bytes, files_in, head, opened, size_of
from convert.checkpoints.source import Format, Leaf, Options, Source, distinct_names, stamps
from convert.core.errors import CheckpointError
from convert.core.tensor_spec import numpy_dtype

ZIP = b"PK\x03\x04"
_EMPTY_ZIP = b"PK\x05\x06"
_DEFLATE_RATIO = 1032  # the most that deflate expands (zlib.net/zlib_tech.html)
_LOCAL = struct.Struct("<4sHHHHHIIIHH")  # APPNOTE.TXT 4.3.7
_PIECE = 1 << 20


@dataclass(frozen=True)
class Member:
    """A member of a zip archive.

    Attributes:
        file: the archive.
        start: where the member's own head lies.
        stored: bytes that it takes in the archive.
        size: bytes that it has.
        crc: CRC-32 of its bytes.
        deflated: whether it is compressed.
    """

    file: Path
    start: int
    stored: int
    size: int
    crc: int
    deflated: bool

    def stream(self, most: int = _PIECE) -> Iterator[bytes]:
        """The member's bytes, at most `most` at a time; the last ones after the checksum was seen to be right.

        Raises:
            CheckpointError: truncated or damaged; without file and leaf.
            OSError: not readable.
        """
        with self.file.open("rb") as file:
            file.seek(data_start(file, self.start))
            left, crc, seen = self.stored, 0, 0
            inflate = zlib.decompressobj(-zlib.MAX_WBITS) if self.deflated else None
            while left or (inflate is not None and not inflate.eof):
                tail = inflate.unconsumed_tail if inflate is not None else b""
                raw = tail or file.read(min(left, most))
                left -= 0 if tail else len(raw)
                try:  # without input, what zlib still holds
                    piece = inflate.decompress(raw, most) if inflate is not None else raw
                except zlib.error as error:
                    raise CheckpointError(f"its compressed bytes are damaged: {error}") from None
                if not raw and not piece:
                    raise CheckpointError(f"truncated: {max(left, 1)} bytes are missing")
                crc, seen = zlib.crc32(piece, crc), seen + len(piece)
                if seen > self.size or (inflate is not None and inflate.eof and (left or inflate.unused_data)):
                    raise CheckpointError(f"more bytes than the {self.size} that the archive's directory says")
                if seen == self.size and (inflate is None or inflate.eof) and crc != self.crc:
                    raise CheckpointError("its checksum is not that of its bytes")
                yield piece
            if seen != self.size:
                raise CheckpointError(f"{seen} bytes, not the {self.size} that the archive's directory says")


def data_start(file: IO[bytes], start: int) -> int:
    """Where the bytes of the member lie whose head is at `start`.

    Raises:
        CheckpointError: there is no such head.
    """
    file.seek(start)
    raw = file.read(_LOCAL.size)
    if len(raw) < _LOCAL.size or raw[:4] != ZIP:
        raise CheckpointError(f"no member of a zip archive at byte {start}")
    *_, name, extra = _LOCAL.unpack(raw)
    return start + _LOCAL.size + int(name) + int(extra)


def members(path: Path) -> dict[str, Member]:
    """The members of a zip archive by name.

    Raises:
        CheckpointError: not a whole zip archive, encrypted, compressed in another way than by deflate, or two members of
            one name.
    """
    found: dict[str, Member] = {}
    with opened(path) as file:
        size = size_of(file)
        try:
            with zipfile.ZipFile(file) as archive:
                infos = archive.infolist()
        except (
            zipfile.BadZipFile,
            OSError,
            ValueError,
            NotImplementedError,
            struct.error,
            EOFError,
            RuntimeError,
        ) as error:
            raise CheckpointError(f"{path}: not a whole zip archive: {error}; {COPY_AGAIN}") from None
    for info in infos:
        if info.filename in found:
            raise CheckpointError(f"{path}: two members are called {info.filename!r}; write the file again")
        if not 0 <= info.header_offset < size:
            raise CheckpointError(f"{path}: {info.filename}: it would lie at byte {info.header_offset}; {COPY_AGAIN}")
        if info.flag_bits & 1:
            raise CheckpointError(f"{path}: {info.filename}: encrypted; write it without a password")
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise CheckpointError(
                f"{path}: {info.filename}: compressed by method {info.compress_type}; NumPy writes 0 and 8"
            )
        deflated = info.compress_type == zipfile.ZIP_DEFLATED
        possible = info.compress_size * _DEFLATE_RATIO + _DEFLATE_RATIO if deflated else info.compress_size
        if (
            info.compress_size > size
            or info.file_size > possible
            or (not deflated and info.file_size != info.compress_size)
        ):
            raise CheckpointError(
                f"{path}: {info.filename}: {info.file_size} bytes cannot come of {info.compress_size} in the archive; {COPY_AGAIN}"
            )
        found[info.filename] = Member(path, info.header_offset, info.compress_size, info.file_size, info.CRC, deflated)
    return found


def member_names(path: Path) -> set[str]:
    """Names in a zip archive; none where it is none."""
    if not head(path).startswith((ZIP, _EMPTY_ZIP)):
        return set()
    try:
        with zipfile.ZipFile(path) as archive:
            return set(archive.namelist())
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, struct.error, EOFError, RuntimeError):
        return set()


class _Npz(Source):
    """An open archive: the directory and each array's head are known."""

    def __init__(self, path: Path) -> None:
        self.path, self.watched = path, stamps([path])
        held: dict[str, tuple[Member, Header]] = {}
        for filename, member in members(path).items():
            key = filename.removesuffix(".npy")
            where = f"{path}: leaf {key}"
            if key in held:
                raise CheckpointError(f"{path}: two leaves would be called {key!r}; write the file again")
            try:
                held[key] = member, _header(member)
            except CheckpointError as error:
                raise CheckpointError(f"{where}: {error}") from None
            except OSError as error:
                raise CheckpointError(f"{where}: cannot be read: {error.strerror or error}") from None
        self.leaves = distinct_names(
            path, (Leaf(tuple(key.split("/")), header.spec) for key, (_, header) in held.items())
        )
        self._held = {name: held["/".join(leaf.keys)] for name, leaf in self.leaves.items()}
        deflated = any(member.deflated for member, _ in held.values())
        self.format = "NumPy .npz, compressed" if deflated else "NumPy .npz"

    def read(self, name: str) -> np.ndarray:
        header = self._held[name][1]
        raw = empty_bytes(header.spec, self.path, name)
        self._filler(name)(raw.data)
        return as_array(raw, Place(self.path, (), header.spec, header.fortran, header.swapped))

    def pieces(self, name: str, chunk: Box, meter: Meter | None = None) -> Iterator[Piece]:
        header = self._held[name][1]
        if header.fortran:
            yield from super().pieces(name, chunk, meter)
            return
        dtype = numpy_dtype(header.spec.dtype)
        found = pieces(self._filler(name), header.spec.shape, chunk, dtype, swapped=header.swapped)
        yield from timed(found, meter, "decode")

    def _filler(self, name: str) -> Callable[[memoryview], None]:
        """A function that fills a buffer with the next of an array's bytes; its checksum was seen to be right after the last."""
        member, header = self._held[name]
        stream = member.stream()
        left = memoryview(b"")
        skip = member.size - header.spec.nbytes

        def fill(buffer: memoryview) -> None:
            nonlocal left, skip
            at = 0
            try:
                while at < len(buffer):
                    while skip >= len(left):
                        skip -= len(left)
                        left = memoryview(next(stream))
                    left, skip = left[skip:], 0
                    size = min(len(left), len(buffer) - at)
                    buffer[at : at + size] = left[:size]
                    at, left = at + size, left[size:]
            except CheckpointError as error:
                raise CheckpointError(f"{self.path}: leaf {name}: {error}; {COPY_AGAIN}") from None
            except OSError as error:
                raise CheckpointError(f"{self.path}: leaf {name}: cannot be read: {error.strerror or error}") from None

        return fill


def _header(member: Member) -> Header:
    start = b""
    for piece in member.stream(1 << 14):
        start += piece
        if len(start) > 20_000:
            break
    file = io.BytesIO(start)
    header = read_header(file)
    if header.nameless:
        raise CheckpointError(
            "its elements are single bytes of a dtype that the file does not tell, float8 or int4; where it was written, "
            "save array.view(numpy.uint8) and its dtype's name, or use safetensors.flax.save_file"
        )
    if member.size - file.tell() != header.spec.nbytes:
        raise CheckpointError(
            f"{header.spec} takes {header.spec.nbytes} bytes, but {member.size - file.tell()} are there; {COPY_AGAIN}"
        )
    return header


def _find(path: Path) -> list[Path]:
    return files_in(path, (".npz",), is_npz)


def is_npz(path: Path) -> bool:
    """Whether the file is a zip archive of arrays (or of nothing, called ``.npz``), damage of its directory included."""
    if not head(path).startswith((ZIP, _EMPTY_ZIP)):
        return False
    names = member_names(path)
    return path.suffix == ".npz" if not names else any(name.endswith(".npy") for name in names)


def _open(path: Path, options: Options) -> Source:
    return _Npz(path)


FORMAT = Format("NumPy .npz", "an .npz file of numpy.savez, such as big_vision's", _find, _open)
