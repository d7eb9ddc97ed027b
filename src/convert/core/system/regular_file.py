"""Open regular files only. A FIFO would wait for a writer, and a device such as ``/dev/zero`` has no end.

A path of another place, such as an object store, opens its file itself (`ObjectPath`); everything that reads goes through here.
An error of close(2) is ignored: it says nothing about what was read, and nothing new about what was synced.
"""

from __future__ import annotations

import errno
import io
import mmap
import os
import stat
from contextlib import suppress
from pathlib import Path, PosixPath
from typing import Any, BinaryIO, Protocol, cast, overload

_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC


class Content(Protocol):
    """The bytes of a file as a sequence, of which only those that are asked for are read. A map of a local file is one."""

    def __len__(self) -> int: ...
    @overload
    def __getitem__(self, at: int, /) -> int: ...
    @overload
    def __getitem__(self, at: slice, /) -> bytes: ...
    def close(self) -> None: ...


class ObjectPath(PosixPath):
    """A path whose file is not of this machine. The methods of `Path` that read are overridden; no system call takes it."""

    def unbuffered(self, stop: int | None = None) -> io.RawIOBase:
        """Open the file for reading; arguments and errors of `open_unbuffered`."""
        raise NotImplementedError

    def mapped(self) -> Content:
        """Return the bytes of the file; errors of `map_regular`."""
        raise NotImplementedError

    def kvstore(self) -> dict[str, Any]:
        """Return the TensorStore spec of the directory."""
        raise NotImplementedError


def not_regular(mode: int) -> OSError | None:
    """Return the error for a file of this mode that is neither regular nor a directory."""
    if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
        return None
    return OSError(errno.EINVAL, f"it is {_KINDS.get(stat.S_IFMT(mode), 'of another kind')}, not a regular file")


def close(descriptor: int) -> None:
    """Close a descriptor, and ignore an error of the system."""
    with suppress(OSError):
        os.close(descriptor)


class _File(io.FileIO):
    def close(self) -> None:
        with suppress(OSError):
            super().close()


def open_descriptor(path: Path | str, follow_link: bool = True) -> int:
    """Open a file for reading, as ``os.open`` does.

    Args:
        path: the file.
        follow_link: whether the last part of the path may be a link; else it is an error with the number ELOOP.

    Raises:
        OSError: it cannot be opened, or is no regular file.
    """
    descriptor = os.open(path, _READ if follow_link else _READ | os.O_NOFOLLOW)
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if (error := not_regular(mode)) is not None:
            raise error
    except BaseException:
        close(descriptor)
        raise
    return descriptor


def open_unbuffered(path: Path, stop: int | None = None) -> io.RawIOBase:
    """Open a file for reading, as ``open`` does without a buffer. Links are followed.

    Args:
        path: the file.
        stop: a byte from which on nothing will be read; an object store is then not asked for more.

    Raises:
        OSError: it cannot be opened, or is no regular file.
    """
    if isinstance(path, ObjectPath):
        return path.unbuffered(stop)
    return _File(open_descriptor(path), "rb")


def open_regular(path: Path) -> BinaryIO:
    """Open a file as `open_unbuffered` does, with a buffer.

    Raises:
        OSError: it cannot be opened, or is no regular file.
    """
    return cast("BinaryIO", io.BufferedReader(open_unbuffered(path)))


def map_regular(path: Path) -> Content:
    """Return the bytes of a file without reading them.

    Raises:
        OSError: it cannot be opened, or is no regular file.
        ValueError: it is empty.
    """
    if isinstance(path, ObjectPath):
        return path.mapped()
    descriptor = open_descriptor(path)
    try:
        return mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
    finally:
        close(descriptor)


def size_of(file: BinaryIO | io.RawIOBase) -> int:
    """Return the size of an open file in bytes."""
    at = file.tell()
    size = file.seek(0, os.SEEK_END)
    file.seek(at)
    return size


def read_regular(path: Path | str, most: int, follow_link: bool = True) -> bytes:
    """Read all of a file that should be small; `follow_link` is that of `open_descriptor`.

    Raises:
        OSError: it cannot be read, is no regular file, or has more than `most` bytes.
    """
    parts, left = [], most + 1
    if isinstance(path, ObjectPath):
        with open_unbuffered(path, left) as file:
            while left and (part := file.read(min(left, 1 << 16))):
                parts.append(part)
                left -= len(part)
    else:
        descriptor = open_descriptor(path, follow_link)
        try:
            while left and (part := os.read(descriptor, min(left, 1 << 16))):
                parts.append(part)
                left -= len(part)
        finally:
            close(descriptor)
    if not left:
        raise OSError(errno.EFBIG, f"it has more than {most} bytes")
    return b"".join(parts)
