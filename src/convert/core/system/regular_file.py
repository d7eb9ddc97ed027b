"""Open regular files only. A FIFO would wait for a writer, and a device such as ``/dev/zero`` has no end."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def open_regular(path: Path, buffering: int = -1) -> BinaryIO:
    """Open a file for reading, as ``open`` does. Links are followed.

    Raises:
        OSError: it cannot be opened, or is no regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, f"it is {_KINDS.get(stat.S_IFMT(mode), 'of another kind')}, not a regular file")
        return os.fdopen(descriptor, "rb", buffering=buffering)
    except BaseException:
        os.close(descriptor)
        raise


def read_regular(path: Path, most: int) -> bytes:
    """Read all of a file that should be small.

    Raises:
        OSError: it cannot be read, is no regular file, or has more than `most` bytes.
    """
    with open_regular(path) as file:
        parts, left = [], most + 1
        while left and (part := file.read(left)):
            parts.append(part)
            left -= len(part)
    if not left:
        raise OSError(errno.EFBIG, f"it has more than {most} bytes")
    return b"".join(parts)
