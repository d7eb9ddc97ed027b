"""The files of an output on this machine: mapped, of full size from the start, and renamed at the end (`atomic`)."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from convert.core.system import file_calls
from convert.core.system.regular_file import close
from convert.writing import digests
from convert.writing.destination import permitted
from convert.writing.destination.atomic import AtomicOutput
from convert.writing.destination.journal import FileLines, Journal

_PAGE = mmap.ALLOCATIONGRANULARITY
# Smallest tensor, in bytes, for which a system call pays: to release its pages, and to start writing them out early.
_MIN_RELEASE, _MIN_WRITE_BACK = 1 << 15, 1 << 20


class LocalOutput(AtomicOutput):
    """Where `Writer` writes a path of this machine."""

    @property
    def folder(self) -> Path:
        """Where free space is needed."""
        return self.out.parent

    def start_journal(self, identity: Mapping[str, str], out: Path) -> Journal:
        """Open the journal beside the temporary; arguments and errors of `Journal.start`."""
        return Journal.start(FileLines(self.journal, self.adopted), identity, out=out)

    def kept(self, file: str, data: mmap.mmap, start: int, stop: int, digest: str) -> bool:
        """Whether an earlier run wrote the bytes of this range, and they are there."""
        with memoryview(data) as view, view[start:stop] as values:
            return digests.digest(values) == digest

    def create(self, file: str, size: int, start: int) -> int:
        """Return the descriptor of a file of `size` bytes, all reserved on the disk. What an earlier run wrote stays.

        Raises:
            OSError: the system refused.
        """
        path = self.path / file if self.directory else self.path
        create = os.O_CREAT if self.adopted else os.O_CREAT | os.O_EXCL
        fd = os.open(path, os.O_RDWR | (create if self.directory else 0), 0o666)
        try:
            os.ftruncate(fd, min(os.fstat(fd).st_size, size))  # of an earlier run
            file_calls.allocate(fd, 0, size)
        except BaseException:
            close(fd)
            raise
        return fd

    def reserve(self, fd: int, start: int, size: int) -> None:
        """Reserve space before a range is filled: `create` has done so."""

    def add(self, files: Mapping[str, bytes]) -> None:
        """Write further files.

        Raises:
            OSError: the system refused.
        """
        for name, content in files.items():
            with (self.path / name).open("wb") as opened:
                opened.write(content)
                opened.flush()
                os.fsync(opened.fileno())

    @property
    def place(self) -> Path:
        """The temporary, whose files other processes can fill (`LocalPart`)."""
        return self.path

    def take(self, file: str, notes: Sequence[Sequence[Any]]) -> None:
        """Take over a file that another process has filled: it is there."""

    def filled(self, file: str, fd: int, data: mmap.mmap, start: int, stop: int) -> None:
        """Release the pages of a range that is complete, and start to write them out."""
        if stop - start < _MIN_RELEASE:
            return
        begin = start // _PAGE * _PAGE
        size = min(-(-stop // _PAGE) * _PAGE, len(data)) - begin
        if hasattr(mmap, "MADV_DONTNEED"):
            data.madvise(mmap.MADV_DONTNEED, begin, size)
        if size >= _MIN_WRITE_BACK:
            file_calls.write_back(fd, begin, size)

    def finish(self, file: str, fd: int, data: mmap.mmap) -> None:
        """Sync a complete file to the disk.

        Raises:
            OSError: the system refused.
        """
        data.flush()
        os.fsync(fd)

    def publish(self, ours: Callable[[str], bool]) -> None:
        """Sync the directory, and rename it; see `AtomicOutput.publish`."""
        if self.directory:
            with permitted.os_errors(self.out):
                file_calls.sync_directory(self.path)
        super().publish(ours)


class LocalPart(LocalOutput):
    """One file of a temporary that another process keeps: that one creates it, and publishes or removes it.

    Attributes:
        notes: what `take` must know: nothing.
    """

    def __init__(self, out: Path, temporary: Path, directory: bool) -> None:
        """Refer to the temporary.

        Args:
            out: the output, for messages.
        """
        self.out, self.path, self.directory, self.adopted, self._fd = out, temporary, directory, True, -1
        self.notes: list[list[Any]] = []

    def create(self, file: str, size: int, start: int) -> int:
        """Return the descriptor of the file, which exists and has `size` bytes.

        Raises:
            OSError: it does not, or has another size.
        """
        path = self.path / file if self.directory else self.path
        fd = os.open(path, os.O_RDWR)
        if os.fstat(fd).st_size != size:
            close(fd)
            raise OSError(errno.ESTALE, f"{path} has another size than the file that was created")
        return fd
