"""Chunks of zarr arrays in plain files, decompressed piece by piece.

TensorStore holds a chunk twice: as it was decompressed, and as it was asked for. Where the chunk lies in a file as it
is, or compressed by zstd alone, which is what Orbax writes, it can be decoded from front to back in a small buffer
instead. Everything else is left to TensorStore.
"""

from __future__ import annotations

import io
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import local
from typing import Any

import zstandard

from convert.checkpoints.chunks import PIECE, WHOLE, Meter

READ = 1 << 20  # bytes read at once
_HEADER = 18  # bytes of a frame's header, at most
SMALL = 1 << 18  # bytes of a value that is read and decoded at once
_READ_ONLY = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0)


@dataclass(frozen=True)
class Encoding:
    """How the chunks of an array are stored, where they can be read here.

    Attributes:
        compressed: by zstd; else they are stored as they are.
        prefix, separator: of the keys of chunks, ``0.3`` or ``c/0/3``.
    """

    compressed: bool
    prefix: str
    separator: str

    def key(self, index: tuple[int, ...]) -> str:
        """The key of a chunk, without the array's prefix."""
        if not index:
            return self.prefix.rstrip(self.separator) or "0"
        return self.prefix + self.separator.join(map(str, index))


def encoding(metadata: Mapping[str, Any], dtype: str, version: int) -> Encoding | None:
    """What zarr metadata of version 2 or 3 says; None where TensorStore has to read it."""
    if dtype in PADDED:
        return None
    return _version_2(metadata) if version == 2 else _version_3(metadata)


PADDED = ("int4", "uint4", "int2", "uint2")  # one byte each, whose upper bits are the writer's choice


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
    said = keys.get("configuration")
    separator = said.get("separator") if isinstance(said, dict) else None
    separator = separator or ("/" if default else ".")
    if separator not in (".", "/"):
        return None
    return Encoding(len(names) == 2, f"c{separator}" if default else "", separator)


@dataclass(frozen=True, slots=True)
class Stored:
    """Where a value lies.

    Attributes:
        file: the file.
        start, stop: its bytes in the file.
    """

    file: Path
    start: int
    stop: int


class _Range:
    """The bytes of a value in an open file, from front to back."""

    def __init__(self, file: int, start: int, stop: int, meter: Meter | None) -> None:
        self._file, self._at, self._stop, self._meter = file, start, stop, meter

    def read(self, size: int = -1) -> bytes:
        """The next bytes; none at the end, or where the file has become shorter."""
        started = time.perf_counter()
        left = self._stop - self._at
        got = os.pread(self._file, min(size, left) if size >= 0 else left, self._at)
        self._done(len(got), started)
        return got

    def readinto(self, buffer: memoryview) -> int:
        """Puts the next bytes into `buffer`; their number, 0 at the end."""
        started = time.perf_counter()
        got = os.preadv(self._file, [buffer[: self._stop - self._at]], self._at)
        self._done(got, started)
        return got

    def _done(self, got: int, started: float) -> None:
        self._at += got
        if self._meter is not None:
            took = time.perf_counter() - started
            self._meter.add("read", took)
            self._meter.add("decode", -took)  # within which it was asked for


class _OfThread(local):
    """What decompresses, kept: to make it anew takes as long as a small value."""

    def __init__(self) -> None:
        self.zstd = zstandard.ZstdDecompressor()


_of_thread = _OfThread()


def decoded(stored: Stored | bytes, compressed: bool, nbytes: int, meter: Meter | None = None) -> bytes | None:
    """All of a small value at once, for which `decoding` takes several times as long.

    Returns:
        its bytes; None where they are not `nbytes`, from 1 to `SMALL`, of one frame: `decoding` reads them then, or says what is wrong.

    Raises:
        OSError: the file cannot be read.
    """
    if not 0 < nbytes <= SMALL:
        return None
    started = time.perf_counter()
    if isinstance(stored, bytes):
        raw = stored
    elif stored.stop - stored.start > 2 * SMALL:  # damaged, or of many frames
        return None
    else:
        file = os.open(stored.file, _READ_ONLY)
        try:
            raw = _Range(file, stored.start, stored.stop, meter).read()
        finally:
            os.close(file)
    made: bytes | None = raw
    if compressed:
        try:  # the size first: what a damaged frame asks for would be reserved
            fits = zstandard.frame_content_size(raw) == nbytes
            made = _of_thread.zstd.decompress(raw, allow_extra_data=False) if fits else None
        except zstandard.ZstdError:
            made = None
    if meter is not None:
        meter.add("decode", time.perf_counter() - started)
    return made if made is not None and len(made) == nbytes else None


def _window(head: bytes) -> int:
    """Bytes of what was decoded that a decoder of the frame with this header keeps; 0 where that is none."""
    try:
        return int(zstandard.get_frame_parameters(head).window_size)
    except zstandard.ZstdError:
        return 0


@contextmanager
def decoding(
    stored: Stored | bytes, compressed: bool, meter: Meter | None = None
) -> Iterator[Callable[[memoryview], None]]:
    """A function that fills a buffer with the next decoded bytes of a value, which must be used up in the end.

    Args:
        stored: where the value lies, or the value.
        compressed: by zstd.
        meter: gets the seconds of ``read``; the caller counts all of it as ``decode``, from which they are taken.

    Raises:
        OSError: the file cannot be read.
        ValueError: the value is corrupt, or shorter or longer than what was asked for.
    """
    with ExitStack() as stack:
        if isinstance(stored, bytes):
            raw: Any = io.BytesIO(stored)
        else:
            file = os.open(stored.file, _READ_ONLY)
            stack.callback(os.close, file)
            raw = _Range(file, stored.start, stored.stop, meter)
        if compressed:
            head = stored[:_HEADER] if isinstance(stored, bytes) else os.pread(file, _HEADER, stored.start)
            if (window := _window(head)) > PIECE:
                stack.enter_context(WHOLE.holding(window))
        # Across frames, so that what follows the first one is not overlooked.
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
                    raise ValueError(f"it ends after {done + at} bytes, where more are due")
                at += got
            done += at

        yield fill
        try:
            more = stream.read(1)
        except zstandard.ZstdError as error:
            raise ValueError(f"zstd, after {done} bytes: {error}") from None
        if more:
            raise ValueError(f"it goes on after the {done} bytes of its chunk")
