"""The files of an output in an object store: written to the parts of multipart uploads, which end together.

A file is mapped as on a disk, over a scratch file without a name. A part is sent when all its tensors are complete, and its space
is given back: the machine holds the tensors that are being filled, not the model.

With `keep`, an interrupted run leaves its uploads, and beside OUT (`stores.unfinished`) a journal that names them. The parts of an upload
cannot be read; the store lists their sizes and ETags, and those that the journal has are not sent again. The part with the header is
sent last, as the header has the digests of all tensors. Its tensors, the head, are kept in an object of their own until then.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from tempfile import gettempdir
from typing import Any

from convert.core.errors import OutputError
from convert.core.findings import Finding
from convert.core.system import file_calls, signals
from convert.core.system.regular_file import close
from convert.stores import StorePath
from convert.stores.errors import StoreError
from convert.stores.parts import Known, Parts, done, give_back, known_files
from convert.stores.unfinished import Unfinished, folder_of
from convert.stores.upload import Uploads, check_destination, scratch
from convert.writing import digests
from convert.writing.destination import permitted
from convert.writing.destination.journal import Journal
from convert.writing.file_layout import INDEX_SUFFIX, INDICES, SINGLE_FILES

_HEAD = ".head"


class StoreOutput:
    """Where `Writer` writes a URL. Attributes and methods are those of `LocalOutput`."""

    def __init__(
        self, out: StorePath, *, directory: bool, overwrite: bool, keep: bool = False, files: Collection[str] = ()
    ) -> None:
        """Check that `out` may be written. Nothing is sent yet.

        Args:
            keep: whether to continue what an earlier run left, and to leave it when this one is interrupted.
            files: names of all files of a directory.

        Raises:
            OutputError: as `refuse_existing`, or the store refused.
        """
        self.out, self.directory, self.overwrite = out, directory, overwrite
        self._keep, self._files = keep, tuple(files)
        refuse_existing(out, overwrite, directory, files if keep else ())
        with permitted.os_errors(out):
            self._uploads: Uploads | None = Uploads(out)
            if not keep:
                remove_unfinished(out, self._uploads)
        self._unfinished: Unfinished | None = None
        self._journal: Journal | None = None
        self._known: dict[str, Known] = {}
        self._parts: dict[str, Parts] = {}
        self._heads: list[Future[None]] = []
        self._extra: dict[str, bytes] = {}
        self._lock = threading.Lock()
        if keep:
            signals.rest = "what is done is kept; continue with --resume"
        else:
            signals.add_cleanup(self._abort)

    def start_journal(self, identity: Mapping[str, str], out: Path) -> Journal:
        """Open the journal beside the output; arguments as `Journal.start`.

        Raises:
            OutputError: the unfinished output is of another conversion. It stays as it is.
            OSError: the store refused.
        """
        assert self._uploads is not None
        unfinished = Unfinished(self.out, self._uploads)
        self._journal = Journal.start(unfinished, identity, out=out, fixed=True)
        self._unfinished, self._known = unfinished, known_files(self._journal.notes)
        self._uploads.abort_others(map(self._path, self._files), but=[each.upload for each in self._known.values()])
        return self._journal

    @property
    def folder(self) -> Path:
        """Where free space is needed: for the scratch files."""
        return Path(gettempdir())

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
        path, known, part = self._path(file), self._known.get(file, Known()), self._uploads.part_size(size)
        fd = scratch(size)
        own = os.dup(fd)  # a thread may still use it when the caller has closed its own
        left = [min(part, size - begin) for begin in range(0, size, part)]
        self._parts[file] = parts = Parts(size, part, left, own, start)
        found = path.bucket.head(path.key) if known.appeared else None
        parts.appeared = found is not None and (found.etag, found.size) == (known.appeared, size)
        if not parts.appeared:
            there = self._uploads.resume(path, known.upload) if known.upload else None
            if there is None:
                self._note("upload", file, self._uploads.start(path))
            for number, (nbytes, etag) in (there or {}).items():
                if parts.last + 1 < number <= len(left) and (nbytes, etag) == (left[number - 1], known.parts.get(number)):  # fmt: skip
                    parts.sent[number] = done(etag)
            parts.head = self._read_head(file, known.head)
        return fd

    def _read_head(self, file: str, digest: str) -> bool:
        """Take over the tensors of the part that is sent last, if they are what an earlier run wrote."""
        parts = self._parts[file]
        begin, stop = parts.tensors
        content = self._unfinished.get(file + _HEAD) if self._unfinished is not None and digest else None
        if content is None or len(content) != stop - begin or digests.digest(content) != digest:
            return False
        file_calls.allocate(parts.fd, begin, stop - begin)
        os.pwrite(parts.fd, content, begin)
        return True

    def _note(self, *line: object) -> None:
        if self._journal is not None:
            self._journal.note(*line)

    @property
    def place(self) -> Mapping[str, str]:
        """The ids of the uploads by file, with which other processes can send their parts (`StorePart`)."""
        assert self._uploads is not None
        return {file: self._uploads.id_of(self._path(file)) for file in self._parts}

    def take(self, file: str, notes: Sequence[Sequence[Any]]) -> None:
        """Take over what another process has sent of a file.

        Args:
            notes: of its `StorePart`.

        Raises:
            OutputError: something of the file was not sent.
            OSError: the store refused.
        """
        parts, sent = self._parts[file], known_files(notes).get(file, Known())
        if parts.appeared:
            return
        parts.sent = {number: done(etag) for number, etag in sent.parts.items()}
        self.out.bucket.forget()  # the head has just been written
        begin, stop = parts.tensors
        whole = parts.sent.keys() == set(range(parts.last + 2, len(parts.left) + 1))
        parts.head = begin == stop or self._read_head(file, sent.head)
        if not (whole and parts.head):
            problem = f"{file} was not sent as a whole"
            raise OutputError(Finding("cluster-failed", problem, path=str(self.out), fix="continue with --resume"))
        for note in notes:
            self._note(*note)

    def kept(self, file: str, data: mmap.mmap, start: int, stop: int, digest: str) -> bool:
        """Whether an earlier run sent the bytes of this range, and the store has them: size and ETag of their parts are those of the journal."""
        parts = self._parts[file]
        inside = range(start // parts.size, -(-stop // parts.size))
        return parts.appeared or all(index + 1 in parts.sent or (parts.head and index == parts.last) for index in inside)  # fmt: skip

    def reserve(self, fd: int, start: int, size: int) -> None:
        """Reserve space for a range, so that a full disk is an error and not a signal.

        Raises:
            OSError: there is not enough.
        """
        file_calls.allocate(fd, start, size)

    def add(self, files: Mapping[str, bytes]) -> None:
        """Keep further files until the end."""
        self._extra |= files

    def filled(self, file: str, fd: int, data: mmap.mmap, start: int, stop: int) -> None:
        """Send the parts that are complete with this range.

        Raises:
            OSError: the store refused.
        """
        parts = self._parts[file]
        if parts.appeared:
            return
        complete, head = [], False
        begin, end = parts.tensors
        with self._lock:
            for index in range(start // parts.size, -(-stop // parts.size)):
                at = index * parts.size
                parts.left[index] -= min(stop, at + parts.size) - max(start, at)
                if not parts.left[index]:
                    complete.append(index)
                elif index == parts.last and parts.left[index] == begin - at and not parts.head:
                    parts.head = head = True
        for index in complete:
            self._send(file, data, index)
        if head and self._unfinished is not None:
            self._heads.append(self._keep_head(file, memoryview(data)[begin:end]))

    def _keep_head(self, file: str, content: memoryview) -> Future[None]:
        assert self._uploads is not None and self._unfinished is not None
        unfinished = self._unfinished

        def work() -> None:
            unfinished.put(file + _HEAD, content)
            self._note("head", file, digests.digest(content))

        return self._uploads.later(work)

    def _send(self, file: str, data: mmap.mmap, index: int) -> None:
        """Send a part, unless an earlier run has; give its space back."""
        assert self._uploads is not None
        parts, number = self._parts[file], index + 1
        begin = index * parts.size
        stop = min(begin + parts.size, len(data))

        def sent(etag: str) -> None:
            if index != parts.last:  # it is sent again by each run
                self._note("part", file, number, etag)
            if number < len(parts.left):  # the last one may end within a page
                give_back(parts.fd, data, begin, stop - begin)

        if number in parts.sent:
            give_back(parts.fd, data, begin, stop - begin)
        else:
            parts.sent[number] = self._uploads.send(self._path(file), number, memoryview(data)[begin:stop], sent)

    def finish(self, file: str, fd: int, data: mmap.mmap) -> None:
        """Send what is left of a file that is complete, and wait for its parts.

        Raises:
            OSError: the store refused.
        """
        parts = self._parts[file]
        if parts.appeared:
            return
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
                refuse_existing(self.out, False, self.directory, self._files if self._keep else ())
            except OutputError:
                raise permitted.appeared(self.out) from None
        uploads = self._uploads
        assert uploads is not None
        with signals.uninterrupted(), permitted.os_errors(self.out):
            if self.directory and self.out.is_dir():
                for old in list(self.out.iterdir()):
                    if ours(old.name) and old.is_file() and not (old.name in self._parts and self._parts[old.name].appeared):  # fmt: skip
                        uploads.remove(old)
            index = [name for name in self._extra if name.endswith(INDEX_SUFFIX)]
            for name in self._extra:
                if name not in index:
                    uploads.put(self.out / name, self._extra[name])
            for file, parts in self._parts.items():
                if not parts.appeared:
                    self._note("appeared", file, uploads.complete(self._path(file), [(number, sent.result()) for number, sent in sorted(parts.sent.items())]))  # fmt: skip
                    if self._unfinished is not None:
                        self._unfinished.flush()
            for name in index:
                uploads.put(self.out / name, self._extra[name])
            self._end(Uploads.finished)
        self.out.bucket.forget()

    def discard(self, *, keep: bool = False) -> None:
        """Remove what was sent, or leave it for the next run. Does nothing after `publish`.

        Raises:
            OutputError: something could not be removed.
        """
        if left := self._end(Uploads.leave) if keep else self._abort():
            problem = f"parts of {', '.join(left)} could not be removed from the store"
            fix = "abort the multipart uploads of these keys, or let a rule of the bucket do it (AbortIncompleteMultipartUpload)"
            raise OutputError(Finding("output-incomplete", problem, path=str(self.out), fix=fix))

    def _abort(self) -> list[str]:
        return self._end(Uploads.abort)

    def _end(self, end: Callable[[Uploads], list[str]]) -> list[str]:
        """End once, and close the scratch files when no thread gives space of them back. Return the keys of what could not be removed."""
        uploads, self._uploads = self._uploads, None
        signals.remove_cleanup(self._abort)
        left = end(uploads) if uploads is not None else []
        if uploads is not None and self._unfinished is not None and end is not Uploads.leave:
            try:
                self._unfinished.remove()
            except OSError:
                left.append(self._unfinished.folder.key)
        while self._parts:
            close(self._parts.popitem()[1].fd)
        return left


class StorePart(StoreOutput):
    """One file of an output whose uploads another process has begun: that one sends the headers, and completes or aborts them.

    Attributes:
        notes: what was sent, for `StoreOutput.take`.
    """

    def __init__(self, out: StorePath, place: Mapping[str, str], directory: bool) -> None:
        """Refer to the uploads (`StoreOutput.place`)."""
        self.out, self.directory, self.overwrite, self._place = out, directory, False, place
        self._uploads = Uploads(out)
        self._unfinished = Unfinished(out, self._uploads)
        self._parts, self._heads, self._lock = {}, [], threading.Lock()
        self.notes: list[list[Any]] = []

    def create(self, file: str, size: int, start: int) -> int:
        """Return the descriptor of the scratch file."""
        assert self._uploads is not None
        part, fd = self._uploads.part_size(size), scratch(size)
        left = [min(part, size - begin) for begin in range(0, size, part)]
        self._parts[file] = Parts(size, part, left, os.dup(fd), start, appeared=not self._place[file])
        self._uploads.join(self._path(file), self._place[file])
        return fd

    def _note(self, *line: object) -> None:
        self.notes.append(list(line))

    def finish(self, file: str, fd: int, data: mmap.mmap) -> None:
        """Wait for what is on its way.

        Raises:
            OSError: the store refused.
        """
        waiting: list[Future[Any]] = [*self._parts[file].sent.values(), *self._heads]
        for future in waiting:
            future.result()

    def discard(self, *, keep: bool = False) -> None:
        """Leave what was sent to the other process."""
        self._end(Uploads.leave)


def remove_unfinished(out: StorePath, uploads: Uploads | None = None) -> None:
    """Remove what an interrupted run left for another one to continue, and which none will.

    Raises:
        StoreError: the store refused, or did not answer.
    """
    if not folder_of(out).is_dir():
        return
    own = uploads or Uploads(out)
    unfinished = Unfinished(out, own)
    lines = [line for line in unfinished.read() if isinstance(line, list)]
    for file, known in known_files(lines).items():
        own.forget(out if file == out.name else out / file, known.upload)
    unfinished.remove()
    if uploads is None:
        own.finished()


def refuse_existing(out: StorePath, overwrite: bool, directory: bool, of_killed: Collection[str] = ()) -> None:
    """Check that a URL may be written; arguments as `permitted.refuse_existing` and `StoreOutput`.

    Raises:
        OutputError: it exists, is of another kind, or the store cannot be written or asked.
    """

    def refuse(code: str, problem: str, fix: str) -> OutputError:
        return OutputError(Finding(code, problem, path=str(out), fix=fix))

    with permitted.os_errors(out):
        check_destination(out)
        is_file = out.is_file()
        names = {path.name for path in out.iterdir()} if out.is_dir() else set()
    if is_file and directory:
        raise refuse("output-kind", "is an object", "give another name, or a name ending in .safetensors for one file")
    if names and not directory:
        raise refuse("output-kind", "has objects below it", "give another name for the file")
    unfinished = not is_file and not {*INDICES, *SINGLE_FILES} & names and names <= set(of_killed)
    if (is_file or names) and not (overwrite or unfinished):
        raise refuse("output-exists", "exists and is kept", "replace it with --overwrite, or give another name")


def require_writable(out: StorePath, overwrite: bool, of_killed: Collection[str] = ()) -> None:
    """Check that an output could be written: begin an upload, and abort it.

    Raises:
        OutputError: as `refuse_existing`, or the store refused.
    """
    directory = out.suffix != ".safetensors"
    refuse_existing(out, overwrite, directory, of_killed)
    with permitted.os_errors(out):
        uploads = Uploads(out)
        try:
            uploads.start(out / SINGLE_FILES[0] if directory else out)
        finally:
            left = uploads.abort()
        if left:
            raise StoreError(
                "an upload cannot be aborted",
                str(out),
                "allow s3:AbortMultipartUpload, or storage.multipartUploads.abort",
            )
