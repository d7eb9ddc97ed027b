"""Calls of the file system with a way out where a file system or another system than Linux lacks them."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
from contextlib import suppress
from pathlib import Path

from convert.core.system.regular_file import close

UNSUPPORTED = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)
_ZEROS = 8 << 20  # bytes written at once where the file system cannot reserve space
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # linux/fcntl.h, linux/fs.h
_SYNC_FILE_RANGE_WRITE = 2  # linux/fs.h


def allocate(fd: int, start: int, size: int) -> None:
    """Reserve `size` bytes of the file from `start` on the disk, and extend it where it is shorter.

    A full disk is then an OSError here, not a SIGBUS when the mapped file is written.
    """
    try:
        os.posix_fallocate(fd, start, size)
    except AttributeError:  # macOS
        pass
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
    else:
        return
    at, stop = start, start + size
    while at < stop:
        at += os.pwrite(fd, bytes(min(_ZEROS, stop - at)), at)


def write_back(fd: int, start: int, size: int) -> None:
    """Start to write a range of a file to the disk, without waiting (Linux, sync_file_range(2); a no-op elsewhere).

    It is only a hint: an error shows when the file is synced.
    """
    begin = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if begin is not None:
        begin(fd, ctypes.c_int64(start), ctypes.c_int64(size), ctypes.c_uint(_SYNC_FILE_RANGE_WRITE))


def sync_directory(path: Path) -> None:
    """Sync a directory, so that its names survive a power cut."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        close(fd)


def is_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.lstat())
    except FileNotFoundError:
        return False


def remove(path: Path) -> None:
    """Remove a file or a directory as far as possible, without an error."""
    try:
        path.unlink(missing_ok=True)
    except OSError:
        with suppress(OSError):  # rmtree does not ignore all errors
            shutil.rmtree(path, ignore_errors=True)


def link(source: str | Path, target: str | Path) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, target, follow_symlinks=False)


def exchange(a: Path, b: Path) -> bool:
    """Exchange two names in one step. Return False where the system or the file system cannot."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    if renameat2(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in UNSUPPORTED:
        return False
    raise OSError(code, os.strerror(code), str(b))
