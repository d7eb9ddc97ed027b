"""Decodes the chunks of zarr arrays in plain files, piece by piece.

TensorStore keeps a chunk in memory twice: decompressed, and as the requested array. Orbax writes chunks uncompressed or
compressed by zstd alone. Such a chunk can be decoded from front to back in a small buffer. TensorStore reads all others.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import local
from typing import Any

import zstandard

from convert.checkpoints.chunks import AT_ONCE_BUDGET, PIECE, Meter
from convert.core.system.regular_file import open_unbuffered

READ = 1 << 20  # bytes per read
_HEADER = 18  # most bytes of a frame's header
SMALL = 1 << 18  # most bytes of a value that is decoded in one call


@dataclass(frozen=True)
class Encoding:
    """How the chunks of an array are stored, where this module can read them.

    Attributes:
        compressed: whether zstd compressed them.
        prefix, separator: of the keys of chunks, ``0.3`` or ``c/0/3``.
    """

    compressed: bool
    prefix: str
    separator: str

    def key(self, index: tuple[int, ...]) -> str:
        """Return the key of a chunk, without the prefix of the array."""
        if not index:
            return self.prefix.rstrip(self.separator) or "0"
        return self.prefix + self.separator.join(map(str, index))


def encoding(metadata: Mapping[str, Any], dtype: str, version: int) -> Encoding | None:
    """Read the encoding in zarr metadata of version 2 or 3; None where only TensorStore can read the chunks."""
    if dtype in PADDED:
        return None
    return _version_2(metadata) if version == 2 else _version_3(metadata)


PADDED = ("int4", "uint4", "int2", "uint2")  # one byte each; the upper bits are unspecified


def _version_2(metadata: Mapping[str, Any]) -> Encoding | None:
    compressor = metadata.get("compressor")
    zstd = isinstance(compressor, dict) and compressor.get("id") == "zstd"
    if metadata.get("order") != "C" or metadata.get("filters") or (compressor is not None and not zstd):
        return None
    separator = metadata.get("dimension_separator", ".")
    return Encoding(zstd, "", separator) if separator in (".", "/") else None


def _version_3(metadata: Mapping[str, Any]) -> Encoding | None:
    codecs = metadata.get("codecs")
    if not isinstance(codecs, list) or not all(isinstance(codec, dict) for codec in codecs):
        return None
    names = [codec.get("name") for codec in codecs]
    if names not in (["bytes"], ["bytes", "zstd"]) or metadata.get("storage_transformers"):
        return None
    order = codecs[0].get("configuration")
    if isinstance(order, dict) and order.get("endian", "little") != "little":
        return None
    keys = metadata.get("chunk_key_encoding")
    if not isinstance(keys, dict) or keys.get("name") not in ("default", "v2"):
        return None
    default = keys["name"] == "default"
    configuration = keys.get("configuration")
    separator = configuration.get("separator") if isinstance(configuration, dict) else None
    separator = separator or ("/" if default else ".")
    if separator not in (".", "/"):
        return None
    return Encoding(len(names) == 2, f"c{separator}" if default else "", separator)


@dataclass(frozen=True, slots=True)
class FileRange:
    """A range of bytes in a file, which holds a value.

    Attributes:
        file: the file.
        start, stop: the range.
    """

    file: Path
    start: int
    stop: int


class _Range:
    """The bytes of a value in an open file, from front to back."""

    def __init__(self, file: io.RawIOBase, stored: FileRange, meter: Meter | None) -> None:
        self._file, self._at, self._stop, self._meter = file, file.seek(stored.start), stored.stop, meter

    def read(self, size: int = -1) -> bytes:
        """Return the next bytes; none at the end, or where the file has become shorter."""
        started = time.perf_counter()
        left = self._stop - self._at
        got = self._file.read(min(size, left) if size >= 0 else left) or b""
        self._done(len(got), started)
        return got

    def readinto(self, buffer: memoryview) -> int:
        """Read the next bytes into `buffer`; return their number, 0 at the end."""
        started = time.perf_counter()
        got = self._file.readinto(buffer[: self._stop - self._at]) or 0
        self._done(got, started)
        return got

    def _done(self, got: int, started: float) -> None:
        self._at += got
        if self._meter is not None:
            took = time.perf_counter() - started
            self._meter.add("read", took)
            self._meter.add("decode", -took)  # the caller counts this time as decoding


class _ThreadDecompressor(local):
    """One decompressor per thread. Creating one takes as long as decoding a small value."""

    def __init__(self) -> None:
        self.zstd = zstandard.ZstdDecompressor()


_decompressor = _ThreadDecompressor()


def decoded(stored: FileRange | bytes, compressed: bool, nbytes: int, meter: Meter | None = None) -> bytes | None:
    """Decode a small value in one call, several times faster than `decoding`.

    Returns:
        its bytes; None where it is not one frame of `nbytes` from 1 to `SMALL`. Then `decoding` reads it or reports the damage.

    Raises:
        OSError: the file cannot be read.
    """
    if not 0 < nbytes <= SMALL:
        return None
    started = time.perf_counter()
    if isinstance(stored, bytes):
        raw = stored
    elif stored.stop - stored.start > 2 * SMALL:  # damaged, or several frames
        return None
    else:
        with open_unbuffered(stored.file, stored.stop) as file:
            raw = _Range(file, stored, meter).read()
    made: bytes | None = raw
    if compressed:
        try:  # check the size first: zstd allocates what a damaged frame claims
            fits = zstandard.frame_content_size(raw) == nbytes
            made = _decompressor.zstd.decompress(raw, allow_extra_data=False) if fits else None
        except zstandard.ZstdError:
            made = None
    if meter is not None:
        meter.add("decode", time.perf_counter() - started)
    return made if made is not None and len(made) == nbytes else None


def _window(head: bytes) -> int:
    """Return the window size of the frame with this header: the decoded bytes that a decoder keeps; 0 if unknown."""
    try:
        return int(zstandard.get_frame_parameters(head).window_size)
    except zstandard.ZstdError:
        return 0


@contextmanager
def decoding(
    stored: FileRange | bytes, compressed: bool, meter: Meter | None = None
) -> Iterator[Callable[[memoryview], None]]:
    """Give a function that fills a buffer with the next decoded bytes of a value. The caller must read the value to its end.

    Args:
        stored: the place of the value, or the value.
        compressed: whether zstd compressed it.
        meter: gets the seconds of ``read``. The caller counts all time as ``decode``; the seconds are subtracted there.

    Raises:
        OSError: the file cannot be read.
        ValueError: the value is corrupt, or shorter or longer than requested.
    """
    with ExitStack() as stack:
        if isinstance(stored, bytes):
            raw: Any = io.BytesIO(stored)
        else:
            file = stack.enter_context(open_unbuffered(stored.file, stored.stop))
            file.seek(stored.start)
            head = file.read(_HEADER) if compressed else b""
            raw = _Range(file, stored, meter)
        if compressed:
            head = stored[:_HEADER] if isinstance(stored, bytes) else head
            if (window := _window(head)) > PIECE:
                stack.enter_context(AT_ONCE_BUDGET.reserve(window))
        # Read across frames, so that bytes after the first frame are detected.
        stream = zstandard.ZstdDecompressor().stream_reader(raw, READ, read_across_frames=True) if compressed else raw
        done = 0

        def fill(buffer: memoryview) -> None:
            nonlocal done
            at = 0
            while at < len(buffer):
                try:
                    got = stream.readinto(buffer[at:])
                except zstandard.ZstdError as error:
                    raise ValueError(f"zstd, after {done + at} bytes: {error}") from None
                if not got:
                    raise ValueError(f"the chunk is truncated after {done + at} bytes")
                at += got
            done += at

        yield fill
        try:
            more = stream.read(1)
        except zstandard.ZstdError as error:
            raise ValueError(f"zstd, after {done} bytes: {error}") from None
        if more:
            raise ValueError(f"the chunk has more than the expected {done} bytes")
