"""The files of an output in an object store: written to the parts of multipart uploads, which end together.

A file is mapped as on a disk, over a scratch file without a name. A part is sent when all its tensors are complete, and its space
is given back: the machine holds the tensors that are being filled, not the model.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import gettempdir

from convert.core.errors import OutputError
from convert.core.findings import Finding
from convert.core.system import signals
from convert.core.system.regular_file import close
from convert.stores import StorePath
from convert.stores.errors import StoreError
from convert.stores.upload import Uploads, check_destination, scratch
from convert.writing import atomic
from convert.writing.file_layout import INDEX, SINGLE_FILE


@dataclass
class _Parts:
    """The parts of one file.

    Attributes:
        size: bytes of each but the last.
        left: bytes of each that are not complete.
        fd: of the scratch file.
        sent: those that are sent or on their way, by number from 1.
    """

    size: int
    left: list[int]
    fd: int
    sent: dict[int, Future[str]] = field(default_factory=dict)


class StoreOutput:
    """Where `Writer` writes a URL. Attributes and methods are those of `LocalOutput`."""

    adopted = False

    def __init__(self, out: StorePath, *, directory: bool, overwrite: bool, of_killed: Collection[str] = ()) -> None:
        """Check that `out` may be written. Nothing is sent yet.

        Args:
            of_killed: names of files of which a killed run may have left objects and uploads, to be removed.

        Raises:
            OutputError: as `refuse_existing`, or the store refused.
        """
        self.out, self.directory, self.overwrite, self._of_killed = out, directory, overwrite, of_killed
        refuse_existing(out, overwrite, directory, of_killed)
        with atomic.os_errors(out):
            self._uploads: Uploads | None = Uploads(out)
            self._uploads.abort_others(self._path(name) for name in of_killed)
        self._parts: dict[str, _Parts] = {}
        self._extra: dict[str, bytes] = {}
        self._lock = threading.Lock()
        signals.add_cleanup(self._abort)

    @property
    def folder(self) -> Path:
        """Where free space is needed: for the scratch files."""
        return Path(gettempdir())

    @property
    def journal(self) -> Path:
        """A run into a store leaves nothing that another one could continue."""
        raise NotImplementedError

    def _path(self, file: str) -> StorePath:
        return self.out / file if self.directory else self.out

    def create(self, file: str, size: int, start: int) -> int:
        """Begin the upload of a file of `size` bytes; return the descriptor of its scratch file. Space is reserved later.

        Args:
            start: where the first tensor starts. The bytes before it are complete at the end.

        Raises:
            OSError: the store or the system refused.
        """
        assert self._uploads is not None
        part = self._uploads.part_size(size)
        self._uploads.start(self._path(file))
        fd = scratch(size)
        own = os.dup(fd)  # a thread may still use it when the caller has closed its own
        self._parts[file] = _Parts(part, [min(part, size - begin) for begin in range(0, size, part)], own)
        return fd

    def reserve(self, fd: int, start: int, size: int) -> None:
        """Reserve space for a range, so that a full disk is an error and not a signal.

        Raises:
            OSError: there is not enough.
        """
        atomic.allocate(fd, start, size)

    def add(self, files: Mapping[str, bytes]) -> None:
        """Keep further files until the end."""
        self._extra |= files

    def filled(self, file: str, fd: int, data: mmap.mmap, start: int, stop: int) -> None:
        """Send the parts that are complete with this range.

        Raises:
            OSError: the store refused.
        """
        parts = self._parts[file]
        complete = []
        with self._lock:
            for index in range(start // parts.size, -(-stop // parts.size)):
                begin = index * parts.size
                parts.left[index] -= min(stop, begin + parts.size) - max(start, begin)
                if not parts.left[index]:
                    complete.append(index)
        for index in complete:
            self._send(file, data, index)

    def _send(self, file: str, data: mmap.mmap, index: int) -> None:
        assert self._uploads is not None
        parts = self._parts[file]
        begin = index * parts.size
        stop = min(begin + parts.size, len(data))

        def give_back() -> None:
            if index + 1 < len(parts.left):  # the last one may end within a page
                _give_back(parts.fd, data, begin, stop - begin)

        sent = self._uploads.send(self._path(file), index + 1, memoryview(data)[begin:stop], give_back)
        parts.sent[index + 1] = sent

    def finish(self, file: str, fd: int, data: mmap.mmap) -> None:
        """Send what is left of a file that is complete, and wait for its parts.

        Raises:
            OSError: the store refused.
        """
        parts = self._parts[file]
        for index in range(len(parts.left)):
            if index + 1 not in parts.sent:
                self._send(file, data, index)
        for future in parts.sent.values():
            future.result()

    def publish(self, ours: Callable[[str], bool]) -> None:
        """Let all objects appear: of a directory the index last, or the only file. An overwritten model is removed first.

        Raises:
            OutputError: another program created `out` meanwhile, or the store refused.
        """
        self.out.bucket.forget()
        if not self.overwrite:
            try:
                refuse_existing(self.out, False, self.directory, self._of_killed)
            except OutputError:
                raise atomic.appeared(self.out) from None
        uploads = self._uploads
        assert uploads is not None
        with signals.uninterrupted(), atomic.os_errors(self.out):
            if self.directory and self.out.is_dir():
                for old in list(self.out.iterdir()):
                    if ours(old.name) and old.is_file():
                        uploads.remove(old)
            index = [name for name in self._extra if name.endswith(".index.json")]
            for name in self._extra:
                if name not in index:
                    uploads.put(self.out / name, self._extra[name])
            for file, parts in self._parts.items():
                uploads.complete(self._path(file), [(number, sent.result()) for number, sent in sorted(parts.sent.items())])  # fmt: skip
            for name in index:
                uploads.put(self.out / name, self._extra[name])
            uploads.finished()
            self._uploads = None
            self._abort()
        self.out.bucket.forget()

    def discard(self, *, keep: bool = False) -> None:
        """Remove what was sent. Does nothing after `publish`.

        Raises:
            OutputError: something could not be removed.
        """
        if left := self._abort():
            problem = f"parts of {', '.join(left)} could not be removed from the store"
            fix = "abort the multipart uploads of these keys, or let a rule of the bucket do it (AbortIncompleteMultipartUpload)"
            raise OutputError(Finding("output-incomplete", problem, path=str(self.out), fix=fix))

    def _abort(self) -> list[str]:
        uploads, self._uploads = self._uploads, None
        signals.remove_cleanup(self._abort)
        left = uploads.abort() if uploads is not None else []
        while self._parts:
            close(self._parts.popitem()[1].fd)
        return left


def refuse_existing(out: StorePath, overwrite: bool, directory: bool, of_killed: Collection[str] = ()) -> None:
    """Check that a URL may be written; arguments as `atomic.refuse_existing` and `StoreOutput`.

    Raises:
        OutputError: it exists, is of another kind, or the store cannot be written or asked.
    """

    def refuse(code: str, problem: str, fix: str) -> OutputError:
        return OutputError(Finding(code, problem, path=str(out), fix=fix))

    with atomic.os_errors(out):
        check_destination(out)
        is_file = out.is_file()
        names = {path.name for path in out.iterdir()} if out.is_dir() else set()
    if is_file and directory:
        raise refuse("output-kind", "is an object", "give another name, or a name ending in .safetensors for one file")
    if names and not directory:
        raise refuse("output-kind", "has objects below it", "give another name for the file")
    unfinished = not is_file and not {INDEX, SINGLE_FILE} & names and names <= set(of_killed)
    if (is_file or names) and not (overwrite or unfinished):
        raise refuse("output-exists", "exists and is kept", "replace it with --overwrite, or give another name")


def require_writable(out: StorePath, overwrite: bool, of_killed: Collection[str] = ()) -> None:
    """Check that an output could be written: begin an upload, and abort it.

    Raises:
        OutputError: as `refuse_existing`, or the store refused.
    """
    directory = out.suffix != ".safetensors"
    refuse_existing(out, overwrite, directory, of_killed)
    with atomic.os_errors(out):
        uploads = Uploads(out)
        try:
            uploads.start(out / SINGLE_FILE if directory else out)
        finally:
            left = uploads.abort()
        if left:
            raise StoreError(
                "an upload cannot be aborted",
                str(out),
                "allow s3:AbortMultipartUpload, or storage.multipartUploads.abort",
            )


_PUNCH_HOLE = 0x01 | 0x02  # linux/falloc.h: FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE


def _give_back(fd: int, data: mmap.mmap, start: int, size: int) -> None:
    """Give the memory and the disk space of a range back; where the system cannot, it stays until the end."""
    with suppress(OSError, ValueError, AttributeError):
        data.madvise(mmap.MADV_DONTNEED, start, size)
        punch = ctypes.CDLL(None).fallocate
        punch(fd, ctypes.c_int(_PUNCH_HOLE), ctypes.c_int64(start), ctypes.c_int64(size))
