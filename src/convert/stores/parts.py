"""The parts of one object that is being written, over its scratch file, and what the journal of an earlier run says of them."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Parts:
    """The parts of one file.

    Attributes:
        total: bytes of the file.
        size: bytes of each but the last.
        left: bytes of each that are not complete.
        fd: of the scratch file.
        start: where the first tensor starts, in the part that is sent last.
        sent: those that are sent or on their way, by number from 1.
        head: whether the tensors of the part that is sent last are kept beside the output.
        appeared: whether an earlier run let the object appear.
    """

    total: int
    size: int
    left: list[int]
    fd: int
    start: int
    sent: dict[int, Future[str]] = field(default_factory=dict)
    head: bool = False
    appeared: bool = False

    @property
    def last(self) -> int:
        """Index of the part that is sent last: the digests of all tensors stand in the header before it."""
        return min(self.start // self.size, len(self.left) - 1)

    @property
    def tensors(self) -> tuple[int, int]:
        """The range of the tensors in the part that is sent last."""
        return self.start, min((self.last + 1) * self.size, self.total)


@dataclass
class Known:
    """What the journal of an earlier run says of a file: its upload, the ETags of parts by number, the digest of its head, the ETag of its object."""

    upload: str = ""
    parts: dict[int, str] = field(default_factory=dict)
    head: str = ""
    appeared: str = ""


def known_files(notes: Iterable[Sequence[Any]]) -> dict[str, Known]:
    """Return what a journal says of each file."""
    known: dict[str, Known] = {}
    for note in notes:
        match note:
            case ["upload", file, upload]:
                known[file] = Known(upload, head=known.get(file, Known()).head)
            case ["part", file, number, etag]:
                known.setdefault(file, Known()).parts[number] = etag
            case ["head", file, digest]:
                known.setdefault(file, Known()).head = digest
            case ["appeared", file, etag]:
                known.setdefault(file, Known()).appeared = etag
    return known


def done(etag: str) -> Future[str]:
    future: Future[str] = Future()
    future.set_result(etag)
    return future


_PUNCH_HOLE = 0x01 | 0x02  # linux/falloc.h: FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE


def give_back(fd: int, data: mmap.mmap, start: int, size: int) -> None:
    """Give the memory and the disk space of a range back; where the system cannot, it stays until the end."""
    with suppress(OSError, ValueError, AttributeError):
        data.madvise(mmap.MADV_DONTNEED, start, size)
        punch = ctypes.CDLL(None).fallocate
        punch(fd, ctypes.c_int(_PUNCH_HOLE), ctypes.c_int64(start), ctypes.c_int64(size))
