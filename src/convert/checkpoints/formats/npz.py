"""Reads ``.npz`` files of ``numpy.savez`` and ``jax.numpy.savez``, such as big_vision's checkpoints.

The file is a zip archive with one ``.npy`` per array. The standard library reads its directory. Each array is read from the
file separately, so the archive is not kept in memory and threads share no lock. Nothing is unpickled.
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

from convert.checkpoints.access import head, opened
from convert.checkpoints.chunks import Box, Meter, Piece, pieces, timed
from convert.checkpoints.encodings.npy_header import Header, read_header
from convert.checkpoints.errors import (
    corrupt,
    located,
    name_clash,
    truncated,
    unreadable,
    unsupported,
)
from convert.checkpoints.files import StoredArray, as_array, empty_bytes, files_in
from convert.checkpoints.source import Format, Leaf, Options, Source, distinct_names, stamps
from convert.core.errors import CheckpointError
from convert.core.system.regular_file import open_regular, size_of
from convert.core.tensor_spec import numpy_dtype

ZIP = b"PK\x03\x04"
_EMPTY_ZIP = b"PK\x05\x06"
_DEFLATE_RATIO = 1032  # the most that deflate expands (zlib.net/zlib_tech.html)
_LOCAL = struct.Struct("<4sHHHHHIIIHH")  # APPNOTE.TXT 4.3.7
_READ_BYTES = 1 << 20
_ZIP_ERRORS = (
    zipfile.BadZipFile,
    OSError,
    ValueError,
    NotImplementedError,
    struct.error,
    EOFError,
    RuntimeError,
)


@dataclass(frozen=True)
class Member:
    """A member of a zip archive.

    Attributes:
        file: the archive.
        start: where the header of the member starts.
        stored: its size in the archive, in bytes.
        size: its size after decompression, in bytes.
        crc: CRC-32 of its decompressed bytes.
        deflated: whether it is compressed.
    """

    file: Path
    start: int
    stored: int
    size: int
    crc: int
    deflated: bool

    def stream(self, most: int = _READ_BYTES) -> Iterator[bytes]:
        """Yield the bytes of the member, at most `most` at a time; the last ones only after the checksum was compared.

        Raises:
            CheckpointError: truncated or damaged; the finding does not name the file.
            OSError: not readable.
        """
        with open_regular(self.file) as file:
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
                    raise corrupt(f"its compressed bytes are damaged: {error}") from None
                if not raw and not piece:
                    raise truncated("the file ends inside this array", got=f"{max(left, 1)} bytes fewer than expected")
                crc, seen = zlib.crc32(piece, crc), seen + len(piece)
                if seen > self.size or (inflate is not None and inflate.eof and (left or inflate.unused_data)):
                    raise corrupt(
                        "it has more bytes than the directory of the archive says", expected=f"{self.size} bytes"
                    )
                if seen == self.size and (inflate is None or inflate.eof) and crc != self.crc:
                    raise corrupt("its checksum is wrong", expected=f"CRC-32 {self.crc:08x}", got=f"{crc:08x}")
                yield piece
            if seen != self.size:
                raise corrupt(
                    "it has fewer bytes than the directory of the archive says",
                    expected=f"{self.size} bytes",
                    got=f"{seen} bytes",
                )


def data_start(file: IO[bytes], start: int) -> int:
    """Return where the bytes of the member start whose header is at `start`.

    Raises:
        CheckpointError: there is no such header.
    """
    file.seek(start)
    raw = file.read(_LOCAL.size)
    if len(raw) < _LOCAL.size or raw[:4] != ZIP:
        raise corrupt(expected=f"the header of a zip member at byte {start}", got=raw[:4].hex(" ") or "the end")
    *_, name, extra = _LOCAL.unpack(raw)
    return start + _LOCAL.size + int(name) + int(extra)


def members(path: Path) -> dict[str, Member]:
    """Read the members of a zip archive by name.

    Raises:
        CheckpointError: not a complete zip archive, encrypted, compressed by another method than deflate, or two members
            have the same name.
    """
    result: dict[str, Member] = {}
    with opened(path) as file:
        size = size_of(file)
        try:
            with zipfile.ZipFile(file) as archive:
                infos = archive.infolist()
        except _ZIP_ERRORS as error:
            raise corrupt(f"not a complete zip archive: {error}", path) from None
    for info in infos:
        place = f"{path}: {info.filename}"
        if info.filename in result:
            raise name_clash(path, info.filename, "write the file again")
        if not 0 <= info.header_offset < size:
            got = f"byte {info.header_offset}"
            raise corrupt("it starts outside of the file", place, expected=f"a byte below {size}", got=got)
        if info.flag_bits & 1:
            raise unsupported("it is encrypted", place, fix="write the file without a password")
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise unsupported(
                "the compression method is unknown",
                place,
                expected="0 or 8, which NumPy writes",
                got=str(info.compress_type),
                fix="write the file with numpy.savez",
            )
        deflated = info.compress_type == zipfile.ZIP_DEFLATED
        possible = info.compress_size * _DEFLATE_RATIO + _DEFLATE_RATIO if deflated else info.compress_size
        if (
            info.compress_size > size
            or info.file_size > possible
            or (not deflated and info.file_size != info.compress_size)
        ):
            raise corrupt(
                "its size is not possible",
                place,
                expected=f"{info.file_size} bytes",
                got=f"{info.compress_size} bytes in the archive",
            )
        result[info.filename] = Member(path, info.header_offset, info.compress_size, info.file_size, info.CRC, deflated)
    return result


def member_names(path: Path) -> set[str]:
    """Return the names in a zip archive; none where the file is not one."""
    if not head(path).startswith((ZIP, _EMPTY_ZIP)):
        return set()
    try:
        with open_regular(path) as file, zipfile.ZipFile(file) as archive:
            return set(archive.namelist())
    except _ZIP_ERRORS:
        return set()


class _Npz(Source):
    """An open archive: the directory and the header of each array have been read."""

    def __init__(self, path: Path) -> None:
        self.path, self.watched = path, stamps([path])
        arrays: dict[str, tuple[Member, Header]] = {}
        for filename, member in members(path).items():
            key = filename.removesuffix(".npy")
            if key in arrays:
                raise name_clash(path, key, "write the file again")
            try:
                arrays[key] = member, _header(member)
            except CheckpointError as error:
                raise located(error, path, key) from None
            except OSError as error:
                raise unreadable(path, error, key) from None
        self.leaves = distinct_names(
            path, (Leaf(tuple(key.split("/")), header.spec) for key, (_, header) in arrays.items())
        )
        self._arrays = {name: arrays["/".join(leaf.keys)] for name, leaf in self.leaves.items()}
        deflated = any(member.deflated for member, _ in arrays.values())
        self.format = "NumPy .npz, compressed" if deflated else "NumPy .npz"

    def read(self, name: str) -> np.ndarray:
        header = self._arrays[name][1]
        raw = empty_bytes(header.spec, self.path, name)
        self._filler(name)(raw.data)
        return as_array(raw, StoredArray(self.path, (), header.spec, header.fortran, header.swapped))

    def pieces(self, name: str, chunk: Box, meter: Meter | None = None) -> Iterator[Piece]:
        header = self._arrays[name][1]
        if header.fortran:
            yield from super().pieces(name, chunk, meter)
            return
        dtype = numpy_dtype(header.spec.dtype)
        parts = pieces(self._filler(name), header.spec.shape, chunk, dtype, swapped=header.swapped)
        yield from timed(parts, meter, "decode")

    def _filler(self, name: str) -> Callable[[memoryview], None]:
        """Return a function that fills a buffer with the next bytes of an array. The last call compares the checksum."""
        member, header = self._arrays[name]
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
                raise located(error, self.path, name) from None
            except OSError as error:
                raise unreadable(self.path, error, name) from None

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
        raise unsupported(
            "its elements are single bytes of a dtype that the file does not name (float8 or int4)",
            fix="save it with safetensors.flax.save_file where the checkpoint is written",
        )
    if (nbytes := member.size - file.tell()) != header.spec.nbytes:
        expected = f"{header.spec.nbytes} bytes for {header.spec}"
        raise corrupt("the size of the array is wrong", expected=expected, got=f"{nbytes} bytes")
    return header


def _find(path: Path) -> list[Path]:
    return files_in(path, (".npz",), is_npz)


def is_npz(path: Path) -> bool:
    """Whether the file is a zip archive of arrays, or an empty or damaged archive with the suffix ``.npz``."""
    if not head(path).startswith((ZIP, _EMPTY_ZIP)):
        return False
    names = member_names(path)
    return path.suffix == ".npz" if not names else any(name.endswith(".npy") for name in names)


def _open(path: Path, options: Options) -> Source:
    return _Npz(path)


FORMAT = Format("NumPy .npz", "an .npz file of numpy.savez, such as big_vision's", _find, _open)
